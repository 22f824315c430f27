"""Refuse a version of TritonBench that lacks needed functions, and name them, before anything runs."""

from __future__ import annotations

import inspect
from typing import Any

TESTED = "10b14473"
"""The commit of TritonBench with which groupbench is tested."""

NAMES = (
    *("register_benchmark", "REGISTERED_BENCHMARKS", "REGISTERED_METRICS", "BUILTIN_METRICS"),
    *("BenchmarkOperator", "BenchmarkOperatorMetrics", "Mode"),
)
"""Names of its module `triton_op` that groupbench uses."""

PARAMETERS = ("operator_name", "func_name", "baseline", "enabled", "fwd_only", "cls")
"""Parameters of `register_benchmark` that groupbench passes."""


def problem_of(triton_op: Any) -> str | None:
    """Return the functions this TritonBench lacks and the way out, or None.

    Args:
        triton_op: Its module `tritonbench.utils.triton_op`.
    """
    missing = [name for name in NAMES if not hasattr(triton_op, name)]
    register = getattr(triton_op, "register_benchmark", None)
    if register is not None:
        parameters = inspect.signature(register).parameters
        missing += [f"register_benchmark({name}=)" for name in PARAMETERS if name not in parameters]
    if not missing:
        return None
    return (
        f"this TritonBench lacks {', '.join(missing)}; groupbench is tested with its commit {TESTED}: "
        "install that one, or add --host builtin, which needs none"
    )
