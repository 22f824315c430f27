"""Arguments that are refused with TritonBench as the host, in one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import TRITONBENCH

pytestmark = TRITONBENCH

# Arguments that are refused, and the start of the last line. Others are in test_tritonbench_launcher.py.
REFUSED = {
    "--op moe_permut": "moe_permut: no operator 'moe_permut' (did you mean 'moe_permute'?); known: grouped_gemm, ",
    "--op grouped_gemm --fwd-bwd": "grouped_gemm has no mode 'fwd_bwd' (did you mean 'fwd'?); known: fwd, bwd",
    "--op grouped_gemm --suite smoke --numinputs 2": "grouped_gemm: unknown option or argument: --numinputs 2",
    "--op sum --input-dimm 2": "sum: unrecognized arguments: --input-dimm 2",
    "--op sum --rep x": "sum: argument --rep: invalid int value: 'x'",
    "--op grouped_gemm --suite smoke --rep 5": "grouped_gemm: --rep works only with TritonBench's own operators",
    "--op sum --only torch_sum,summ": "sum: no backend 'summ'; known: triton_sum, ",
    "--op grouped_gemm --suite smoke --baseline no": "grouped_gemm: no backend 'no'; known: torch_loop, ",
    "--op sum,test_op --only no --num-inputs 1": (
        "sum: none of the backends of --only; known: triton_sum, torch_sum, torch_compile_sum; test_op: none"
    ),
    "--op sum --input-id 99": "sum: --input-id 99: there are inputs 0 to 13",
    "--op sum --input-loader no.json": "sum: --input-loader no.json: ",
    "--op sum --plugin nomod.x": "plugin 'nomod.x' does not load: ModuleNotFoundError",
    "--op sum --metrics latency,beauty": "sum: TritonBench has no metric 'beauty'; it has: ",
    "--op sum --plugin faulty_backends.BACKENDS": (
        "sum: plugin 'faulty_backends.BACKENDS': sum is TritonBench's, for which a plugin is a function"
    ),
}


@pytest.mark.parametrize(("command", "message"), REFUSED.items(), ids=REFUSED)
def test_refused(command: str, message: str, measured: Callable[..., Any], faulty: str) -> None:
    done, records = measured(*command.split(), "--host", "tritonbench", "--device", "cpu")
    assert (done.returncode, records) == (2, [])
    assert done.stderr.splitlines()[-1].startswith(f"tritonbench: {message}")
    assert "Traceback" not in done.stderr
