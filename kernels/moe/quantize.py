"""Quantise the layer's matrices to fp8, with the work before it in the same kernel: see layer_fp8.py.

A program has 128 rows from one expert and 128 columns. It writes values in one or two forms:

    by rows     q [M, K], one scale per 128 columns in a row, for products that sum over columns
    by columns  q_t [K, P], transposed, one scale per 128 rows in a column, for weight gradients

`quantize_rows_of` gathers token rows, so the permuted rows do not exist in 16 bits. `swiglu_quantized`
computes the activation, and `swiglu_backward_quantized` the gradient; swiglu.py has the formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.grouped_gemm.experts import expert_of, expert_tiles, of_groups
from groupbench.kernels.grouped_gemm.quantize import (
    E4M3,
    SCALE_BLOCK,
    SMALLEST_AMAX,
    _amax,
    _e4m3,
    _scale,
    empty_fp8,
    padded_rows,
)
from groupbench.kernels.grouped_gemm.support import interpreted
from groupbench.kernels.moe.routing import Routing


class Quantized(NamedTuple):
    """An fp8 matrix with scales, in either form above."""

    q: Tensor
    scale: Tensor


@triton.jit
def _store_rows(
    x, q_ptr, scale_ptr, rows, block_k, inside, M, q_stride, SMALLEST: tl.constexpr, EMULATED: tl.constexpr
):
    scale, inverse = _scale(_amax(x, 1), SMALLEST)
    columns = block_k * 128 + tl.arange(0, 128)
    tl.store(q_ptr + rows[:, None] * q_stride + columns[None, :], _e4m3(x * inverse[:, None], EMULATED), mask=inside)
    tl.store(scale_ptr + block_k.to(tl.int64) * M + rows, scale, mask=tl.max(inside.to(tl.int32), 1) > 0)


@triton.jit
def _store_columns(x, q_ptr, scale_ptr, block, columns, K, P, SMALLEST: tl.constexpr, EMULATED: tl.constexpr):
    scale, inverse = _scale(_amax(x, 0), SMALLEST)
    to = columns.to(tl.int64)[None, :] * P + block * 128 + tl.arange(0, 128)[:, None]
    tl.store(q_ptr + to, _e4m3(x * inverse[None, :], EMULATED), mask=(columns < K)[None, :])
    tl.store(scale_ptr + block.to(tl.int64) * K + columns, scale, mask=columns < K)


@triton.jit
def _rows_kernel(
    x_ptr,  # [T, K]
    source_ptr,  # [M]: the flat choice of each row
    offs_ptr,  # [G]
    q_ptr, scale_ptr, q_t_ptr, scale_t_ptr, M, K, P, x_stride, q_stride, choices,
    G: tl.constexpr, G_POW2: tl.constexpr, COLUMNS: tl.constexpr, SMALLEST: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    starts, ends, counts, before = expert_tiles(offs_ptr, G, G_POW2, 128)
    block, block_k = tl.program_id(0), tl.program_id(1)
    if block < tl.sum(counts, 0):
        _, start, size, row = expert_of(block, starts, ends, counts, before, G_POW2, 128)
        inner = row + tl.arange(0, 128)
        rows = (start + inner).to(tl.int64)
        columns = block_k * 128 + tl.arange(0, 128)
        inside = (inner < size)[:, None] & (columns < K)[None, :]
        token = (tl.load(source_ptr + rows, mask=inner < size, other=0) // choices).to(tl.int64)
        x = tl.load(x_ptr + token[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        _store_rows(x, q_ptr, scale_ptr, rows, block_k, inside, M, q_stride, SMALLEST, EMULATED)
        if COLUMNS:
            _store_columns(x, q_t_ptr, scale_t_ptr, block, columns, K, P, SMALLEST, EMULATED)


def quantize_rows_of(
    x: Tensor,  # [T, K], rows of stride 1
    routing: Routing,
    by_columns: bool,
) -> tuple[Quantized, Quantized | None]:
    """Return all choices' rows, sorted by expert, by rows and, if wanted, by columns."""
    M, K, G = routing.source.numel(), x.size(1), routing.offs.numel()
    out, out_t = _empty_rows(M, K, x.device), _empty_columns(M, G, K, x.device) if by_columns else None
    _launch(_rows_kernel, M, G, K, 8)(
        x, routing.source, routing.offs, *out, *(out_t or (None, None)), M, K, padded_rows(M, G), x.stride(0),
        out.q.stride(0), routing.position.size(1), COLUMNS=by_columns,
    )  # fmt: skip
    return out, out_t


@triton.jit
def _swiglu_kernel(
    both_ptr,  # [M, 2F]
    offs_ptr,  # [G]
    q_ptr, scale_ptr, M, F, q_stride,
    G: tl.constexpr, G_POW2: tl.constexpr, SMALLEST: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)
    block_k = tl.program_id(1)
    columns = block_k * 128 + tl.arange(0, 128)
    inside = (rows < tl.load(offs_ptr + G - 1))[:, None] & (columns < F)[None, :]
    at = both_ptr + rows[:, None] * 2 * F + columns[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
    act = gate / (1 + tl.exp(-gate)) * up
    _store_rows(act, q_ptr, scale_ptr, rows, block_k, inside, M, q_stride, SMALLEST, EMULATED)


def swiglu_quantized(
    both: Tensor,  # [M, 2F] contiguous: gate, then up
    offs: Tensor,  # [G]
) -> Quantized:
    """Return silu(gate) * up for every row, by rows."""
    M, F, G = both.size(0), both.size(1) // 2, offs.numel()
    out = _empty_rows(M, F, both.device)
    _launch(_swiglu_kernel, M, G, F, 8)(both, offs, *out, M, F, out.q.stride(0))
    return out


@triton.jit
def _swiglu_backward_kernel(
    both_ptr,  # [M, 2F]
    da_ptr,  # [M, F]
    weights_ptr,  # [M] by flat choice
    source_ptr,  # [M]
    offs_ptr,  # [G]
    q_ptr, scale_ptr,  # dboth by rows
    q_t_ptr, scale_t_ptr,  # dboth by columns
    weighted_ptr, scale_w_ptr,  # weights * act, by columns
    sums_ptr,  # [F/128, M]: of da * act
    M, F, P, q_stride,
    G: tl.constexpr, G_POW2: tl.constexpr, SMALLEST: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    starts, ends, counts, before = expert_tiles(offs_ptr, G, G_POW2, 128)
    block, block_k = tl.program_id(0), tl.program_id(1)
    if block < tl.sum(counts, 0):
        _, start, size, row = expert_of(block, starts, ends, counts, before, G_POW2, 128)
        inner = row + tl.arange(0, 128)
        rows = (start + inner).to(tl.int64)
        columns = block_k * 128 + tl.arange(0, 128)
        inside = (inner < size)[:, None] & (columns < F)[None, :]
        at = both_ptr + rows[:, None] * 2 * F + columns[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
        da = tl.load(da_ptr + rows[:, None] * F + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        choice = tl.load(source_ptr + rows, mask=inner < size, other=0)
        w = tl.load(weights_ptr + choice, mask=inner < size, other=0.0).to(tl.float32)
        s = 1 / (1 + tl.exp(-gate))
        silu = gate * s
        act = silu * up
        tl.store(sums_ptr + block_k.to(tl.int64) * M + rows, tl.sum(da * act, 1), mask=inner < size)
        _store_columns(act * w[:, None], weighted_ptr, scale_w_ptr, block, columns, F, P, SMALLEST, EMULATED)
        da *= w[:, None]
        dup = da * silu
        _store_rows(
            dup,
            q_ptr + F,
            scale_ptr + tl.cast(F // 128, tl.int64) * M,
            rows,
            block_k,
            inside,
            M,
            q_stride,
            SMALLEST,
            EMULATED,
        )
        _store_columns(
            dup, q_t_ptr + tl.cast(F, tl.int64) * P, scale_t_ptr + F, block, columns, 2 * F, P, SMALLEST, EMULATED
        )
        dgate = da * up * s * (1 + gate * (1 - s))
        _store_rows(dgate, q_ptr, scale_ptr, rows, block_k, inside, M, q_stride, SMALLEST, EMULATED)
        _store_columns(dgate, q_t_ptr, scale_t_ptr, block, columns, 2 * F, P, SMALLEST, EMULATED)


def swiglu_backward_quantized(
    da: Tensor,  # [M, F] contiguous
    both: Tensor,  # [M, 2F] contiguous
    weights: Tensor,  # [T, k], T*k = M
    routing: Routing,
) -> tuple[Quantized, Quantized, Quantized, Tensor]:  # dboth by rows and columns, weighted by columns, dweights [T, k]
    """Return the gradients for gate and up, weights * act, and the weights' gradient. F is divisible by 128."""
    (M, F), G, device = da.shape, routing.offs.numel(), da.device
    dboth, dboth_t, weighted = _empty_rows(M, 2 * F, device), *(_empty_columns(M, G, n, device) for n in (2 * F, F))
    sums = torch.zeros(F // SCALE_BLOCK, M, dtype=torch.float32, device=device)
    _launch(_swiglu_backward_kernel, M, G, F, 16)(
        both, da, weights.contiguous(), routing.source, routing.offs, *dboth, *dboth_t, *weighted, sums, M, F,
        padded_rows(M, G), dboth.q.stride(0),
    )  # fmt: skip
    position = routing.position.long()
    dweights = torch.where(position < 0, 0.0, sums.sum(0)[position.clamp_min(0)])
    return dboth, dboth_t, weighted, dweights.to(weights.dtype)


def _empty_rows(M: int, K: int, device: torch.device) -> Quantized:
    scale = torch.empty(triton.cdiv(K, SCALE_BLOCK), M, dtype=torch.float32, device=device).t()
    return Quantized(empty_fp8(M, K, device), scale)


def _empty_columns(M: int, G: int, K: int, device: torch.device) -> Quantized:
    P = padded_rows(M, G)
    scale = torch.empty(P // SCALE_BLOCK, K, dtype=torch.float32, device=device)
    return Quantized(torch.empty(K, P, dtype=E4M3, device=device), scale)


def _launch(kernel: Any, M: int, G: int, K: int, num_warps: int) -> Any:
    """Return the launch over all 128 x 128 blocks."""
    grid = (padded_rows(M, G) // SCALE_BLOCK, triton.cdiv(K, SCALE_BLOCK))
    fixed = {**of_groups(G), "SMALLEST": SMALLEST_AMAX, "EMULATED": interpreted(), "num_warps": num_warps}
    return lambda *arguments, **more: kernel[grid](*arguments, **fixed, **more)
