"""`groupbench selftest`: check whether this installation catches cheating backends."""

from __future__ import annotations

import sys

import click

from groupbench.tracker.cli.output import Format, output_format
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.programs import own_program

MODULE = "groupbench.operators.integrity"


@click.command()
@click.option("--integrity", is_flag=True, help="Run backends that cheat, and print which check catches each.")
@click.option("--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True,
              help="Device to run the backends on.")  # fmt: skip
@click.option("--cheats", "only", metavar="NAMES", help="Run only these cheats, joined by commas.")
@output_format("table", "json")
@click.pass_context
def selftest(context: click.Context, integrity: bool, device: str, only: str | None, form: Format) -> None:
    """Check whether this installation catches cheating backends and accepts honest ones.

    docs/explanation/integrity.md describes the cheats: cached, lazy or forged results, replaced clocks, and work that
    is skipped or moved to a thread or another stream. The test takes up to a minute and needs everything that
    measuring needs.

    Exit codes: 0 every cheat was caught, 1 a cheat passed or an honest backend was accused, 2 usage error, 3 the times
    of some could not be checked on this machine.
    """
    from groupbench.tracker.night.measuring import run_program

    if not integrity:
        raise click.UsageError("nothing to test: give --integrity", context)
    command = own_program(MODULE, "--device", device)
    command += ["--only", only] if only else []
    command += ["--json"] if form == "json" else []
    try:
        code = run_program(command)
    except OSError as error:
        raise TrackerError(f"cannot start {sys.executable}: {error.strerror}") from error
    if code not in (ExitCode.OK, ExitCode.FAILED, ExitCode.INCOMPLETE):
        raise TrackerError(f"the self-test did not run: its process ended with exit code {code}")
    context.exit(code)
