"""Compare the gradients of the grouped product with torch's, and check that only what is wanted is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm import choose
from groupbench.kernels.ops import grouped_mm


def operands(sizes: tuple[int, ...], tail: int, layout: str, n: int = 4, k: int = 3):
    """Return a, b (leaves that require gradients) and offs."""
    torch.manual_seed(0)
    a = torch.randn(sum(sizes) + tail, k).requires_grad_()
    if layout == "nk":
        b = torch.randn(len(sizes), n, k).transpose(1, 2).requires_grad_()
    else:
        b = torch.randn(len(sizes), k, n).requires_grad_()
    return a, b, torch.tensor(sizes).cumsum(0).to(torch.int32)


def by_torch(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    ends = offs.tolist()
    parts = [a[start:end] @ b[g] for g, (start, end) in enumerate(zip([0, *ends], ends, strict=False))]
    return torch.cat([*parts, a.new_zeros(a.size(0) - ends[-1], b.size(2))])


@pytest.mark.parametrize("only", ["a", "b"])
def test_a_gradient_that_is_not_needed_is_not_computed(only, device, monkeypatch):
    a, b, offs = (x.detach().to(device) for x in operands((2, 0, 3), 1, "kn"))
    (a if only == "a" else b).requires_grad_()
    out = grouped_mm(a, b, offs)

    saved = [saved is not None for saved in out.grad_fn.saved_tensors]
    assert saved == [only == "b", only == "a", True]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("computed")

    monkeypatch.setattr(choose.Launches, "gradient_of_b" if only == "a" else "gradient_of_a", refuse)
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
def test_kernels_match_the_gradients_of_torch(sizes, tail, n, k, layout, dtype_, device, poisoned, check):
    a, b, offs = operands(sizes, tail, layout, n, k)
    a, b, offs = a.detach().to(device), b.detach().to(device), offs.to(device)
    b = b[:1] if layout == "shared" else b
    rows = sum(sizes)
    a[rows:] = float("nan")
    a, b = a.to(dtype_), b.to(dtype_)
    dc = torch.randn(rows + tail, n).to(device, dtype_)
    dc[rows:] = float("nan")

    def gradients(a: Tensor, b: Tensor, dc: Tensor, product: Any) -> tuple[Tensor, ...]:
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        each = b.expand(len(sizes), -1, -1) if layout == "shared" else b
        with poisoned():
            out = product(a, each, offs)
            da, db = torch.autograd.grad(out, (a, b), dc)
        assert (out[rows:] == 0).all()
        assert (da[rows:] == 0).all()
        if layout != "shared" and product is grouped_mm:
            assert db.stride() == b.stride()
        return out, da, db

    expected = gradients(a.double(), b.double(), dc.double(), by_torch)
    for got, wanted in zip(gradients(a, b, dc, grouped_mm), expected, strict=True):
        check(got, wanted, dtype_)


def test_the_gradient_of_a_sum(device, check):
    """The gradient is one expanded number: TMA cannot read its strides."""
    a, b, offs = operands((20, 12), 0, "kn", 16, 16)
    a, b, offs = a.detach().to(device).requires_grad_(), b.detach().to(device).requires_grad_(), offs.to(device)
    grouped_mm(a, b, offs).sum().backward()
    check(a.grad, torch.cat([b[0].sum(1).expand(20, -1), b[1].sum(1).expand(12, -1)]).detach(), torch.float32)
    sums = torch.stack([part.sum(0) for part in a.detach().split([20, 12])])
    check(b.grad, sums[:, :, None].expand(-1, -1, 16), torch.float32)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the interpreter's operations look at offsets too, in another way"
)
def test_offsets_are_not_read_on_the_host(monkeypatch):
    a, b, offs = operands((20, 12), 0, "kn", 16, 16)

    def refuse(self: Tensor) -> Any:
        raise AssertionError("read on the host")

    monkeypatch.setattr(torch.Tensor, "tolist", refuse)
    grouped_mm(a, b, offs).sum().backward()
    assert a.grad is not None
