"""Finds triton_flat's fastest config for each problem of the suites, and writes the file that ships.

    python -m groupbench.operators.tune_flat -o kernels/grouped_gemm/configs/flat_h100.json
    python -m groupbench.operators.tune_flat --dgrad -o kernels/grouped_gemm/configs/flat_h100.json

The gradient of the rows is the forward with the other layout of the weights, and a problem of its own: with --dgrad
those are tuned, and added to what the file holds.

Runs on the GPU it tunes for, in one process, about five seconds a problem.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from groupbench.operators.shapes import SUITES, GroupedShape
from groupbench.operators.tuning import fastest_burst, read_tuned, write_tuned


def fastest(shape: GroupedShape, dtype: str, dgrad: bool = False) -> tuple[str, dict[str, Any], float]:
    """(key, config, ms) of the fastest candidate for a problem on this GPU."""
    from groupbench.kernels.grouped_gemm.flat import candidates, illegal, prepare_flat
    from groupbench.kernels.grouped_gemm.support import stored_weights
    from groupbench.kernels.grouped_gemm.tuned import tuning_key
    from groupbench.operators import grouped_gemm, grouped_gemm_dgrad

    x = (grouped_gemm_dgrad if dgrad else grouped_gemm).make_inputs(shape, dtype, "cuda", seed=0)
    times = []
    for config in candidates(shape.M / shape.G):
        if illegal(config, x.a.dtype) is None:
            times.append((fastest_burst(prepare_flat(x.a, x.b, x.offs, config)), config))
    ms, config = min(times, key=lambda found: found[0])
    G, K, N = x.b.shape
    key = tuning_key(shape.M, G, N, K, x.a.dtype, stored_weights(x.b)[1])
    return key, dataclasses.asdict(config), ms


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--suite", "suites", multiple=True, default=("tritonbench", "moe"), show_default=True)
@click.option("--dtype", default="bf16", show_default=True)
@click.option("--dgrad", is_flag=True, help="The gradients of the suites' rows, added to the output file.")
def main(output: Path, suites: tuple[str, ...], dtype: str, dgrad: bool) -> None:
    """Tune triton_flat for this GPU."""
    import torch

    configs = read_tuned(output) if dgrad else {}
    for suite in suites:
        for name, shape in SUITES[suite].items():
            key, config, ms = fastest(shape, dtype, dgrad)
            configs[key] = config
            click.echo(f"{name}: {ms:.4f} ms {config}")
            torch.cuda.empty_cache()
    write_tuned(output, "triton_flat's fastest config by problem, of the candidates in flat.py", configs)


if __name__ == "__main__":
    main()
