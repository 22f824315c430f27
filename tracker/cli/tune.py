"""`groupbench tune`: run the operators' tuners in their own process, since they import torch."""

from __future__ import annotations

from pathlib import Path

import click

from groupbench.tracker.cli.here import wait_option
from groupbench.tracker.cli.options import DTYPE
from groupbench.tracker.facts.programs import own_program
from groupbench.tracker.tools.parameters import Duration

MODULE = "groupbench.operators.tuners"


@click.command()
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--list", "listed", is_flag=True, help="List the kernels and their suites.")
@click.option(
    "--suite",
    "suites",
    multiple=True,
    metavar="NAME",
    help="Tune the shapes of this suite; may be repeated. Default: the first suite of each kernel.",
)
@click.option(
    "--shape",
    "--shapes",
    "shapes",
    multiple=True,
    metavar="TEXT",
    help="Tune this shape instead of a suite; may be repeated.",
)
@click.option(*DTYPE, metavar="NAME", help="Dtype of the operands. Default: bf16.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to write to. Default: GROUPBENCH_CONFIGS, or ~/.cache/groupbench.",
)
@click.option(
    "--limit",
    "--budget",
    "limit",
    type=Duration(),
    help="Start no new problem after this time.",
)
@click.option(
    "--helion-budget",
    type=Duration(),
    help="Time that Helion's own autotuner gets for a problem of a Helion kernel; 0 leaves it out. Default: 60s.",
)
@wait_option()
def tune(
    kernels: tuple[str, ...],
    listed: bool,
    suites: tuple[str, ...],
    shapes: tuple[str, ...],
    dtype: str | None,
    folder: Path | None,
    limit: float | None,
    helion_budget: float | None,
) -> None:
    """Find the fastest kernel configs for this GPU and save them for this user.

    Each saved file names the GPU and the Triton version, and lists the speed-up of each config over the default one.
    Exit code 75: another command uses this device.
    """
    from groupbench.tracker.night.measuring import become, under_lease

    options = {"--dtype": dtype, "--folder": folder, "--limit": limit, "--helion-budget": helion_budget}
    arguments = [*kernels, *(["--list"] if listed else [])]
    arguments += [word for suite in suites for word in ("--suite", suite)]
    arguments += [word for shape in shapes for word in ("--shape", shape)]
    arguments += [word for option, value in options.items() if value is not None for word in (option, str(value))]
    command = own_program(MODULE, *arguments)
    become(command if listed else under_lease("auto", command))
