"""Permutation of tokens to experts and back in Helion: backends `helion` of moe_permute and moe_unpermute.

    spread      out[position[t, j]] = x[t]                                  x [T, H]   out [T*k, H]
    combine     out[t] = sum over j of weights[t, j] * y[position[t, j]]    y [T*k, H]   out [T, H]

permute.py's two kernels in Helion's words: a tile of tokens and columns is loaded once and stored k times, or k rows
are summed in fp32. H and k are compile-time constants, the number of tokens is not. Positions come from routing.py.

Rows may lie past 2**31 elements, and Helion 1.5 looks at its inputs' sizes alone to decide what it counts in: not at
strides, nor at what it allocates. So where anything reaches that far, the kernels are those that count in int64, and
positions are int64, and what is computed from them with them.
"""

from __future__ import annotations

from collections.abc import Callable

import helion
import helion.language as hl
import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm.support import require_runnable
from groupbench.kernels.moe.permute import check_positions, check_rows, choose_config
from groupbench.kernels.moe.routing import check_ids, route


@helion.kernel(static_shapes=False)
def spread(
    x: Tensor,  # [T, H]
    position: Tensor,  # [T, k], int32 or int64
) -> Tensor:  # [T*k, H]
    H = hl.specialize(x.size(1))
    k = hl.specialize(position.size(1))
    out = torch.empty(x.size(0) * k, H, dtype=x.dtype, device=x.device)
    for tile_t, tile_h in hl.tile([x.size(0), H]):
        rows = x[tile_t, tile_h]
        for j in hl.static_range(k):
            to = position[tile_t, j]
            hl.store(out, [to, tile_h], rows, extra_mask=(to >= 0)[:, None])
    return out


@helion.kernel(static_shapes=False)
def combine(
    y: Tensor,  # [rows, H]
    position: Tensor,  # [T, k], int32 or int64
    weights: Tensor,  # [T, k]
) -> Tensor:  # [T, H]
    H = hl.specialize(y.size(1))
    k = hl.specialize(position.size(1))
    out = torch.empty(position.size(0), H, dtype=y.dtype, device=y.device)
    for tile_t, tile_h in hl.tile([position.size(0), H]):
        acc = hl.zeros([tile_t, tile_h], dtype=torch.float32)
        for j in hl.static_range(k):
            at = position[tile_t, j]
            held = (at >= 0)[:, None]
            row = hl.load(y, [at, tile_h], extra_mask=held).to(torch.float32)
            # Whatever the weight of a choice without a row is, NaN included, it counts for nothing.
            acc = acc + torch.where(held, row * weights[tile_t, j].to(torch.float32)[:, None], 0.0)
        out[tile_t, tile_h] = acc.to(out.dtype)
    return out


spread_wide = helion.kernel(spread.fn, static_shapes=False, index_dtype=torch.int64)
combine_wide = helion.kernel(combine.fn, static_shapes=False, index_dtype=torch.int64)


def default_config(T: int, H: int, itemsize: int, device: torch.device, rows: int = 1) -> helion.Config:
    """A token a program on a GPU; the interpreter pays by operation, hardly by element."""
    config = choose_config(T, H, itemsize, rows)
    tokens = 1 if device.type == "cuda" else 16
    return helion.Config(block_sizes=[tokens, config.block_h], num_warps=config.num_warps, num_stages=1)


def prepare_helion_permute(
    x: Tensor,  # [T, H], any strides
    ids: Tensor,  # [T, k], int32 or int64
    G: int,
    config: helion.Config | None = None,
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:  # rows [T*k, H], offs [G], position [T, k]
    """Compile, without tuning; the callable routes by whatever `ids` then says, allocates and copies."""
    require_runnable(x)
    check_ids(ids, G)
    check_rows(x, ids)
    T, H, k = *x.shape, ids.size(1)
    wide = max(T * k * H, reach(x)) >= 2**31

    def positions() -> tuple[Tensor, Tensor, Tensor]:
        """(offs, position, position as the Helion kernel takes it)."""
        routing = route(ids, G)
        return routing.offs, routing.position, routing.position.long() if wide else routing.position

    if T == 0 or H == 0:
        return lambda: (x.new_empty(T * k, H), *positions()[:2])
    source = _two_at_least(x)
    kernel = spread_wide if wide else spread
    compiled = kernel.bind(_spread_arguments(source, positions()[2])).compile_config(
        config or default_config(T, H, x.element_size(), x.device)
    )

    def run() -> tuple[Tensor, Tensor, Tensor]:
        offs, position, as_taken = positions()
        return compiled(*_spread_arguments(source, as_taken))[: T * k, :H], offs, position

    if x.device.type == "cuda":
        run()  # compiles what Helion generated
    return run


def prepare_helion_unpermute(
    y: Tensor,  # [rows, H], any strides
    position: Tensor,  # [T, k] int32
    weights: Tensor,  # [T, k], any float dtype
    config: helion.Config | None = None,
) -> Callable[[], Tensor]:  # [T, H]
    """Compile, without tuning; the callable allocates and sums. Raises ValueError."""
    require_runnable(y)
    check_positions(y, position, weights)
    T, H = position.size(0), y.size(1)
    if T == 0 or H == 0:
        return lambda: y.new_empty(T, H)
    wide = max(T * H, reach(y), reach(position), reach(weights)) >= 2**31
    rows, taken, factors = _two_at_least(y), _two_rows(position), _two_rows(weights)

    def arguments() -> tuple[Tensor, Tensor, Tensor]:
        return rows, taken.long() if wide else taken, factors

    config = config or default_config(T, H, y.element_size(), y.device, rows=weights.size(1))
    compiled = (combine_wide if wide else combine).bind(arguments()).compile_config(config)

    def run() -> Tensor:
        out: Tensor = compiled(*arguments())
        return out[:T, :H]

    if y.device.type == "cuda":
        run()
    return run


def reach(x: Tensor) -> int:
    """Elements from x's first one to its last one, in memory."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _spread_arguments(x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """A second token, where there is one alone, has no row."""
    if position.size(0) < x.size(0):
        position = torch.cat([position, torch.full_like(position, -1)])
    return x, position


def _two_at_least(x: Tensor) -> Tensor:
    """x [rows, columns] with two of either: Helion 1.5 drops the index of a dimension of one element."""
    x = _two_rows(x)
    return x.expand(-1, 2) if x.size(1) == 1 else x


def _two_rows(x: Tensor) -> Tensor:
    """The second one is the first again, and the caller cuts off what comes of it."""
    return x.expand(2, -1) if x.size(0) == 1 else x
