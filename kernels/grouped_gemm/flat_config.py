"""The config for both kernels: flat.py, which chooses between them, and flat_specialized.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FlatConfig:
    """The flat kernel's tile sizes and launch options; `flat.illegal` decides which combinations compile."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # tile rows of a super-group, see tile_order.py
    swap: bool = False  # out.T = b.T @ a.T
    split_store: bool = False  # store a tile in two halves: half the shared memory for it, room for another stage
    flatten: bool = True  # one software pipeline over all tiles: a tile's loads start before the last one is stored
    halves: bool = False  # tiles of half the rows at an expert's end if these suffice, and in a short last wave
    per_sm: int = 1  # programs per SM: one stores while the other multiplies
    specialized: bool = False  # run flat_specialized.py; num_warps then counts each of its multiplying groups
    lockstep: int = 0  # with specialized: steps of K after which programs wait for each other; 0: never
