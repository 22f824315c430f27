"""Compute a grouped GEMM with gradients: the function for a layer to call.

    c[rows of g] = a[rows of g] @ b[g]          a [M, K]   b [G, K, N]   c [M, N]
    da[rows of g] = dc[rows of g] @ b[g].T      the forward kernel, with the other layout of b
    db[g] = a[rows of g].T @ dc[rows of g]      wgrad.py, in b's own layout

Rows past offs[-1] belong to no group. They are zero in c and da, and do not contribute to db.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from groupbench.kernels.grouped_gemm.support import group_ends


def grouped_gemm(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]; weights stored as [G, N, K] come as a transposed view, one shared by all expanded
    offs: Tensor,  # [G], int32 or int64 end offsets
    reference: bool = False,  # plain torch, in any dtype and on any device
    trusted: bool = False,  # the caller vouches for shapes and offsets; checking them synchronises with the device
) -> Tensor:  # [M, N]
    """Return every group's product, differentiable once in a and b.

    Triton kernels compute it, or torch's own products with `reference`. Without `trusted`, the forward pass reads offs
    once on the host. Do not change its values before the backward pass. Raises ValueError for unsupported operands.
    """
    if not trusted:
        group_ends(a, b, offs)
    product: Any = (_ReferenceGroupedGemm if reference else _TritonGroupedGemm).apply
    return product(a, b, offs)


def is_nk(b: Tensor) -> bool:
    """Return whether b [G, K, N] is a view on weights stored as [G, N, K]."""
    return b.stride(1) == 1 and b.stride(2) != 1


class _TritonGroupedGemm(torch.autograd.Function):
    """Compute the product and the gradients by Triton kernels."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        from groupbench.kernels.grouped_gemm.flat import prepare_flat

        _save(ctx, a, b, offs)
        return prepare_flat(a, b, offs, trusted=True)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        from groupbench.kernels.grouped_gemm.flat import prepare_flat
        from groupbench.kernels.grouped_gemm.wgrad import wgrad_launcher

        a, b, offs = _saved(ctx)
        # The gradient of a sum is one expanded number (strides of 0), which TMA cannot read.
        dc = dc if dc.stride(-1) == 1 and dc.stride(0) else dc.contiguous()
        da = db = None
        if ctx.needs_input_grad[0]:
            da = prepare_flat(dc, b.transpose(1, 2), offs, trusted=True)()
        if ctx.needs_input_grad[1]:
            db = wgrad_launcher(a, dc, offs, ctx.nk)()
        return da, db, None


class _ReferenceGroupedGemm(torch.autograd.Function):
    """Compute the same in the operands' dtype, so numerical differentiation in fp64 can check the formulas."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        _save(ctx, a, b, offs)
        return _products(a, b, offs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dc: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b, offs = _saved(ctx)
        da = db = None
        if ctx.needs_input_grad[0]:
            da = _products(dc, b.transpose(1, 2), offs)
        if ctx.needs_input_grad[1]:
            G, K, N = ctx.b_shape
            db = a.new_zeros(G, N, K).transpose(1, 2) if ctx.nk else a.new_zeros(G, K, N)
            for g, start, end in _groups(offs):
                db[g] = a[start:end].T @ dc[start:end]
        return da, db, None


def _save(ctx: Any, a: Tensor, b: Tensor, offs: Tensor) -> None:
    """Save only the operands for the requested gradients: a for b's gradient, b for a's."""
    ctx.nk = is_nk(b)
    wants_a, wants_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if wants_b else None, b if wants_a else None, offs)
    ctx.b_shape = b.shape


def _saved(ctx: Any) -> tuple[Any, Any, Tensor]:
    return ctx.saved_tensors


def _products(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    out = a.new_zeros(a.size(0), b.size(2))
    for g, start, end in _groups(offs):
        out[start:end] = a[start:end] @ b[g]
    return out


def _groups(offs: Tensor) -> list[tuple[int, int, int]]:
    """Return (group, first row, end row) for every group."""
    ends = offs.tolist()
    return [(g, start, end) for g, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))]
