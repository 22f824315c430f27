"""`groupbench runs`: list the newest runs."""

from __future__ import annotations

from datetime import datetime

import click

from groupbench.tracker.cli.options import commit_filters, limit_option, reading
from groupbench.tracker.cli.output import Column, Format, output_formats, write_table
from groupbench.tracker.text.wording import commit_text, date, run_text

COLUMNS = (
    Column("run", "run", run_text),
    Column("date", "started", date),
    Column("commit", "commit", commit_text),
    Column("branch", "branch"),
    Column("plan", "plan"),
    Column("trigger", "trigger"),
    Column("hardware", "hardware", ", ".join, wraps=True),
    Column("cells", "counts", lambda counts: ", ".join(f"{n} {status}" for status, n in counts.items())),
    Column("subject", "subject", wraps=True),
)


@click.command()
@commit_filters
@limit_option("Number of runs to list.", default=20)
@output_formats
@click.pass_obj
def runs(
    db: str,
    since: datetime | None,
    until: datetime | None,
    limit: int,
    form: Format | None,
    **fields: tuple[str, ...],
) -> None:
    """List the runs, newest first."""
    from groupbench.tracker.facts.record import STATUSES
    from groupbench.tracker.query import listing
    from groupbench.tracker.query.filters import Filter

    with reading(db) as session:
        matches = listing.runs(session, limit, Filter(**fields, since=since, until=until))
    rows = [run.flat() for run in matches]
    for row in rows:
        counts = {status: row["counts"][status] for status in STATUSES if status in row["counts"]}
        row["counts"] = [f"{n} {status}" for status, n in counts.items()] if form == "csv" else counts
    write_table(COLUMNS, rows, form)
