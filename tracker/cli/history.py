"""`groupbench history`: a line for each series and run."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.options import When, reading, series_filters
from groupbench.tracker.cli.output import (
    Column,
    Format,
    date,
    milliseconds,
    output_formats,
    say,
    short_number,
    signed_percent,
    spread,
    write_table,
)

if TYPE_CHECKING:
    from groupbench.tracker.rows import HistoryRow

COLUMNS = (
    Column("date", "started", date),
    Column("commit", "commit", lambda commit: commit[:10] + ("+" if commit.endswith("+") else "")),
    Column("operator", "operator"),
    Column("backend", "backend"),
    Column("mode", "mode"),
    Column("shape", "shape", wraps=True),
    Column("dtype", "dtype"),
    Column("ms", "latency_ms", milliseconds, right=True),
    Column("spread", "spread", spread, right=True),
    Column("Δ", "change", signed_percent, right=True),
    Column("tflops", "tflops", short_number, right=True),
    Column("rms", "rms", short_number, right=True),
    Column("status", "status"),
    Column("timing", "timing"),
    Column("environment changed", "environment_changed", "; ".join, wraps=True),
    Column("message", "message", wraps=True),
)
EXTRA = (
    Column("hardware", "hardware", wraps=True),
    Column("host", "host"),
    Column("protocol", "protocol"),
    Column("seed", "seed"),
    Column("run", "run"),
    Column("dirty", "dirty"),
    Column("branch", "branch"),
    Column("subject", "subject", wraps=True),
)
"""For programs only."""


@click.command()
@series_filters
@click.option("--since", type=When(), metavar="DATE|AGO", help="Runs that began at or after it: 2026-01-31, 7d.")
@click.option("--until", type=When(end=True), metavar="DATE|AGO", help="Runs that began before its end.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the newest N of each series.")
@output_formats
@click.pass_obj
def history(
    db: str,
    since: datetime | None,
    until: datetime | None,
    limit: int | None,
    form: Format | None,
    **fields: tuple[str, ...],
) -> None:
    """How each series went from commit to commit.

    Δ is against the latest earlier speed of the series in the same environment. `interpreted` timings are no
    speed: they have no Δ and no tflops.
    """
    from groupbench.tracker import query
    from groupbench.tracker.rows import Filter

    with reading(db) as session:
        found = query.history(session, Filter(**fields, since=since, until=until))
    if limit is not None:
        found = _newest(found, limit)
    if not found:
        say("no point matches")
    rows = [_row(row) for row in found]
    if form in ("json", "csv"):
        write_table((*COLUMNS, *EXTRA), rows, form)
    else:
        write_table(_shown(rows), rows, form)


def _newest(rows: list[HistoryRow], limit: int) -> list[HistoryRow]:
    kept: list[HistoryRow] = []
    seen: dict[int, int] = {}
    for row in reversed(rows):
        seen[row.point.series.pk] = seen.get(row.point.series.pk, 0) + 1
        if seen[row.point.series.pk] <= limit:
            kept.append(row)
    return kept[::-1]


def _shown(rows: list[dict[str, Any]]) -> tuple[Column, ...]:
    """Columns that hold nothing are left out."""
    rare = {"environment_changed", "message", "tflops", "change"}
    return tuple(column for column in COLUMNS if column.key not in rare or any(row[column.key] for row in rows))


def _row(row: HistoryRow) -> dict[str, Any]:
    point, series, run = row.point, row.point.series, row.point.run
    return {
        "started": run.started,
        "commit": run.commit + ("+" if run.dirty else ""),
        "operator": series.operator,
        "backend": series.backend,
        "mode": series.mode,
        "shape": series.shape,
        "dtype": series.dtype,
        "latency_ms": point.median_ms,
        "spread": point.half_spread,
        "change": row.change,
        "tflops": point.tflops,
        "rms": point.rms,
        "status": point.status,
        "timing": point.timing,
        "environment_changed": list(row.environment_changed),
        "message": point.message,
        "hardware": series.hardware,
        "host": series.host,
        "protocol": series.protocol,
        "seed": series.seed,
        "run": run.id,
        "dirty": run.dirty,
        "branch": run.branch,
        "subject": run.subject,
    }
