"""The config of both weight-gradient kernels: wgrad.py, which chooses between them, and wgrad_specialized.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WgradConfig:
    """Tile sizes and launch options of the weight gradient; `wgrad.illegal` decides which combinations compile."""

    block_p: int  # rows of an output tile: K of the layer, or N if weights are stored as [G, N, K]
    block_q: int  # its columns
    block_m: int  # rows of A and dC per step
    num_warps: int
    num_stages: int
    group_p: int = 8  # tile rows of a super-group, see tile_order.py
    split_store: bool = False  # store a tile in two halves: half the shared memory for it, room for another stage
    dynamic: bool = False  # groups with most rows first; each program takes the next tile when it is free
    per_sm: int = 1  # programs per SM: one stores while the other multiplies
    specialized: bool = False  # run wgrad_specialized.py; num_warps then counts each of its multiplying groups
    lockstep: int = 0  # with specialized and without dynamic: steps after which programs wait for each other; 0: never
