"""What is tried of the kernels that Helion generates: helion_jagged, helion_persistent and helion_barrier (split-K).

A grid of block sizes, warps and stages within the GPU's limits; of helion_barrier its tunable `split_k`, 1 to 512 by
powers of two. Helion's own search takes much longer; its `kernel.autotune` takes the same arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from groupbench.operators.catalog.gemm_shapes import GemmShape
from groupbench.operators.catalog.shapes import GroupedShape
from groupbench.operators.tuners import tuning

if TYPE_CHECKING:
    import helion

SIDES = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (32, 128), (16, 128))


def neighbours(default: helion.Config, order: tuple[int, int, int]) -> Iterator[helion.Config]:
    """The default with other block sizes, warps and stages; `order` holds the places of M, N and K among its blocks."""
    import helion

    for (m, n), depth, stages in itertools.product(SIDES, (32, 64, 128), (3, 4)):
        sizes = [0, 0, 0]
        for place, size in zip(order, (m, n, depth), strict=True):
            sizes[place] = size
        warps = 8 if m * n >= 128 * 128 else 4
        yield helion.Config(**{**default.config, "block_sizes": sizes, "num_warps": warps, "num_stages": stages})


def search(kernel: str, shape: GroupedShape, dtype: str) -> tuning.Search:
    """The grid of a grouped kernel for a problem on this GPU."""
    import importlib

    from groupbench.kernels.device import device_of
    from groupbench.kernels.grouped_gemm.tuned import tuning_key
    from groupbench.kernels.helion_configs import fit, illegal
    from groupbench.operators.catalog.grouped_gemm import make_inputs

    module: Any = importlib.import_module(f"groupbench.kernels.grouped_gemm.{kernel}")
    prepare = getattr(module, f"prepare_{kernel}")
    x = make_inputs(shape, dtype, "cuda", seed=0)
    of, device = x.a.dtype, device_of(x.a.device)
    if kernel == "helion_jagged":
        order, untuned = (1, 0, 2), module.default_config(x.a.device, of)
    else:
        order, untuned = (0, 1, 2), module.default_config(x.a.device, of, shape.M / shape.G)
    default = fit(untuned, of, device)
    legal = [config for config in neighbours(default, order) if illegal(config, of, device) is None]
    key = tuning_key(shape.M, shape.G, shape.N, shape.K, of, shape.nk)
    return tuning.Search(key, default, legal, (lambda config: prepare(x.a, x.b, x.offs, config),))


def search_barrier(shape: GemmShape, dtype: str) -> tuning.Search:
    """The splits of helion_barrier, its tile and stages those of the rule."""
    import helion

    from groupbench.kernels.device import device_of
    from groupbench.kernels.split_k.helion_barrier import default_config, prepare_barrier
    from groupbench.kernels.split_k.tiled import config_key
    from groupbench.operators.catalog.gemm_shapes import make_inputs

    x = make_inputs(shape, dtype, "cuda", 0)
    default = default_config(shape.M, shape.N, shape.K, x.a.dtype, device_of(x.a.device))
    depth = default.block_sizes[2]
    splits = [split for split in (1 << power for power in range(10)) if split * depth <= 2 * shape.K]
    candidates = [helion.Config(**{**default.config, "split_k": split}) for split in splits]
    key = config_key(shape.M, shape.N, shape.K, x.a.dtype)
    return tuning.Search(key, default, candidates, (lambda config: prepare_barrier(x.a, x.b, config),))
