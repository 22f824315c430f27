"""Lists of what there is of an operator of TritonBench's."""

from __future__ import annotations

from typing import Any

from groupbench.operators.hosts.adapter.internals import NO_PRECISION, triton_op
from groupbench.operators.hosts.journal import Setup


def known_metrics(op: str) -> list[str]:
    return sorted(triton_op.BUILTIN_METRICS | {*triton_op.REGISTERED_METRICS.get(op, ())})


def show(setup: Setup, cls: Any) -> None:
    """Print what there is of an operator of TritonBench's."""
    op = setup.op
    if "operators" in setup.lists:
        modes = "fwd" if cls.FWD_ONLY else "fwd, bwd, fwd_bwd"
        precision = "its inputs' precision" if cls.DEFAULT_PRECISION == NO_PRECISION else cls.DEFAULT_PRECISION
        print(f"{op}: TritonBench's; modes {modes}; {precision} unless --precision says another")
    if "backends" in setup.lists:
        print(f"{op}:")
        for name, backend in triton_op.REGISTERED_BENCHMARKS.get(op, {}).items():
            mark = " (baseline)" if backend.baseline else ""
            print(f"  {name}{mark}: TritonBench's{'' if backend.enabled else ', not installed here'}")
    if "metrics" in setup.lists:
        for name in known_metrics(op):
            print(name)
