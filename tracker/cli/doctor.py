"""`groupbench doctor`: what this machine can measure, and what would make it better."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from groupbench.tracker.cli.output import Column, Format, output_formats, write_json, write_table
from groupbench.tracker.exits import ExitCode
from groupbench.tracker.text.wording import counted, printable

if TYPE_CHECKING:
    from groupbench.tracker.doctor.checkup import Checkup, Finding


FACTS = (
    Column("", "area"),
    Column("what", "name"),
    Column("is", "value", wraps=True),
)
ALL = (
    *FACTS,
    Column("level", "level"),
    Column("why", "why", wraps=True),
    Column("command", "command", wraps=True),
)


@click.command()
@output_formats
@click.pass_context
def doctor(context: click.Context, form: Format | None) -> None:
    """What this machine can measure, and what would make it better, with the command for each.

    Looks at the GPUs (clocks, power, other processes, throttling), at torch, triton and helion and whether they go
    together, at the CPU, the disks and the database. Changes nothing.

    Exit codes: 0 something can be measured here, 1 nothing can, 2 usage.
    """
    from dataclasses import asdict

    from groupbench.tracker.doctor.checkup import examine

    found = examine(context.obj)
    if form == "json":
        write_json(found.flat())
    elif form is not None:
        write_table(ALL, [asdict(finding) for finding in found.findings], form)
    else:
        _tell(found)
    context.exit(ExitCode.OK if found.measures else ExitCode.FAILED)


def _tell(found: Checkup) -> None:
    """The answer first, then what to do, then everything that was looked at."""
    from dataclasses import asdict

    click.echo(printable(_summary(found)))
    for level, title in (("broken", "To be mended"), ("better", "What would make it better")):
        findings = [finding for finding in found.findings if finding.level == level]
        if findings:
            click.echo(f"\n{title}:")
        for finding in findings:
            _tell_one(finding)
    click.echo()
    write_table(FACTS, [asdict(finding) for finding in found.findings], None)


def _summary(found: Checkup) -> str:
    if not found.measures:
        return "DOCTOR nothing can be measured here; what is stored can be asked, judged and reported"
    backends = counted(sum(map(len, found.operators.values())), "backend")
    card = next((finding.value for finding in found.findings if finding.name == "model"), "the GPU")
    where = f"on {card}" if found.device == "cuda" else "on the CPU, where Triton and Helion kernels are interpreted"
    return f"DOCTOR {backends} of {counted(len(found.operators), 'operator')} can be measured {where}"


def _tell_one(finding: Finding) -> None:
    click.echo(printable(f"- {finding.area}, {finding.name}: {finding.value}. {finding.why or ''}"))
    if finding.command:
        click.echo(f"    {printable_command(finding.command)}")


def printable_command(command: str) -> str:
    """As it is typed: only characters that steer a terminal are taken out, spaces stay."""
    return "".join(char for char in command if char.isprintable())
