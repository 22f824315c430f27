"""Finds the fastest configs of the fused kernel with bias and permutation, and writes the file that ships.

    python -m groupbench.operators.tune_bias_add_permute -o kernels/grouped_gemm/configs/bias_add_permute_h100.json

Runs on the GPU it tunes for, in one process: a dozen configs a shape, about a second each with compiling. Beside each
time stands the share of the device's copy bandwidth at which the least bytes moved. When the limit is over, what has
been found is written; what an output file held already and was not tuned now is kept.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import click

from groupbench.operators.grouped_gemm_bias_add_permute import SHAPES, FusedShape, min_bytes, parse_shape
from groupbench.operators.tuning import fastest_burst, read_tuned, write_tuned

ABOUT = "fastest configs of the fused kernel by problem, of the candidates in kernels/bias_add_permute/fused.py"


def times_of(shape: FusedShape, dtype: str) -> tuple[str, list[tuple[float, dict[str, Any]]]]:
    """(key, [(ms, config)], fastest first) of every candidate that runs."""
    from groupbench.kernels.bias_add_permute.fused import candidates, config_key, prepare_fused
    from groupbench.operators.grouped_gemm_bias_add_permute import make_inputs

    x = make_inputs(shape, dtype, "cuda", seed=0)
    times = []
    for config in candidates(x.op):
        try:
            times.append((fastest_burst(prepare_fused(x.groups, x.op, config)), dataclasses.asdict(config)))
        except Exception as error:  # another Triton may need more shared memory
            click.echo(f"  {config} does not run: {error}", err=True)
    return config_key(x.groups, x.op), sorted(times, key=lambda found: found[0])


def copy_gb_per_s() -> float:
    """Bytes read and written in a copy of 1 GiB, by time."""
    import torch

    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").zero_()
    return 2 * source.numel() / fastest_burst(source.clone) / 1e6


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write, or to add to.")
@click.option("--shape", "texts", multiple=True, default=tuple(SHAPES), show_default=True)
@click.option("--dtype", default="bf16", show_default=True)
@click.option("--limit", type=click.FloatRange(min=1), default=120, show_default=True, help="Seconds.")
def main(output: Path, texts: tuple[str, ...], dtype: str, limit: float) -> None:
    """Tune the fused kernel with bias and permutation for this GPU."""
    import torch

    try:
        shapes = [parse_shape(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--shape") from error
    if not torch.cuda.is_available():
        raise click.UsageError("tuning needs the GPU that it is for; torch sees none here")
    configs = read_tuned(output)
    end = time.monotonic() + limit
    copy = copy_gb_per_s()
    for number, shape in enumerate(shapes):
        if time.monotonic() > end:
            click.echo(f"time is up: {len(shapes) - number} problems are left", err=True)
            break
        key, times = times_of(shape, dtype)
        click.echo(f"{shape}")
        for ms, config in times:
            share = min_bytes(shape, dtype) / ms / 1e6 / copy
            click.echo(f"  {ms:.4f} ms {share:.0%} of copy {' '.join(f'{k}={v}' for k, v in config.items())}")
        if times:
            configs[key] = times[0][1]
            write_tuned(output, ABOUT, dict(sorted(configs.items())))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
