"""`groupbench doctor`: check this machine and suggest improvements for measuring on it."""

from __future__ import annotations

from dataclasses import asdict

import click

from groupbench.tracker.cli.declared import command
from groupbench.tracker.cli.here import this_project
from groupbench.tracker.cli.output import Column, Format, output_formats, write_json, write_table
from groupbench.tracker.doctor.check import Check
from groupbench.tracker.doctor.checkup import Checkup, examine
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.text.wording import counted, printable

FACTS = (
    Column("", "area"),
    Column("check", "name"),
    Column("value", "value", wraps=True),
)
ALL = (
    *FACTS,
    Column("level", "level"),
    Column("reason", "why", wraps=True),
    Column("command", "command", wraps=True),
)


@command()
def doctor(context: click.Context, form: Format = output_formats) -> None:
    """Check this machine and suggest improvements for measuring on it, with a command for each.

    Checks the GPUs (clocks, power, other processes, throttling), whether torch, triton and helion work together, the
    CPU, the disks and the database. Changes nothing.

    Exit codes: 0 something can be measured, 1 nothing can be measured, 2 usage error.
    """
    checkup = examine(context.obj, this_project(context))
    if form == "json":
        write_json(checkup.flat())
    elif form != "table":
        write_table(ALL, [asdict(check) for check in checkup.findings], form)
    else:
        _write(checkup)
    context.exit(ExitCode.OK if checkup.measures else ExitCode.FAILED)


def _write(checkup: Checkup) -> None:
    """Print the summary, then problems and improvements, then every check."""
    click.echo(printable(_summary(checkup)))
    for level, title in (("broken", "Problems to fix"), ("better", "Possible improvements")):
        findings = [finding for finding in checkup.findings if finding.level == level]
        if findings:
            click.echo(f"\n{title}:")
        for finding in findings:
            _write_finding(finding)
    click.echo()
    write_table(FACTS, [asdict(finding) for finding in checkup.findings], "table")


def _summary(checkup: Checkup) -> str:
    if not checkup.measures:
        return "DOCTOR nothing can be measured here; stored results can still be queried, judged and reported"
    backends = counted(sum(map(len, checkup.operators.values())), "backend")
    card = next((finding.value for finding in checkup.findings if finding.name == "model"), "the GPU")
    where = f"on {card}" if checkup.device == "cuda" else "on the CPU, where Triton and Helion kernels are interpreted"
    return f"DOCTOR {backends} of {counted(len(checkup.operators), 'operator')} can be measured {where}"


def _write_finding(finding: Check) -> None:
    click.echo(printable(f"- {finding.area}, {finding.name}: {finding.value}. {finding.why or ''}"))
    if finding.command:
        click.echo(f"    {printable_command(finding.command)}")


def printable_command(command: str) -> str:
    """Return a command without control characters, but with all spaces, ready to be pasted."""
    return "".join(char for char in command if char.isprintable())
