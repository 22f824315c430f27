"""Lists of the backends, metrics and modes of TritonBench's own operators."""

from __future__ import annotations

from typing import Any

from groupbench.operators.hosts.adapter.internals import NO_PRECISION, triton_op
from groupbench.operators.hosts.journal import Setup


def known_metrics(op: str) -> list[str]:
    return sorted(triton_op.BUILTIN_METRICS | {*triton_op.REGISTERED_METRICS.get(op, ())})


def show(setup: Setup, cls: Any) -> None:
    """Print the facts about a TritonBench operator that `setup.lists` selects."""
    op = setup.op
    if "operators" in setup.lists:
        modes = "fwd" if cls.FWD_ONLY else "fwd, bwd, fwd_bwd"
        precision = "its inputs' precision" if cls.DEFAULT_PRECISION == NO_PRECISION else cls.DEFAULT_PRECISION
        print(f"{op}: TritonBench's; modes {modes}; {precision} unless --precision names another")
    if "backends" in setup.lists:
        print(f"{op}:")
        for name, backend in triton_op.REGISTERED_BENCHMARKS.get(op, {}).items():
            mark = " (baseline)" if backend.baseline else ""
            print(f"  {name}{mark}: TritonBench's{'' if backend.enabled else ', not installed here'}")
    if "metrics" in setup.lists:
        for name in known_metrics(op):
            print(name)
