"""`groupbench queue`: list the measuring commands and the waiting ones."""

from __future__ import annotations

from dataclasses import asdict

import click

from groupbench.tracker.cli.output import Column, Format, output_format, say, write_table
from groupbench.tracker.tools import lease

COLUMNS = (
    Column("device", "device"),
    Column("state", "state"),
    Column("place", "place", right=True),
    Column("pid", "pid", right=True),
    Column("since", "since"),
    Column("command", "command", wraps=True),
    Column("folder", "folder", wraps=True),
    Column("user", "user"),
    Column("host", "host"),
)


@click.command()
@output_format("table", "json")
def queue(form: Format) -> None:
    """List the commands measuring on a device or waiting for it.

    One command at a time measures on a device. The others wait, at most for the time of their option --wait: first
    come, first served. Place 0 holds the device. Commands see each other if they share the folder of locks
    (GROUPBENCH_LOCKS, by default /tmp).
    """
    places = lease.queue()
    if not places:
        say("no command measures or waits")
    write_table(COLUMNS, [asdict(place) for place in places], form)
