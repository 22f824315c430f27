"""Divide a problem into sweeps over tiles, and build the operand table for the kernels.

fused.py and fused_specialized.py share the config, the table rows, the sweeps, and the compile-time constants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod

import triton
from torch import Tensor

from groupbench.kernels.bias_add_permute.problem import Group
from groupbench.kernels.grouped_gemm.support import TMA_BYTES, no_tma

# One table row. Addresses are in bytes, strides in elements, f_offset in elements of the one buffer of all outputs.
FIELDS = (
    *("a_address", "b_address", "d_address", "e_address", "f_offset"),
    *("a_stride_m", "a_stride_k", "b_stride_n", "b_stride_k", "d_stride_n", "e_stride_m", "e_stride_n"),
    *("M1", "M2", "N0", "N1", "M", "N", "K"),
)


@dataclass(frozen=True)
class FusedConfig:
    """The fused kernels' tile sizes and launch options; `fused.illegal` decides which combinations compile."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    per_sm: int = 1  # programs that run on an SM at a time
    tma: bool = False  # read a, b and e by TMA, if it can read them
    registers: int | None = None  # per thread at most, to make room for another program; None: ptxas decides


def tma_reads(groups: Sequence[Group]) -> bool:
    """Return whether TMA can read a, b and e in every group with an output."""

    def reads(group: Group) -> bool:
        matrices = {"a": group.a, "b": group.b} | ({} if group.e is None else {"e": group.e})
        moves = all(x.stride(0) > 0 and x.numel() for x in matrices.values())
        return moves and no_tma(TMA_BYTES, **matrices) is None

    return all(reads(group) for group in busy(groups))


def tiles_of(groups: Sequence[Group], config: FusedConfig) -> int:
    """Return all groups' tiles."""
    return sum(
        triton.cdiv(group.a.size(0), config.block_m) * triton.cdiv(group.b.size(0), config.block_n) for group in groups
    )


def sweeps(groups: Sequence[Group], config: FusedConfig, programs: int) -> list[tuple[int, int, int, int]]:
    """Return (group, first row, first column, end column) for every sweep, in order, for `programs` at a time."""
    work = []
    left = tiles_of(groups, config)
    for g, group in enumerate(groups):
        (M, N), tiles = (group.a.size(0), group.b.size(0)), triton.cdiv(group.b.size(0), config.block_n)
        for row in range(0, M if N else 0, config.block_m):
            parts = triton.cdiv(tiles, max(1, left // programs))
            cuts = [*(tiles * part // parts * config.block_n for part in range(parts)), N]
            work += [(g, row, start, end) for start, end in pairwise(cuts)]
            left -= tiles
    return work


def table_row(group: Group, offset: int) -> list[int]:
    """Return one group's values for `FIELDS`."""
    a, b, d, e = group.a, group.b, group.d, group.e
    strides = [*a.stride(), *b.stride(), *d.stride(), *(e.stride() if e is not None else (0, 0))]
    addresses = [a.data_ptr(), b.data_ptr(), d.data_ptr(), e.data_ptr() if e is not None else 0]
    return [*addresses, offset, *strides, *group.m[1:], *group.n, a.size(0), b.size(0), a.size(1)]


def constants_of(groups: Sequence[Group], config: FusedConfig) -> dict[str, int | bool]:
    """Return the kernel's compile-time constants: unit strides, common alignment, full tiles."""
    groups = busy(groups)
    itemsize = groups[0].a.element_size()

    def unit(matrices: Sequence[Tensor]) -> bool:
        # The stride of a dimension of one element is never used, so its value does not matter.
        return all(x.stride(1) == 1 or x.size(1) <= 1 for x in matrices)

    def align(matrices: Sequence[Tensor]) -> int:
        of_each = (gcd(x.data_ptr() // itemsize, x.size(1), x.stride(0)) for x in matrices)
        return gcd(16 // itemsize, *of_each)

    def even(sizes: Sequence[int], block: int) -> bool:
        return all(size % block == 0 for size in sizes)

    a, b = [group.a for group in groups], [group.b for group in groups]
    e = [group.e for group in groups if group.e is not None]
    return {
        "A_UNIT": unit(a),
        "B_UNIT": unit(b),
        "E_UNIT": unit(e),
        "ALIGN_K": align([*a, *b]),
        "ALIGN_M": gcd(16 // itemsize, *(group.m[2] for group in groups)),
        "ALIGN_N": gcd(align(e), *(group.b.size(0) for group in groups)),
        "EVEN_M": even([group.a.size(0) for group in groups], config.block_m),
        "EVEN_N": even([group.b.size(0) for group in groups], config.block_n),
        # A K of 0 is one step of zeros, see `steps`.
        "EVEN_K": even([group.a.size(1) or 1 for group in groups], config.block_k),
        "WHOLE_M": even([group.m[2] for group in groups], config.block_m),
        "WHOLE_N": even([group.n[1] for group in groups], config.block_n),
    }


def busy(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with an output, or all groups if all outputs are empty."""
    return [group for group in groups if prod(group.permuted)] or list(groups)
