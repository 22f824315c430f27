"""Predict the time of a grouped product or gradient. An untuned problem on Hopper takes the fastest config by it.

    time = start + hypot(waves * (products + rest) of a tile, traffic / bandwidth)

This does not hold for products whose clocks fall (`limited_by_power`). A wave is one tile on every SM. The last one
takes as long as a full one. Products and rest of a tile, such as its stores, overlap with the traffic as far as two
sides of a right angle do.

Fitted to 117 random products and 176 random gradients on an H200 (2026-12-01; 1 to 128 groups, means of 32 to 5,000
rows, even to skewed) with each config. The one predicted as fastest for the half of the problems that was not fitted
takes 1.03 and 1.02 times as long as the fastest (geometric mean; at most 1.31 and 1.35).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from groupbench.kernels.device import HOPPER_FLOPS, KNOWN, Device

TILE = 128 * 256  # elements, for which `rest_us` holds
MOST_FLOPS = 1e12  # of a fitted problem; larger ones take over a millisecond, and the GPU's power limits them
QUANTILES = (-1.645, -1.036, -0.674, -0.385, -0.126, 0.126, 0.385, 0.674, 1.036, 1.645)  # normal: 5 to 95 %
BANDWIDTH = 0.955  # of the memory's by clock and bus width


@dataclass(frozen=True)
class Tile:
    """A config's tile, and its speed.

    Attributes:
        rows, columns: Of the output, computed at a time by one program, or by the cluster if programs share operands.
        per_sm: Programs of an SM, or clusters.
        start_us: Time of the launch, the first loads and the last stores.
        rest_us: Time for `TILE` elements on an SM, apart from products and traffic.
        rate: Of products within a tile, as a share of the tensor cores' highest.
    """

    rows: int
    columns: int
    per_sm: float
    start_us: float
    rest_us: float
    rate: float = 0.84


def limited_by_power(M: int, N: int, K: int) -> bool:
    """Return whether a product is larger than those that were fitted: the fewest bytes then count."""
    return 2 * M * N * K > MOST_FLOPS


def tiles_of_rows(M: int, G: int, rows: int) -> float:
    """Return how many tiles with `rows` rows G groups have together, whose M rows scatter like Poisson variables."""
    mean = M / G
    sizes = [mean + deviations * math.sqrt(mean) for deviations in QUANTILES]
    return G * sum(max(math.ceil(size / rows), 1) for size in sizes) / len(sizes)


def product_us(tile: Tile, M: int, G: int, N: int, K: int, device: Device) -> float:
    """Return the predicted time of a [M, K] @ b [G, K, N] in 16 bits, in us."""
    tiles = tiles_of_rows(M, G, tile.rows) * math.ceil(N / tile.columns)
    return _us(tile, tiles, K, 2 * (M * (K + N) + G * N * K), device)


def gradient_us(tile: Tile, M: int, G: int, P: int, Q: int, device: Device) -> float:
    """Return the predicted time of x [M, P].T @ y [M, Q] by group, [G, P, Q] in 16 bits, in us."""
    tiles = G * math.ceil(P / tile.rows) * math.ceil(Q / tile.columns)
    return _us(tile, tiles, M / G, 2 * (M * (P + Q) + G * P * Q), device)


def _us(tile: Tile, tiles: float, depth: float, traffic: int, device: Device) -> float:
    """Return the time for tiles, each a sum of `depth` products, and bytes of traffic."""
    h100 = KNOWN["sm_90"]
    elements = math.ceil(tiles / (device.sms * tile.per_sm)) * tile.rows * tile.columns * tile.per_sm  # on an SM
    flops_per_us = tile.rate * HOPPER_FLOPS * (device.ghz or h100.ghz) * 1e3
    bytes_per_us = BANDWIDTH * (device.gb_per_s or h100.gb_per_s) * 1e3
    return tile.start_us + math.hypot(
        elements * (2 * depth / flops_per_us + tile.rest_us / TILE), traffic / bytes_per_us
    )
