"""Grouped GEMM in Helion with as many programs as SMs: backend `helion_persistent`.

    out[start_g:end_g] = a[start_g:end_g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

All groups' tiles are numbered consecutively, and worker w of W computes tiles w, w + W, w + 2W, ... Group sizes stay on
the device. Each worker walks the groups and computes the first tile in each from the previous one:

    first = w                          in group 0
    first = (first - tiles_g) mod W    from group g to group g + 1

Groups with fewer tiles than workers therefore go to different workers, and any two workers' tile counts differ by at
most one. Inside a group the tiles go down the rows first: workers running together share columns of b.

b may have any strides: weights stored as [G, N, K] come as a transposed view, and one matrix shared by all groups as an
expanded view (stride 0), through the same kernel. K, N and the worker count are compile-time constants. M and G are
run-time values, since routing changes them at every step.

From Helion's examples/grouped_gemm.py, second kernel, with these repairs: a worker there steps through as many
iterations as the group has tiles and skips all but every W-th of them; the numbering there starts again at worker 0 in
each group; the output there is filled with zeros first; tiles there end at 128; and B is one matrix there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import helion
import helion.language as hl
import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm.offsets import empty_table, tabulate
from groupbench.kernels.grouped_gemm.support import (
    past_int32,
    without_ones,
    worker_count,
)
from groupbench.kernels.helion_configs import Choices, compile_for, prepare_forward

# block_sizes has the tile's sizes in M, N and K.
CHOICES = Choices(
    # As for the Triton kernels: on an H100 at 4 x 4096^3 in bf16 0.74 ms, against 0.95 ms with 128x128 tiles.
    large=helion.Config(block_sizes=[128, 256, 64], num_warps=8, num_stages=4),
    # Fewer rows per group: 0.039 ms at 4 x 1024^3 where the wide tile takes 0.060 ms, 1.96 ms against 3.12 ms with 128
    # experts of 512 rows.
    small=helion.Config(block_sizes=[128, 128, 64], num_warps=8, num_stages=4),
    large_rows=2048,
)


# dot_precision applies to fp32 operands; the default, TF32, would leave them fp16's mantissa.
@helion.kernel(static_shapes=False, dot_precision="ieee")
def grouped_gemm_persistent(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]
    group_offsets: Tensor,  # [G + 1], int32 or int64
    out: Tensor,  # [M, N]; rows past group_offsets[-1] are left as they are
    workers: int,
) -> Tensor:  # out
    K = hl.specialize(a.size(1))
    G = b.size(0)
    N = hl.specialize(b.size(2))
    workers = hl.specialize(workers)
    BLOCK_M = hl.register_block_size(16, 256)
    BLOCK_N = hl.register_block_size(16, 256)
    for worker in hl.grid(workers):
        # A tensor, since Helion cannot carry a Python number through a device loop.
        first = hl.full([], 0, dtype=torch.int64) + worker
        for g in hl.grid(G):
            start = group_offsets[g]
            end = group_offsets[g + 1]
            tiles_m = (end - start + BLOCK_M - 1) // BLOCK_M
            tiles = tiles_m * ((N + BLOCK_N - 1) // BLOCK_N)
            for tile in hl.grid(first, tiles, workers):
                row = start + (tile % tiles_m) * BLOCK_M + hl.arange(BLOCK_M)
                col = (tile // tiles_m) * BLOCK_N + hl.arange(BLOCK_N)
                row_ok = (row < end)[:, None]
                col_ok = (col < N)[None, :]
                acc = hl.zeros([BLOCK_M, BLOCK_N], dtype=torch.float32)
                for tile_k in hl.tile(K):
                    a_tile = hl.load(a, [row, tile_k], extra_mask=row_ok)
                    b_tile = hl.load(b, [g, tile_k, col], extra_mask=col_ok)
                    acc = torch.addmm(acc, a_tile, b_tile)
                hl.store(out, [row, col], acc.to(out.dtype), extra_mask=row_ok & col_ok)
            # Floor modulo: never negative, as in Python.
            first = (first - tiles) % workers
    return out


def prepare_helion_persistent(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [G, K, N], any strides; one shared matrix is expanded
    offs: Tensor,  # [G], int32 or int64 end offsets
    config: helion.Config | None = None,
    workers: int | None = None,  # None: one per SM
) -> Callable[[], Tensor]:  # [M, N]; rows past offs[-1] are zero
    """Check the operands and compile, without tuning; the returned callable allocates the output and launches.

    The callable reads `offs` on the device and follows later changes. Raises ValueError for unsupported operands.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers={workers}: must be at least 1")
    return prepare_forward("helion_persistent", CHOICES, partial(_prepare_with, workers), a, b, offs, config)


def _prepare_with(
    workers: int | None, a: Tensor, b: Tensor, offs: Tensor, config: helion.Config
) -> Callable[[], Tensor]:
    """Run `prepare_helion_persistent` with a config, for checked operands."""
    workers = workers or worker_count(a.device)
    M, N = a.size(0), b.size(2)
    a, b = without_ones(a, b)
    rows, columns = a.size(0), b.size(2)
    table = empty_table(offs, past_int32(a, b))
    compiled = compile_for(grouped_gemm_persistent, (a, b, table, a.new_empty(rows, columns), workers), config)

    def run() -> Tensor:
        out = torch.empty(rows, columns, dtype=a.dtype, device=a.device)
        tabulate(offs, table, out)
        return compiled(a, b, table, out, workers)[:M, :N]

    if a.device.type == "cuda":
        run()  # compiles the generated Triton code
    return run
