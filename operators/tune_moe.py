"""Finds the fastest configs of a layer's first grouped GEMM with SwiGLU for each problem, and writes the file.

    python -m groupbench.operators.tune_moe -o kernels/grouped_gemm/configs/gate_up_h100.json
    python -m groupbench.operators.tune_moe -o gate_up.json --suite decode --limit 60

Runs on the GPU it tunes for, in one process, a few seconds a problem: what is compared is the time for inference and
for training together. Problems that the time limit leaves out, and those that an existing output file holds beside,
keep what they have. The layer's other products are tuned by tune_flat and tune_wgrad.
"""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from groupbench.operators import moe
from groupbench.operators.moe import MoeShape
from groupbench.operators.tuning import fastest_burst, read_tuned, write_tuned

ABOUT = "fastest configs of gate and up with SwiGLU by problem, of the candidates in kernels/moe/gate_up.py"


def times_of(shape: MoeShape, dtype: str) -> tuple[str, list[tuple[float, dict[str, Any]]]]:
    """(key, [(ms, config)], fastest first) of every legal candidate for a problem on this GPU."""
    from groupbench.kernels.grouped_gemm.tuned import tuning_key
    from groupbench.kernels.moe.gate_up import candidates, gate_up, illegal
    from groupbench.kernels.moe.permute import spread_rows
    from groupbench.kernels.moe.routing import route
    from groupbench.operators.moe_layer import make_inputs

    x = make_inputs(shape, dtype, "cuda", seed=0)
    routing = route(x.ids, shape.G)
    rows = spread_rows(x.x, routing.position)
    times = []
    for config in candidates(shape.choices / shape.G):
        if illegal(config, rows.dtype) is None:
            ms = [
                fastest_burst(partial(gate_up, rows, x.w_gate_up, routing.offs, save, config)) for save in (False, True)
            ]
            times.append((sum(ms), dataclasses.asdict(config)))
    key = tuning_key(shape.choices, shape.G, 2 * shape.F, shape.H, rows.dtype, nk=True)
    return key, sorted(times, key=lambda found: found[0])


@click.command()
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="File to write, or to add to.")
@click.option("--suite", "suites", multiple=True, default=("moe", "decode"), show_default=True)
@click.option("--shape", "texts", multiple=True, help="Shapes in place of suites.")
@click.option("--dtype", default="bf16", show_default=True)
@click.option("--limit", type=float, default=1200, show_default=True, help="Seconds; a problem begun is ended.")
def main(output: Path, suites: tuple[str, ...], texts: tuple[str, ...], dtype: str, limit: float) -> None:
    """Tune the first product of a mixture-of-experts layer for this GPU."""
    import torch

    problems = [moe.parse(text, layer=True) for text in texts]
    if not texts:
        problems = [shape for suite in suites for shape in moe.LAYER_SUITES[suite].values()]
    configs = read_tuned(output)
    end = time.monotonic() + limit
    for number, shape in enumerate(problems):
        if time.monotonic() > end:
            click.echo(f"time is up: {len(problems) - number} problems are left", err=True)
            break
        key, times = times_of(shape, dtype)
        configs[key] = times[0][1]
        click.echo(f"{shape}")
        for ms, config in times:
            rate = 8e-9 * shape.M * shape.H * shape.F / ms  # two runs
            click.echo(f"  {ms:.4f} ms {rate:6.1f} TFLOP/s {' '.join(f'{k}={v}' for k, v in config.items())}")
        write_tuned(output, ABOUT, dict(sorted(configs.items())))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
