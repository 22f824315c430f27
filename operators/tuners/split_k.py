"""Compare the config that the split-K rule chooses with the fastest of its neighbours, shape by shape.

    python -m groupbench.operators.tuners.split_k --suite skinny --dtype bf16

For each shape it prints the times of cuBLAS, of the rule's config (`choose_config` of tiled.py, or `choose_stream` of
stream.py), and of the fastest config that differs from it in tile, splits, warps, stages or the way B is read. The
rule's numbers come from here. No file is written, since a rule is easier to read than a table. Runs on the GPU to tune
for, in one process, about a minute per shape, nearly all of it to compile.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import click

from groupbench.operators.catalog.gemm_shapes import GemmShape
from groupbench.operators.catalog.split_k_matmul import SPLIT_K_MATMUL, SUITES
from groupbench.operators.tuners import tuning

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from groupbench.kernels.split_k.stream import StreamConfig
    from groupbench.kernels.split_k.tiled import SplitKConfig

Config = TypeVar("Config")
MOST_TRIED = 24


def neighbours(M: int, N: int, K: int, dtype: torch.dtype, sms: int) -> Iterator[SplitKConfig]:
    """Yield the rule's config, then the legal configs around it, each once."""
    from groupbench.kernels.split_k.slots import most_adders
    from groupbench.kernels.split_k.tiled import choose_config, illegal, legal_splits, tile_count

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


def stream_neighbours(M: int, N: int, K: int, sms: int) -> Iterator[StreamConfig]:
    """Yield the rule's config, then those around it, for the kernel that reads B into registers."""
    from groupbench.kernels.split_k.slots import most_adders
    from groupbench.kernels.split_k.stream import ROWS, StreamConfig, choose_stream
    from groupbench.kernels.split_k.tiled import even_splits, legal_splits

    rule = choose_stream(M, N, K, sms)
    seen = {rule}
    yield rule
    for block_n, warp_k, num_warps, per_sm in itertools.product((16, 32), (64, 128), (2, 4, 8, 16), (0.5, 1, 2)):
        tiles = math.ceil(N / block_n)
        splits = legal_splits(even_splits(int(sms * per_sm) // tiles), K, warp_k * num_warps)
        neighbour = StreamConfig(block_n, warp_k, splits, num_warps, most_adders(ROWS * block_n, splits))
        if neighbour not in seen:
            seen.add(neighbour)
            yield neighbour


def evenly(configs: list[Config], most: int) -> list[Config]:
    """Return at most `most` of the configs, spread evenly over the list, with the first."""
    return configs[:: math.ceil(len(configs) / most)]


def microseconds(run: Callable[[], object]) -> float:
    """Return the time of a call as tuning.py measures it, in microseconds.

    It is infinite if the GPU cannot run all programs that wait for each other at the same time.
    """
    try:
        return 1e3 * tuning.fastest_burst(run)
    except RuntimeError as error:
        if "cooperative" not in str(error):
            raise
        return math.inf


def search(shape: GemmShape, dtype: str) -> tuning.Search:
    """Return the search over the neighbours of tiled.py's rule for a problem on this GPU."""
    from groupbench.kernels.device import device_of
    from groupbench.kernels.split_k.tiled import config_key, default_config, illegal, prepare_fixup

    x = SPLIT_K_MATMUL.make_inputs(shape, dtype, "cuda", 0)
    torch_dtype, device = x.a.dtype, device_of(x.a.device)
    default = default_config(shape.M, shape.N, shape.K, torch_dtype, device)
    near = neighbours(shape.M, shape.N, shape.K, torch_dtype, device.sms)
    legal = evenly([config for config in near if illegal(config, shape.K, torch_dtype, device) is None], MOST_TRIED)
    key = config_key(shape.M, shape.N, shape.K, torch_dtype)
    return tuning.Search(key, default, legal, (lambda config: prepare_fixup(x.a, x.b, config),))


def candidates(a: Tensor, b: Tensor, sms: int, most: int) -> list[tuple[Callable[[], Tensor], object]]:
    """Return calls and their configs, the rule's first, for the kernel that `prepare_fixup` chooses for these operands.

    most  largest number of configs
    """
    from groupbench.kernels.split_k.stream import prepare_stream, unsuitable
    from groupbench.kernels.split_k.tiled import prepare_fixup

    (M, K), N = a.shape, b.size(1)
    if unsuitable(a, b) is None:
        streams = evenly(list(stream_neighbours(M, N, K, sms)), most)
        return [(prepare_stream(a, b, config), config) for config in streams]
    configs = evenly(list(neighbours(M, N, K, a.dtype, sms)), most)
    return [(prepare_fixup(a, b, config), config) for config in configs]


@click.command()
@tuning.suite_option(SUITES, "skinny")
@tuning.shape_option
@tuning.dtype_option
@click.option(
    "--configs", type=click.IntRange(min=1), default=60, show_default=True, help="Largest number of configs per shape."
)
def main(suites: tuple[str, ...], texts: tuple[str, ...], dtype: str, configs: int) -> None:
    """Compare the rule with its neighbours on this GPU."""
    import torch

    from groupbench.kernels.device import device_of

    named = tuning.chosen(SPLIT_K_MATMUL.parse_shape, texts, (shape for suite in suites for shape in SUITES[suite]))
    tuning.require_gpu()
    sms = device_of(torch.device("cuda")).sms
    for shape in named.values():
        x = SPLIT_K_MATMUL.make_inputs(shape, dtype, "cuda", 0)
        times = [(microseconds(run), config) for run, config in candidates(x.a, x.b, sms, configs)]
        cublas = microseconds(lambda x=x: torch.mm(x.a, x.b))  # type: ignore[misc]
        best, config = min(times, key=lambda timed: timed[0])
        rule = times[0][0]
        click.echo(f"{shape}: cuBLAS {cublas:.2f} us, rule {rule:.2f} ({cublas / rule:.2f}), ", nl=False)
        click.echo(f"best {best:.2f} ({cublas / best:.2f})\n  rule {times[0][1]}\n  best {config}")


if __name__ == "__main__":
    main()
