"""Finds the fastest configs of the weights' gradient for each problem, and writes the file that ships.

    python -m groupbench.operators.tune_wgrad -o kernels/grouped_gemm/configs/wgrad_h100.json
    python -m groupbench.operators.tune_wgrad -o wgrad.json --suite moe --limit 300
    python -m groupbench.operators.tune_wgrad --helion dsv3_gu_ep32 --limit 120

Runs on the GPU it tunes for, in one process, about five seconds a problem. What is compared is a cooled burst of each
config, the faster of two; a difference below half a percent is luck. Problems that the time limit leaves out, and those
that an existing output file holds beside, keep what they have. With --helion, Helion's own search is run for one shape
instead, and its config printed, for helion_wgrad.py.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any

import click

from groupbench.operators import shapes
from groupbench.operators.measure.protocol import GpuTimer, Protocol
from groupbench.operators.shapes import GroupedShape

PROTOCOL = Protocol(bursts=2, samples=6, warmups=2, idle_s=0.12)


def times_of(shape: GroupedShape, dtype: str) -> tuple[str, list[tuple[float, dict[str, Any]]]]:
    """(key, [(ms, config)], fastest first) of every legal candidate for a problem on this GPU."""
    from groupbench.kernels.grouped_gemm.wgrad import MOST_RANKED, candidates, illegal, prepare_wgrad, tuning_key
    from groupbench.operators.grouped_gemm_wgrad import make_inputs

    x = make_inputs(shape, dtype, "cuda", seed=0)
    times = []
    for config in candidates(shape.M / shape.G):
        if illegal(config, x.a.dtype) is None and not (config.dynamic and shape.G > MOST_RANKED):
            timer = GpuTimer(prepare_wgrad(x.a, x.dc, x.offs, x.nk, config), PROTOCOL)
            times.append((min(_burst(timer) for _ in range(PROTOCOL.bursts)), dataclasses.asdict(config)))
    key = tuning_key(shape.M, shape.G, shape.N, shape.K, x.a.dtype, shape.nk)
    return key, sorted(times, key=lambda found: found[0])


def _burst(timer: GpuTimer) -> float:
    time.sleep(PROTOCOL.idle_s)
    return statistics.median(timer.burst())


def tune_helion(shape: GroupedShape, dtype: str, limit_s: float) -> str:
    """Helion's best config for a problem, after a search of about limit_s seconds, as text."""
    import os

    os.environ.setdefault("HELION_AUTOTUNE_EFFORT", "quick")
    os.environ["HELION_AUTOTUNE_BUDGET_SECONDS"] = str(int(limit_s))
    from groupbench.kernels.grouped_gemm.helion_wgrad import tune_helion_wgrad
    from groupbench.operators.grouped_gemm_wgrad import make_inputs

    x = make_inputs(shape, dtype, "cuda", seed=0)
    return repr(tune_helion_wgrad(x.a, x.dc, x.offs, x.nk))


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File to write, or to add to.")
@click.option("--suite", "suites", multiple=True, default=("tritonbench", "moe"), show_default=True)
@click.option("--shape", "texts", multiple=True, help="Shapes in place of suites.")
@click.option("--dtype", default="bf16", show_default=True)
@click.option("--limit", type=float, default=1200, show_default=True, help="Seconds; a problem begun is ended.")
@click.option("--helion", help="Let Helion search for this shape instead.")
def main(
    output: Path | None, suites: tuple[str, ...], texts: tuple[str, ...], dtype: str, limit: float, helion: str | None
) -> None:
    """Tune the weights' gradient for this GPU."""
    if helion is not None:
        click.echo(tune_helion(shapes.parse(helion), dtype, limit))
        return
    if output is None:
        raise click.UsageError("say where the configs go: -o FILE")
    problems = [shapes.parse(text) for text in texts]
    if not texts:
        of_suites = shapes.weight_gradient_suites()
        problems = [shape for suite in suites for shape in of_suites[suite]]
    configs = json.loads(output.read_text())["configs"] if output.exists() else {}
    end = time.monotonic() + limit
    for number, shape in enumerate(problems):
        if time.monotonic() > end:
            click.echo(f"time is up: {len(problems) - number} problems are left", err=True)
            break
        key, times = times_of(shape, dtype)
        configs[key] = times[0][1]
        click.echo(f"{shape}")
        for ms, config in times:
            click.echo(f"  {ms:.4f} ms {2e-9 * shape.M * shape.N * shape.K / ms:6.1f} TFLOP/s {_short(config)}")
        write(output, configs)


def _short(config: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in config.items())


def write(output: Path, configs: dict[str, dict[str, Any]]) -> None:
    """Write the file, a config a line."""
    import torch
    import triton

    torch.cuda.empty_cache()
    measured = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(config)}" for key, config in sorted(configs.items()))
    output.write_text(
        '{\n "about": "fastest configs of the weights\' gradient by problem, of the candidates in wgrad.py",\n'
        f' "measured": {json.dumps(measured)},\n "configs": {{\n{lines}\n }}\n}}\n'
    )


if __name__ == "__main__":
    main()
