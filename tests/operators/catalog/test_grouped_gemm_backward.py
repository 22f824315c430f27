"""The gradients of grouped GEMM as separate operators, and both together as the mode bwd of grouped_gemm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from groupbench.operators import plan
from groupbench.operators.catalog import grouped_gemm as gg
from groupbench.operators.catalog import grouped_gemm_dgrad as dgrad
from groupbench.operators.catalog import grouped_gemm_wgrad as wgrad
from groupbench.operators.catalog import shapes
from groupbench.operators.catalog.canary import CANARY
from groupbench.operators.catalog.shapes import GroupedShape, listed
from groupbench.operators.measure import accuracy
from groupbench.operators.operator import Operator, Target
from groupbench.operators.tolerances import TOLERANCES

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BWD = gg.GROUPED_GEMM.in_mode("bwd")


def by_autograd(shape: GroupedShape) -> tuple[Any, Tensor, Tensor]:
    """Return (inputs of mode bwd, dA, dB), with gradients computed by torch in fp64."""
    x = gg.make_backward_inputs(shape, "fp32", DEVICE, seed=3)
    a, b = x.x.a.double().requires_grad_(), x.x.b.double().clone().requires_grad_()
    parts = [rows @ b[g] for g, rows in enumerate(a.split(x.x.rows))]
    torch.cat(parts).backward(x.dc.double())
    return x, a.grad, b.grad


@pytest.mark.parametrize("shape", shapes.SUITES["smoke"].values(), ids=shapes.SUITES["smoke"])
def test_references_are_the_gradients_that_autograd_finds(shape: GroupedShape) -> None:
    x, da, db = by_autograd(shape)
    gradients = BWD.reference(x)
    assert list(gradients) == ["dA", "dB"]
    torch.testing.assert_close(gradients["dA"].double(), da)
    torch.testing.assert_close(gradients["dB"].double(), db)


@pytest.mark.parametrize("shape", shapes.SUITES["smoke"].values(), ids=shapes.SUITES["smoke"])
def test_all_three_are_of_the_same_problem(shape: GroupedShape) -> None:
    both = BWD.reference(BWD.make_inputs(shape, "fp16", DEVICE, 5))
    for name, operator in (("dA", dgrad.GROUPED_GEMM_DGRAD), ("dB", wgrad.GROUPED_GEMM_WGRAD)):
        alone = operator.reference(operator.make_inputs(shape, "fp16", DEVICE, 5))
        torch.testing.assert_close(alone, both[name])


def test_gradients_of_weights_have_their_layout() -> None:
    for nk in (False, True):
        x = wgrad.make_inputs(listed((3, 0, 5), 16, 24, nk=nk), "fp16", DEVICE, 0)
        for backend in wgrad.GROUPED_GEMM_WGRAD.backends:
            if backend.unavailable(Target(DEVICE, "fp16", interpreted=DEVICE == "cpu")) is None:
                assert backend.prepare(x)().stride() == ((384, 1, 24) if nk else (384, 16, 1)), backend.name


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_suites_leave_out_gradients_too_large_to_check() -> None:
    left_out = set(map(str, gg.GROUPED_GEMM.suites["moe"])) - set(map(str, BWD.suites["moe"]))
    assert left_out == {str(shapes.SUITES["moe"][name]) for name in ("dsv3_decode", "dsv3_full_gu", "llama4_mav_gu")}
    assert wgrad.GROUPED_GEMM_WGRAD.suites == BWD.suites
    assert dgrad.GROUPED_GEMM_DGRAD.suites == shapes.packed_suites()
    jobs = plan.jobs(plan.Selection("grouped_gemm", suites=("moe",), mode="bwd"), "cuda", interpreted=False)
    assert len({job.shape for job in jobs}) == len(BWD.suites["moe"])
    assert {job.mode for job in jobs} == {"bwd"}


# --- modes ------------------------------------------------------------------------------------------------------------


def test_modes_of_an_operator() -> None:
    assert gg.GROUPED_GEMM.modes == ("fwd", "bwd")
    assert gg.GROUPED_GEMM.in_mode("fwd") is gg.GROUPED_GEMM
    for operator in (CANARY, dgrad.GROUPED_GEMM_DGRAD, wgrad.GROUPED_GEMM_WGRAD):
        assert operator.modes == ("fwd",)
        with pytest.raises(KeyError):
            operator.in_mode("bwd")
    with pytest.raises(KeyError):
        gg.GROUPED_GEMM.in_mode("fwd_bwd")


def test_backends_without_a_backward_say_so() -> None:
    target = Target("cuda", "bf16", capability=(9, 0))
    assert [backend.name for backend in BWD.backends] == [backend.name for backend in gg.GROUPED_GEMM.backends]
    for backend in gg.GROUPED_GEMM.backends:
        reason = BWD.backend(backend.name).unavailable(target)
        if backend.prepare_bwd is None:
            assert reason == f"{backend.name} has no backward"
        else:
            assert reason is None
            assert BWD.backend(backend.name).prepare is backend.prepare_bwd


# --- several outputs --------------------------------------------------------------------------------------------------


def two(first: Tensor, second: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    return lambda: (first.clone(), second.clone())


def test_each_of_several_outputs_is_held_to_its_own_reference() -> None:
    reference = {"dA": torch.ones(4, 8), "dB": torch.full((2, 3, 8), 100.0)}
    right = two(*reference.values())
    measured, problem = accuracy.check(right, reference, TOLERANCES["fp32"])
    assert problem is None
    assert measured.repeatable
    # An error of 1 is 1 % of the second output, and as much as the whole of the first.
    off = torch.ones(4, 8)
    off[2, 5] = 2
    measured, problem = accuracy.check(two(off, reference["dB"]), reference, TOLERANCES["fp32"])
    assert problem.startswith("dA: ")
    assert measured.first_bad == (2, 5)
    assert measured.max_abs == 1
    broken = reference["dB"].clone()
    broken[1, 2, 3] = float("inf")
    measured, problem = accuracy.check(two(reference["dA"], broken), reference, TOLERANCES["fp32"])
    assert problem.startswith("dB: ")
    assert (measured.first_bad, measured.rms) == ((1, 2, 3), None)


def test_several_outputs_that_are_not_written_or_not_repeated() -> None:
    reference = {"dA": torch.ones(4, 8), "dB": torch.ones(2, 8)}
    measured, problem = accuracy.check(lambda: (torch.ones(4, 8), torch.empty(2, 8)), reference, TOLERANCES["fp32"])
    assert problem is not None and problem == "dB: 100 % of the output was never written, the first at [0, 0]"
    assert measured.unwritten == 1
    kept = (torch.ones(4, 8), torch.ones(2, 8))  # the same memory each time, which the check overwrites
    assert accuracy.check(lambda: kept, reference, TOLERANCES["fp32"])[1] is not None
    calls = iter([1.0, 1.0 + 1e-6])
    measured, problem = accuracy.check(
        lambda: (torch.ones(4, 8), torch.full((2, 8), next(calls))), reference, TOLERANCES["fp32"]
    )
    assert problem is None
    assert not measured.repeatable


@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        (torch.ones(4, 8), TypeError, "Tensor, not a tuple of dA, dB"),
        ((torch.ones(4, 8),), ValueError, "returned 1, expected 2 outputs: dA, dB"),
        ((torch.ones(4, 8), torch.ones(8, 2)), ValueError, r"^dB: .* shape \[8, 2\], expected \[2, 8\]"),
        ((torch.ones(4, 8), torch.ones(2, 8).double()), TypeError, "^dB: .* torch.float64, expected torch.float32"),
    ],
    ids=["one_tensor", "too_few", "shape", "dtype"],
)
def test_several_outputs_of_the_wrong_kind(outputs: Any, error: type[Exception], message: str) -> None:
    reference = {"dA": torch.ones(4, 8), "dB": torch.ones(2, 8)}
    with pytest.raises(error, match=message):
        accuracy.check(lambda: outputs, reference, TOLERANCES["fp32"], torch.float32)


def test_a_plugins_backward_takes_part() -> None:
    plugged_in = replace(gg.GROUPED_GEMM.backend("torch_loop"), name="mine", operator="grouped_gemm")
    operator: Operator = gg.GROUPED_GEMM.with_backends((plugged_in,)).in_mode("bwd")
    assert operator.backend("mine").prepare is gg.prepare_torch_loop_bwd
