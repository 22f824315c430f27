"""Questions to the store. Each function only reads, and answers with frozen dataclasses."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, Select, and_, func, or_, select
from sqlalchemy.orm import Session

from groupbench.tracker import git
from groupbench.tracker.errors import QueryError
from groupbench.tracker.identity import EXACT
from groupbench.tracker.query import filters
from groupbench.tracker.query.ancestry import ancestors, commit_order
from groupbench.tracker.query.lines import Line
from groupbench.tracker.query.rows import (
    EnvironmentRow,
    Filter,
    Outcome,
    PointDetail,
    PointRow,
    RunRow,
    RunSummary,
    SeriesRow,
    State,
)
from groupbench.tracker.record import Environment, Record
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import Commit, Point, Run, Series
from groupbench.tracker.store.schema import Environment as EnvironmentTable


def runs(session: Session, limit: int | None = None, where: Filter = Filter()) -> list[RunSummary]:  # noqa: B008
    """The newest runs first, with what they hold. Of `where` branch, commits and dates count."""
    conditions = run_conditions(session, where)
    return _summaries(
        session, list(session.execute(_run_select().where(*conditions).order_by(*NEWEST_FIRST).limit(limit)))
    )


def summaries_of_runs(session: Session, keys: Sequence[int]) -> list[RunSummary]:
    """Return runs by their keys, in that order, with what they hold."""
    rows = {row.pk: row for chunk in chunks(keys) for row in session.execute(_run_select().where(Run.id.in_(chunk)))}
    return _summaries(session, [rows[key] for key in keys])


def _summaries(session: Session, rows: Sequence[Row[Any]]) -> list[RunSummary]:
    keys = [row.pk for row in rows]
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
    return [RunSummary(_run(row), tuple(sorted(hardware[row.pk])), counts[row.pk]) for row in rows]


def find_run(session: Session, text: str | None = None) -> RunRow:
    """The run whose id starts with `text`, or the newest."""
    query = _run_select().order_by(*NEWEST_FIRST)
    if text is None:
        row = session.execute(query.limit(1)).first()
        if row is None:
            raise QueryError("the database holds no run; `groupbench ingest FILE` stores one")
        return _run(row)
    exact = session.execute(query.where(Run.uuid == text)).first()
    found = [exact] if exact else list(session.execute(query.where(starts(Run.uuid, text)).limit(6)))
    if not found:
        raise QueryError(f"no run {text!r}; `groupbench runs` lists them")
    if len(found) > 1:
        raise QueryError(f"run {text!r} is ambiguous: {some([row.id for row in found])}")
    return _run(found[0])


def previous_of_plan(session: Session, run: RunRow, hardware: Iterable[str], line: Line) -> RunRow | None:
    """Return the newest run of a line before `run`, of its plan, that measured any of the hardware.

    None without a plan.
    """
    if run.plan is None:
        return None
    on_it = (  # of each run in its turn: a list of all runs would read every point that there is
        select(Point.id)
        .join(Series, Point.series_id == Series.id)
        .where(Point.run_id == Run.id, Series.hardware.in_(list(hardware)))
        .correlate(Run)
    )
    of_plan = set(session.scalars(select(Run.id).where(Run.plan == run.plan)))
    candidates = [key for key in line.runs if key in of_plan and key != run.pk]
    for start in range(0, len(candidates), _FEW):
        few = candidates[start : start + _FEW]
        measured = set(session.scalars(select(Run.id).where(Run.id.in_(few), on_it.exists())))
        for key in few:
            if key in measured:
                return run_rows(session, [key])[key]
    return None


_FEW = 10
"""Runs that are asked about at once, where the first of them is nearly always the answer."""


def resolve_commit(session: Session, text: str) -> State:
    """What a word stands for: `latest`, `previous`, a branch, the unique start of a hash, or what git knows.

    `HASH+` is the dirty tree of a commit; without the sign, and for a branch, a clean tree is preferred. Git is
    asked, where there is a checkout, for what the database does not know: a tag, HEAD~3.
    """
    query = _run_select().order_by(*NEWEST_FIRST)
    if text in ("latest", "previous"):
        states = list(dict.fromkeys(_run(row).state for row in session.execute(query)))
        place = 0 if text == "latest" else 1
        if len(states) <= place:
            raise QueryError(f"no {text} commit: the database holds runs of {len(states)}")
        return states[place]
    clean_first = _run_select().order_by(Run.dirty, *NEWEST_FIRST)
    row = session.execute(clean_first.where(Commit.branch == text).limit(1)).first()
    if row is not None:
        return _run(row).state
    prefix = text.removesuffix("+")
    hashes = list(session.scalars(select(Commit.hash).where(starts(Commit.hash, prefix)).limit(6))) if prefix else []
    if prefix in hashes:
        hashes = [prefix]
    if not hashes:
        hashes = [_commit_of_git(session, text, prefix)]
    if len(hashes) > 1:
        raise QueryError(f"commit {text!r} is ambiguous: {some([hash_[:12] for hash_ in hashes])}")
    trees = set(session.scalars(select(Run.dirty).join(Commit).where(Commit.hash == hashes[0])))
    if not trees:
        raise QueryError(f"commit {hashes[0][:12]} has no run; `groupbench runs` lists what is stored")
    dirty = text.endswith("+") or False not in trees
    if dirty not in trees:
        raise QueryError(f"commit {prefix!r} has no run of a dirty tree")
    return State(hashes[0], dirty)


def _commit_of_git(session: Session, text: str, prefix: str) -> str:
    hash_ = git.rev_parse(prefix)
    if hash_ is None:
        raise QueryError(f"no commit or branch {text!r}; `groupbench runs` lists what is stored")
    if session.scalar(select(Commit.id).where(Commit.hash == hash_)) is None:
        raise QueryError(
            f"{text!r} is commit {hash_[:12]}, of which nothing is stored; `groupbench runs` lists what is"
        )
    return hash_


def commits_between(session: Session, text: str) -> set[str]:
    """Hashes of the stored commits in a range `A..B`: after A, up to and with B.

    Git says, where it knows both; else what is stored of their parents, where that leads from B to A; else the order
    of the commits.
    """
    first, last = filters.commit_range(text)
    low = resolve_commit(session, first).commit if first else None
    high = resolve_commit(session, last).commit if last else None
    if low and high:
        known = git.between(low, high)
        if known is not None:
            return known
        reached = ancestors(session, high)
        if low in reached:
            return reached - ancestors(session, low)
    order = [node.hash for node in commit_order(session)]
    begin = order.index(low) + 1 if low else 0
    end = order.index(high) + 1 if high else len(order)
    if begin > end:
        raise QueryError(f"{text!r} is the wrong way round: {first} came after {last}")
    return set(order[begin:end])


def names(session: Session, field_name: str) -> list[str]:
    """Every value of one field of the series."""
    return list(session.scalars(select(getattr(Series, field_name)).distinct().order_by(getattr(Series, field_name))))


def find_series(session: Session, where: Filter) -> list[SeriesRow]:
    """The series that a filter's names, shapes, sizes and hardware allow.

    Raises QueryError for a name or a size that no series has: a typing error, not an empty answer.
    """
    glob = session.get_bind().dialect.name == "sqlite"
    conditions: list[ColumnElement[bool]] = [
        getattr(Series, name).in_(getattr(where, name)) for name in EXACT if getattr(where, name)
    ]
    for name in filters.PATTERNS:
        patterns = getattr(where, name)
        # Sizes are no text: which shapes have them is seen below.
        if patterns and not (name == "shape" and any(map(_says_sizes, patterns))):
            column = getattr(Series, name)
            conditions.append(or_(*(or_(column == text, _like(column, text, glob)) for text in patterns)))
    found = [SeriesRow(**row._mapping) for row in session.execute(series_select().where(*conditions))]
    for name in (*EXACT, *filters.PATTERNS):
        if filters.unknown(name, getattr(where, name), {getattr(series, name) for series in found}):
            filters.refuse_unknown(name, getattr(where, name), names(session, name))
    return narrowed(found, where)


def narrowed(series: Iterable[SeriesRow], where: Filter, *, exact: bool = False) -> list[SeriesRow]:
    """Of series in hand, those that a filter allows. Raises QueryError for a size that none of them has.

    `exact`: also for a name that none of them has.
    """
    series = list(series)
    for name in (*EXACT, *filters.PATTERNS) if exact else ():
        filters.refuse_unknown(name, getattr(where, name), sorted({getattr(row, name) for row in series}))
    found = [row for row in series if all(getattr(row, n) in getattr(where, n) for n in EXACT if getattr(where, n))]
    if where.hardware:
        fits_hardware = any_pattern(where.hardware)
        found = [row for row in found if fits_hardware(row.hardware)]
    wanted = [filters.sizes(text) for text in where.where]
    wanted_shapes = [filters.sizes(text) for text in where.shape if filters.is_expression(text)]
    known = sorted({name for row in found for name in row.dims})
    for size in (size for group in (*wanted, *wanted_shapes) for size in group):
        if found and size.name not in known:
            raise QueryError(f"no size {size.name!r}; known: {', '.join(known) or 'none'}")
    if wanted:
        found = [row for row in found if all(filters.all_hold(group, row.dims) for group in wanted)]
    if where.shape:
        fits_shape = any_pattern(where.shape)
        unnamed = {filters.unnamed_sizes(text) for text in where.shape}
        found = [
            row
            for row in found
            if fits_shape(row.shape)
            or filters.without_letters(row.shape) in unnamed
            or any(filters.all_hold(group, row.dims) for group in wanted_shapes)
        ]
    return found


def _says_sizes(shape: str) -> bool:
    return filters.is_expression(shape) or filters.unnamed_sizes(shape) is not None


def find_point(session: Session, text: str) -> PointDetail:
    """The point of an id, as `history --ids` shows it."""
    given = re.fullmatch(r"(\d{1,18})\.(\d{1,18})", text, re.ASCII)
    if given is None:
        raise QueryError(f"{text!r} is no id; `groupbench history --ids` shows those of points, such as 12.3")
    key = and_(Point.series_id == int(given[1]), Point.run_id == int(given[2]))
    found = points_where(session, key)
    if not found:
        raise QueryError(f"no point {text!r}; `groupbench history --ids` shows them")
    (point,) = found
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
    )


def point_record(session: Session, point: PointRow) -> Record:
    """A point as the record that it came from."""
    from groupbench.tracker.store.records import stored_records  # loads numpy, which no other question needs

    return next(stored_records(session, point.run.pk, series=point.series.pk))


def run_at(session: Session, when: datetime) -> RunRow:
    """The newest run that had begun at an instant."""
    row = session.execute(_run_select().where(Run.started <= when).order_by(*NEWEST_FIRST).limit(1)).first()
    if row is None:
        raise QueryError(f"no run at or before {when:%Y-%m-%d %H:%M} UTC; `groupbench runs` lists them")
    return _run(row)


def points_of_run(session: Session, run: RunRow) -> list[PointRow]:
    return sorted(points_where(session, Run.id == run.pk), key=lambda point: point.series.sort_key)


def outcomes_of_run(session: Session, run: RunRow) -> dict[int, Outcome]:
    """What became of each cell of a run, by the key of its series."""
    timed = and_(Point.status == "ok", Point.median_ms.is_not(None), Point.timing.in_(("gpu", "cpu")))
    query = select(Point.series_id, Point.status, timed).where(Point.run_id == run.pk)
    return {series: Outcome(status, bool(told)) for series, status, told in session.execute(query)}


def points_of_runs(session: Session, keys: Sequence[int]) -> list[PointRow]:
    """Points of many runs, by series and time."""
    found = [point for chunk in chunks(keys) for point in points_where(session, Run.id.in_(chunk))]
    return sorted(found, key=lambda p: (p.series.sort_key, p.run.started, p.run.pk))


def points_of_state(session: Session, state: State) -> list[PointRow]:
    found = points_where(session, Commit.hash == state.commit, Run.dirty == state.dirty)
    return sorted(found, key=lambda p: (p.series.sort_key, p.run.started, p.run.pk))


NEWEST_FIRST = (Run.started.desc(), Run.id.desc())

_POINT_FIELDS = [name for name in PointRow.__dataclass_fields__ if name not in ("pk", "series", "run", "environment")]


def _run_select() -> Select[Any]:
    columns = (Run.id.label("pk"), Run.uuid.label("id"), Run.dirty, Run.started, Run.trigger, Run.plan)
    statement: Any = select(*columns, Commit.hash.label("commit"), Commit.branch, Commit.subject).join(Commit)
    return statement


def _run(row: Row[Any]) -> RunRow:
    return RunRow(**{name: getattr(row, name) for name in RunRow.__dataclass_fields__})


def run_conditions(session: Session, where: Filter) -> list[ColumnElement[bool]]:
    """What a filter says of runs. Whoever uses it has joined run and commit."""
    conditions = [*dates(where), *on_branch(session, where)]
    if where.commit:
        states = [resolve_commit(session, text) for text in where.commit]
        conditions.append(or_(*(and_(Commit.hash == state.commit, Run.dirty == state.dirty) for state in states)))
    for text in where.commits:
        conditions.append(Commit.hash.in_(sorted(commits_between(session, text))))
    return conditions


def on_branch(session: Session, where: Filter) -> list[ColumnElement[bool]]:
    """What a filter says of commits' branches. Raises QueryError for a branch that no commit is of."""
    if not where.branch:
        return []
    known = sorted(filter(None, session.scalars(select(Commit.branch).distinct())))
    filters.refuse_unknown("branch", where.branch, known)
    return [Commit.branch.in_(where.branch)]


def dates(where: Filter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    if where.since is not None:
        conditions.append(Run.started >= where.since)
    if where.until is not None:
        conditions.append(Run.started < where.until)
    return conditions


def not_after(run: RunRow) -> ColumnElement[bool]:
    """What holds of a run and of those before it in time: the reverse of NEWEST_FIRST. The query has joined run."""
    return or_(Run.started < run.started, and_(Run.started == run.started, Run.id <= run.pk))


def points_where(
    session: Session, *conditions: ColumnElement[bool], series: Mapping[int, SeriesRow] | None = None
) -> list[PointRow]:
    """Points in no order; `series` are rows in hand already."""
    columns = [getattr(Point, name) for name in _POINT_FIELDS]
    query = (
        select(Point.id, Point.series_id, Point.run_id, Point.environment_id, *columns)
        .join(Series, Point.series_id == Series.id)
        .join(Run, Point.run_id == Run.id)
        .join(Commit, Run.commit_id == Commit.id)
        .where(*conditions)
    )
    found = session.execute(query).all()
    if series is None:
        series = series_rows(session, {row.series_id for row in found})
    runs_of = run_rows(session, {row.run_id for row in found})
    where = environment_rows(session, {row.environment_id for row in found})
    return [PointRow(row[0], series[row[1]], runs_of[row[2]], where[row[3]], *row[4:]) for row in found]


def run_rows(session: Session, keys: Iterable[int]) -> dict[int, RunRow]:
    """Runs by key."""
    return {
        row.pk: _run(row) for chunk in chunks(keys) for row in session.execute(_run_select().where(Run.id.in_(chunk)))
    }


def series_rows(session: Session, keys: Iterable[int]) -> dict[int, SeriesRow]:
    """Series by key."""
    return {
        row.pk: SeriesRow(**row._mapping)
        for chunk in chunks(keys)
        for row in session.execute(series_select().where(Series.id.in_(chunk)))
    }


def environment_rows(session: Session, keys: Iterable[int]) -> dict[int, EnvironmentRow]:
    query = select(EnvironmentTable.id, EnvironmentTable.identity, EnvironmentTable.facts)
    return {
        key: EnvironmentRow(key, identity, msgspec.convert(facts, Environment))
        for chunk in chunks(keys)
        for key, identity, facts in session.execute(query.where(EnvironmentTable.id.in_(chunk)))
    }


def series_select() -> Select[Any]:
    columns = [getattr(Series, name) for name in SeriesRow.__dataclass_fields__ if name != "pk"]
    return select(Series.id.label("pk"), *columns)


def starts(column: Any, text: str) -> ColumnElement[bool]:
    """Case and wildcards taken literally."""
    return func.substr(column, 1, len(text)) == text


def _like(column: Any, pattern: str, glob: bool) -> ColumnElement[bool]:
    """Shell wildcards * and ?; everything else, brackets included, is literal."""
    if glob:
        return column.op("GLOB")(pattern.replace("[", "[[]"))
    escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return column.like(escaped.replace("*", "%").replace("?", "_"), escape="\\")


def any_pattern(patterns: Iterable[str]) -> Callable[[str], bool]:
    """`_like` in Python: whether a text is one of the patterns, or fits its wildcards."""
    exact = set(patterns)
    wild = [_Wildcards(pattern) for pattern in exact if "*" in pattern or "?" in pattern]
    return lambda text: text in exact or any(each.fit(text) for each in wild)


class _Wildcards:
    """A pattern of shell wildcards, matched without backtracking.

    Of each part between two stars the first match is as good as any: a later one leaves less for the rest. A regular
    expression would try them all, which takes time exponential in the number of stars.
    """

    def __init__(self, pattern: str) -> None:
        parts = ["".join("." if c == "?" else re.escape(c) for c in part) for part in pattern.split("*")]
        self._first, *self._rest = (re.compile(part, re.DOTALL) for part in parts)
        self._last_length = len(pattern.rpartition("*")[2])

    def fit(self, text: str) -> bool:
        """Return whether the pattern is all of a text."""
        if not self._rest:
            return self._first.fullmatch(text) is not None
        start = self._first.match(text)
        if start is None:
            return False
        at = start.end()
        for part in self._rest[:-1]:
            found = part.search(text, at)
            if found is None:
                return False
            at = found.end()
        end = len(text) - self._last_length
        return end >= at and self._rest[-1].match(text, end) is not None


def some(values: Sequence[str]) -> str:
    return ", ".join(values[:5]) + (", …" if len(values) > 5 else "")
