"""Finds helion_worklist's fastest config for problems on this GPU, and writes the file that ships.

    python -m groupbench.operators.tune_worklist -o kernels/grouped_gemm/configs/worklist_h100.json

One process, about four seconds a problem; what a problem had in the file is kept where the problem is not tuned again,
and is a candidate where it is. `--budget` stops in time, and what is tuned by then is written.

`--autotune SECONDS` lets Helion's own search look for that long too, for each problem, with the rows of a tile and the
order of the fastest config so far; its find is a candidate like the others, timed in the same way.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from groupbench.operators.shapes import SUITES, GroupedShape, parse
from groupbench.operators.tuning import fastest_burst, read_tuned, write_tuned

if TYPE_CHECKING:
    from groupbench.kernels.grouped_gemm.helion_worklist import WorklistConfig
    from groupbench.operators.grouped_gemm import GroupedInputs

ABOUT = "helion_worklist's fastest config by problem, of the candidates in helion_worklist.py"


def fastest(
    x: GroupedInputs, configs: list[WorklistConfig], autotune_s: float = 0
) -> tuple[WorklistConfig, float, list[str]]:
    """(config, ms, what could not run) of the fastest of `configs`, and of Helion's find where it may search."""
    from groupbench.kernels.grouped_gemm import helion_worklist

    times: list[tuple[float, WorklistConfig]] = []
    failed: list[str] = []

    def try_out(config: WorklistConfig) -> None:
        reason = helion_worklist.illegal(config, x.a.dtype)
        try:
            if reason is None:
                run = helion_worklist.prepare_helion_worklist(x.a, x.b, x.offs, config)
                times.append((fastest_burst(run), config))
        except Exception as error:  # of a compiler, by candidate
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if reason is not None:
            failed.append(f"{config}: {reason}")

    for config in configs:
        try_out(config)
    if autotune_s and times:
        try_out(helion_worklist.tune_helion_worklist(x.a, x.b, x.offs, min(times, key=_time)[1], autotune_s))
    if not times:
        raise click.ClickException("no config runs: " + "; ".join(failed))
    ms, config = min(times, key=_time)
    return config, ms, failed


def _time(found: tuple[float, WorklistConfig]) -> float:
    return found[0]


def read_configs(path: Path) -> list[WorklistConfig]:
    """A list of configs from JSON: [{"block_m": 128, "block_n": 256, ...}, ...]."""
    from groupbench.kernels.grouped_gemm.helion_worklist import config_from

    try:
        return [config_from(values) for values in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        raise click.BadParameter(f"{path} is no list of configs: {error}") from error


def chosen_shapes(suites: tuple[str, ...], shapes: tuple[str, ...]) -> list[GroupedShape]:
    """Of the suites, or those named instead; each problem once."""
    if shapes:
        try:
            found = [parse(text) for text in shapes]
        except ValueError as error:
            raise click.BadParameter(str(error)) from error
    else:
        found = [shape for suite in suites for shape in SUITES[suite].values()]
    return list(dict.fromkeys(found))


@click.command()
@click.option("-o", "--out", "output", type=click.Path(path_type=Path), required=True, help="the file to write")
@click.option("--suite", "suites", multiple=True, type=click.Choice(list(SUITES)), default=("tritonbench", "moe"))
@click.option("--shapes", multiple=True, help="problems instead of suites: names of suites' problems, or their text")
@click.option("--configs", "configs_path", type=click.Path(path_type=Path), help="JSON list of configs to try instead")
@click.option("--dtype", default="bf16", show_default=True)
@click.option("--budget", "budget_s", default=600.0, show_default=True, help="seconds, after which no problem is begun")
@click.option("--autotune", "autotune_s", default=0.0, show_default=True, help="seconds for Helion's search, a problem")
def main(
    output: Path,
    suites: tuple[str, ...],
    shapes: tuple[str, ...],
    configs_path: Path | None,
    dtype: str,
    budget_s: float,
    autotune_s: float,
) -> None:
    """Tune helion_worklist for this GPU."""
    problems = chosen_shapes(suites, shapes)
    given = read_configs(configs_path) if configs_path else None

    import torch

    from groupbench.kernels.grouped_gemm.helion_worklist import candidates, config_from
    from groupbench.kernels.grouped_gemm.tuned import tuning_key
    from groupbench.operators.grouped_gemm import make_inputs

    if not torch.cuda.is_available():
        raise click.ClickException("tuning needs the GPU to tune for, and torch sees none")
    before = read_tuned(output)
    tuned = dict(before)
    stop = time.monotonic() + budget_s
    for shape in problems:
        if time.monotonic() > stop:
            click.echo(f"out of budget before {shape}", err=True)
            break
        x = make_inputs(shape, dtype, "cuda", seed=0)
        key = tuning_key(shape.M, shape.G, shape.N, shape.K, x.a.dtype, shape.nk)
        configs = list(given or candidates(shape.M / shape.G, shape.K))
        if key in before and config_from(before[key]) not in configs:
            configs.append(config_from(before[key]))
        config, ms, failed = fastest(x, configs, autotune_s)
        tuned[key] = dataclasses.asdict(config)
        click.echo(f"{shape}: {ms:.4f} ms {config}")
        for line in failed:
            click.echo(f"  not run: {line}", err=True)
        write_tuned(output, ABOUT, tuned, "helion")
        del x
        torch.cuda.empty_cache()


if __name__ == "__main__":  # Helion's autotuner starts processes that import this module again
    main()
