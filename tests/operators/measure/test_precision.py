"""A timed result may not be coarser than the first one, whatever the shape and dtype, and an honest one never is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from groupbench.operators.measure import exchange, judge  # noqa: E402
from groupbench.operators.measure.accuracy import compare  # noqa: E402
from groupbench.operators.measure.judge import (  # noqa: E402
    PRECISION,
    At,
    OutputJudgement,
)
from groupbench.operators.measure.wire import Job  # noqa: E402
from groupbench.operators.tolerances import TOLERANCES  # noqa: E402

SHAPES = ("G=2,M_g=4,N=8,K=256", "G=1,M_g=1,N=96,K=64", "G=4,M_g=8|0|3|40,N=48,K=128", "G=2,M_g=128,N=128,K=512")
SECRETS = range(40)


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("output")
    yield descriptor
    os.close(descriptor)


def product(x: Any, weights: Callable[[Any], Any] = lambda b: b, rows: Callable[[Any], Any] = lambda a: a) -> Any:
    parts = [rows(a.float()) @ weights(b.float()) for a, b in zip(x.a.split(x.rows), x.b, strict=True)]
    return torch.cat(parts).to(x.a.dtype)


def int8(values: Any) -> Any:
    """Round to 8 bits with a scale for each column, as weights usually are."""
    scale = values.abs().amax(0, keepdim=True).clamp_min(1e-20) / 127
    return (values / scale).round() * scale


COARSE = {
    "bf16": {"int8 weights": (int8,), "int8": (int8, lambda a: int8(a.T).T)},
    "fp16": {"int8 weights": (int8,), "bf16": (lambda b: b.bfloat16().float(), lambda a: a.bfloat16().float())},
    "fp32": {"tf32": (lambda b: b.half().float(), lambda a: a.half().float())},
}


def judged(problem: judge.JudgeHandler, out: Any, file: int, at: At, first_rms: float | None = None) -> OutputJudgement:
    sent, slack = exchange.send("tensor", [out], file), 1.0 if first_rms is None else PRECISION.slack
    return problem.compare(sent, f"/proc/self/fd/{file}", at, None, None, None, slack, first_rms=first_rms)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", COARSE)
def test_coarser_results_are_found_when_timed_and_honest_ones_are_not_accused(
    shape: str, dtype: str, file: int
) -> None:
    problem, cell = judge.JudgeHandler(), judge.JudgeHandler()
    for each in (problem, cell):
        each.load(Job("grouped_gemm", "torch_loop", shape, dtype, "cpu"))
    inputs, moves = cell.problem.inputs, cell.problem.moves
    first = judged(problem, product(inputs), file, At())
    assert first.problem is None and first.accuracy.rms is not None
    for secret in SECRETS:
        moves.set(secret, secret % 3)
        at = At(secret, secret % 3)
        assert judged(problem, product(inputs), file, at, first.accuracy.rms).problem is None
        for name, coarse in COARSE[dtype].items() if secret < 5 else ():
            out = product(inputs, *coarse)
            assert "relative RMS error" in (judged(problem, out, file, at, first.accuracy.rms).problem or ""), name


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_a_first_result_may_be_exact_and_a_later_one_rounded(dtype: str) -> None:
    """Small integers have exact products. The moved inputs are not integers."""
    rounding = 0.41 * torch.finfo(judge.torch_dtype(dtype)).eps / 2
    assert rounding < judge._one_rounding(dtype) < (4 if dtype != "fp32" else 100) * rounding


def test_a_packed_result_may_be_as_coarse_as_the_first() -> None:
    """Four-bit codes have no dtype in torch."""
    assert judge._one_rounding("w4") == 0.0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("largest", [1, 3, 8, 24, 100])
def test_a_rounding_is_right_however_few_elements_make_the_output(dtype: str, largest: int) -> None:
    """The errors of an output with few large elements, such as that of a softmax, are those of these elements."""
    torch.manual_seed(largest)
    like, rounded = judge._one_rounding(dtype), judge.torch_dtype(dtype)
    for _ in range(200):
        reference = torch.randn(largest + 4000, dtype=torch.float64)
        reference[:largest] = 1000 * (
            1 + 0.1 * torch.rand(()) + 0.01 * torch.rand(largest)
        )  # just above a power of two
        assert compare(reference.to(rounded), reference, TOLERANCES[dtype], 6.0, like)[1] is None


@pytest.mark.parametrize("sizes", [(8,), (512, 640, 8)])
def test_outputs_are_judged_by_their_own_numbers_of_elements(sizes: tuple[int, ...]) -> None:
    """A group of eight results may be as coarse as a single one, also next to hundreds of others."""
    reference = {str(size): torch.full((size,), 1.0 + 2**-11, dtype=torch.float64) for size in sizes}
    outputs = {name: values.half() for name, values in reference.items()}
    like = judge._one_rounding("fp16")
    faults = {name: compare(outputs[name], reference[name], TOLERANCES["fp16"], 6.0, like)[1] for name in outputs}
    assert faults["8"] is None
    assert all("relative RMS error" in (faults[name] or "") for name in faults if name != "8")
