"""Configs to try that are derived from a default config: Helion's, and those of the split-K rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from groupbench.operators.deferred import torch

if TYPE_CHECKING:
    import helion

    from groupbench.kernels.device import Device
    from groupbench.kernels.split_k.tiled import SplitKConfig

SIDES = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (32, 128), (16, 128))
"""Rows and columns of the tiles in Helion's grid, of which wgmma computes at least 64 x 128 at full rate."""
MOST_TRIED = 24
"""Split-K configs per problem. Compiling one takes about a second."""


def helion_grid(default: helion.Config, order: Sequence[int]) -> Iterator[helion.Config]:
    """Yield a config with other block sizes, warps and stages.

    Args:
        default: Config whose other settings are kept.
        order: Positions in `block_sizes`: tile rows, tile columns, and the reduction step.
    """
    import helion

    for (m, n), depth, stages in itertools.product(SIDES, (32, 64, 128), (3, 4)):
        sizes = [0, 0, 0]
        for place, size in zip(order, (m, n, depth), strict=True):
            sizes[place] = size
        warps = 8 if m * n >= 128 * 128 else 4
        yield helion.Config(**{**default.config, "block_sizes": sizes, "num_warps": warps, "num_stages": stages})


def helion_splits(default: helion.Config, most: int) -> Iterator[helion.Config]:
    """Yield a config with `split_k` from 1 to 512, while the stretches cover no more than `most` of K."""
    import helion

    for split in (1 << power for power in range(10)):
        if split * default.block_sizes[2] <= most:
            yield helion.Config(**{**default.config, "split_k": split})


def split_k(M: int, N: int, K: int, dtype: torch.dtype, device: Device) -> list[SplitKConfig]:
    """Return the rule's config and legal configs around it, spread evenly over tiles, splits and stages."""
    from groupbench.kernels.split_k.tiled import illegal

    near = [config for config in around_rule(M, N, K, dtype, device.sms) if illegal(config, K, dtype, device) is None]
    return near[:: math.ceil(len(near) / MOST_TRIED)]


def around_rule(M: int, N: int, K: int, dtype: torch.dtype, sms: int) -> Iterator[SplitKConfig]:
    """Yield the rule's config, then each legal config around it once."""
    from groupbench.kernels.split_k.slots import most_adders
    from groupbench.kernels.split_k.splits import legal_splits
    from groupbench.kernels.split_k.tiled import choose_config, illegal, tile_count

    rule = choose_config(M, N, K, dtype, sms)
    seen = {rule}
    yield rule
    narrow = sorted({max(16, rule.block_n // 2), rule.block_n, min(128, 2 * rule.block_n)})
    deep = sorted({max(32, rule.block_k // 2), rule.block_k, min(256, 2 * rule.block_k)})
    for block_n, block_k, per_sm, stages, streamed in itertools.product(
        narrow, deep, (0.5, 1, 2, 4), (3, 4, 6), (False, True)
    ):
        config = replace(rule, block_n=block_n, block_k=block_k, num_stages=stages, streamed=streamed, adders=1)
        splits = legal_splits(int(sms * per_sm) // tile_count(M, N, config), K, block_k)
        neighbour = replace(config, splits=splits, adders=most_adders(rule.block_m * block_n, splits))
        if neighbour not in seen and illegal(neighbour, K, dtype) is None:
            seen.add(neighbour)
            yield neighbour
