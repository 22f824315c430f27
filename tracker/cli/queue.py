"""`groupbench queue`: list the measuring commands and the waiting ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict

from groupbench.tracker.cli.declared import command
from groupbench.tracker.cli.output import Column, Format, output_format, plain, say, write_table
from groupbench.tracker.tools import lease

COLUMNS = (
    *plain(("device", "state")),
    *plain(("place", "pid"), right=True),
    *plain(("since",)),
    Column("command", "command", wraps=True),
    Column("folder", "folder", wraps=True),
    *plain(("user", "host")),
)


@command()
def queue(db: str, form: Format = output_format("table", "json")) -> None:
    """List the commands measuring on a device or waiting for it.

    One command at a time measures on a device. The others wait, at most for the time of their option --wait: first
    come, first served, and `groupbench --urgent` before them. A command joins when its preparation is done. Place 0
    holds the device. Commands see each other if they share the folder of locks (GROUPBENCH_LOCKS, by default /tmp) or a
    database in PostgreSQL.
    """
    places = list(dict.fromkeys([*lease.queue(), *_elsewhere(db)]))  # a night may have another host's urgent one too
    if not places:
        say("no command measures or waits")
    write_table(COLUMNS, [asdict(place) for place in places], form)


def _elsewhere(database: str) -> list[lease.Place]:
    """Return the commands on other hosts with the database."""
    if "://" not in database or database.startswith("sqlite"):
        return []
    from groupbench.tracker.store.queue import places

    others, waiting = [], Counter[str]()
    for device, where, holds, facts in places(database):
        waiting[device] += not holds
        if where != lease.here():
            others.append(lease.shared_place(device, 0 if holds else waiting[device], facts))
    return others
