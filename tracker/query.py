"""Questions to the store. Each function only reads, and answers with frozen dataclasses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, Select, and_, func, or_, select
from sqlalchemy.orm import Session

from groupbench.tracker.environment import environment_differences
from groupbench.tracker.errors import QueryError
from groupbench.tracker.record import Environment
from groupbench.tracker.rows import (
    Earlier,
    EnvironmentRow,
    Filter,
    HistoryRow,
    PointRow,
    RunRow,
    RunSummary,
    SeriesRow,
    State,
)
from groupbench.tracker.schema import Commit, Point, Run, Series
from groupbench.tracker.schema import Environment as EnvironmentTable

NAMES = ("operator", "backend", "mode", "dtype", "host", "protocol")
"""Fields of a series that are asked for by exact name; an unknown name is a mistake."""


def runs(session: Session, limit: int | None = None) -> list[RunSummary]:
    """The newest runs first, with what they hold."""
    rows = list(session.execute(_run_select().order_by(*_NEWEST_FIRST).limit(limit)))
    keys = [row.pk for row in rows]
    counts: dict[int, dict[str, int]] = {key: {} for key in keys}
    hardware: dict[int, set[str]] = {key: set() for key in keys}
    for chunk in _chunks(keys):
        query = (
            select(Point.run_id, Series.hardware, Point.status, func.count())
            .join(Series, Point.series_id == Series.id)
            .where(Point.run_id.in_(chunk))
            .group_by(Point.run_id, Series.hardware, Point.status)
        )
        for run, model, status, count in session.execute(query):
            counts[run][status] = counts[run].get(status, 0) + count
            hardware[run].add(model)
    return [RunSummary(_run(row), tuple(sorted(hardware[row.pk])), counts[row.pk]) for row in rows]


def find_run(session: Session, text: str | None = None) -> RunRow:
    """The run whose id starts with `text`, or the newest."""
    query = _run_select().order_by(*_NEWEST_FIRST)
    if text is None:
        row = session.execute(query.limit(1)).first()
        if row is None:
            raise QueryError("the database holds no run; `groupbench ingest FILE` stores one")
        return _run(row)
    exact = session.execute(query.where(Run.uuid == text)).first()
    found = [exact] if exact else list(session.execute(query.where(_starts(Run.uuid, text)).limit(6)))
    if not found:
        raise QueryError(f"no run {text!r}; `groupbench runs` lists them")
    if len(found) > 1:
        raise QueryError(f"run {text!r} is ambiguous: {_some([row.id for row in found])}")
    return _run(found[0])


def previous_of_plan(session: Session, run: RunRow, hardware: Iterable[str]) -> RunRow | None:
    """The newest run before `run` of its plan that measured any of the hardware; None without a plan."""
    if run.plan is None:
        return None
    on_it = select(Point.run_id).join(Series, Point.series_id == Series.id).where(Series.hardware.in_(list(hardware)))
    query = _run_select().where(Run.plan == run.plan, _before(run), Run.id.in_(on_it))
    row = session.execute(query.order_by(*_NEWEST_FIRST).limit(1)).first()
    return None if row is None else _run(row)


def resolve_commit(session: Session, text: str) -> State:
    """What a word stands for: `latest`, `previous`, a branch, or the unique start of a hash.

    `HASH+` is the dirty tree of a commit; without the sign, and for a branch, a clean tree is preferred.
    """
    query = _run_select().order_by(*_NEWEST_FIRST)
    if text in ("latest", "previous"):
        states = list(dict.fromkeys(_run(row).state for row in session.execute(query)))
        place = 0 if text == "latest" else 1
        if len(states) <= place:
            raise QueryError(f"no {text} commit: the database holds runs of {len(states)}")
        return states[place]
    clean_first = _run_select().order_by(Run.dirty, *_NEWEST_FIRST)
    row = session.execute(clean_first.where(Commit.branch == text).limit(1)).first()
    if row is not None:
        return _run(row).state
    prefix = text.removesuffix("+")
    hashes = list(session.scalars(select(Commit.hash).where(_starts(Commit.hash, prefix)).limit(6))) if prefix else []
    if prefix in hashes:
        hashes = [prefix]
    if not hashes:
        raise QueryError(f"no commit or branch {text!r}; `groupbench runs` lists what is stored")
    if len(hashes) > 1:
        raise QueryError(f"commit {text!r} is ambiguous: {_some([hash_[:12] for hash_ in hashes])}")
    trees = set(session.scalars(select(Run.dirty).join(Commit).where(Commit.hash == hashes[0])))
    dirty = text.endswith("+") or False not in trees
    if dirty not in trees:
        raise QueryError(f"commit {prefix!r} has no run of a dirty tree")
    return State(hashes[0], dirty)


def names(session: Session, field_name: str) -> list[str]:
    """Every value of one field of the series."""
    return list(session.scalars(select(getattr(Series, field_name)).distinct().order_by(getattr(Series, field_name))))


def history(session: Session, where: Filter) -> list[HistoryRow]:
    """Points ordered by series, then time. Changes and environments are told against all of the branch, even
    where the filter starts or ends in between."""
    for name in NAMES:
        known = names(session, name) if getattr(where, name) else []
        for value in getattr(where, name):
            if value not in known:
                raise QueryError(f"no {name} {value!r}; known: {', '.join(known) or 'none'}")
    states = [resolve_commit(session, text) for text in where.commit]
    glob = session.get_bind().dialect.name == "sqlite"
    conditions: list[ColumnElement[bool]] = [
        getattr(Series, name).in_(getattr(where, name)) for name in NAMES if getattr(where, name)
    ]
    for name in ("shape", "hardware"):
        patterns = getattr(where, name)
        if patterns:
            column = getattr(Series, name)
            conditions.append(or_(*(or_(column == text, _like(column, text, glob)) for text in patterns)))
    if where.branch:
        conditions.append(Commit.branch.in_(where.branch))
    rows: list[HistoryRow] = []
    before: PointRow | None = None
    speeds: dict[tuple[str, str | None], float] = {}
    points = sorted(_points(session, *conditions), key=lambda p: (p.series.sort_key, p.run.started, p.run.pk))
    for point in points:
        if before is None or before.series.pk != point.series.pk:
            before, speeds = None, {}
        row = HistoryRow(point, _change(point, speeds), _differences(before, point))
        before = point
        inside = (where.since is None or point.run.started >= where.since) and (
            where.until is None or point.run.started < where.until
        )
        if inside and (not states or point.run.state in states):
            rows.append(row)
    return rows


def points_of_run(session: Session, run: RunRow) -> list[PointRow]:
    return sorted(_points(session, Run.id == run.pk), key=lambda point: point.series.sort_key)


def points_of_runs(session: Session, keys: Sequence[int]) -> list[PointRow]:
    """Points of many runs, by series and time."""
    found = [point for chunk in _chunks(keys) for point in _points(session, Run.id.in_(chunk))]
    return sorted(found, key=lambda p: (p.series.sort_key, p.run.started, p.run.pk))


def points_of_state(session: Session, state: State) -> list[PointRow]:
    found = _points(session, Commit.hash == state.commit, Run.dirty == state.dirty)
    return sorted(found, key=lambda p: (p.series.sort_key, p.run.started, p.run.pk))


def earlier(session: Session, run: RunRow, window: int) -> dict[int, Earlier]:
    """For each point of a run, by its key: the `window` newest ok points before it."""
    here = points_of_run(session, run)
    rank = (
        func.row_number()
        .over(
            partition_by=(Point.series_id, EnvironmentTable.identity, Point.timing),
            order_by=(Run.started.desc(), Run.id.desc()),
        )
        .label("rank")
    )
    ranked = (
        select(Point.id.label("point"), rank)
        .join(Run, Point.run_id == Run.id)
        .join(EnvironmentTable, Point.environment_id == EnvironmentTable.id)
        .where(
            Point.status == "ok",
            _before(run),
            Point.series_id.in_(select(Point.series_id).where(Point.run_id == run.pk)),
        )
        .subquery()
    )
    found = _points(session, Point.id.in_(select(ranked.c.point).where(ranked.c.rank <= window)))
    by_series: dict[int, list[PointRow]] = {}
    for point in sorted(found, key=lambda p: (p.run.started, p.run.pk), reverse=True):
        by_series.setdefault(point.series.pk, []).append(point)
    answer = {}
    for point in here:
        before = by_series.get(point.series.pk, [])
        same = [p for p in before if p.environment.identity == point.environment.identity]
        other = [p for p in before if p.environment.identity != point.environment.identity]
        alike = tuple(p for p in same if p.timing == point.timing)
        answer[point.pk] = Earlier(alike, other[0] if other else None)
    return answer


_NEWEST_FIRST = (Run.started.desc(), Run.id.desc())

_POINT_FIELDS = [name for name in PointRow.__dataclass_fields__ if name not in ("pk", "series", "run", "environment")]


def _run_select() -> Select[Any]:
    columns = (Run.id.label("pk"), Run.uuid.label("id"), Run.dirty, Run.started, Run.trigger, Run.plan)
    statement: Any = select(*columns, Commit.hash.label("commit"), Commit.branch, Commit.subject).join(Commit)
    return statement


def _run(row: Row[Any]) -> RunRow:
    return RunRow(**{name: getattr(row, name) for name in RunRow.__dataclass_fields__})


def _before(run: RunRow) -> ColumnElement[bool]:
    return or_(Run.started < run.started, and_(Run.started == run.started, Run.id < run.pk))


def _points(session: Session, *conditions: ColumnElement[bool]) -> list[PointRow]:
    columns = [getattr(Point, name) for name in _POINT_FIELDS]
    query = (
        select(Point.id, Point.series_id, Point.run_id, Point.environment_id, *columns)
        .join(Series, Point.series_id == Series.id)
        .join(Run, Point.run_id == Run.id)
        .join(Commit, Run.commit_id == Commit.id)
        .where(*conditions)
    )
    found = session.execute(query).all()
    series = {
        row.pk: SeriesRow(**row._mapping)
        for chunk in _chunks({row.series_id for row in found})
        for row in session.execute(_series_select().where(Series.id.in_(chunk)))
    }
    run_rows = {
        row.pk: _run(row)
        for chunk in _chunks({row.run_id for row in found})
        for row in session.execute(_run_select().where(Run.id.in_(chunk)))
    }
    where = {
        key: EnvironmentRow(key, identity, msgspec.convert(facts, Environment))
        for chunk in _chunks({row.environment_id for row in found})
        for key, identity, facts in session.execute(
            select(EnvironmentTable.id, EnvironmentTable.identity, EnvironmentTable.facts).where(
                EnvironmentTable.id.in_(chunk)
            )
        )
    }
    return [PointRow(row[0], series[row[1]], run_rows[row[2]], where[row[3]], *row[4:]) for row in found]


def _series_select() -> Select[Any]:
    columns = [getattr(Series, name) for name in SeriesRow.__dataclass_fields__ if name != "pk"]
    return select(Series.id.label("pk"), *columns)


def _change(point: PointRow, speeds: dict[tuple[str, str | None], float]) -> float | None:
    if not point.timed or point.median_ms is None:
        return None
    key = (point.environment.identity, point.timing)
    before = speeds.get(key)
    speeds[key] = point.median_ms
    return None if before is None else point.median_ms / before - 1


def _differences(before: PointRow | None, point: PointRow) -> tuple[str, ...]:
    if before is None or before.environment.identity == point.environment.identity:
        return ()
    return tuple(environment_differences(before.environment.facts, point.environment.facts))


def _starts(column: Any, text: str) -> ColumnElement[bool]:
    """Case and wildcards taken literally."""
    return func.substr(column, 1, len(text)) == text


def _like(column: Any, pattern: str, glob: bool) -> ColumnElement[bool]:
    """Shell wildcards * and ?; everything else, brackets included, is literal."""
    if glob:
        return column.op("GLOB")(pattern.replace("[", "[[]"))
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return column.like(escaped.replace("*", "%").replace("?", "_"), escape="\\")


def _chunks(keys: Iterable[int], size: int = 500) -> Iterator[list[int]]:
    ordered = list(keys)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def _some(values: Sequence[str]) -> str:
    return ", ".join(values[:5]) + (", …" if len(values) > 5 else "")
