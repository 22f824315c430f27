"""Compare the differentiable product's formulas with numerical differentiation, and its kernels with its formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm import flat, wgrad
from groupbench.kernels.grouped_gemm.autograd import grouped_gemm

SIZES = {
    "empty_groups": ((0, 2, 0, 0, 3, 0), 0),
    "one_row_groups": ((1, 1, 1), 0),
    "one_group": ((5,), 0),
    "no_rows": ((0, 0), 0),
    "rows_past_the_groups": ((2, 0, 1), 3),
    "no_rows_in_groups": ((0, 0), 2),
}


def operands(
    sizes: tuple[int, ...], tail: int, layout: str, dtype: torch.dtype = torch.float64, n: int = 4, k: int = 3
):
    """Return a, b (leaves that require gradients) and offs."""
    torch.manual_seed(0)
    a = torch.randn(sum(sizes) + tail, k, dtype=dtype).requires_grad_()
    if layout == "nk":
        b = torch.randn(len(sizes), n, k, dtype=dtype).transpose(1, 2).requires_grad_()
    else:
        b = torch.randn(len(sizes), k, n, dtype=dtype).requires_grad_()
    return a, b, torch.tensor(sizes).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("layout", ["kn", "nk"])
@pytest.mark.parametrize(("sizes", "tail"), SIZES.values(), ids=SIZES)
def test_reference_gradients_match_numerical_differentiation(sizes, tail, layout):
    a, b, offs = operands(sizes, tail, layout)
    assert torch.autograd.gradcheck(lambda a, b: grouped_gemm(a, b, offs, reference=True), (a, b))


@pytest.mark.parametrize("only", ["a", "b"])
@pytest.mark.parametrize("reference", [True, False], ids=["reference", "triton"])
def test_a_gradient_that_is_not_needed_is_not_computed(only, reference, device, monkeypatch):
    a, b, offs = (
        x.detach().to(device) for x in operands((2, 0, 3), 1, "kn", torch.float64 if reference else torch.float32)
    )
    (a if only == "a" else b).requires_grad_()
    out = grouped_gemm(a, b, offs, reference=reference)

    saved = [saved is not None for saved in out.grad_fn.saved_tensors]
    assert saved == [only == "b", only == "a", True]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("computed")

    monkeypatch.setattr(*((wgrad, "wgrad_launcher") if only == "a" else (flat, "prepare_flat")), refuse)
    out.sum().backward()
    assert (a.grad is None) == (only == "b")
    assert (b.grad is None) == (only == "a")


@pytest.mark.parametrize("dtype_", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("layout", ["kn", "nk", "shared"])
@pytest.mark.parametrize(
    ("sizes", "tail", "n", "k"),
    [((33, 0, 1, 40), 0, 48, 64), ((21, 0, 40), 6, 48, 64), ((5, 30), 2, 45, 33)],
    ids=["ragged", "rows_past_the_groups", "odd_n_and_k"],
)
def test_kernels_match_the_gradients_of_the_reference(sizes, tail, n, k, layout, dtype_, device, poisoned, check):
    a, b, offs = operands(sizes, tail, layout, torch.float32, n, k)
    a, b, offs = a.detach().to(device), b.detach().to(device), offs.to(device)
    b = b[:1] if layout == "shared" else b
    rows = sum(sizes)
    a[rows:] = float("nan")
    a, b = a.to(dtype_), b.to(dtype_)
    dc = torch.randn(rows + tail, n).to(device, dtype_)
    dc[rows:] = float("nan")

    def gradients(a: Tensor, b: Tensor, dc: Tensor, reference: bool) -> tuple[Tensor, ...]:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        each = b.expand(len(sizes), -1, -1) if layout == "shared" else b
        with poisoned():
            out = grouped_gemm(a, each, offs, reference=reference)
            da, db = torch.autograd.grad(out, (a, b), dc)
        assert (out[rows:] == 0).all()
        assert (da[rows:] == 0).all()
        if layout != "shared":
            assert db.stride() == b.stride()
        return out, da, db

    expected = gradients(a.double(), b.double(), dc.double(), True)
    for got, wanted in zip(gradients(a, b, dc, False), expected, strict=True):
        check(got, wanted, dtype_)


def test_the_gradient_of_a_sum(device, check):
    """The gradient is one expanded number: TMA cannot read its strides."""
    a, b, offs = operands((20, 12), 0, "kn", torch.float32, 16, 16)
    a, b, offs = a.detach().to(device).requires_grad_(), b.detach().to(device).requires_grad_(), offs.to(device)
    grouped_gemm(a, b, offs).sum().backward()
    check(a.grad, torch.cat([b[0].sum(1).expand(20, -1), b[1].sum(1).expand(12, -1)]).detach(), torch.float32)
    sums = torch.stack([part.sum(0) for part in a.detach().split([20, 12])])
    check(b.grad, sums[:, :, None].expand(-1, -1, 16), torch.float32)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter's operations look at offsets too, in another way"
)
def test_trusted_offsets_are_not_read_on_the_host(monkeypatch):
    a, b, offs = operands((20, 12), 0, "kn", torch.float32, 16, 16)

    def refuse(self: Tensor) -> Any:
        raise AssertionError("read on the host")

    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    grouped_gemm(a, b, offs, trusted=True).sum().backward()
    assert a.grad is not None
    with pytest.raises(AssertionError, match="read on the host"):
        grouped_gemm(a, b, offs)


@pytest.mark.parametrize("reference", [True, False], ids=["reference", "triton"])
def test_refuses_unfit_operands_and_a_second_derivative(reference):
    a, b, offs = operands((2, 3), 0, "kn", torch.float32)
    with pytest.raises(ValueError, match="must not decrease"):
        grouped_gemm(a, b, offs.flip(0), reference=reference)
    with pytest.raises(ValueError, match="expected a"):
        grouped_gemm(a[:, :2], b, offs, reference=reference)
    if not torch.cuda.is_available() or reference:
        (da,) = torch.autograd.grad(grouped_gemm(a, b, offs, reference=reference).square().sum(), a, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            da.sum().backward()
