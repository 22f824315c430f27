"""`groupbench runs`: what is stored, newest first."""

from __future__ import annotations

from typing import Any

import click

from groupbench.tracker.cli.options import reading
from groupbench.tracker.cli.output import Column, Format, date, output_formats, write_table

COLUMNS = (
    Column("run", "run", lambda run: run if len(run) <= 12 else run[:12]),
    Column("date", "started", date),
    Column("commit", "commit", lambda commit: commit[:10] + ("+" if commit.endswith("+") else "")),
    Column("plan", "plan"),
    Column("trigger", "trigger"),
    Column("hardware", "hardware", ", ".join, wraps=True),
    Column("cells", "counts", lambda counts: ", ".join(f"{n} {status}" for status, n in counts.items())),
    Column("subject", "subject", wraps=True),
)


@click.command()
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, metavar="N", help="How many.")
@output_formats
@click.pass_obj
def runs(db: str, limit: int, form: Format | None) -> None:
    """List the newest runs."""
    from groupbench.tracker import query
    from groupbench.tracker.record import STATUSES

    with reading(db) as session:
        found = query.runs(session, limit)
    rows: list[dict[str, Any]] = [
        {
            "run": row.run.id,
            "started": row.run.started,
            "commit": row.run.commit + ("+" if row.run.dirty else ""),
            "plan": row.run.plan,
            "trigger": row.run.trigger,
            "hardware": list(row.hardware),
            "counts": {status: row.counts[status] for status in STATUSES if status in row.counts},
            "subject": row.run.subject,
        }
        for row in found
    ]
    if form == "csv":
        for row in rows:
            row["counts"] = [f"{number} {status}" for status, number in row["counts"].items()]
    write_table(COLUMNS, rows, form)
