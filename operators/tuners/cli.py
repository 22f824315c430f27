"""Tune kernels for this GPU: `python -m groupbench.operators.tuners`, run by `groupbench tune`.

The fastest config of each problem is written to the folder GROUPBENCH_CONFIGS, by default ~/.cache/groupbench, in a
file with the GPU's name and Triton's version. Kernels read it when a problem is prepared. `-o` makes the shipped files:

    python -m groupbench.operators.tuners flat --suite moe -o kernels/grouped_gemm/configs/flat_h100.json
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from groupbench.operators.deferred import torch
from groupbench.operators.dtypes import BYTES
from groupbench.operators.errors import GroupbenchError
from groupbench.operators.measure.faults import describe
from groupbench.operators.registry import get_operator
from groupbench.operators.tuners import tuning
from groupbench.operators.tuners.autotuner import by_helion
from groupbench.operators.tuners.kernels import KERNELS, Search, Tunable
from groupbench.tracker.text.wording import no_such
from groupbench.tracker.tools import shell, signals
from groupbench.tracker.tools.parameters import Duration


def fields_of(config: Any) -> dict[str, Any]:
    """Return a config as a JSON object: the fields of a dataclass, or the settings of a Helion config."""
    return dataclasses.asdict(config) if dataclasses.is_dataclass(config) else dict(config.config)  # type: ignore[arg-type]


def tune_one(search: Search, listed: bool = False, helion_s: float = 0) -> tuple[Any, float, float | None] | None:
    """Time the configs of a search.

    Args:
        search: Default config and candidates.
        listed: Print the time of every config.
        helion_s: Seconds for Helion's autotuner, if it can search for this kernel's configs; 0 for no search.

    Returns:
        Fastest config, time in ms, and the default config's ms or None if it does not run. None if no config runs.
    """
    others = [config for config in search.candidates if fields_of(config) != fields_of(search.default)]
    if search.in_helion and helion_s and (searched := by_helion(search.default, search.prepare, helion_s)):
        others.append(searched)
    times = tuning.time_each([search.default, *others], search.prepare)
    if not times:
        return None
    ranked = sorted(times, key=lambda timed: timed[0])
    for ms, config in ranked if listed else ():
        click.echo(f"  {ms:.4f} ms {' '.join(f'{name}={value}' for name, value in fields_of(config).items())}")
    default_ms = next((ms for ms, config in times if config is search.default), None)
    return ranked[0][1], ranked[0][0], default_ms


def shapes_of(tunable: Tunable, suites: tuple[str, ...], texts: tuple[str, ...], dgrad: bool = False) -> dict[str, Any]:
    """Return shapes by text: those of `texts`, else of the suites, else of the first suite.

    Raises:
        click.BadParameter: A suite is unknown, or a text is not a shape.
    """
    operator = get_operator(tunable.operator)
    available = operator.suites
    if unknown := [suite for suite in suites if suite not in available]:
        raise click.BadParameter(no_such("no suite", unknown[0], available), param_hint="--suite")
    try:
        shapes = [operator.parse_shape(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--shape") from error
    shapes = shapes or [shape for name in suites or [*available][:1] for shape in available[name]]
    if dgrad:  # the forward product with the other layout of the weights
        shapes = [dataclasses.replace(s, N=s.K, K=s.N, nk=s.shared or not s.nk, shared=False) for s in shapes]
    return {str(shape): shape for shape in shapes}


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True})
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--list", "listed", is_flag=True, help="List the kernels and their suites.")
@click.option("--suite", "suites", multiple=True, help="Suites to tune. By default the first of each kernel.")
@click.option("--shape", "--shapes", "texts", multiple=True, help="Shapes to tune instead of suites.")
@click.option("--dtype", "--precision", "dtype", type=click.Choice(list(BYTES)), default="bf16")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Folder to write to.")
@click.option(
    "-o", "--output", "--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write, for one kernel."
)
@click.option("--dgrad", is_flag=True, help="Tune the gradients of the rows (kernels of grouped_gemm).")
@click.option(
    "--helion-budget",
    "helion_s",
    type=Duration(),
    default="60s",
    help="Time that Helion's own autotuner gets for a problem of a Helion kernel; 0 leaves it out.",
)
@click.option("--times", is_flag=True, help="Print the time of every config.")
@click.option(
    "--limit",
    "--budget",
    "limit",
    type=Duration(),
    default="1200s",
    help="Start no further problem after this time.",
)
def main(
    kernels: tuple[str, ...],
    listed: bool,
    suites: tuple[str, ...],
    texts: tuple[str, ...],
    dtype: str,
    folder: Path | None,
    output: Path | None,
    dgrad: bool,
    times: bool,
    helion_s: float,
    limit: float,
) -> None:
    """Find the fastest configs of the kernels on this GPU and store them for this user.

    Writes to the folder GROUPBENCH_CONFIGS, by default ~/.cache/groupbench. Every file contains the GPU, Triton's
    version, and the margin of each config over the default.
    """
    if unknown := [name for name in kernels if name not in KERNELS]:
        raise click.BadParameter(no_such("no kernel", unknown[0], KERNELS), param_hint="KERNEL")
    if listed:
        for name, tunable in KERNELS.items():
            suites_of = ", ".join(get_operator(tunable.operator).suites)
            click.echo(f"{name:18} {tunable.operator}: {tunable.about} (suites: {suites_of})")
        return
    chosen = kernels or tuple(KERNELS)
    if output is not None and len(chosen) != 1:
        raise click.UsageError("-o needs one KERNEL")
    if dgrad and {KERNELS[name].operator for name in chosen} != {"grouped_gemm"}:
        raise click.UsageError("--dgrad needs a KERNEL of grouped_gemm")
    problems = {name: shapes_of(KERNELS[name], suites, texts, dgrad) for name in chosen}
    _require_gpu()
    end = time.monotonic() + limit
    with signals.keeping(lambda: "the configs that were printed are kept"):
        for name, named in problems.items():
            _tune_kernel(name, named, dtype, output or _file(name, folder), end, times, helion_s)


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        raise click.UsageError("tuning needs the GPU to tune for; torch does not see one")


def _file(kernel: str, folder: Path | None) -> Path:
    """Return the kernel's file for this GPU in a folder, or in the user's."""
    from groupbench.kernels.grouped_gemm import tuned

    path = tuned.user_file(kernel, torch.cuda.get_device_name())
    return path if folder is None else folder / path.name


def _tune_kernel(
    name: str, named: Mapping[str, Any], dtype: str, path: Path, end: float, listed: bool, helion_s: float
) -> None:
    """Tune a kernel's problems until `end`, in seconds of the monotonic clock, and write after each."""
    for text, shape in named.items():
        if time.monotonic() > end:
            click.echo(f"{name}: time is up before {text}", err=True)
            return
        try:
            for search in KERNELS[name].searches(shape, dtype):
                _tune_problem(f"{name} {text}", name, search, path, listed, helion_s)
        except Exception as error:
            click.echo(f"{name} {text}: {describe(error)}", err=True)
        torch.cuda.empty_cache()
    click.echo(f"{name}: {path}")


def _tune_problem(title: str, name: str, search: Search, path: Path, listed: bool, helion_s: float) -> None:
    """Run a search and write its fastest config."""
    from groupbench.kernels.grouped_gemm import tuned

    outcome = tune_one(search, listed, helion_s)
    if outcome is None:
        click.echo(f"{title}: no config runs", err=True)
        return
    config, ms, default_ms = outcome
    margin = {"ms": ms} | ({} if default_ms is None else {"default_ms": default_ms})
    tuned.keep(path, torch.cuda.get_device_name(), {search.key: fields_of(config)}, {search.key: margin})
    faster = "" if default_ms is None else f", {default_ms / ms - 1:.1%} faster than the default"
    click.echo(f"{name} {search.key}: {ms:.4f} ms{faster}")


def run() -> NoReturn:
    """Run the command, with each error in one line, and exit with the exit code."""
    shell.run("groupbench tune", main, GroupbenchError)
