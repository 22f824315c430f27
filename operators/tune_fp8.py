"""Finds the fp8 kernel's fastest config for each problem and mode, and writes the file that ships.

    python -m groupbench.operators.tune_fp8 -o kernels/grouped_gemm/configs/fp8_h100.json --budget 240

Runs on the GPU it tunes for, in one process; a problem takes about ten seconds a mode the first time its number of
experts is met, most of it compiling. When the budget is over, what has been found is written and the rest is left to
the configs by size class. What is in the file already and was not tuned now is kept.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import click

from groupbench.operators.shapes import MOE, GroupedShape
from groupbench.operators.tuning import fastest_burst, read_tuned, write_tuned

# Few experts with many rows, many with fewer, and a few rows each; the first are tuned first.
SHAPES = (
    *("dsv3_gu_ep32_zipf", "dsv3_dn_ep32", "mixtral8x7b_gu", "qwen30b_gu", "qwen30b_dn", "qwen30b_decode"),
    *("gptoss20b_gu", "dsv3_decode"),
)


def fastest(shape: GroupedShape, mode: str) -> tuple[str, dict[str, Any], float]:
    """(key, config, ms) of the fastest candidate for a problem on this GPU."""
    from groupbench.kernels.grouped_gemm import fp8
    from groupbench.kernels.grouped_gemm.tuned import problem_key
    from groupbench.operators.grouped_gemm_fp8 import make_inputs

    x = make_inputs(shape, "fp8", "cuda", seed=0, blockwise=mode == fp8.BLOCKWISE)
    times = []
    for config in fp8.candidates(mode, shape.M / shape.G):
        run = fp8.prepare_fp8(
            x.a, x.scale_a, x.b, x.scale_b, x.offs, fast_accum=mode == fp8.ROWWISE_FAST, config=config
        )
        try:
            times.append((fastest_burst(run), config))
        except Exception as error:  # another Triton may need more shared memory
            click.echo(f"  {mode}: {config} does not run: {error}", err=True)
            continue
        click.echo(f"  {mode}: {times[-1][0]:.4f} ms {config}")
    ms, config = min(times, key=lambda found: found[0])
    return problem_key(shape.M, shape.G, shape.N, shape.K, mode), dataclasses.asdict(config), ms


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--shape", "names", type=click.Choice(list(MOE)), multiple=True, default=SHAPES, help="Of suite moe.")
@click.option("--mode", "modes", multiple=True, default=("rowwise", "rowwise_fast", "blockwise"), show_default=True)
@click.option("--budget", type=click.FloatRange(min=1), default=240, show_default=True, help="Seconds.")
def main(output: Path, names: tuple[str, ...], modes: tuple[str, ...], budget: float) -> None:
    """Tune the fp8 kernel for this GPU."""
    import torch

    from groupbench.kernels.grouped_gemm.fp8 import MODES

    if unknown := set(modes) - set(MODES):
        raise click.BadParameter(f"{', '.join(unknown)}: modes are {', '.join(MODES)}", param_hint="--mode")
    if not torch.cuda.is_available():
        raise click.UsageError("tuning needs the GPU that it is for; torch sees none here")
    configs = read_tuned(output)
    stop = time.monotonic() + budget
    for name in names:
        for mode in modes:
            if time.monotonic() > stop:
                click.echo(f"{name} {mode}: not tuned, {budget:g} s are over", err=True)
                continue
            key, configs[key], ms = fastest(MOE[name], mode)
            click.echo(f"{name} {mode}: {ms:.4f} ms {configs[key]}")
            torch.cuda.empty_cache()
    about = "the fp8 kernel's fastest config by problem and mode, of the candidates in fp8.py"
    write_tuned(output, about, configs)


if __name__ == "__main__":
    main()
