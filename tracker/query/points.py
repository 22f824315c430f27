"""Read points: by run, by code state, and a single one with the whole record."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.loaded import LoadedDifference
from groupbench.tracker.facts.record import Environment, Record
from groupbench.tracker.query.rows import EnvironmentRow, PointDetail, PointOutcome, PointRow, RunRow, SeriesRow, State
from groupbench.tracker.query.runs import run_rows
from groupbench.tracker.query.series import series_rows
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import NEWEST_FIRST, TIMED_POINT, Commit, Point, Run, Series
from groupbench.tracker.store.schema import Environment as EnvironmentTable

ReadRuns = Callable[[Session, Iterable[int]], Mapping[int, RunRow]]
"""Returns runs by key, like `run_rows`. The mapping may hold other runs too."""

_POINT_FIELDS = [name for name in PointRow.__dataclass_fields__ if name not in ("pk", "series", "run", "environment")]


def points_where(
    session: Session,
    *conditions: ColumnElement[bool],
    series: Mapping[int, SeriesRow] | None = None,
    read_runs: ReadRuns = run_rows,
) -> list[PointRow]:
    """Return the points under all conditions, unordered.

    `series` may pass loaded rows, and `read_runs` a function with a cache.
    """
    columns = [getattr(Point, name) for name in _POINT_FIELDS]
    query = (
        select(Point.id, Point.series_id, Point.run_id, Point.environment_id, Point.amounts, *columns)
        .join(Series, Point.series_id == Series.id)
        .join(Run, Point.run_id == Run.id)
        .join(Commit, Run.commit_id == Commit.id)
        .where(*conditions)
    )
    rows = session.execute(query).all()
    if series is None:
        series = series_rows(session, {row.series_id for row in rows})
    runs_of = read_runs(session, {row.run_id for row in rows})
    environment_of = environment_rows(session, {row.environment_id for row in rows})
    return [
        PointRow(row[0], series[row[1]].with_amounts(row[4]), runs_of[row[2]], environment_of[row[3]], *row[5:])
        for row in rows
    ]


def environment_rows(session: Session, keys: Iterable[int]) -> dict[int, EnvironmentRow]:
    query = select(EnvironmentTable.id, EnvironmentTable.identity, EnvironmentTable.facts)
    return {
        key: EnvironmentRow(key, identity, msgspec.convert(facts, Environment))
        for chunk in chunks(keys)
        for key, identity, facts in session.execute(query.where(EnvironmentTable.id.in_(chunk)))
    }


def by_series_and_time(points: Iterable[PointRow]) -> list[PointRow]:
    return sorted(points, key=lambda point: (point.series.sort_key, point.run.when))


def points_of_run(session: Session, run: RunRow) -> list[PointRow]:
    return sorted(points_where(session, Run.id == run.pk), key=lambda point: point.series.sort_key)


def points_of_runs(session: Session, keys: Sequence[int]) -> list[PointRow]:
    """Return many runs' points, by series and time."""
    points = [point for chunk in chunks(keys) for point in points_where(session, Run.id.in_(chunk))]
    return by_series_and_time(points)


def points_of_state(session: Session, state: State) -> list[PointRow]:
    points = points_where(session, Commit.hash == state.commit, Run.dirty == state.dirty)
    return by_series_and_time(points)


def outcomes_of_run(session: Session, run: RunRow) -> dict[int, PointOutcome]:
    """Return each cell's outcome in a run, by series key."""
    query = select(Point.series_id, Point.status, TIMED_POINT).where(Point.run_id == run.pk)
    return {series: PointOutcome(status, bool(has_latency)) for series, status, has_latency in session.execute(query)}


def find_point(session: Session, text: str) -> PointDetail:
    """Return the point with an id from `history --ids`. Raises QueryError."""
    match = re.fullmatch(r"(\d{1,18})\.(\d{1,18})", text, re.ASCII)
    if match is None:
        raise QueryError(f"{text!r} is not a point id such as 12.3; `groupbench history --ids` lists them")
    key = and_(Point.series_id == int(match[1]), Point.run_id == int(match[2]))
    points = points_where(session, key)
    if not points:
        raise QueryError(f"no point {text!r}; `groupbench history --ids` lists them")
    (point,) = points
    run = session.get_one(Run, point.run.pk)
    commit = session.get_one(Commit, run.commit_id)
    record = point_record(session, point)
    return PointDetail(
        point=point,
        bursts_ms=record.latency.bursts_ms if record.latency else (),
        telemetry=record.latency.telemetry if record.latency else (),
        kernels=record.kernels,
        first_bad=record.accuracy.first_bad if record.accuracy else None,
        command=run.command,
        parents=tuple(commit.parents or ()),
        author=commit.author,
        committed=commit.time,
        loaded=record.loaded,
        since_before=_since_before(session, point),
    )


def _since_before(session: Session, point: PointRow) -> LoadedDifference | None:
    """Return how the loaded files and packages differ from those of the series' point before, by time."""
    from groupbench.tracker.query.loaded import LoadedLists

    earlier = select(Point.run_id).join(Run, Point.run_id == Run.id).where(Point.series_id == point.series.pk)
    key = session.scalar(earlier.where(Run.started < point.run.started).order_by(*NEWEST_FIRST).limit(1))
    if key is None:
        return None
    (before,) = points_where(session, Point.series_id == point.series.pk, Point.run_id == key)
    return LoadedLists(session, [before, point]).difference(before, point)


def point_record(session: Session, point: PointRow) -> Record:
    """Return a point's record."""
    from groupbench.tracker.store.records import stored_records  # imports numpy, which no other query needs

    return next(stored_records(session, point.run.pk, series=point.series.pk))
