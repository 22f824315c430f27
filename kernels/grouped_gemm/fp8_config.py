"""The config for both fp8 kernels: fp8.py, which chooses between them, and fp8_specialized.py."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fp8Config:
    """The fp8 kernels' tile sizes and launch options; `fp8.illegal` decides which combinations compile."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # tile rows of a super-group, see tile_order.py
    swap: bool = False  # out.T = b @ a.T: N on the 64 rows of wgmma, as few as 16 rows of A in a tile
    split_store: bool = False  # store a tile in two halves: half the shared memory for it, room for another stage
    flatten: bool = True  # one software pipeline over all tiles
    per_sm: int = 1  # programs per SM: one adds or stores while the other multiplies
    specialized: bool = False  # run fp8_specialized.py; num_warps then counts each of its two multiplying groups


SPECIALIZED = Fp8Config(128, 256, 128, num_warps=4, num_stages=4, specialized=True)
