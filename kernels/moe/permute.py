"""Copy rows of tokens to rows of experts, and sum them back: backends `triton` of moe_permute and moe_unpermute.

    permute     out[position[t, j]] = x[t]                        x [T, H]   out [T*k, H]
    unpermute   out[t] = sum over j of weights[t, j] * y[position[t, j]]      y [T*k, H]   out [T, H]

Positions come from routing.py. A choice without a row (-1) is written nowhere and adds nothing, whatever the weight.
Rows of `out` from offs[-1] on belong to no choice and are not written. The sum is taken in fp32, j after j: the same
bits in every call, which atomic additions by row would not give.

Both kernels walk tokens, not rows. A program loads x's row once and stores it k times. In the order of the experts each
row would be read k times, which took 1.1 to 1.5 times as long on an H100. For the sum, all k rows are requested before
the first is added. For a token that lacks some rows, the others are requested two by two, and the missing ones cost
nothing.

After the routing, programs are launched while it still runs (routing.py). The first ones, as many as the GPU holds at
once, read their tokens' rows during this time. For many tokens with four to eight experts, permute_fused.py copies.

With k = 8 the permutation moves 9 rows per token, reads and writes together; torch's index_select moves 16.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from groupbench.kernels.grouped_gemm.support import can_chain, require_runnable, require_tensors, worker_count
from groupbench.kernels.launch import Kept, Launch
from groupbench.kernels.masks import masked_if
from groupbench.kernels.moe.permute_fused import TokensConfig, choose_tokens, place_and_spread
from groupbench.kernels.moe.routing import Routing, check_ids, route, route_reference
from groupbench.kernels.variants import Variant, first_that_runs

VECTOR = 16  # bytes that a thread loads or stores at a time
MOST_BYTES = 16384  # bytes of a row in one program: 512 threads with two vectors each
IN_FLIGHT = 32768  # bytes of all k rows that a program requests at once; registers limit it
AT_ONCE = 2  # rows that a program requests together, for a token that lacks some
SM_WARPS = 64  # warps that an SM holds
MANY = 8  # with so many rows summed per row written, a thread has two vectors of each; with fewer, four
STREAMED = 4  # with so many rows summed per row written, L2 drops them first


@dataclass(frozen=True)
class RowConfig:
    """A program copies block_h columns at a time; each of `splits` programs takes every splits-th block of a row."""

    block_h: int
    num_warps: int
    splits: int = 1


def choose_config(T: int, H: int, itemsize: int, rows: int = 1, vectors: int = 2) -> RowConfig:
    """Return the config for T tokens, with `rows` rows of H elements in flight at a time in a program.

    A program takes a whole row at once if the row is not too wide, with `vectors` vectors per thread. On an H100 in
    bf16, two vectors are 1 to 4 % faster for H of 2880 to 7168 than blocks that leave fewer lanes idle. With too many
    rows in flight they are up to 1.6 times slower.
    """
    if T < 4096:
        return narrow_config(H, itemsize)
    widest = max(min(MOST_BYTES, IN_FLIGHT // rows) // itemsize, 1)
    block_h = min(triton.next_power_of_2(H), 1 << widest.bit_length() - 1)
    return RowConfig(block_h, num_warps=min(max(block_h * itemsize // (vectors * VECTOR * 32), 1), 16))


def narrow_config(H: int, itemsize: int) -> RowConfig:
    """Return the config for few tokens: several programs share a row, so that every SM has work.

    A thread has one or two vectors, in blocks that leave at most a tenth of their lanes idle.
    """
    vectors = triton.cdiv(H * itemsize, VECTOR)
    width = 128
    for wider in (512, 256):
        if triton.cdiv(vectors, wider) * wider <= 1.1 * vectors:
            width = wider
            break
    block_h = min(width * VECTOR // itemsize, triton.next_power_of_2(H))
    return RowConfig(block_h, num_warps=4, splits=triton.cdiv(H, block_h))


@triton.jit
def _spread_kernel(
    x_ptr,  # [T, H]
    position_ptr,  # [T, K]
    out_ptr,  # [rows, H]
    H,
    early,  # tokens whose rows are read before positions are known
    stride_x,
    stride_xh,
    stride_out,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK_H
    columns = start + tl.arange(0, BLOCK_H)
    at = x_ptr + token * stride_x + columns.to(tl.int64) * stride_xh
    row = tl.load(at, mask=masked_if(token < early, columns < H))
    if CHAINED:
        gdc_wait()
    last = tl.load(position_ptr + token * K)
    for j in tl.static_range(1, K):
        last = tl.maximum(last, tl.load(position_ptr + token * K + j))
    for first in range(start, H, SPLITS * BLOCK_H):
        columns = first + tl.arange(0, BLOCK_H)
        if (first > start) | (token >= early):
            at = x_ptr + token * stride_x + columns.to(tl.int64) * stride_xh
            row = tl.load(at, mask=masked_if(last >= 0, columns < H))  # do not read a token without rows
        for j in tl.static_range(K):
            to = tl.load(position_ptr + token * K + j).to(tl.int64)
            tl.store(out_ptr + to * stride_out + columns, row, mask=masked_if(to >= 0, columns < H))


@triton.jit
def _combine_all(
    y_ptr, position_ptr, weights_ptr, out_ptr, token, H, stride_y, stride_yh, K: tl.constexpr, BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr, WEIGHTED: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """Sum the rows of a token whose choices all have one: all are requested before the first is added."""
    rows = ()
    weights = ()
    for j in tl.static_range(K):
        rows += (tl.load(position_ptr + token * K + j).to(tl.int64),)  # type: ignore[assignment]
        if WEIGHTED:
            weights += (tl.load(weights_ptr + token * K + j).to(tl.float32),)  # type: ignore[assignment]
    for first in range(tl.program_id(1) * BLOCK_H, H, SPLITS * BLOCK_H):
        columns = first + tl.arange(0, BLOCK_H)
        at = y_ptr + columns.to(tl.int64) * stride_yh
        values = ()
        for j in tl.static_range(K):
            row = at + rows[j] * stride_y
            values += (tl.load(row, mask=columns < H, other=0.0, eviction_policy=EVICT),)  # type: ignore[assignment]
        acc = tl.zeros((BLOCK_H,), dtype=tl.float32)
        for j in tl.static_range(K):
            acc += values[j].to(tl.float32) * weights[j] if WEIGHTED else values[j].to(tl.float32)
        tl.store(out_ptr + token * H + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < H)


@triton.jit
def _combine_some(
    y_ptr, position_ptr, weights_ptr, out_ptr, token, H, stride_y, stride_yh, K: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_H: tl.constexpr, SPLITS: tl.constexpr, WEIGHTED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sum the rows of a token with choices that lack one: these add nothing, even if their weight is NaN."""
    choices = tl.arange(0, CHOICES)
    position = tl.load(position_ptr + token * K + choices, mask=choices < K, other=-1)
    held = position >= 0
    if WEIGHTED:
        weights = tl.load(weights_ptr + token * K + choices, mask=held, other=0.0).to(tl.float32)
    count = tl.sum(held.to(tl.int32), 0)
    number = tl.where(held, tl.cumsum(held.to(tl.int32), 0) - 1, -1)
    for first in range(tl.program_id(1) * BLOCK_H, H, SPLITS * BLOCK_H):
        columns = first + tl.arange(0, BLOCK_H)
        at = y_ptr + columns.to(tl.int64) * stride_yh
        acc = tl.zeros((BLOCK_H,), dtype=tl.float32)
        for done in range(0, count, AT_ONCE):
            for more in tl.static_range(AT_ONCE):
                this = number == done + more
                row = tl.max(tl.where(this, position, -1), 0).to(tl.int64)
                values = tl.load(at + row * stride_y, mask=masked_if(row >= 0, columns < H), other=0.0).to(tl.float32)
                acc += values * tl.sum(tl.where(this, weights, 0.0), 0) if WEIGHTED else values
        tl.store(out_ptr + token * H + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < H)


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
    CHOICES: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SPLITS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EVICT: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    least = tl.load(position_ptr + token * K)
    for j in tl.static_range(1, K):
        least = tl.minimum(least, tl.load(position_ptr + token * K + j))
    # Two functions, since a branch between the loads of rows would make each wait for the previous one.
    if least >= 0:
        _combine_all(
            y_ptr, position_ptr, weights_ptr, out_ptr, token, H, stride_y, stride_yh, K, BLOCK_H, SPLITS, WEIGHTED,
            EVICT,
        )  # fmt: skip
    else:
        _combine_some(
            y_ptr, position_ptr, weights_ptr, out_ptr, token, H, stride_y, stride_yh, K, CHOICES, BLOCK_H, SPLITS,
            WEIGHTED, AT_ONCE,
        )  # fmt: skip


def permute_rows(
    x: Tensor,  # [T, H], any strides
    ids: Tensor,  # [T, k], int32 or int64
    G: int,
) -> tuple[Tensor, Routing]:  # rows [T*k, H]; those from offs[-1] on are not written
    """Return the rows of all choices, sorted by expert, and their routing.

    Allocates and launches, for an x that was checked already. Raises ValueError for ids or a G that the kernels cannot
    take.
    """
    key = (x.shape, x.stride(), x.dtype, x.get_device(), ids.shape, ids.dtype, G)
    run = _permutes.get(key)
    if run is None:
        check_ids(ids, G)
        run = _permutes.add(key, _permute(choose_tokens(x, ids.size(1), G), (x.dtype, G, x.device)))
    return run(x, ids, G)


_permutes: Kept[Callable[[Tensor, Tensor, int], tuple[Tensor, Routing]]] = Kept()


def _permute(
    config: TokensConfig | None, compiled_for: Hashable
) -> Callable[[Tensor, Tensor, int], tuple[Tensor, Routing]]:
    """Return `permute_rows`, in one launch after the routing's if there is a config for it."""

    def apart(x: Tensor, ids: Tensor, G: int) -> tuple[Tensor, Routing]:
        routing = route(ids, G)
        return _spread(x, routing.position, None, chained=routing.source.numel() > 0 and can_chain(x.device)), routing

    if config is None:
        return apart
    together = partial(place_and_spread, config=config)
    variants = [
        Variant("together", lambda: together, key=(config, compiled_for)),
        Variant("apart", lambda: apart),
    ]
    return first_that_runs("moe_permute", variants)


def spread_rows(
    x: Tensor,  # [T, H], any strides
    position: Tensor,  # [T, k] int32
    config: RowConfig | None = None,
) -> Tensor:  # [T*k, H]; rows that belong to no choice are not written
    """Return x's rows at the positions of their choices, for operands that were checked already."""
    return _spread(x, position, config, chained=False)


def _spread(x: Tensor, position: Tensor, config: RowConfig | None, chained: bool) -> Tensor:
    """Run `spread_rows`.

    Args:
        chained: The previous launches are those of `route`, which do not write x, so that it may be read early.
    """
    (T, H), k = x.shape, position.size(1)
    position = position.contiguous()
    out = torch.empty(T * k, H, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    key = ("spread", x.shape, x.stride(), x.dtype, x.get_device(), k, config, chained)
    kept = _launches.get(key)
    if kept is None:
        config = config or choose_config(T, H, x.element_size())
        early = worker_count(x.device, SM_WARPS // config.num_warps) // config.splits if chained else 0
        bound = Launch(
            _spread_kernel, (T, config.splits), K=k, BLOCK_H=config.block_h, SPLITS=config.splits, CHAINED=chained,
            num_warps=config.num_warps, **({"launch_pdl": True} if chained else {}),
        )  # fmt: skip
        kept = _launches.add(key, (bound, (H, early, *x.stride(), H)))
    launch, numbers = kept
    if not launch.again(x.data_ptr(), position.data_ptr(), out.data_ptr()):
        launch(x, position, out, *numbers)
    return out


_launches: Kept[tuple[Launch, tuple[int, ...]]] = Kept()
"""Bound launches by problem class, with their integer arguments."""


def combine_rows(
    y: Tensor,  # [rows, H], any strides
    position: Tensor,  # [T, k] int32
    weights: Tensor | None,  # [T, k], any float dtype; None: all are 1
    config: RowConfig | None = None,
) -> Tensor:  # [T, H]
    """Return the weighted sum of every token's rows, for operands that were checked already."""
    (T, k), H = position.shape, y.size(1)
    position = position.contiguous()
    out = torch.empty(T, H, dtype=y.dtype, device=y.device)
    if not out.numel():
        return out
    factors = position if weights is None else weights.contiguous()
    key = ("combine", T, k, y.shape, y.stride(), y.dtype, y.get_device(), factors.dtype, config)
    kept = _launches.get(key)
    if kept is None:
        config = config or choose_config(T, H, y.element_size(), rows=k, vectors=2 if k >= MANY else 4)
        bound = Launch(
            _combine_kernel, (T, config.splits), K=k, CHOICES=triton.next_power_of_2(k), BLOCK_H=config.block_h,
            SPLITS=config.splits, WEIGHTED=weights is not None, EVICT="evict_first" if k >= STREAMED else "",
            AT_ONCE=max(min(AT_ONCE, k // 2), 1), num_warps=config.num_warps,
        )  # fmt: skip
        kept = _launches.add(key, (bound, (H, *y.stride())))
    launch, numbers = kept
    if not launch.again(y.data_ptr(), position.data_ptr(), factors.data_ptr(), out.data_ptr()):
        launch(y, position, factors, out, *numbers)
    return out


def prepare_permute(
    x: Tensor,  # [T, H], any strides
    ids: Tensor,  # [T, k], int32 or int64
    G: int,
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:  # rows [T*k, H], offs [G], position [T, k]
    """Check the operands; the returned callable routes, allocates and copies.

    The callable reads `ids` on the device and follows later changes. Raises ValueError for operands that do not fit
    together or cannot run.
    """
    require_runnable(x)
    check_ids(ids, G)
    check_rows(x, ids)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        rows, routing = permute_rows(x, ids, G)
        return rows, routing.offs, routing.position

    return run


def prepare_unpermute(
    y: Tensor,  # [rows, H], any strides
    position: Tensor,  # [T, k] int32
    weights: Tensor,  # [T, k], any float dtype
) -> Callable[[], Tensor]:  # [T, H]
    """Check the operands; the returned callable allocates and sums.

    Raises ValueError for operands that do not fit together or cannot run. Positions are checked here only, which
    synchronises with the device.
    """
    require_runnable(y)
    check_positions(y, position, weights)
    return lambda: combine_rows(y, position, weights)


def check_rows(x: Tensor, ids: Tensor) -> None:
    """Raise ValueError unless x [T, H] has a row for each token of ids [T, k]."""
    require_tensors(x=x)
    if x.ndim != 2 or x.size(0) != ids.size(0):
        raise ValueError(f"expected x [{ids.size(0)}, H] with a row for each token of ids, got {tuple(x.shape)}")


def check_positions(y: Tensor, position: Tensor, weights: Tensor) -> None:
    """Raise ValueError unless y [rows, H], position [T, k] and weights [T, k] fit together.

    Checking the positions synchronises with the device. The kernels do not check them, and would read past y.
    """
    require_tensors(y=y, position=position, weights=weights)
    if y.ndim != 2 or position.ndim != 2 or position.dtype != torch.int32:
        raise ValueError(
            f"expected y [rows, H] and position [T, k] in int32, got {tuple(y.shape)} and {tuple(position.shape)} in "
            f"{position.dtype}"
        )
    if weights.shape != position.shape or not weights.is_floating_point():
        raise ValueError(
            f"expected weights {tuple(position.shape)} in a float dtype, got {tuple(weights.shape)} in {weights.dtype}"
        )
    if position.numel() and (most := int(position.max())) >= y.size(0):
        raise ValueError(f"position holds {most}, and y [rows, H] has {y.size(0)} rows")


# --- the same in torch ------------------------------------------------------------------------------------------------


def permute_reference(x: Tensor, ids: Tensor, G: int) -> tuple[Tensor, Routing]:
    """Return the results of `permute_rows`; rows that belong to no choice are zero."""
    routing = route_reference(ids, G)
    return spread_reference(x, routing.position), routing


def spread_reference(x: Tensor, position: Tensor) -> Tensor:
    """Return the rows of `spread_rows`; those that belong to no choice are zero."""
    out = x.new_zeros(position.numel(), x.size(1))
    token, choice = torch.nonzero(position >= 0, as_tuple=True)
    out[position[token, choice].long()] = x[token]
    return out


def combine_reference(y: Tensor, position: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums of `combine_rows`, computed in y's dtype."""
    held = (position >= 0)[:, :, None]
    rows = y[position.clamp_min(0).long()]
    factors = 1.0 if weights is None else weights.to(y.dtype)[:, :, None]
    return torch.where(held, rows * factors, 0.0).sum(1)
