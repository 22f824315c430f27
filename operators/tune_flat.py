"""Finds triton_flat's fastest config for each problem of the suites, and writes the file that ships.

    python -m groupbench.operators.tune_flat -o kernels/grouped_gemm/configs/flat_h100.json
    python -m groupbench.operators.tune_flat --dgrad -o kernels/grouped_gemm/configs/flat_h100.json

The gradient of the rows is the forward with the other layout of the weights, and a problem of its own: with --dgrad
those are tuned, and added to what the file holds.

Runs on the GPU it tunes for, in one process, about five seconds a problem. What is compared is a cooled burst of each
config, the faster of two, so that a difference below half a percent is luck; it costs nothing to choose either then.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import click

from groupbench.operators.measure.protocol import GpuTimer, Protocol
from groupbench.operators.shapes import SUITES, GroupedShape

PROTOCOL = Protocol(bursts=2, samples=6, warmups=2, idle_s=0.12)


def fastest(shape: GroupedShape, dtype: str, dgrad: bool = False) -> tuple[str, dict[str, Any], float]:
    """(key, config, ms) of the fastest candidate for a problem on this GPU."""
    from groupbench.kernels.grouped_gemm.flat import candidates, illegal, prepare_flat, tuning_key
    from groupbench.operators import grouped_gemm, grouped_gemm_dgrad

    x = (grouped_gemm_dgrad if dgrad else grouped_gemm).make_inputs(shape, dtype, "cuda", seed=0)
    times = []
    for config in candidates(shape.M / shape.G):
        if illegal(config, x.a.dtype) is None:
            timer = GpuTimer(prepare_flat(x.a, x.b, x.offs, config), PROTOCOL)
            times.append((min(_burst(timer) for _ in range(PROTOCOL.bursts)), config))
    ms, config = min(times, key=lambda found: found[0])
    G, K, N = x.b.shape
    key = tuning_key(shape.M, G, N, K, x.a.dtype, x.b.stride(1) == 1 and x.b.stride(2) != 1)
    return key, dataclasses.asdict(config), ms


def _burst(timer: GpuTimer) -> float:
    time.sleep(PROTOCOL.idle_s)
    return statistics.median(timer.burst())


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True)
@click.option("--suite", "suites", multiple=True, default=("tritonbench", "moe"), show_default=True)
@click.option("--dtype", default="bf16", show_default=True)
@click.option("--dgrad", is_flag=True, help="The gradients of the suites' rows, added to the output file.")
def main(output: Path, suites: tuple[str, ...], dtype: str, dgrad: bool) -> None:
    """Tune triton_flat for this GPU."""
    import torch
    import triton

    configs = json.loads(output.read_text())["configs"] if dgrad and output.exists() else {}
    for suite in suites:
        for name, shape in SUITES[suite].items():
            key, config, ms = fastest(shape, dtype, dgrad)
            configs[key] = config
            click.echo(f"{name}: {ms:.4f} ms {config}")
            torch.cuda.empty_cache()
    about = {
        "about": "triton_flat's fastest config by problem, of the candidates in flat.py",
        "measured": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}",
        "configs": configs,
    }
    output.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
