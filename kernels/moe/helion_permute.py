"""Permute tokens to experts and back in Helion: backends `helion` of moe_permute and moe_unpermute.

    spread      out[position[t, j]] = x[t]                                  x [T, H]   out [T*k, H]
    combine     out[t] = sum over j of weights[t, j] * y[position[t, j]]    y [T*k, H]   out [T, H]

These are permute.py's two kernels, written in Helion. A tile of tokens and columns is loaded once and stored k times,
or k rows are summed in fp32. H and k are compile-time constants, the number of tokens is not. Positions come from
routing.py.

Row offsets may exceed 2**31 elements, and Helion 1.5 chooses the index type by the input sizes alone. It ignores
strides, and the tensors that it allocates. For such operands there are kernels with int64 indices, and their positions
are int64, so that offsets computed from these are too.
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
            # A choice without a row adds nothing, even if its weight is NaN.
            acc = acc + torch.where(held, row * weights[tile_t, j].to(torch.float32)[:, None], 0.0)
        out[tile_t, tile_h] = acc.to(out.dtype)
    return out


spread_wide = helion.kernel(spread.fn, static_shapes=False, index_dtype=torch.int64)
combine_wide = helion.kernel(combine.fn, static_shapes=False, index_dtype=torch.int64)


def default_config(T: int, H: int, itemsize: int, device: torch.device, rows: int = 1) -> helion.Config:
    """Return a config with one token per program on a GPU, and 16 in the interpreter, which is slow per operation."""
    config = choose_config(T, H, itemsize, rows)
    tokens = 1 if device.type == "cuda" else 16
    return helion.Config(block_sizes=[tokens, config.block_h], num_warps=config.num_warps, num_stages=1)


def prepare_helion_permute(
    x: Tensor,  # [T, H], any strides
    ids: Tensor,  # [T, k], int32 or int64
    G: int,
    config: helion.Config | None = None,
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:  # rows [T*k, H], offs [G], position [T, k]
    """Compile, without tuning; the returned callable routes, allocates and copies.

    The callable reads `ids` on the device and follows later changes. Raises ValueError for operands that the kernels
    cannot take.
    """
    require_runnable(x)
    check_ids(ids, G)
    check_rows(x, ids)
    T, H, k = *x.shape, ids.size(1)
    wide = max(T * k * H, reach(x)) >= 2**31

    def positions() -> tuple[Tensor, Tensor, Tensor]:
        """Return (offs, position, position in the dtype of the Helion kernel)."""
        routing = route(ids, G)
        return routing.offs, routing.position, routing.position.long() if wide else routing.position

    if T == 0 or H == 0:
        return lambda: (x.new_empty(T * k, H), *positions()[:2])
    source = _at_least_2x2(x)
    kernel = spread_wide if wide else spread
    compiled = kernel.bind(_spread_arguments(source, positions()[2])).compile_config(
        config or default_config(T, H, x.element_size(), x.device)
    )

    def run() -> tuple[Tensor, Tensor, Tensor]:
        offs, position, kernel_position = positions()
        return compiled(*_spread_arguments(source, kernel_position))[: T * k, :H], offs, position

    if x.device.type == "cuda":
        run()  # compiles the generated Triton code
    return run


def prepare_helion_unpermute(
    y: Tensor,  # [rows, H], any strides
    position: Tensor,  # [T, k] int32
    weights: Tensor,  # [T, k], any float dtype
    config: helion.Config | None = None,
) -> Callable[[], Tensor]:  # [T, H]
    """Compile, without tuning; the returned callable allocates and sums.

    Raises ValueError for operands that do not fit together or cannot run. Positions are checked here only, which
    synchronises with the device.
    """
    require_runnable(y)
    check_positions(y, position, weights)
    T, H = position.size(0), y.size(1)
    if T == 0 or H == 0:
        return lambda: y.new_empty(T, H)
    wide = max(T * H, reach(y), reach(position), reach(weights)) >= 2**31
    rows, positions, factors = _at_least_2x2(y), _at_least_2_rows(position), _at_least_2_rows(weights)

    def arguments() -> tuple[Tensor, Tensor, Tensor]:
        return rows, positions.long() if wide else positions, factors

    config = config or default_config(T, H, y.element_size(), y.device, rows=weights.size(1))
    compiled = (combine_wide if wide else combine).bind(arguments()).compile_config(config)

    def run() -> Tensor:
        out: Tensor = compiled(*arguments())
        return out[:T, :H]

    if y.device.type == "cuda":
        run()
    return run


def reach(x: Tensor) -> int:
    """Return the offset of x's last element from its first one, in elements."""
    return sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _spread_arguments(x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the arguments of `spread`; if x repeats a single token, its copy has no row."""
    if position.size(0) < x.size(0):
        position = torch.cat([position, torch.full_like(position, -1)])
    return x, position


def _at_least_2x2(x: Tensor) -> Tensor:
    """Return x with at least two rows and columns: Helion 1.5 drops the index of a dimension of one element."""
    x = _at_least_2_rows(x)
    return x.expand(-1, 2) if x.size(1) == 1 else x


def _at_least_2_rows(x: Tensor) -> Tensor:
    """Return x with a single row repeated; the caller cuts off the results of the copy."""
    return x.expand(2, -1) if x.size(0) == 1 else x
