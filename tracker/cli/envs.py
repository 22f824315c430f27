"""`groupbench list envs`: list the environments of the results and how they differ."""

from __future__ import annotations

import click

from groupbench.tracker.cli.declared import argument, command, group
from groupbench.tracker.cli.options import HARDWARE_FILTER, reading
from groupbench.tracker.cli.output import Column, Format, output_formats, plain, say, write_rows, write_table
from groupbench.tracker.facts.environment import declared
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.rows import EnvironmentSummary
from groupbench.tracker.text.wording import date

COLUMNS = (
    Column("environment", "environment", lambda identity: identity[:10]),
    Column("hardware", "hardware", wraps=True),
    Column("first", "first", date),
    Column("last", "last", date),
    *plain(("runs", "points"), right=True),
    *plain(("driver", "cuda", "python", "torch", "triton", "helion")),
    Column("differs from the previous one", "differs", "; ".join, wraps=True),
)


@command()
def envs(
    db: str,
    pair: tuple[str, ...] = argument(nargs=-1, metavar="[A B]"),
    where: Filter = group(Filter, **HARDWARE_FILTER),
    form: Format = output_formats,
) -> None:
    """List the environments, or the differences between A and B.

    A and B are prefixes of environment ids. A change in any declared field makes a new environment. `compare`
    and `history`'s Δ stay within one environment. The gate also compares one machine's toolchains.
    """
    from groupbench.tracker.query import listing

    if len(pair) not in (0, 2):
        raise click.UsageError("give two environments or none")
    with reading(db) as session:
        if pair:
            a, b = (declared(listing.find_environment(session, text).facts) for text in pair)
            _compare(a, b, form)
            return
        matches = listing.environments(session, where)
    rare = ("driver", "cuda", "helion", "differs")
    rows = [row.flat() for row in matches]
    columns = [c for c in COLUMNS if c.key not in rare or any(row[c.key] for row in rows)]
    write_rows(EnvironmentSummary, columns, matches, form, "no environments match")


def _compare(a: dict[str, str | None], b: dict[str, str | None], form: Format) -> None:
    rows = [{"fact": name, "a": a.get(name), "b": b.get(name)} for name in {**a, **b} if a.get(name) != b.get(name)]
    if not rows:
        say("the environments are equal")
    write_table([Column("fact", "fact"), Column("A", "a"), Column("B", "b")], rows, form)
