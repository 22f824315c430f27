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

from groupbench.kernels.grouped_gemm import quantize_cuda
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
from groupbench.kernels.launch import launch
from groupbench.kernels.moe.routing import Routing

SUM_BLOCK = 256  # choices of a program that adds up their sums


class Quantized(NamedTuple):
    """An fp8 matrix with scales, in either form above."""

    q: Tensor
    scale: Tensor


@triton.jit
def _store_rows(
    x, q_ptr, scale_ptr, rows, block_k, inside, stride, q_stride, SMALLEST: tl.constexpr, EMULATED: tl.constexpr
):
    scale, inverse = _scale(_amax(x, 1), SMALLEST)
    columns = block_k * 128 + tl.arange(0, 128)
    tl.store(q_ptr + rows[:, None] * q_stride + columns[None, :], _e4m3(x * inverse[:, None], EMULATED), mask=inside)
    tl.store(scale_ptr + block_k.to(tl.int64) * stride + rows, scale, mask=tl.max(inside.to(tl.int32), 1) > 0)


@triton.jit
def _store_columns(x, q_ptr, scale_ptr, block, columns, K, P, SMALLEST: tl.constexpr, EMULATED: tl.constexpr):
    scale, inverse = _scale(_amax(x, 0), SMALLEST)
    to = columns.to(tl.int64)[None, :] * P + block * 128 + tl.arange(0, 128)[:, None]
    tl.store(q_ptr + to, _e4m3(x * inverse[None, :], EMULATED), mask=(columns < K)[None, :])
    tl.store(scale_ptr + block.to(tl.int64) * K + columns, scale, mask=columns < K)


@triton.jit
def _blocks_kernel(offs_ptr, blocks_ptr, G: tl.constexpr, G_POW2: tl.constexpr):
    starts, ends, counts, before = expert_tiles(offs_ptr, G, G_POW2, 128)
    block = tl.program_id(0)
    _, start, size, row = expert_of(block, starts, ends, counts, before, G_POW2, 128)
    tl.store(blocks_ptr + 2 * block, start + row)
    tl.store(blocks_ptr + 2 * block + 1, tl.where(block < tl.sum(counts, 0), tl.minimum(size - row, 128), 0))


def row_blocks(routing: Routing) -> Tensor:  # [P/128, 2] int32
    """Return the first row and the number of rows, at most 128 of one expert, for each block; at the end, none."""
    G, P = routing.offs.numel(), padded_rows(routing.source.numel(), routing.offs.numel())
    blocks = torch.empty(P // SCALE_BLOCK, 2, dtype=torch.int32, device=routing.offs.device)
    launch(_blocks_kernel, (P // SCALE_BLOCK,), routing.offs, blocks, **of_groups(G), num_warps=1)
    return blocks


@triton.jit
def _rows_of(blocks_ptr, block):
    """Return a block's rows, and which of them exist."""
    inner = tl.arange(0, 128)
    rows = (tl.load(blocks_ptr + 2 * block) + inner).to(tl.int64)
    return rows, inner < tl.load(blocks_ptr + 2 * block + 1)


@triton.jit
def _rows_kernel(
    x_ptr,  # [T, K]
    source_ptr,  # [M]: the flat choice of each row
    blocks_ptr,  # [P/128, 2]
    q_ptr, scale_ptr, q_t_ptr, scale_t_ptr, stride, K, P, x_stride, q_stride, choices,
    COLUMNS: tl.constexpr, SMALLEST: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    block, block_k = tl.program_id(0), tl.program_id(1)
    rows, is_row = _rows_of(blocks_ptr, block)
    if tl.load(blocks_ptr + 2 * block + 1) > 0:
        columns = block_k * 128 + tl.arange(0, 128)
        inside = is_row[:, None] & (columns < K)[None, :]
        token = (tl.load(source_ptr + rows, mask=is_row, other=0) // choices).to(tl.int64)
        x = tl.load(x_ptr + token[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        _store_rows(x, q_ptr, scale_ptr, rows, block_k, inside, stride, q_stride, SMALLEST, EMULATED)
        if COLUMNS:
            _store_columns(x, q_t_ptr, scale_t_ptr, block, columns, K, P, SMALLEST, EMULATED)


def quantize_rows_of(
    x: Tensor,  # [T, K], rows of stride 1
    routing: Routing,
    blocks: Tensor,  # of `row_blocks`
    by_columns: bool,
) -> tuple[Quantized, Quantized | None]:
    """Return all choices' rows, sorted by expert, by rows and, if wanted, by columns."""
    M, K, G = routing.source.numel(), x.size(1), routing.offs.numel()
    out, out_t = _empty_rows(M, K, x.device), _empty_columns(M, G, K, x.device) if by_columns else None
    arguments = (
        x, routing.source, blocks, *out, *(out_t or (None, None)), out.scale.stride(1), K,
        len(blocks) * SCALE_BLOCK, x.stride(0), out.q.stride(0), routing.position.size(1),
    )  # fmt: skip
    _launch("rows_kernel", _rows_kernel, blocks, K, 8, x)(*arguments, COLUMNS=by_columns)
    return out, out_t


@triton.jit
def _swiglu_kernel(
    both_ptr,  # [M, 2F]
    blocks_ptr,  # [P/128, 2]
    q_ptr, scale_ptr, stride, F, P, q_stride, SMALLEST: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    rows, is_row = _rows_of(blocks_ptr, tl.program_id(0))
    block_k = tl.program_id(1)
    columns = block_k * 128 + tl.arange(0, 128)
    inside = is_row[:, None] & (columns < F)[None, :]
    at = both_ptr + rows[:, None] * 2 * F + columns[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
    act = gate / (1 + tl.exp(-gate)) * up
    _store_rows(act, q_ptr, scale_ptr, rows, block_k, inside, stride, q_stride, SMALLEST, EMULATED)


def swiglu_quantized(
    both: Tensor,  # [M, 2F] contiguous: gate, then up
    blocks: Tensor,  # of `row_blocks`
) -> Quantized:
    """Return silu(gate) * up for every row, by rows."""
    M, F = both.size(0), both.size(1) // 2
    out = _empty_rows(M, F, both.device)
    arguments = (both, blocks, *out, out.scale.stride(1), F, len(blocks) * SCALE_BLOCK, out.q.stride(0))
    _launch("swiglu_kernel", _swiglu_kernel, blocks, F, 8, both)(*arguments)
    return out


@triton.jit
def _swiglu_backward_kernel(
    both_ptr,  # [M, 2F]
    da_ptr,  # [M, F]
    weights_ptr,  # [M] by flat choice
    source_ptr,  # [M]
    blocks_ptr,  # [P/128, 2]
    q_ptr, scale_ptr,  # dboth by rows
    q_t_ptr, scale_t_ptr,  # dboth by columns
    weighted_ptr, scale_w_ptr,  # weights * act, by columns
    sums_ptr,  # [F/128, M]: of da * act
    stride, F, P, q_stride, SMALLEST: tl.constexpr, EMULATED: tl.constexpr,
):  # fmt: skip
    block, block_k = tl.program_id(0), tl.program_id(1)
    rows, is_row = _rows_of(blocks_ptr, block)
    if tl.load(blocks_ptr + 2 * block + 1) > 0:
        columns = block_k * 128 + tl.arange(0, 128)
        inside = is_row[:, None] & (columns < F)[None, :]
        at = both_ptr + rows[:, None] * 2 * F + columns[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
        da = tl.load(da_ptr + rows[:, None] * F + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        choice = tl.load(source_ptr + rows, mask=is_row, other=0)
        w = tl.load(weights_ptr + choice, mask=is_row, other=0.0).to(tl.float32)
        s = 1 / (1 + tl.exp(-gate))
        silu = gate * s
        act = silu * up
        tl.store(sums_ptr + block_k.to(tl.int64) * stride + rows, tl.sum(da * act, 1), mask=is_row)
        _store_columns(act * w[:, None], weighted_ptr, scale_w_ptr, block, columns, F, P, SMALLEST, EMULATED)
        da *= w[:, None]
        dup = da * silu
        _store_rows(
            dup,
            q_ptr + F,
            scale_ptr + tl.cast(F // 128, tl.int64) * stride,
            rows,
            block_k,
            inside,
            stride,
            q_stride,
            SMALLEST,
            EMULATED,
        )
        _store_columns(
            dup, q_t_ptr + tl.cast(F, tl.int64) * P, scale_t_ptr + F, block, columns, 2 * F, P, SMALLEST, EMULATED
        )
        dgate = da * up * s * (1 + gate * (1 - s))
        _store_rows(dgate, q_ptr, scale_ptr, rows, block_k, inside, stride, q_stride, SMALLEST, EMULATED)
        _store_columns(dgate, q_t_ptr, scale_t_ptr, block, columns, 2 * F, P, SMALLEST, EMULATED)


def swiglu_backward_quantized(
    da: Tensor,  # [M, F] contiguous
    both: Tensor,  # [M, 2F] contiguous
    weights: Tensor,  # [T, k], T*k = M
    routing: Routing,
    blocks: Tensor,  # of `row_blocks`
) -> tuple[Quantized, Quantized, Quantized, Tensor]:  # dboth by rows and columns, weighted by columns, dweights [T, k]
    """Return the gradients for gate and up, weights * act, and the weights' gradient. F is divisible by 128."""
    (M, F), G, device = da.shape, routing.offs.numel(), da.device
    dboth, dboth_t, weighted = _empty_rows(M, 2 * F, device), *(_empty_columns(M, G, n, device) for n in (2 * F, F))
    stride = dboth.scale.stride(1)
    sums = torch.empty(F // SCALE_BLOCK, stride, dtype=torch.float32, device=device)
    arguments = (
        both, da, weights.float().contiguous(), routing.source, blocks, *dboth, *dboth_t, *weighted, sums, stride, F,
        len(blocks) * SCALE_BLOCK, dboth.q.stride(0),
    )  # fmt: skip
    _launch("swiglu_backward_kernel", _swiglu_backward_kernel, blocks, F, 16, da)(*arguments)
    dweights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    grid = (triton.cdiv(M, SUM_BLOCK),)
    launch(
        _sum_kernel, grid, sums, routing.position, dweights, M, stride, F // SCALE_BLOCK, BLOCK=SUM_BLOCK, num_warps=4
    )
    return dboth, dboth_t, weighted, dweights


@triton.jit
def _sum_kernel(sums_ptr, position_ptr, dweights_ptr, M, stride, blocks, BLOCK: tl.constexpr):
    """Add a row's sums in order, for every choice; 0 for one without a row."""
    choices = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(position_ptr + choices, mask=choices < M, other=-1).to(tl.int64)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for block in range(blocks):
        total += tl.load(sums_ptr + tl.cast(stride, tl.int64) * block + row, mask=row >= 0, other=0.0)
    tl.store(dweights_ptr + choices, total.to(dweights_ptr.dtype.element_ty), mask=choices < M)


def _empty_rows(M: int, K: int, device: torch.device) -> Quantized:
    # Scales of a block of columns start at a multiple of 16 bytes, for copies of them.
    scale = torch.empty(triton.cdiv(K, SCALE_BLOCK), triton.cdiv(M, 4) * 4, dtype=torch.float32, device=device)
    return Quantized(empty_fp8(M, K, device), scale.t()[:M])


def _empty_columns(M: int, G: int, K: int, device: torch.device) -> Quantized:
    P = padded_rows(M, G)
    scale = torch.empty(P // SCALE_BLOCK, K, dtype=torch.float32, device=device)
    return Quantized(torch.empty(K, P, dtype=E4M3, device=device), scale)


def _launch(in_cuda: str, kernel: Any, blocks: Tensor, columns: int, num_warps: int, like: Tensor) -> Any:
    """Return the launch over all 128 x 128 blocks of a matrix like this one, in CUDA C++ if that can run."""
    if columns % SCALE_BLOCK == 0 and quantize_cuda.unsuitable(like) is None:
        return lambda *arguments, **_: quantize_cuda.launch_tiles(in_cuda, len(blocks), columns, like, *arguments)
    grid = (len(blocks), triton.cdiv(columns, SCALE_BLOCK))
    fixed = {"SMALLEST": SMALLEST_AMAX, "EMULATED": interpreted(), "num_warps": num_warps}
    return lambda *arguments, **more: kernel[grid](*arguments, **fixed, **more)
