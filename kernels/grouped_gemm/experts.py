"""Find a tile's expert on the device, from the offsets alone, at every call.

Every expert's tiles are counted once per program, and a tile's expert is the number of experts whose tiles end before
it (a sum over G, no search).
"""

from __future__ import annotations

import triton
import triton.language as tl


def of_groups(G: int) -> dict[str, int]:
    """Return the constants G and G_POW2 for a kernel finding experts."""
    return {"G": G, "G_POW2": triton.next_power_of_2(G)}


@triton.jit
def expert_tiles(offs_ptr, G: tl.constexpr, G_POW2: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (first row, end row, tile rows, tile rows before it) for every expert, each [G_POW2]."""
    experts = tl.arange(0, G_POW2)
    real = experts < G
    ends = tl.load(offs_ptr + experts, mask=real, other=0).to(tl.int32)
    starts = tl.load(offs_ptr + experts - 1, mask=real & (experts > 0), other=0).to(tl.int32)
    counts = tl.where(real, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    return starts, ends, counts, tl.cumsum(counts, 0) - counts


@triton.jit
def expert_of(tile_m, starts, ends, counts, before, G_POW2: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return tile row `tile_m`'s (expert, first row, row count, row within them)."""
    g = tl.sum((before + counts <= tile_m).to(tl.int32), 0)
    is_owner = tl.arange(0, G_POW2) == g
    start = tl.sum(tl.where(is_owner, starts, 0), 0)
    size = tl.sum(tl.where(is_owner, ends, 0), 0) - start
    return g, start, size, (tile_m - tl.sum(tl.where(is_owner, before, 0), 0)) * BLOCK_M


@triton.jit
def zero_past(out_ptr, end, M, N, stride, NUM_PROGRAMS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write zeros to the rows from `end` to M, which belong to no expert."""
    columns = tl.arange(0, BLOCK_N)
    row_elements = tl.full((), 1, tl.int64) * stride
    for row in range(end + tl.program_id(0), M, NUM_PROGRAMS):
        for first in range(0, N, BLOCK_N):
            at = out_ptr + row * row_elements + first + columns
            tl.store(at, tl.zeros((BLOCK_N,), dtype=out_ptr.dtype.element_ty), mask=first + columns < N)
