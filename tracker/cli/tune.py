"""`groupbench tune`: the tuners of the operators, in a process of their own, since they import torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from groupbench.tracker.cli.options import DTYPE

MODULE = "groupbench.operators.tuners"


@click.command()
@click.argument("kernels", nargs=-1, metavar="[KERNEL]...")
@click.option("--list", "listed", is_flag=True, help="List the kernels and their suites.")
@click.option("--suite", "suites", multiple=True, help="Suites to tune. By default the first of each kernel.")
@click.option("--shape", "--shapes", "shapes", multiple=True, help="Shapes in place of suites.")
@click.option(*DTYPE, help="Dtype of the operands. By default bf16.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), help="Folder to write to.")
@click.option("--limit", type=click.FloatRange(min=0), help="Seconds; a problem begun is ended.")
def tune(
    kernels: tuple[str, ...],
    listed: bool,
    suites: tuple[str, ...],
    shapes: tuple[str, ...],
    dtype: str | None,
    folder: Path | None,
    limit: float | None,
) -> None:
    """Find the fastest configs of the kernels on this GPU, and keep them for this user.

    Writes into the folder that GROUPBENCH_CONFIGS names, else ~/.cache/groupbench. Every file holds the GPU, Triton's
    version, and by how much each config is faster than the default one.
    """
    given = {"--dtype": dtype, "--folder": folder, "--limit": limit}
    arguments = [*kernels, *(["--list"] if listed else [])]
    arguments += [word for suite in suites for word in ("--suite", suite)]
    arguments += [word for shape in shapes for word in ("--shape", shape)]
    arguments += [word for option, value in given.items() if value is not None for word in (option, str(value))]
    done = subprocess.run([sys.executable, "-m", MODULE, *arguments])
    sys.exit(done.returncode)
