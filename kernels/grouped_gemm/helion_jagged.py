"""Grouped GEMM in Helion, a loop over each group's rows: backend `helion_jagged`.

    out[start_g:end_g] = a[start_g:end_g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

One program computes one tile column in one group. It reads the group's borders from the device and walks down the rows,
so the grid (G x N tiles) is known on the host while group sizes stay on the device. A group without rows is a loop
without steps. Uneven groups give programs uneven work; `helion_persistent` distributes it evenly.

b may have any strides: weights stored as [G, N, K] come as a transposed view, and one matrix shared by all groups as an
expanded view (stride 0), through the same kernel. K and N belong to the layer and are compile-time constants, so tiles
dividing them need no mask. M and G are run-time values, since routing changes them at every step.

From Helion's examples/grouped_gemm.py, first kernel. There the grid is the group count alone, and four groups leave all
but four SMs of a GPU idle; there B is one [K, N] matrix for all groups.
"""

from __future__ import annotations

from collections.abc import Callable

import helion
import helion.language as hl
import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm.offsets import empty_table, tabulate
from groupbench.kernels.grouped_gemm.support import past_int32
from groupbench.kernels.helion_configs import Choices, compile_for, prepare_forward

# block_sizes has the sizes of tile_n, tile_m and tile_k, in the order in which the kernel names them. A program walks
# all rows of its group, so tall tiles mean fewer iterations: on an H100 at 4 x 4096^3 in bf16 0.75 ms with 256 rows,
# 0.87 ms with 128. With loop order [1, 0], neighbours in the grid work on the same group and share its rows of A in L2:
# 0.84 ms against 1.79 ms with 128 experts of 1536 x 2048.
IN_GROUP = {"loop_orders": [[1, 0]]}
LARGE = helion.Config(block_sizes=[128, 256, 64], num_warps=8, num_stages=3, **IN_GROUP)
CHOICES = Choices(LARGE, LARGE, every=IN_GROUP)


# dot_precision applies to fp32 operands; the default, TF32, would leave them fp16's mantissa.
@helion.kernel(static_shapes=False, dot_precision="ieee")
def grouped_gemm_jagged(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]
    group_offsets: Tensor,  # [G + 1], int32 or int64
    out: Tensor,  # [M, N]; rows past group_offsets[-1] are left as they are
) -> Tensor:  # out
    K = hl.specialize(a.size(1))
    G = b.size(0)
    N = hl.specialize(b.size(2))
    for tile_g, tile_n in hl.tile([G, N], block_size=[1, None]):
        g = tile_g.id
        start = group_offsets[g]
        rows = group_offsets[g + 1] - start
        for tile_m in hl.tile(rows):
            acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
            for tile_k in hl.tile(K):
                # Helion masks tile_m at `rows`: rows of the next group are neither read nor written.
                acc = torch.addmm(acc, a[start + tile_m.index, tile_k], b[g, tile_k, tile_n])
            out[start + tile_m.index, tile_n] = acc.to(out.dtype)
    return out


def prepare_helion_jagged(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [G, K, N], any strides; one shared matrix is expanded
    offs: Tensor,  # [G], int32 or int64 end offsets
    config: helion.Config | None = None,
) -> Callable[[], Tensor]:  # [M, N]; rows past offs[-1] are zero
    """Check the operands and compile, without tuning; the returned callable allocates the output and launches.

    The callable reads `offs` on the device and follows later changes. Raises ValueError for unsupported operands.
    """
    return prepare_forward("helion_jagged", CHOICES, _prepare_with, a, b, offs, config)


def _prepare_with(a: Tensor, b: Tensor, offs: Tensor, config: helion.Config) -> Callable[[], Tensor]:
    """Run `prepare_helion_jagged` with a config, for checked operands."""
    M, N = a.size(0), b.size(2)
    table = empty_table(offs, past_int32(a, b))
    compiled = compile_for(grouped_gemm_jagged, (a, b, table, a.new_empty(M, N)), config)

    def run() -> Tensor:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        tabulate(offs, table, out)
        return compiled(a, b, table, out)

    if a.device.type == "cuda":
        run()  # compiles the generated Triton code
    return run
