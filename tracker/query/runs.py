"""Read runs with their commits, and define their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, case, func, or_, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.record import UNKNOWN_COMMIT
from groupbench.tracker.query.rows import RunRow, RunSummary
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.decisions import rejections
from groupbench.tracker.store.schema import Commit, Point, Run, Series

_RUN_FIELDS = [field.name for field in fields(RunRow)]


def run_select() -> Select[Any]:
    """Return the query whose rows `run_row` converts."""
    columns = (Run.id.label("pk"), Run.uuid.label("id"), Run.dirty, Run.started, Run.trigger, Run.plan)
    of_commit: tuple[Any, ...] = (
        Commit.hash.label("commit"),
        Commit.branch,
        Commit.subject,
        Commit.time.label("committed"),
        Commit.author,
    )
    why = rejections()
    selected = select(*columns, *of_commit, why.c.reason.label("rejected"))
    return selected.join(Commit).outerjoin(why, why.c.run_id == Run.id)


def run_row(row: Row[Any]) -> RunRow:
    """Convert a `run_select` row to a RunRow."""
    return RunRow(**{name: getattr(row, name) for name in _RUN_FIELDS})


def code_of_runs() -> ColumnElement[int]:
    """Return a number per run's code: equal only for certainly the same code, as in State.same_code."""
    unknown = select(Commit.id).where(Commit.hash == UNKNOWN_COMMIT).scalar_subquery()
    return case((or_(Run.dirty, Run.commit_id == unknown), -Run.id - 1), else_=Run.commit_id)


def run_rows(session: Session, keys: Iterable[int]) -> dict[int, RunRow]:
    """Return runs by key."""
    return {
        row.pk: run_row(row) for chunk in chunks(keys) for row in session.execute(run_select().where(Run.id.in_(chunk)))
    }


def summaries_of_runs(session: Session, keys: Sequence[int]) -> list[RunSummary]:
    """Return run summaries, in the order given by `keys`."""
    rows = run_rows(session, keys)
    counts: dict[int, dict[str, int]] = {key: {} for key in keys}
    hardware: dict[int, set[str]] = {key: set() for key in keys}
    for chunk in chunks(keys):
        query = (
            select(Point.run_id, Series.hardware, Point.status, func.count())
            .join(Series, Point.series_id == Series.id)
            .where(Point.run_id.in_(chunk))
            .group_by(Point.run_id, Series.hardware, Point.status)
        )
        for run, model, status, count in session.execute(query):
            counts[run][status] = counts[run].get(status, 0) + count
            hardware[run].add(model)
    return [RunSummary(rows[key], tuple(sorted(hardware[key])), counts[key]) for key in keys]
