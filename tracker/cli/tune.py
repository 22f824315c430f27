"""`groupbench tune`: run the operators' tuners in their own process, since they import torch."""

from __future__ import annotations

from pathlib import Path

import click

from groupbench.tracker.cli.declared import argument, command, flag, option
from groupbench.tracker.cli.here import wait_option
from groupbench.tracker.facts.programs import own_program
from groupbench.tracker.facts.vocabulary import DTYPE
from groupbench.tracker.night import measuring
from groupbench.tracker.tools.parameters import Duration

MODULE = "groupbench.operators.tuners"


@command()
@wait_option()
def tune(
    kernels: tuple[str, ...] = argument(nargs=-1, metavar="[KERNEL]..."),
    listed: bool = flag("--list", help="List the kernels and their suites."),
    suites: tuple[str, ...] = option(
        "--suite",
        multiple=True,
        help="Tune the shapes of this suite; may be repeated. Default: the first suite of each kernel.",
    ),
    shapes: tuple[str, ...] = option(
        "--shape",
        "--shapes",
        multiple=True,
        metavar="TEXT",
        help="Tune this shape instead of a suite; may be repeated.",
    ),
    dtype: str | None = option(*DTYPE, help="Dtype of the operands. Default: bf16."),
    folder: Path | None = option(
        "--folder",
        type=click.Path(path_type=Path, file_okay=False),
        help="Folder to write to. Default: GROUPBENCH_CONFIGS, or ~/.cache/groupbench.",
    ),
    limit: float | None = option("--limit", "--budget", type=Duration(), help="Start no new problem after this time."),
    helion_budget: float | None = option(
        "--helion-budget",
        type=Duration(),
        help="Time that Helion's own autotuner gets for a problem of a Helion kernel; 0 leaves it out. Default: 60s.",
    ),
) -> None:
    """Find the fastest kernel configs for this GPU and save them for this user.

    Each saved file names the GPU and the Triton version, and lists the speed-up of each config over the default one.
    Exit code 75: another command uses this device.
    """
    options = {"--dtype": dtype, "--folder": folder, "--limit": limit, "--helion-budget": helion_budget}
    arguments = [*kernels, *(["--list"] if listed else [])]
    arguments += [word for suite in suites for word in ("--suite", suite)]
    arguments += [word for shape in shapes for word in ("--shape", shape)]
    arguments += [word for option, value in options.items() if value is not None for word in (option, str(value))]
    command = own_program(MODULE, *arguments)
    measuring.become(command if listed else measuring.under_lease("auto", command))
