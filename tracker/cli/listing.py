"""`groupbench list`: list runs, commits, series and operators."""

from __future__ import annotations

from groupbench.tracker.cli.declared import command, group
from groupbench.tracker.cli.options import CELL_FILTERS, RUN_FILTERS, limit_option, reading
from groupbench.tracker.cli.output import (
    CELL,
    HOST,
    SEED,
    Column,
    Format,
    output_formats,
    plain,
    say,
    write_rows,
    write_table,
)
from groupbench.tracker.facts.record import STATUSES
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.rows import CommitSummary, SeriesSummary
from groupbench.tracker.text.wording import commit_text, date, run_text

RUNS = (
    Column("run", "run", run_text),
    Column("date", "started", date),
    Column("commit", "commit", commit_text),
    *plain(("branch", "plan", "trigger")),
    Column("hardware", "hardware", ", ".join, wraps=True),
    Column("cells", "counts", lambda counts: ", ".join(f"{n} {status}" for status, n in counts.items())),
    Column("rejected", "rejected", wraps=True),
    Column("subject", "subject", wraps=True),
)
COMMITS = (
    Column("commit", "commit", commit_text),
    Column("time", "time", date),
    *plain(("branch",)),
    *plain(("runs", "points"), right=True),
    Column("first run", "first", date),
    Column("last run", "last", date),
    Column("parents", "parents", lambda parents: " ".join(map(commit_text, parents))),
    *plain(("author",)),
    Column("subject", "subject", wraps=True),
)
DATES = (Column("first", "first", date), Column("last", "last", date))
SERIES = (
    *plain(("series",), right=True),
    *CELL,
    Column("hardware", "hardware", wraps=True),
    HOST,
    *plain(("protocol",)),
    SEED,
    *plain(("points", "ok"), right=True),
    *DATES,
)
OPERATORS = (
    *plain(("operator",)),
    Column("backends", "backends", ", ".join, wraps=True),
    *plain(("shapes", "series", "points"), right=True),
    *DATES,
)


@command()
def runs(
    db: str,
    where: Filter = group(Filter, **RUN_FILTERS),
    limit: int = limit_option("Number of runs to list.", default=20),
    form: Format = output_formats,
) -> None:
    """List the runs, newest first. One that a person rejected has the reason."""
    from groupbench.tracker.query import listing

    with reading(db) as session:
        matches = listing.runs(session, limit, where)
    rows = [run.flat() for run in matches]
    for row in rows:
        counts = {status: row["counts"][status] for status in STATUSES if status in row["counts"]}
        row["counts"] = [f"{n} {status}" for status, n in counts.items()] if form == "csv" else counts
    columns = [each for each in RUNS if each.key != "rejected" or form == "csv" or any(row["rejected"] for row in rows)]
    write_table(columns, rows, form)


@command()
def commits(
    db: str,
    where: Filter = group(Filter, **RUN_FILTERS),
    limit: int = limit_option("Number of commits to list.", default=20),
    form: Format = output_formats,
) -> None:
    """List the measured commits, newest first."""
    from groupbench.tracker.query import listing

    with reading(db) as session:
        rows = listing.commits(session, where, limit)
    write_rows(CommitSummary, COMMITS, rows, form, "no commits match")


@command()
def series(
    db: str, where: Filter = group(Filter, **CELL_FILTERS, **RUN_FILTERS), form: Format = output_formats
) -> None:
    """List the series, with point counts and the first and last date."""
    from groupbench.tracker.query import listing

    with reading(db) as session:
        rows = listing.series(session, where)
    write_rows(SeriesSummary, SERIES, rows, form, "no series match")


@command()
def operators(db: str, form: Format = output_formats) -> None:
    """List the operators with results. `tritonbench --list-operators` lists the measurable ones."""
    from groupbench.tracker.query import listing

    with reading(db) as session:
        every = [row.flat() for row in listing.series(session, Filter())]
    if not every:
        say("no results are stored")
    rows = []
    for name in sorted({row["operator"] for row in every}):
        series_rows = [row for row in every if row["operator"] == name]
        rows.append(
            {
                "operator": name,
                "backends": sorted({row["backend"] for row in series_rows}),
                "shapes": len({row["shape"] for row in series_rows}),
                "series": len(series_rows),
                "points": sum(row["points"] for row in series_rows),
                "first": min(row["first"] for row in series_rows),
                "last": max(row["last"] for row in series_rows),
            }
        )
    write_table(OPERATORS, rows, form)
