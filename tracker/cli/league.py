"""`groupbench league`: rank the backends by problem: which is fastest, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.declared import argument, command, group
from groupbench.tracker.cli.options import CELL_FILTERS, reading
from groupbench.tracker.cli.output import Column, Format, output_formats, say, write_json, write_notes, write_table
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.metrics import METRICS
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.text.wording import interval, ratio, short_number

if TYPE_CHECKING:
    from groupbench.tracker.compare.league import LeagueTable

COLUMNS = (
    Column("operator", "operator", varies=True),
    Column("mode", "mode", varies=True),
    Column("dtype", "dtype", varies=True),
    Column("hardware", "hardware", varies=True),
    Column("backend", "backend"),
    Column("won", "won", right=True),
    Column("of", "matches", right=True),
    Column("wrong", "wrong", right=True, varies=True),
    Column("not run", "absent", right=True, varies=True),
    Column("behind", "behind", ratio, right=True),
    Column("95 %", "interval", lambda bounds: interval(*bounds), right=True),
    Column("worst", "worst", ratio, right=True),
    Column("on", "worst_shape", wraps=True, middle=True),
    Column("rms", "rms", short_number, right=True),
    Column("memory", "memory_mib", METRICS["workspace_mib"].text, right=True),
    Column("prepare", "prepare_ms", METRICS["prepare_ms"].text, right=True),
    Column("properties", "properties", ", ".join, wraps=True),
    Column("version", "packages", ", ".join, wraps=True),
)


@command()
def league(
    context: click.Context,
    words: tuple[str, ...] = argument(nargs=-1, required=True, metavar="WHAT..."),
    form: Format = output_formats,
    where: Filter = group(Filter, **CELL_FILTERS),
) -> None:
    """Rank the backends, with their accuracy, memory, properties and versions.

    WHAT is as in `compare`: a commit, run:ID, `latest`, a date, or a file of records, which needs no database.
    Backends are compared on the same problem, GPU, toolchain and commit.

    Exit codes: 0 ok, 2 usage error, 4 nothing can be compared.
    """
    from groupbench.tracker.compare import sides
    from groupbench.tracker.compare.league import league as tables_of
    from groupbench.tracker.query.lines import every_line

    with nullcontext(None) if all(map(sides.is_file, words)) else reading(context.obj) as session:
        given = [sides.find_side(session, word) for word in words]
        line = None  # the runs of a file have no place in the database
        if session is not None and all(side.state is not None for side in given):
            line = every_line(session)
    tables = tables_of([point for side in given for point in side.points], where, line)
    if form == "json":
        write_json([_data(table) for table in tables])
    else:
        write_table(COLUMNS, [row for table in tables for row in _rows(table)], form)
        write_notes([line for table in tables for line in _notes(table)], form)
    if not tables:
        say("nothing to compare: no problem has two backends on one GPU at one commit")
        context.exit(ExitCode.INCOMPARABLE)


def _data(table: LeagueTable) -> dict[str, Any]:
    return {"title": table.title, "problems": len(table.matches), "standings": [*map(asdict, table.standings)]}


def _rows(table: LeagueTable) -> Iterator[dict[str, Any]]:
    of = {name: getattr(table, name) for name in ("operator", "mode", "dtype", "hardware")}
    for standing in table.standings:
        behind = standing.behind
        yield of | asdict(standing) | {"behind": behind.ratio, "interval": (behind.low, behind.high)}


def _notes(table: LeagueTable) -> Iterator[str]:
    yield from (f"{table.title}: {line}" for line in table.provenance)
    untimed = ", ".join(f"{name} ({status})" for name, status in sorted(table.untimed.items()))
    if untimed:
        yield f"{table.title}: not timed: {untimed}"
