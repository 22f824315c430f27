"""A grouped GEMM's weight gradient in Helion, one program for each group's tile: backend `helion_jagged`.

    db[g] = a[rows of g].T @ dc[rows of g]        a [M, K]   dc [M, N]   db [G, K, N]

The grid is groups times tiles, known on the host. The reduction walks the group's rows, whose number each program reads
from the offsets. The last tile is masked in both operands, so rows outside the group never enter. A group without rows
gets zeros. For weights stored as [G, N, K] the operands change places.

K and N are compile-time constants. M and G are run-time values, since routing changes them at every step. After
Helion's examples/jagged_dense_bmm.py, whose inner loop also runs from one offset to the next.
"""

from __future__ import annotations

from collections.abc import Callable

import helion
import helion.language as hl
import torch
from torch import Tensor

from groupbench.kernels.grouped_gemm.offsets import empty_table, tabulate
from groupbench.kernels.grouped_gemm.support import group_ends, require_runnable, require_tensors, require_within_int32
from groupbench.kernels.grouped_gemm.tuned import tuning_key
from groupbench.kernels.helion_configs import Choices, compile_for, first_that_compiles

# block_sizes has the output tile's rows and columns, and the rows of a step through the group.
CHOICES = Choices(
    large=helion.Config(block_sizes=[128, 256, 64], l2_groupings=[8], num_warps=8, num_stages=4),
    small=helion.Config(block_sizes=[128, 128, 64], l2_groupings=[8], num_warps=8, num_stages=4),
    large_rows=1024,
)


# dot_precision applies to fp32 operands; the default, TF32, would leave them fp16's mantissa.
@helion.kernel(static_shapes=False, dot_precision="ieee")
def grouped_gemm_wgrad(
    x: Tensor,  # [M, P]
    y: Tensor,  # [M, Q]
    group_offsets: Tensor,  # [G + 1], int32 or int64
) -> Tensor:  # [G, P, Q]
    P = hl.specialize(x.size(1))
    Q = hl.specialize(y.size(1))
    G = group_offsets.size(0) - 1
    out = torch.empty(G, P, Q, dtype=x.dtype, device=x.device)
    # Neighbouring programs differ in the first dimension: tiles of one group share its rows in L2.
    for tile_p, tile_q, tile_g in hl.tile([P, Q, G], block_size=[None, None, 1]):
        g = tile_g.id
        acc = hl.zeros([tile_p, tile_q], dtype=torch.float32)
        for tile_m in hl.tile(group_offsets[g], group_offsets[g + 1]):
            acc = torch.addmm(acc, x[tile_m, tile_p].T, y[tile_m, tile_q])
        out[g, tile_p, tile_q] = acc.to(out.dtype)
    return out


# For an output with 2**31 elements or more: Helion chooses the index type by its inputs, and the output may be much
# larger.
grouped_gemm_wgrad_wide = helion.kernel(
    grouped_gemm_wgrad.fn, static_shapes=False, dot_precision="ieee", index_dtype=torch.int64
)


def prepare_helion_wgrad(
    a: Tensor,  # [M, K], any strides
    dc: Tensor,  # [M, N], any strides
    offs: Tensor,  # [G], int32 or int64 end offsets
    nk: bool = False,  # the weights, and so their gradient, are stored as [G, N, K]
    config: helion.Config | None = None,
) -> Callable[[], Tensor]:  # [G, K, N], a transposed view with `nk`; zero for a group without rows
    """Check the operands and compile, without tuning; the returned callable allocates the output and launches.

    The callable reads `offs` on the device and follows later changes. Raises ValueError for unsupported operands.
    """
    require_tensors(a=a, dc=dc, offs=offs)
    require_runnable(a, dc)
    group_ends(a, a.new_empty(offs.numel(), *a.shape[-1:], 0), offs)
    if dc.ndim != 2 or dc.size(0) != a.size(0):
        raise ValueError(f"expected dc [{a.size(0)}, N] with a row for each of a's, got {tuple(dc.shape)}")
    (M, K), N, G = a.shape, dc.size(1), offs.numel()
    if M == 0 or N == 0 or K == 0:
        return lambda: torch.zeros(G, K, N, dtype=a.dtype, device=a.device)
    require_within_int32(a=a, dc=dc)
    offs = offs.to(a.device)

    def prepare(config: helion.Config) -> Callable[[], Tensor]:
        return _prepare_with(a, dc, offs, nk, config)

    if config is not None:
        return prepare(config)
    key = tuning_key(M, G, N, K, a.dtype, nk)
    return first_that_compiles("helion_wgrad", key, CHOICES.default(a, M / G), a, prepare)


def _prepare_with(a: Tensor, dc: Tensor, offs: Tensor, nk: bool, config: helion.Config) -> Callable[[], Tensor]:
    """Run `prepare_helion_wgrad` with a config, for checked operands."""
    K, N = a.size(1), dc.size(1)
    x, y, table = _arguments(a, dc, offs, nk)
    compiled = compile_for(_kernel(x, y, table), (x, y, table), config)
    P, Q = (N, K) if nk else (K, N)

    def run() -> Tensor:
        tabulate(offs, table)
        out = compiled(x, y, table)[:, :P, :Q]
        return out.transpose(1, 2) if nk else out

    if a.device.type == "cuda":
        run()  # compiles the generated Triton code
    return run


def _kernel(x: Tensor, y: Tensor, table: Tensor) -> helion.Kernel:
    """Return the kernel whose index type reaches every output element [G, P, Q]."""
    elements = (table.numel() - 1) * x.size(1) * y.size(1)
    return grouped_gemm_wgrad_wide if elements >= 2**31 else grouped_gemm_wgrad


def _arguments(a: Tensor, dc: Tensor, offs: Tensor, nk: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kernel's arguments, with an empty table for `tabulate` to fill."""
    x, y = (_wide_enough(operand) for operand in ((dc, a) if nk else (a, dc)))
    return x, y, empty_table(offs, wide=False)


def _wide_enough(x: Tensor) -> Tensor:
    """Return x [M, columns] with at least two rows and columns.

    Helion 1.5.0 drops a one-element dimension's index. A second row belongs to no group. A second column repeats the
    first one, and the caller cuts it off.
    """
    if x.size(0) == 1:
        x = x.expand(2, -1)
    return x.expand(-1, 2) if x.size(1) == 1 else x
