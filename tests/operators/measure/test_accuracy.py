"""Right outputs pass, and wrong ones fail, even if only a small part is wrong."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from groupbench.operators.measure.accuracy import check, compare, poisoned, rehearse
from groupbench.operators.measure.given import Given, place_sums
from groupbench.operators.tolerances import TOLERANCES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def product(m: int, n: int, k: int = 96, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in ((m, k), (k, n)))
    return a @ b


def wide(dtype: str, x: Tensor) -> Tensor:
    return x if dtype == "fp32" else x.float()


@given(st.sampled_from(list(DTYPES)), st.integers(1, 150), st.integers(1, 150), st.integers(1, 64), st.integers(0, 99))
def test_a_correctly_rounded_product_passes(dtype: str, m: int, n: int, k: int, seed: int) -> None:
    reference = wide(dtype, product(m, n, k, seed))
    measured, problem = compare(reference.to(DTYPES[dtype]), reference, TOLERANCES[dtype])
    assert problem is None
    assert measured.mismatch == 0
    assert measured.unwritten == 0
    assert measured.first_bad is None


WRONG: dict[str, Callable[[Tensor], object]] = {
    "the whole": lambda x: x.mul_(1.01),
    "one row": lambda x: x[137].mul_(1.01),
    "the last row": lambda x: x[-1].mul_(1.01),
    "one block": lambda x: x[64:128, 128:192].mul_(1.01),
    "the last block": lambda x: x[192:, 192:].mul_(1.01),
    "one element": lambda x: x.view(-1)[x.abs().argmax()].mul_(1.1),
    "one NaN": lambda x: x[3, 5].fill_(math.nan),
    "one infinity": lambda x: x[3, 5].fill_(math.inf),
    "a row of zeros": lambda x: x[7].zero_(),
    "two rows swapped": lambda x: x[10:12].copy_(x[10:12].flip(0)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", WRONG.values(), ids=WRONG)
def test_wrong_anywhere_is_wrong(fault: Callable[[Tensor], object], dtype: str) -> None:
    reference = wide(dtype, product(250, 230))
    out = reference.clone()
    fault(out)
    assert compare(out.to(DTYPES[dtype]), reference, TOLERANCES[dtype])[1] is not None


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_one_wrong_element_that_the_mean_hides_is_detected(dtype: str) -> None:
    reference, tolerance = product(250, 230).float(), TOLERANCES[dtype]
    out = reference.clone()
    allowed = tolerance.atol * reference.square().mean().sqrt() + tolerance.rtol * reference[100, 100].abs()
    out[100, 100] += 0.9 * allowed
    assert compare(out, reference, tolerance)[1] is None
    out[100, 100] += 0.2 * allowed
    measured, problem = compare(out, reference, tolerance)
    assert problem.endswith("of the elements are outside the tolerance, the first at [100, 100]")
    assert measured.worst_block_rms < tolerance.rms


def test_terms_that_cancel_in_a_large_row_are_not_wrong() -> None:
    """Causal attention's first rows average few values: their rounding errors exceed the tolerance of later rows."""
    reference = torch.randn(512, 128, dtype=torch.float64) / 8
    reference[2] *= 8
    reference[2, 7] = 0.0
    out = reference.bfloat16()
    out[2, 7] = 0.004  # half a unit in the last place of bf16 at 1
    assert compare(out, reference, TOLERANCES["bf16"])[1] is None
    out[200, 7] = reference[200, 7] + 0.02
    assert compare(out, reference, TOLERANCES["bf16"])[0].first_bad == (200, 7)


def test_tf32_is_wrong_for_fp32() -> None:
    a, b = torch.randn(128, 128), torch.randn(128, 128)
    truncated = [(x.view(torch.int32) & ~0x1FFF).view(torch.float32) for x in (a, b)]
    problem = compare(truncated[0] @ truncated[1], a.double() @ b.double(), TOLERANCES["fp32"])[1]
    assert problem is not None


def test_first_bad_is_the_first() -> None:
    reference = product(80, 80).float()
    out = reference.clone()
    out[7, 3] += 100
    out[70, 1] += 100
    measured, problem = compare(out, reference, TOLERANCES["fp32"])
    assert measured.first_bad == (7, 3)
    assert measured.mismatch == pytest.approx(2 / 6400)
    assert "[7, 3]" in (problem or "")


def test_the_rms_is_the_relative_rms() -> None:
    reference = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    measured, _ = compare(reference + torch.tensor([[0.5, 0.0]]), reference, TOLERANCES["fp32"])
    assert measured.rms == pytest.approx(0.1)
    assert measured.max_abs == 0.5


def test_unwritten_share() -> None:
    reference = product(64, 32).float()
    out = reference.clone()
    out[:16] = math.nan
    measured, problem = compare(out, reference, TOLERANCES["fp32"])
    assert measured.unwritten == 0.25
    assert measured.rms is None
    assert "25 %" in (problem or "")


EARLIER = "is that of an earlier call, returned again or never overwritten"
NOT_A_NUMBER: dict[str, tuple[Callable[[Tensor], Callable[[], Tensor]], str]] = {
    "cached": (lambda x: lambda: x, EARLIER),
    "a view of the cached": (lambda x: lambda: x[:], EARLIER),
    "a list of the cached": (lambda x: lambda: [x[:1], x[1:]], EARLIER),
    "unwritten": (lambda x: lambda: torch.empty_like(x), "was never written"),
    "NaN": (lambda x: lambda: x + math.nan, "is NaN, perhaps from memory that was never written"),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("backend", "message"), NOT_A_NUMBER.values(), ids=NOT_A_NUMBER)
def test_a_message_tells_cached_unwritten_and_nan_apart(
    backend: Callable[[Tensor], Callable[[], Tensor]], message: str, dtype: torch.dtype
) -> None:
    reference = torch.ones(4, 6, dtype=torch.float64)
    measured, problem = check(backend(reference.to(dtype, copy=True)), reference, TOLERANCES["fp32"])
    assert problem == f"100 % of the output {message}, the first at [0, 0]"
    assert measured.unwritten == 1


SPECIAL = {
    "both NaN": (math.nan, math.nan, True),
    "both infinite": (math.inf, math.inf, True),
    "opposite infinities": (math.inf, -math.inf, False),
    "NaN for a number": (math.nan, 1.0, False),
    "a number for NaN": (1.0, math.nan, False),
    "infinity for a number": (math.inf, 1.0, False),
    "a number for infinity": (6e4, math.inf, False),
    "NaN for infinity": (math.nan, math.inf, False),
}


@pytest.mark.parametrize(("value", "expected", "agrees"), SPECIAL.values(), ids=SPECIAL)
def test_nan_and_infinity_agree_only_with_themselves(value: float, expected: float, agrees: bool) -> None:
    reference = product(70, 70).float()
    out = reference.clone()
    out[65, 2], reference[65, 2] = value, expected
    measured, problem = compare(out, reference, TOLERANCES["fp32"])
    assert (problem is None) == agrees, problem
    assert measured.first_bad == (None if agrees else (65, 2))


def test_a_reference_of_zeros() -> None:
    zeros = torch.zeros(5, 7)
    assert compare(zeros.clone(), zeros, TOLERANCES["fp16"])[1] is None
    out = zeros.clone()
    out[4, 6] = 1e-6
    measured, problem = compare(out, zeros, TOLERANCES["fp16"])
    assert problem is not None
    assert measured.first_bad == (4, 6)
    assert measured.rms is None  # infinite


@pytest.mark.parametrize("size", [(0, 8), (8, 0), (0, 0)])
def test_an_empty_output_is_right(size: tuple[int, int]) -> None:
    accuracy, problem = check(lambda: torch.empty(size), torch.empty(size), TOLERANCES["fp32"])
    assert problem is None
    assert accuracy.rms == 0
    assert accuracy.repeatable


# --- check ------------------------------------------------------------------------------------------------------------

REFERENCE = product(64, 64).float()

ODD = {
    "nothing": (None, TypeError, "NoneType"),
    "a number": (1.0, TypeError, "float"),
    "an empty list": ([], TypeError, "list"),
    "a list of numbers": ([1.0], TypeError, "list"),
    "another shape": (torch.zeros(64, 63), ValueError, "[64, 63]"),
    "the transpose's shape": (torch.zeros(3), ValueError, "[3]"),
    "too few groups": ([REFERENCE[:10].clone()], ValueError, "[10, 64]"),
}


@pytest.mark.parametrize(("out", "error", "message"), ODD.values(), ids=ODD)
def test_an_invalid_output_raises(out: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        check(lambda: out, REFERENCE, TOLERANCES["fp32"])
    assert message in str(caught.value)


BUFFER = torch.zeros(64, 64)
RIGHT: dict[str, Callable[[], object]] = {
    "a list of groups": lambda: [REFERENCE[:10].clone(), REFERENCE[10:].clone()],
    "a buffer that is written each time": lambda: BUFFER.copy_(REFERENCE),
}


@pytest.mark.parametrize("run", RIGHT.values(), ids=RIGHT)
def test_an_output_in_another_form_is_right(run: Callable[[], object]) -> None:
    measured, problem = check(run, REFERENCE, TOLERANCES["fp32"])
    assert problem is None and measured.repeatable


UNLIKE = {
    "almost the same": (REFERENCE, REFERENCE + 1e-6, None),
    "a wrong first one": (2 * REFERENCE, REFERENCE, "another run"),
    "zeros of unlike sign": (torch.zeros(2, 2), -torch.zeros(2, 2), None),
}


@pytest.mark.parametrize(("first", "second", "fault"), UNLIKE.values(), ids=UNLIKE)
def test_two_outputs_that_differ_in_any_bit_are_noticed(first: Tensor, second: Tensor, fault: str | None) -> None:
    calls = iter([first.clone(), second.clone()])
    accuracy, problem = check(lambda: next(calls), second, TOLERANCES["fp32"])
    assert problem is None if fault is None else problem.startswith(fault)
    assert accuracy.repeatable is False


ALLOCATE: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(64, 64),
    "empty_like": lambda: torch.empty_like(REFERENCE),
    "new_empty": lambda: REFERENCE.new_empty(64, 64),
    "empty_strided": lambda: torch.empty_strided((64, 64), (64, 1)),
    "new_empty_strided": lambda: REFERENCE.new_empty_strided((64, 64), (64, 1)),
    "empty_permuted": lambda: torch.empty_permuted((64, 64), (1, 0)),
    "half": lambda: torch.empty(64, 64, dtype=torch.float16),
}


@pytest.mark.parametrize("allocate", ALLOCATE.values(), ids=ALLOCATE)
def test_poison_reaches(allocate: Callable[[], Tensor]) -> None:
    with poisoned():
        assert allocate().isnan().all()
    measured, problem = check(allocate, REFERENCE, TOLERANCES["fp32"])
    assert measured.unwritten == 1
    assert "100 %" in (problem or "")


def test_poison_leaves_filled_tensors_and_integers_alone() -> None:
    with poisoned():
        assert torch.zeros(3).eq(0).all()
        assert torch.ones(3).eq(1).all()
        assert torch.empty(3, dtype=torch.int32).dtype == torch.int32
    assert not torch.empty(1000).fill_(1).isnan().any()


def test_an_output_of_inference_mode_is_right() -> None:
    """Outside that mode, torch refuses to change such a tensor in place."""
    x = torch.randn(8, 4)

    @torch.inference_mode()
    def run() -> Tensor:
        return x * 2

    _, problem = check(run, x.double() * 2, TOLERANCES["fp32"], torch.float32)
    assert problem is None
    shown = rehearse(run, "cpu", Given(()))
    assert (shown.first, shown.returned, shown.fresh) == ([], [], True)


@pytest.mark.parametrize("buffers", [1, 2, 5])
def test_a_buffer_that_is_handed_out_again_is_noticed(buffers: int) -> None:
    kept = [torch.empty(8, 4) for _ in range(buffers)]
    numbers = itertools.count()
    x = torch.randn(8, 4)

    def run() -> Tensor:
        return torch.mul(x, 2, out=kept[next(numbers) % buffers])

    assert rehearse(run, "cpu", Given(())).fresh is False
    assert rehearse(lambda: x * 2, "cpu", Given(())).fresh is True


def test_an_output_of_another_dtype_is_refused() -> None:
    """An fp32 output moves twice the bytes of fp16, so its latency is not comparable."""
    reference = torch.ones(4, 4)
    with pytest.raises(TypeError, match=r"float32, expected torch\.float16"):
        check(lambda: torch.ones(4, 4), reference, TOLERANCES["fp16"], torch.float16)


def test_sums_by_place_tell_values_in_other_places_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupbench.operators.measure.given.SUMMED", 100)
    line = torch.arange(257)
    swapped = line.clone()
    swapped[[0, 200]] = swapped[[200, 0]]
    sums = [place_sums(values) for values in (line, line.flip(0), swapped, line[:0])]
    assert len({*map(tuple, sums)}) == len(sums)
