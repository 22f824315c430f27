"""Matrix-list products in Helion, through pointer tables: backend `helion_pointers`.

    c_g = a_g @ b_g        a_g [M_g, K_g]   b_g [K_g, N_g]   c_g [M_g, N_g]     g = 0..G-1

Helion reads tensors, not addresses, with one exception: `hl.stacktensor_like` reads from a device pointer as if from a
tensor like a given one. Given a flat tensor, an index is an offset from the pointer, so row * ld + column reaches
any matrix. The schedule is helion_persistent.py's: as many workers as SMs walk the groups, and each carries its
first tile over from one group to the next.

Helion's example (examples/grouped_gemm.py) packs A, and has one K and one N for all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import helion
import helion.language as hl
import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm.mnk import busy, config_key, offsets_of, require_lists, with_outputs
from groupbench.kernels.grouped_gemm.support import worker_count
from groupbench.kernels.helion_configs import compile_for, first_that_compiles

# block_sizes has the tile's sizes in M, N and K.
CONFIGS = {
    "cuda": helion.Config(block_sizes=[64, 128, 64], num_warps=4, num_stages=4),
    "cuda_fp32": helion.Config(block_sizes=[64, 64, 32], num_warps=4, num_stages=3),
    # The cost in Triton's interpreter depends on the number of operations, not of elements.
    "cpu": helion.Config(block_sizes=[32, 32, 32], num_warps=4, num_stages=1),
}


def default_config(device: torch.device, dtype: torch.dtype) -> helion.Config:
    """Return the config for a dtype."""
    if device.type != "cuda":
        return CONFIGS["cpu"]
    return CONFIGS["cuda_fp32" if dtype == torch.float32 else "cuda"]


# dot_precision applies to fp32 operands; the default, TF32, would leave them fp16's mantissa.
@helion.kernel(static_shapes=False, dot_precision="ieee", index_dtype=torch.int64)
def multiply_pointers(
    addresses: Tensor,  # [G, 2] uint64: of A and B
    sizes: Tensor,  # [G, 8] int64: M, N, K, strides of A and B, offset of C
    like: Tensor,  # flat, of the operands' dtype and at least as long as the longest one
    out: Tensor,  # the buffer of all outputs
    workers: int,
) -> Tensor:  # out
    workers = hl.specialize(workers)
    G = sizes.size(0)
    BLOCK_M = hl.register_block_size(16, 256)
    BLOCK_N = hl.register_block_size(16, 256)
    for worker in hl.grid(workers):
        # A tensor, since Helion cannot carry a Python number through a device loop.
        first = hl.full([], 0, dtype=torch.int64) + worker
        for g in hl.grid(G):
            M = sizes[g, 0]
            N = sizes[g, 1]
            K = sizes[g, 2]
            tiles_m = (M + BLOCK_M - 1) // BLOCK_M
            tiles = tiles_m * ((N + BLOCK_N - 1) // BLOCK_N)
            for tile in hl.grid(first, tiles, workers):
                row = (tile % tiles_m) * BLOCK_M + hl.arange(BLOCK_M)
                col = (tile // tiles_m) * BLOCK_N + hl.arange(BLOCK_N)
                row_ok = (row < M)[:, None]
                col_ok = (col < N)[None, :]
                acc = hl.zeros([BLOCK_M, BLOCK_N], dtype=torch.float32)
                for tile_k in hl.tile(K):
                    a = hl.stacktensor_like(like, addresses[g, 0])
                    b = hl.stacktensor_like(like, addresses[g, 1])
                    k = tile_k.index
                    k_ok = k < K
                    from_a = row[:, None] * sizes[g, 3] + k[None, :] * sizes[g, 4]
                    from_b = k[:, None] * sizes[g, 5] + col[None, :] * sizes[g, 6]
                    a_tile = hl.load(a, [from_a], extra_mask=row_ok & k_ok[None, :])
                    b_tile = hl.load(b, [from_b], extra_mask=k_ok[:, None] & col_ok)
                    acc = torch.addmm(acc, a_tile, b_tile)
                to = sizes[g, 7] + row[:, None] * N + col[None, :]
                hl.store(out, [to], acc.to(out.dtype), extra_mask=row_ok & col_ok)
            # Floor modulo: never negative, as in Python.
            first = (first - tiles) % workers
    return out


def prepare_mnk_helion(
    group_a: Sequence[Tensor],  # G of [M_g, K_g], any strides
    group_b: Sequence[Tensor],  # G of [K_g, N_g], any strides
    config: helion.Config | None = None,
) -> Callable[[], tuple[Tensor, ...]]:  # G of [M_g, N_g], views of one buffer
    """Build the tables and compile, without tuning; the returned callable allocates the outputs and launches once.

    Raises ValueError if groups do not fit together.
    """
    require_lists(group_a, group_b)
    if not busy(group_a, group_b):
        return with_outputs(group_a, group_b, None)

    def prepare(config: helion.Config) -> Callable[[], tuple[Tensor, ...]]:
        return _prepare_with(group_a, group_b, config)

    if config is not None:
        return prepare(config)
    device, dtype = group_a[0].device, group_a[0].dtype
    return first_that_compiles(
        "mnk_helion", config_key(group_a, group_b), default_config(device, dtype), group_a[0], prepare
    )


def arguments(
    group_a: Sequence[Tensor], group_b: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Tensor, int]:  # all but the output
    """Return the tables, the tensor pointers are read like, and the worker count."""
    order, offsets = busy(group_a, group_b), offsets_of(group_a, group_b)
    operands = [(group_a[g], group_b[g]) for g in order]
    device = group_a[0].device
    addresses = torch.tensor([[a.data_ptr(), b.data_ptr()] for a, b in operands], dtype=torch.int64).to(device)
    rows = [
        [a.size(0), b.size(1), a.size(1), *a.stride(), *b.stride(), offsets[g]]
        for g, (a, b) in zip(order, operands, strict=True)
    ]
    sizes = torch.tensor(rows, dtype=torch.int64, device=device)
    return addresses.view(torch.uint64), sizes, _flat_view_of_longest(operands), worker_count(device)


def _flat_view_of_longest(operands: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the memory behind the operand reaching over most elements, as a vector."""

    def reach(x: Tensor) -> int:
        return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))

    longest = max((x for pair in operands for x in pair), key=reach)
    return longest.as_strided((reach(longest),), (1,))


def _prepare_with(
    group_a: Sequence[Tensor], group_b: Sequence[Tensor], config: helion.Config
) -> Callable[[], tuple[Tensor, ...]]:
    """Run `prepare_mnk_helion` with a config, for checked groups."""
    addresses, sizes, like, workers = arguments(group_a, group_b)
    kept = (*group_a, *group_b)  # the table holds addresses only: the callable must own the matrices
    some = like.new_empty(offsets_of(group_a, group_b)[-1])
    compiled = compile_for(multiply_pointers, (addresses, sizes, like, some, workers), config)

    def multiply(out: Tensor) -> None:
        compiled(addresses, sizes, like, out, workers)
        assert kept

    run = with_outputs(group_a, group_b, multiply)
    if some.device.type == "cuda":
        run()  # compiles the generated Triton code
    return run
