"""`groupbench selftest`: check whether this installation catches cheating backends."""

from __future__ import annotations

import sys

import click

from groupbench.tracker.cli.declared import command, option
from groupbench.tracker.cli.output import Format, output_format
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.programs import own_program
from groupbench.tracker.night import measuring

MODULE = "groupbench.operators.integrity"


@command()
def selftest(
    context: click.Context,
    integrity: bool = option("--integrity", is_flag=True, hidden=True, help="The only test."),
    device: str = option(
        "--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", help="Device to run the backends on."
    ),
    only: str | None = option("--cheats", metavar="NAMES", help="Run only these cheats, joined by commas."),
    form: Format = output_format("table", "json"),
) -> None:
    """Run backends that cheat, and print which check catches each. Honest backends must be accepted.

    docs/explanation/integrity.md describes the cheats: cached, lazy or forged results, replaced clocks, and work that
    is skipped or moved to a thread or another stream. The test takes up to a minute and needs everything that
    measuring needs.

    Exit codes: 0 every cheat was caught, 1 a cheat passed or an honest backend was accused, 2 usage error, 3 the times
    of some could not be checked on this machine.
    """
    command = own_program(MODULE, "--device", device)
    command += ["--only", only] if only else []
    command += ["--json"] if form == "json" else []
    try:
        code = measuring.run_program(command)
    except OSError as error:
        raise TrackerError(f"cannot start {sys.executable}: {error.strerror}") from error
    if code not in (ExitCode.OK, ExitCode.FAILED, ExitCode.INCOMPLETE):
        raise TrackerError(f"the self-test did not run: its process ended with exit code {code}")
    context.exit(code)
