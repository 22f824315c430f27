"""Choose the order in which a persistent Triton kernel walks a matrix's tiles.

Column after column through a *super-group* with GROUP_M tile rows, then the next super-group:

    GROUP_M = 2     tiles_n ->      0  2  4
                    tiles_m         1  3  5
                      |             6  7  8      (the last super-group has one row only)

Programs running together then use about GROUP_M rows of A and as few columns of B as possible, which stay in L2. Row by
row they would sweep all of B for each row of A. The idea is from Triton's matrix multiplication tutorial
(03-matrix-multiplication).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def super_grouped(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return (tile row, tile column) of the `tile`-th tile, 0 <= tile < tiles_m * tiles_n."""
    width = GROUP_M * tiles_n
    first_m = (tile // width) * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    # Relative to the super-group: `tile % rows` would start the columns of a short last super-group at another row. It
    # would still visit every tile once, but not in the order that is drawn above.
    inside = tile % width
    return first_m + inside % rows, inside // rows


@triton.jit
def serpentine(inside, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Return (tile row, tile column) of the `inside`-th tile of one expert, 0 <= inside < tiles_m * tiles_n.

    The expert's tile rows are split into blocks with about GROUP_M rows, as equal as possible. Each is walked column
    after column, even blocks from left to right and odd ones back, so two blocks meet at columns in L2:

        GROUP_M = 2     tiles_n ->      0  2  4
                        tiles_m         1  3  5
                          |            10  8  6
                                       11  9  7
    """
    blocks = tl.maximum((tiles_m + GROUP_M // 2) // GROUP_M, 1)
    height = (tiles_m + blocks - 1) // blocks
    block = inside // (height * tiles_n)
    inside -= block * height * tiles_n
    rows = tl.minimum(tiles_m - block * height, height)
    column = inside // rows
    return block * height + inside % rows, column + block % 2 * (tiles_n - 1 - 2 * column)
