"""`groupbench series`: list the series with their number of points."""

from __future__ import annotations

from datetime import datetime

import click

from groupbench.tracker.cli.options import commit_filters, reading, series_filters
from groupbench.tracker.cli.output import CELL, HOST, SEED, Column, Format, output_formats, plain, say, write_table
from groupbench.tracker.text.wording import date

COLUMNS = (
    Column("series", "series", right=True),
    *CELL,
    Column("hardware", "hardware", wraps=True),
    HOST,
    Column("protocol", "protocol"),
    SEED,
    Column("points", "points", right=True),
    Column("ok", "ok", right=True),
    Column("first", "first", date),
    Column("last", "last", date),
)


@click.command()
@series_filters
@commit_filters
@output_formats
@click.pass_obj
def series(
    db: str, since: datetime | None, until: datetime | None, form: Format | None, **fields: tuple[str, ...]
) -> None:
    """List the series, each with its number of points and the dates of the first and last."""
    from groupbench.tracker.query import listing
    from groupbench.tracker.query.filters import Filter
    from groupbench.tracker.query.rows import SeriesSummary

    with reading(db) as session:
        rows = listing.series(session, Filter(**fields, since=since, until=until))
    if not rows:
        say("no series match")
    columns = plain(SeriesSummary.columns()) if form in ("json", "csv") else COLUMNS
    write_table(columns, [row.flat() for row in rows], form)
