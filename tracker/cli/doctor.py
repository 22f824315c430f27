"""`groupbench doctor`: check this machine and suggest improvements for measuring on it."""

from __future__ import annotations

from dataclasses import asdict

import click

from groupbench.tracker.cli.declared import command
from groupbench.tracker.cli.output import Column, Format, output_formats, write_table
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
def doctor(form: Format = output_formats) -> None:
    """Check this machine and suggest improvements for measuring on it, with a command for each.

    Checks the GPUs (clocks, power, other processes, throttling), the CPU, its load, and the tools that measuring needs.
    Changes nothing.
    """
    from groupbench.tracker.doctor.gpu import gpus
    from groupbench.tracker.doctor.host import host

    checks = [*gpus(), *host()]
    rows = [asdict(check) for check in checks]
    if form != "table":
        write_table(ALL, rows, form)
        return
    better = [check for check in checks if check.level == "better"]
    click.echo(f"DOCTOR {counted(len(better), 'possible improvement')} in {counted(len(checks), 'check')}")
    for check in better:
        click.echo(printable(f"- {check.area}, {check.name}: {check.value}. {check.why}"))
        if check.command:
            click.echo(f"    {''.join(char for char in check.command if char.isprintable())}")
    click.echo()
    write_table(FACTS, rows, "table")
