"""Test the orders in which kernels visit the tiles of a product."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from groupbench.kernels.grouped_gemm.tile_order import serpentine, super_grouped


@triton.jit
def _walk(out_ptr, tiles_m, tiles_n, GROUP_M: tl.constexpr, ORDER: tl.constexpr):
    for tile in range(tiles_m * tiles_n):
        tile_m, tile_n = ORDER(tile, tiles_m, tiles_n, GROUP_M)
        tl.store(out_ptr + tile, tile_m * tiles_n + tile_n)


def walked(order: Any, tiles_m: int, tiles_n: int, group_m: int) -> list[tuple[int, int]]:
    """Return (tile row, tile column) in the order of the kernel."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.full((tiles_m * tiles_n,), -1, dtype=torch.int32, device=device)
    _walk[(1,)](out, tiles_m, tiles_n, GROUP_M=group_m, ORDER=order)
    return [divmod(tile, tiles_n) for tile in out.tolist()]


@pytest.mark.parametrize("order", [serpentine, super_grouped], ids=["serpentine", "super_grouped"])
@given(st.integers(1, 12), st.integers(1, 5), st.sampled_from([1, 2, 3, 8]))
def test_every_tile_is_visited_once(order, tiles_m, tiles_n, group_m):
    visited = walked(order, tiles_m, tiles_n, group_m)
    assert sorted(visited) == [(m, n) for m in range(tiles_m) for n in range(tiles_n)]
    # Neighbours share a row block or a column, but for the step from one block to the next.
    assert order is super_grouped or all(abs(a[1] - b[1]) <= 1 for a, b in itertools.pairwise(visited))


def test_a_serpentine_goes_back_in_blocks_of_rows_as_equal_as_possible():
    there = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    back = [(2, 2), (3, 2), (2, 1), (3, 1), (2, 0), (3, 0)]
    assert walked(serpentine, 4, 3, 2) == there + back
    # Twenty-two rows are two blocks of eleven, not one of sixteen and one of six.
    assert walked(serpentine, 22, 2, 16)[:11] == [(m, 0) for m in range(11)]


def test_a_super_group_starts_each_column_at_its_first_row():
    there = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert walked(super_grouped, 3, 3, 2) == [*there, (2, 0), (2, 1), (2, 2)]
    # A short last super-group too, whose first tile, the ninth, is not a multiple of its two rows.
    assert walked(super_grouped, 5, 3, 3)[9:] == [(3, 0), (4, 0), (3, 1), (4, 1), (3, 2), (4, 2)]
