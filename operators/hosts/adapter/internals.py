"""What is used of TritonBench's internals (commit 10b14473). A test fails when one of the names is gone."""

from __future__ import annotations

import sys

try:
    from tritonbench.components.do_bench import Latency as TritonBenchLatency
    from tritonbench.operators import op as operator_list
    from tritonbench.utils import run_utils, triton_op
except ImportError as error:
    sys.exit(f"TritonBench does not import here: {error}; install what it needs, or give --host builtin")

PACKAGE = "tritonbench.operators"

NO_PRECISION = "bypass"
"""What TritonBench says of an operator that names none, nor its user."""

__all__ = ["NO_PRECISION", "PACKAGE", "TritonBenchLatency", "operator_list", "run_utils", "triton_op"]
