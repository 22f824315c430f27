"""`groupbench selftest`: whether this installation catches what it should, on this machine."""

from __future__ import annotations

import subprocess
import sys

import click

from groupbench.tracker.errors import TrackerError
from groupbench.tracker.exits import ExitCode

MODULE = "groupbench.operators.integrity"


@click.command()
@click.option("--integrity", is_flag=True, help="Run backends that cheat, and print what catches each.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Device to run them on.")
@click.option("--cheats", "only", metavar="NAMES", help="Run these cheats alone, separated by commas.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def selftest(context: click.Context, integrity: bool, device: str, only: str | None, as_json: bool) -> None:
    """Check that this installation catches backends that cheat, and leaves honest ones alone.

    The cheats are those of docs/integrity.md: results that are cached, lazy or forged, clocks that are replaced, work
    that is left out or left to a thread or a stream. It takes a minute or two and needs what measuring needs.

    Exit codes: 0 all were caught, 1 one was not, or an honest backend was accused, 2 usage.
    """
    if not integrity:
        raise click.UsageError("say what to test: --integrity", context)
    command = [sys.executable, "-m", MODULE, "--device", device]
    command += ["--only", only] if only else []
    command += ["--json"] if as_json else []
    try:
        code = subprocess.run(command).returncode
    except OSError as error:
        raise TrackerError(f"cannot start {sys.executable}: {error.strerror}") from error
    if code not in (ExitCode.OK, ExitCode.FAILED):
        raise TrackerError(f"the self-test did not run: its process ended with {code}")
    context.exit(code)
