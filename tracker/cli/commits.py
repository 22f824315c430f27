"""`groupbench commits`: list the measured commits."""

from __future__ import annotations

from datetime import datetime

import click

from groupbench.tracker.cli.options import commit_filters, limit_option, reading
from groupbench.tracker.cli.output import Column, Format, output_formats, plain, say, write_table
from groupbench.tracker.text.wording import commit_text, date

COLUMNS = (
    Column("commit", "commit", commit_text),
    Column("time", "time", date),
    Column("branch", "branch"),
    Column("runs", "runs", right=True),
    Column("points", "points", right=True),
    Column("first run", "first", date),
    Column("last run", "last", date),
    Column("parents", "parents", lambda parents: " ".join(map(commit_text, parents))),
    Column("author", "author"),
    Column("subject", "subject", wraps=True),
)


@click.command()
@commit_filters
@limit_option("Number of commits to list.", default=20)
@output_formats
@click.pass_obj
def commits(
    db: str,
    since: datetime | None,
    until: datetime | None,
    limit: int,
    form: Format | None,
    **fields: tuple[str, ...],
) -> None:
    """List the measured commits, newest first."""
    from groupbench.tracker.query import listing
    from groupbench.tracker.query.filters import Filter
    from groupbench.tracker.query.rows import CommitSummary

    with reading(db) as session:
        rows = listing.commits(session, Filter(**fields, since=since, until=until), limit)
    if not rows:
        say("no commits match")
    columns = plain(CommitSummary.columns()) if form in ("json", "csv") else COLUMNS
    write_table(columns, [row.flat() for row in rows], form)
