"""Rows of tokens to rows of experts, and back with weights: backends `triton` of moe_permute and moe_unpermute.

    permute     out[position[t, j]] = x[t]                        x [T, H]   out [T*k, H]
    unpermute   out[t] = sum over j of weights[t, j] * y[position[t, j]]      y [T*k, H]   out [T, H]

Positions are routing.py's; a choice without a row (-1) is written nowhere and adds nothing, its weight whatever it is.
Rows of `out` that are no choice's, from offs[-1] on, are not written. The sum is taken in fp32, j after j: the same
bits in every call, which atomic additions by row would not give.

Both walk tokens, not rows. A program loads x's row once and stores it k times: in the order of the experts each row
would be read k times, and, of more tokens than L2 holds, from memory. For the sum the loads of all k rows wait for none
of each other.

With k = 8 the permutation moves 9 rows a token, reads and writes together, where torch's index_select moves 16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.grouped_gemm.support import require_runnable
from groupbench.kernels.moe.routing import check_ids, route, route_reference


@dataclass(frozen=True)
class RowConfig:
    """block_h columns at a time; `splits` programs share a token's row, each with every splits-th block of it."""

    block_h: int
    num_warps: int
    splits: int = 1


def choose_config(T: int, H: int, itemsize: int) -> RowConfig:
    """Vectors of 16 bytes, one or two a thread, in blocks that leave a tenth of their lanes idle at most."""
    vectors = triton.cdiv(H * itemsize, 16)
    width = 128
    for wider in (512, 256):
        if triton.cdiv(vectors, wider) * wider <= 1.1 * vectors:
            width = wider
            break
    block_h = min(width * 16 // itemsize, triton.next_power_of_2(H))
    # Few tokens are shared out, so that every SM has some.
    splits = triton.cdiv(H, block_h) if T < 4096 else 1
    return RowConfig(block_h, num_warps=4, splits=splits)


@triton.jit
def _spread_kernel(
    x_ptr,  # [T, H]
    position_ptr,  # [T, K]
    out_ptr,  # [rows, H]
    H,
    stride_x,
    stride_xh,
    stride_out,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for first in range(tl.program_id(1) * BLOCK_H, H, SPLITS * BLOCK_H):
        columns = first + tl.arange(0, BLOCK_H)
        row = tl.load(x_ptr + token * stride_x + columns.to(tl.int64) * stride_xh, mask=columns < H)
        for j in tl.static_range(K):
            to = tl.load(position_ptr + token * K + j).to(tl.int64)
            tl.store(out_ptr + to * stride_out + columns, row, mask=(columns < H) & (to >= 0))


@triton.jit
def _combine_kernel(
    y_ptr,  # [rows, H]
    position_ptr,  # [T, K]
    weights_ptr,  # [T, K] contiguous; unused without WEIGHTED
    out_ptr,  # [T, H]
    H,
    stride_y,
    stride_yh,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for first in range(tl.program_id(1) * BLOCK_H, H, SPLITS * BLOCK_H):
        columns = first + tl.arange(0, BLOCK_H)
        acc = tl.zeros((BLOCK_H,), dtype=tl.float32)
        for j in tl.static_range(K):
            at = tl.load(position_ptr + token * K + j).to(tl.int64)
            inside = (columns < H) & (at >= 0)
            row = tl.load(y_ptr + at * stride_y + columns.to(tl.int64) * stride_yh, mask=inside, other=0.0)
            row = row.to(tl.float32)
            if WEIGHTED:
                # Whatever the weight of a choice without a row is, NaN included, it counts for nothing.
                row = tl.where(at >= 0, row * tl.load(weights_ptr + token * K + j).to(tl.float32), 0.0)
            acc += row
        tl.store(out_ptr + token * H + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < H)


def spread_rows(
    x: Tensor,  # [T, H], any strides
    position: Tensor,  # [T, k] int32, contiguous
    config: RowConfig | None = None,
) -> Tensor:  # [T*k, H]; rows that are no choice's are not written
    """Allocate and launch."""
    (T, H), k = x.shape, position.size(1)
    out = torch.empty(T * k, H, dtype=x.dtype, device=x.device)
    if out.numel():
        config = config or choose_config(T, H, x.element_size())
        _spread_kernel[(T, config.splits)](
            x, position, out, H, *x.stride(), H, K=k, BLOCK_H=config.block_h, SPLITS=config.splits,
            num_warps=config.num_warps,
        )  # fmt: skip
    return out


def combine_rows(
    y: Tensor,  # [rows, H], any strides
    position: Tensor,  # [T, k] int32, contiguous
    weights: Tensor | None,  # [T, k], any float dtype; None: all are 1
    config: RowConfig | None = None,
) -> Tensor:  # [T, H]
    """Allocate and launch."""
    (T, k), H = position.shape, y.size(1)
    out = torch.empty(T, H, dtype=y.dtype, device=y.device)
    if out.numel():
        config = config or choose_config(T, H, y.element_size())
        _combine_kernel[(T, config.splits)](
            y, position, position if weights is None else weights.contiguous(), out, H, *y.stride(), K=k,
            BLOCK_H=config.block_h, SPLITS=config.splits, WEIGHTED=weights is not None, num_warps=config.num_warps,
        )  # fmt: skip
    return out


def prepare_permute(
    x: Tensor,  # [T, H], any strides
    ids: Tensor,  # [T, k], int32 or int64
    G: int,
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:  # rows [T*k, H], offs [G], position [T, k]
    """Check; the callable routes by whatever `ids` then says, allocates and copies. Raises ValueError."""
    require_runnable(x)
    check_ids(ids, G)
    check_rows(x, ids)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        routing = route(ids, G)
        return spread_rows(x, routing.position), routing.offs, routing.position

    return run


def prepare_unpermute(
    y: Tensor,  # [rows, H], any strides
    position: Tensor,  # [T, k] int32
    weights: Tensor,  # [T, k], any float dtype
) -> Callable[[], Tensor]:  # [T, H]
    """Check; the callable allocates and sums. Raises ValueError."""
    require_runnable(y)
    check_positions(y, position, weights)
    position = position.contiguous()
    return lambda: combine_rows(y, position, weights)


def check_rows(x: Tensor, ids: Tensor) -> None:
    """Raise ValueError unless x [T, H] has a row for each token of ids [T, k]."""
    if x.ndim != 2 or x.size(0) != ids.size(0):
        raise ValueError(f"expected x [{ids.size(0)}, H] with a row for each token of ids, got {tuple(x.shape)}")


def check_positions(y: Tensor, position: Tensor, weights: Tensor) -> None:
    """Raise ValueError unless y [rows, H], position [T, k] and weights [T, k] fit together."""
    if y.ndim != 2 or position.ndim != 2 or position.dtype != torch.int32:
        raise ValueError(
            f"expected y [rows, H] and position [T, k] in int32, got {tuple(y.shape)} and {tuple(position.shape)} in "
            f"{position.dtype}"
        )
    if weights.shape != position.shape or not weights.is_floating_point():
        raise ValueError(f"expected weights {tuple(position.shape)}, got {tuple(weights.shape)} in {weights.dtype}")


# --- the same in torch ------------------------------------------------------------------------------------------------


def permute_reference(x: Tensor, ids: Tensor, G: int) -> tuple[Tensor, Tensor, Tensor]:
    """(rows, offs, position); rows that are no choice's are zero."""
    routing = route_reference(ids, G)
    return spread_reference(x, routing.position), routing.offs, routing.position


def spread_reference(x: Tensor, position: Tensor) -> Tensor:
    out = x.new_zeros(position.numel(), x.size(1))
    token, choice = torch.nonzero(position >= 0, as_tuple=True)
    out[position[token, choice].long()] = x[token]
    return out


def combine_reference(y: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """In y's dtype."""
    held = (position >= 0)[:, :, None]
    rows = y[position.clamp_min(0).long()]
    factors = 1.0 if weights is None else weights.to(y.dtype)[:, :, None]
    return torch.where(held, rows * factors, 0.0).sum(1)
