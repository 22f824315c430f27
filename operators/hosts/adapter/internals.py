"""The TritonBench internals that groupbench uses (commit 10b14473). A test fails if one of the names is gone."""

from __future__ import annotations

import sys

from groupbench.operators.hosts.supported import problem_of

try:
    from tritonbench.components.do_bench import Latency as TritonBenchLatency
    from tritonbench.operators import op as operator_list
    from tritonbench.utils import run_utils, triton_op
except ImportError as error:
    sys.exit(f"TritonBench does not import here: {error}; install its dependencies, or add --host builtin")

if (problem := problem_of(triton_op)) is not None:
    sys.exit(problem)

PACKAGE = "tritonbench.operators"

NO_PRECISION = "bypass"
"""TritonBench's precision if neither the operator nor the user chooses one."""

__all__ = ["NO_PRECISION", "PACKAGE", "TritonBenchLatency", "operator_list", "run_utils", "triton_op"]
