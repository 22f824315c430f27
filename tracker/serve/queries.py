"""Page queries, which read few rows beyond those shown.

A database with a million points has tens of thousands of series, so the database itself searches, sorts and pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple
from typing import cast as typed

from sqlalchemy import ColumnElement, Select, Text, and_, case, cast, func, or_, select, true
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import hardware_class
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.identity import EXACT, PROBLEM, SHOWN
from groupbench.tracker.query import filters, resolve
from groupbench.tracker.query.patterns import matches
from groupbench.tracker.query.points import ReadRuns, environment_rows, points_where
from groupbench.tracker.query.rows import EnvironmentRow, PointRow, RunRow, SeriesRow, is_timed
from groupbench.tracker.query.runs import run_rows
from groupbench.tracker.query.series import names, series_rows
from groupbench.tracker.serve.parameters import NotFound, resolve_parameter
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.points import PPM
from groupbench.tracker.store.schema import (
    NEWEST_FIRST,
    TIMED_POINT,
    Alert,
    Commit,
    Decision,
    Incident,
    Point,
    Run,
    Series,
    table_of,
)

RECENT_RUNS = 40
"""Number of newest runs that are searched for the newest results of the series on a page."""

FACETS = (*EXACT, "hardware")
"""Fields of a series that forms offer as filters."""

_TEXT = tuple(getattr(Series, name) for name in SHOWN if name != "seed")
_PROBLEM = tuple(getattr(Series, name) for name in PROBLEM)
_SORT = (*_PROBLEM, Series.backend, Series.id)
_POINT = table_of(Point).columns
_CHECKSUM_PART = 2**31  # a sum of whole checksums is more than an integer of the database holds
_SAFE_INTEGER = 2**53  # sizes are compared as floats: no database then has to hold a larger integer


@dataclass(frozen=True)
class Slice:
    """A series selection: by required words, exact names, shapes with wildcards, and sizes."""

    words: tuple[str, ...] = ()
    names: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (facet, the values that it may have)
    shapes: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()

    def conditions(self, session: Session) -> list[ColumnElement[bool]]:
        """Return conditions for a series query. Raises QueryError for malformed sizes."""
        # LIKE ignores case on SQLite only.
        contains = _contains if session.get_bind().dialect.name == "sqlite" else _contains_any_case
        # A word has no blank, so it occurs in one of the names. To join them would take four times as long.
        clauses: list[ColumnElement[bool]] = [or_(*(contains(name, word) for name in _TEXT)) for word in self.words]
        clauses += [getattr(Series, name).in_(values) for name, values in self.names if values]
        if self.shapes:
            clauses.append(or_(*(matches(session, Series.shape, pattern) for pattern in self.shapes)))
        clauses += [_holds(size) for text_ in self.sizes for size in filters.sizes(text_)]
        return clauses


def _contains(name: Any, word: str) -> ColumnElement[bool]:
    return typed("ColumnElement[bool]", name.contains(word, autoescape=True))


def _contains_any_case(name: Any, word: str) -> ColumnElement[bool]:
    return _contains(func.lower(name), word.lower())


def facets(session: Session) -> dict[str, list[str]]:
    """Return all values for each FACETS field."""
    return {name: names(session, name) for name in FACETS}


def series_keys(session: Session, where: Slice) -> list[int]:
    """Return the keys for all series in a slice, sorted by name."""
    return _keys(session, select(Series.id).where(*where.conditions(session)).order_by(*_SORT))


def _keys(session: Session, sorted_: Select[int]) -> list[int]:
    """Return a query's selected keys, in order.

    They are read as one text. For each row, Python's lock is released, and other requests may keep it for a while.
    """
    text = session.scalar(select(_joined(sorted_.subquery().columns[0], ",")))
    return [int(key) for key in text.split(",")] if text else []


def _joined(column: Any, separator: str) -> ColumnElement[str]:
    """Return an aggregate to join a column's values, in a sorted subquery's row order."""
    return func.aggregate_strings(cast(column, Text), separator)


def one_series(session: Session, key: int) -> SeriesRow:
    series = series_rows(session, [key]).get(key)
    if series is None:
        raise NotFound(f"no series {key}; /series lists them")
    return series


class Result(NamedTuple):
    """A point's fields in a list."""

    pk: int
    series: int
    status: str
    timing: str | None
    median_ms: float | None
    error: float | None
    rms: float | None
    baseline: bool
    message: str | None
    amounts: dict[str, Any] | None

    @property
    def timed(self) -> bool:
        return is_timed(self.status, self.median_ms, self.timing)


class RecentResult(NamedTuple):
    """A point's fields for a list of series. A named tuple, because a page creates thousands."""

    pk: int
    series: int
    run: int
    status: str
    timing: str | None
    median_ms: float | None
    environment: int

    @property
    def timed(self) -> bool:
        return is_timed(self.status, self.median_ms, self.timing)


def recent_results(session: Session, keys: Sequence[int], newest: Sequence[int]) -> dict[int, list[RecentResult]]:
    """Return each series' results in these runs, oldest first, by series key. `newest` is newest first.

    A series without a result in these runs has instead the one measured last.
    """
    place = {run: number for number, run in enumerate(reversed(newest))}
    of_runs = select(*_RECENT).where(_POINT.run_id.in_(newest))
    read = (session.execute(of_runs.where(_POINT.series_id.in_(chunk))).all() for chunk in chunks(keys, 200))
    rows = sorted(chain.from_iterable(read), key=lambda row: place[row[2]])
    results = grouped(map(RecentResult._make, rows), itemgetter(1))
    for chunk in chunks([key for key in keys if key not in results], 200):
        results.update({row[1]: [RecentResult._make(row)] for row in session.execute(_newest_of_each(chunk))})
    return results


_RECENT = [_POINT[name] for name in ("id", "series_id", "run_id", "status", "timing", "median_ms", "environment_id")]


def _newest_of_each(keys: Sequence[int]) -> Any:
    """Return the query for each series' newest result."""
    order = func.row_number().over(partition_by=Point.series_id, order_by=NEWEST_FIRST)
    ranked = select(Point.id.label("id"), order.label("place")).join(Run, Point.run_id == Run.id)
    inner = ranked.where(Point.series_id.in_(keys)).subquery()
    newest = select(*_RECENT).join(inner, inner.columns.id == _POINT.id)
    return newest.where(inner.columns.place == 1)


def results_by_key(session: Session, keys: Iterable[int]) -> dict[int, Result]:
    """Return the points with these keys, by key."""
    return {
        row.id: _result(row)
        for chunk in chunks(keys)
        for row in session.execute(_results().where(_POINT.id.in_(chunk)))
    }


def _results() -> Any:
    """Return the query for `_result` rows: Result's fields in order, with `error` in ppm."""
    names = ("status", "timing", "median_ms", "error_ppm", "rms", "baseline", "message", "amounts")
    return select(*(_POINT[name] for name in ("id", "series_id", *names)))


def _result(row: Any) -> Result:
    ppm = row[_ERROR]
    return Result._make(row if ppm is None else (*row[:_ERROR], ppm / PPM, *row[_ERROR + 1 :]))


_ERROR = Result._fields.index("error")


def newest_points(session: Session, series: SeriesRow, number: int, read_runs: ReadRuns) -> list[PointRow]:
    """Return one series' newest points, oldest first."""
    of_series = Point.series_id == series.pk
    # By run, not by the point's key: the index of series and run then answers without reading the points.
    newest = select(Point.run_id).join(Run, Point.run_id == Run.id).where(of_series)
    runs = newest.order_by(*NEWEST_FIRST).limit(number)
    rows = points_where(session, of_series, Point.run_id.in_(runs), series={series.pk: series}, read_runs=read_runs)
    return sorted(rows, key=lambda point: point.run.when)


def latencies(session: Session, series: Sequence[int], runs: Sequence[int]) -> dict[int, dict[int, float]]:
    """Return the timed points' median in ms for these series and runs, by series and run.

    Reading whole points would take ten times as long.
    """
    of_series: dict[int, dict[int, float]] = {key: {} for key in series}
    if not runs:
        return of_series
    wanted = set(runs)
    statement = select(_POINT.series_id, _POINT.run_id, _POINT.median_ms).where(TIMED_POINT)
    # A range, because binding every run would take longer than reading their points.
    between = _POINT.run_id.between(min(wanted), max(wanted))
    for key, run, ms in session.execute(statement.where(_POINT.series_id.in_(series), between)).all():
        if run in wanted:
            of_series[key][run] = ms
    return of_series


def counts_of_series(session: Session, keys: Sequence[int]) -> dict[int, int]:
    """Return point counts by series."""
    statement = select(Point.series_id, func.count()).group_by(Point.series_id)
    return {
        key: number
        for chunk in chunks(keys)
        for key, number in session.execute(statement.where(Point.series_id.in_(chunk)))
    }


@dataclass(frozen=True)
class RunCounts:
    """A run's point counts by status, with hardware and environments."""

    statuses: dict[str, int]
    hardware: tuple[str, ...]
    environments: tuple[EnvironmentRow, ...]


def count_run(session: Session, run: int) -> RunCounts:
    """Return a run's counts, from the points alone: a join with series would take ten times as long."""
    statement = select(_POINT.environment_id, _POINT.status, func.count()).where(_POINT.run_id == run)
    rows = list(session.execute(statement.group_by(_POINT.environment_id, _POINT.status)))
    environments = environment_rows(session, {row[0] for row in rows})
    statuses: dict[str, int] = {}
    for _, status, number in rows:
        statuses[status] = statuses.get(status, 0) + number
    sorted_environments = tuple(environments[key] for key in sorted(environments))
    return RunCounts(
        statuses, tuple(sorted({hardware_class(row.facts) for row in sorted_environments})), sorted_environments
    )


def version_of_points(session: Session, run: int) -> tuple[int, int | None]:
    """Return a value to detect added, replaced and removed points of a run, from an index only."""
    number, newest = session.execute(select(func.count(), func.max(_POINT.id)).where(_POINT.run_id == run)).one()
    return number, newest


def version_of_runs(session: Session) -> tuple[Any, ...]:
    """Return a value to detect every stored, changed or removed run, commit or decision.

    Reads the rows' checksums, since `ingest` completes commit facts without a new row.
    """
    runs, commits, decisions = (
        select(
            func.count().label("number"),
            func.max(table.id).label("newest"),
            func.sum(table.checksum % _CHECKSUM_PART).label("sum"),
        ).subquery()
        for table in (Run, Commit, Decision)
    )
    joined = runs.join(commits, true()).join(decisions, true())
    return tuple(session.execute(select(runs, commits, decisions).select_from(joined)).one())


def find_runs(
    session: Session, where: Sequence[ColumnElement[bool]], *, limit: int, offset: int
) -> tuple[int, list[RunRow]]:
    """Return (number of matching runs, one page of them), newest first."""
    number = session.scalar(select(func.count()).select_from(Run).join(Commit).where(*where)) or 0
    statement = select(Run.id).join(Commit).where(*where).order_by(*NEWEST_FIRST)
    keys = list(session.scalars(statement.limit(limit).offset(offset)))
    rows = run_rows(session, keys)
    return number, [rows[key] for key in keys]


def run_conditions(
    session: Session,
    *,
    branches: Sequence[str] = (),
    commit: str | None = None,
    plan: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[ColumnElement[bool]]:
    """Return the conditions on runs for the given filters. Raises BadRequest if no run has the commit."""
    where = filters.Filter(commit=(commit,) if commit else (), since=since, until=until)
    conditions = resolve_parameter("commit", partial(resolve.run_conditions, session, where, lookup=None))
    if branches:  # an unknown one has no runs here, and is an error only for the commands
        conditions.append(Commit.branch.in_(branches))
    if plan:
        conditions.append(Run.plan == plan)
    return conditions


def results_of_run(
    session: Session, run: RunRow, where: Slice, statuses: Sequence[str], *, limit: int, offset: int
) -> tuple[int, list[tuple[SeriesRow, Result]]]:
    """Return (number of a run's results in a slice, one page of them), sorted by series names."""
    conditions: list[ColumnElement[bool]] = [Point.run_id == run.pk]
    if statuses:
        conditions.append(Point.status.in_(statuses))
    slice_ = where.conditions(session)
    sorted_ = select(Point.series_id).join(Series, Point.series_id == Series.id).where(*conditions, *slice_)
    sorted_ = sorted_.order_by(*_SORT)
    if slice_:  # searching takes longer than reading all keys that it finds
        every_key = _keys(session, sorted_)
        number, keys = len(every_key), every_key[offset : offset + limit]
    else:
        number = session.scalar(select(func.count()).select_from(Point).where(*conditions)) or 0
        keys = list(session.scalars(sorted_.limit(limit).offset(offset)))
    series = series_rows(session, keys)
    results = {
        row.series_id: _result(row)
        for chunk in chunks(keys)
        for row in session.execute(_results().where(_POINT.series_id.in_(chunk), _POINT.run_id == run.pk))
    }
    return number, [(series[key], results[key]) for key in keys]


def incident_keys(
    session: Session, states: Sequence[str], where: Slice, *, limit: int, offset: int
) -> tuple[int, list[int]]:
    """Return (number of incidents in these states and this slice, one page of keys), the newest change first."""
    statement = select(Alert.incident_id, func.max(Run.started)).join(Run, Alert.run_id == Run.id)
    if states:
        statement = statement.join(Incident, Alert.incident_id == Incident.id).where(Incident.state.in_(states))
    if slice_ := where.conditions(session):
        statement = statement.join(Series, Alert.series_id == Series.id).where(*slice_)
    statement = statement.group_by(Alert.incident_id)
    number = session.scalar(select(func.count()).select_from(statement.subquery())) or 0
    newest = statement.order_by(func.max(Run.started).desc(), Alert.incident_id.desc())
    return number, list(session.scalars(newest.limit(limit).offset(offset)))


def incident_counts(session: Session) -> dict[str, int]:
    """Return incident counts by state."""
    rows = session.execute(select(Incident.state, func.count()).group_by(Incident.state))
    return {str(state): int(number) for state, number in rows}


def _holds(size: filters.Size) -> ColumnElement[bool]:
    value = Series.dims[size.name].as_float()
    ends = []
    if size.low is not None:
        ends.append(value >= float(max(min(size.low, _SAFE_INTEGER), -_SAFE_INTEGER)))
    if size.high is not None:
        ends.append(value <= float(max(min(size.high, _SAFE_INTEGER), -_SAFE_INTEGER)))
    inside = and_(*ends)
    if not size.outside:
        return inside
    return and_(value.is_not(None), case((inside, False), else_=True))
