"""Arguments that are refused with TritonBench as the host, in one line each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from cases import TRITONBENCH, named

pytestmark = TRITONBENCH

HOST = ("--host", "tritonbench", "--device", "cpu")
OURS = ("--op", "grouped_gemm", "--suite", "smoke")

# Arguments that are refused, and the start of the last line.
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "an unknown operator": (
        ("--op", "moe_permut"),
        "moe_permut: no operator 'moe_permut' (did you mean 'moe_permute'?); known: grouped_gemm, ",
    ),
    "an operator that a plugin has under another name": (
        ("--op", "row_log_softmx", "--plugin", "examples/operators/row_log_softmax.py"),
        "row_log_softmx: no operator 'row_log_softmx' (did you mean 'row_log_softmax'?); known: grouped_gemm, ",
    ),
    "a mode that ours lacks": (
        (*OURS, "--fwd-bwd"),
        "grouped_gemm has no mode 'fwd_bwd' (did you mean 'fwd'?); known: fwd, bwd",
    ),
    "an option of ours": ((*OURS, "--numinputs", "2"), "grouped_gemm: unknown option or argument: --numinputs 2"),
    "an option": (("--op", "sum", "--input-dimm", "2"), "sum: unrecognized arguments: --input-dimm 2"),
    "an option of an operator without options": (
        ("--op", "vector_add", "--size", "2"),
        "vector_add: unknown option or argument: --size 2",
    ),
    "an option's value": (("--op", "sum", "--input-dim", "x"), "sum: argument --input-dim: invalid int value: 'x'"),
    "an option of its host": (("--op", "sum", "--rep", "x"), "sum: argument --rep: invalid int value: 'x'"),
    "its timing of ours": ((*OURS, "--rep", "5"), "grouped_gemm: --rep works only with TritonBench's own operators"),
    "our timing of its": (("--op", "sum", "--bursts", "2"), "--bursts works only with groupbench's operators; sum is"),
    "a backend": (("--op", "sum", "--only", "torch_sum,summ"), "sum: no backend 'summ'; known: triton_sum, "),
    "a backend to skip": (("--op", "sum", "--skip", "summ"), "sum: no backend 'summ'; known: triton_sum, "),
    "a baseline of ours": ((*OURS, "--baseline", "no"), "grouped_gemm: no backend 'no'; known: torch_loop, "),
    "backends of neither": (
        ("--op", "sum,test_op", "--only", "no", "--num-inputs", "1"),
        "sum: none of the backends of --only; known: triton_sum, torch_sum, torch_compile_sum; test_op: none",
    ),
    "an input": (("--op", "sum", "--input-id", "99"), "sum: --input-id 99: there are inputs 0 to 13"),
    "an input of ours": ((*OURS, "--input-id", "9"), "grouped_gemm: --input-id 9: there are inputs 0 to 3"),
    "an input's number": (("--op", "sum", "--input-id", "abc"), "--input-id 'abc' is not a number"),
    "inputs twice": (
        ("--op", "sum", "--input-id", "0,1", "--num-inputs", "1"),
        "--num-inputs must be at least 1, with",
    ),
    "inputs of a missing file": (
        ("--op", "sum", "--input-loader", "no.json"),
        "sum: --input-loader no.json: ",
    ),
    "a plugin": (("--op", "sum", "--plugin", "nomod.x"), "plugin 'nomod.x' does not load: ModuleNotFoundError"),
    "graphs on a CPU": (("--op", "sum", "--cudagraph"), "--cudagraph needs a GPU: a CPU has no CUDA graphs"),
    "processes of its own": (
        ("--op", "sum", "--isolate"),
        "--isolate cannot be combined with records: each operator has",
    ),
    "an A/B": (("--op", "sum", "--side-a", "x", "--side-b=y"), "--side-a cannot be combined with records: "),
    "a file of several operators": (("--op", "sum,softmax", "--output", "x.csv"), "--output takes one operator on "),
    "a suite of an operator that is not ours": (("--op", "sum", "--suite", "smoke"), "sum is not an operator of"),
    "a metric": (("--op", "sum", "--metrics", "latency,beauty"), "sum: TritonBench has no metric 'beauty'; it has: "),
    "a metric that the other host has": (
        ("--op", "moe_permute", "--shapes", "T=3,k=1,G=2,H=5", "--metrics", "rms"),
        "moe_permute: TritonBench has no metric 'rms'; it has: accuracy, ",
    ),
    "a Backend for an operator that is not ours": (
        ("--op", "sum", "--plugin", "faulty_backends.BACKENDS"),
        "sum: plugin 'faulty_backends.BACKENDS': sum is TritonBench's, for which a plugin is a function",
    ),
}


# Several names, options, values and operators are checked in one place.
REFUSED_ALIKE = (
    *("an operator that a plugin has under another name", "an option of an operator without options"),
    *("an option's value", "a backend to skip", "an input of ours", "a metric that the other host has"),
)


@pytest.mark.parametrize(("args", "message"), named(REFUSED, *REFUSED_ALIKE))
def test_refused(args: tuple[str, ...], message: str, measured: Callable[..., Any], faulty: str) -> None:
    done, records = measured(*args, *HOST)
    assert (done.returncode, records) == (2, [])
    assert done.stderr.splitlines()[-1].startswith(f"tritonbench: {message}")
    assert "Traceback" not in done.stderr
