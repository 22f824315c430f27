"""Records out of the store, as they went in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker import record as records
from groupbench.tracker.ingest import unpack_samples
from groupbench.tracker.rows import RunRow
from groupbench.tracker.schema import Commit, Environment, Point, Run, Series


def stored_records(session: Session, run: RunRow | None = None) -> Iterator[records.Record]:
    """The records back, as they were but for samples, which are rounded to float32."""
    query = select(Point, Series, Run, Commit, Environment.facts)
    query = query.join(Series, Point.series_id == Series.id).join(Run, Point.run_id == Run.id)
    query = query.join(Commit, Run.commit_id == Commit.id)
    query = query.join(Environment, Point.environment_id == Environment.id).order_by(Run.id, Point.id)
    if run is not None:
        query = query.where(Run.id == run.pk)
    for row in session.execute(query.execution_options(yield_per=200)):
        yield _record(*row)


def _record(point: Point, series: Series, run: Run, commit: Commit, facts: dict[str, Any]) -> records.Record:
    latency = None
    if point.samples is not None and point.burst_lengths is not None:
        latency = {
            "timing": point.timing,
            "bursts_ms": unpack_samples(point.samples, point.burst_lengths),
            "telemetry": point.telemetry or (),
            "prepare_ms": point.prepare_ms,
            "enqueue_ms": point.enqueue_ms,
        }
    accuracy = {name: getattr(point, name) for name in records.Accuracy.__struct_fields__}
    measured = any(value is not None for value in accuracy.values())
    cell_fields = {name: getattr(series, name) for name in records.Cell.__struct_fields__}
    commit_fields = {name: getattr(commit, name) for name in ("hash", "branch", "time", "author", "subject")}
    return msgspec.convert(
        {
            "schema": records.SCHEMA,
            "run": {
                "id": run.uuid,
                "started": run.started,
                "commit": {**commit_fields, "parents": commit.parents or (), "dirty": run.dirty},
                "trigger": run.trigger,
                "plan": run.plan,
                "command": run.command,
            },
            "environment": facts,
            "cell": cell_fields,
            "status": point.status,
            "message": point.message,
            "baseline": point.baseline,
            "latency": latency,
            "accuracy": accuracy if measured else None,
            "kernels": point.kernels,
            "duration_s": point.duration_s,
        },
        records.Record,
    )
