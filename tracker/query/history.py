"""Series history along a branch: each point with change and speed-up over a baseline."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import environment_differences
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.query.filters import Filter, commit_range
from groupbench.tracker.query.lines import CommitLine, every_line, line_through
from groupbench.tracker.query.loaded import LoadedLists
from groupbench.tracker.query.points import points_where
from groupbench.tracker.query.resolve import commits_between, on_branch, resolve_commit
from groupbench.tracker.query.rows import HistoryRow, PointRow, RunRow, SeriesRow, speedup_over
from groupbench.tracker.query.runs import run_row, run_select
from groupbench.tracker.query.series import find_series, names, series_select
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import NEWEST_FIRST, TIMED_POINT, Commit, Point, Run, Series
from groupbench.tracker.text.wording import counted, no_such
from groupbench.tracker.tools import git

AT_ONCE = 8
"""Most runs whose points are read at once to find the ones before a filter's."""


@dataclass(frozen=True)
class BranchHistory:
    """Points along a branch's commits."""

    rows: list[HistoryRow]  # by series, oldest commit first
    runs: tuple[str, ...] = ()  # ids of their runs, in the same order
    notes: tuple[str, ...] = ()  # warnings about the order and omitted results


def history(
    session: Session,
    where: Filter,
    *,
    baseline: str | None = None,
    limit: int | None = None,
    all_branches: bool = False,
) -> BranchHistory:
    """Return each series' points along one branch: by commit, and within a commit by time.

    The branch is the newest run's, or the one named in `where`. Results from other branches are omitted and counted,
    unless `where` names one such commit or several branches. Changes and environments are relative to the point before
    on the branch, even if the filter starts or ends in between.

    `baseline` is the backend for speed-ups; `limit` keeps each series' newest points. Raises QueryError for unknown
    names.
    """
    series = {row.pk: row for row in find_series(session, where)}
    over = _baseline_series(session, baseline, series.values()) if baseline is not None else {}
    chosen = _choice(session, where)
    runs = [run_row(row) for row in session.execute(run_select())]
    allowed = {run.pk for run in runs if len(where.branch) < 2 or run.branch in where.branch}
    wanted = {run.pk for run in runs if run.pk in allowed and chosen(run)}
    line = _line(session, where, all_branches)
    along = line.along(_points(session, series, [key for key in line.runs if key in allowed], wanted))
    rows = [row for row in changes(along, LoadedLists(session, along)) if row.point.run.pk in wanted]
    others = 0 if where.branch else len(_read(session, series, wanted.difference(line.runs)))
    omitted = f"{counted(others, 'result')} of other branches left out; --all lists them" if others else None
    if limit is not None:
        of_series = grouped(rows, lambda row: row.point.series.pk).values()
        rows = [row for each in of_series for row in each[max(len(each) - limit, 0) :]]
    if baseline is not None:
        rows = _with_speedups(session, rows, over)
    ids = {row.point.run.pk: row.point.run.id for row in rows}
    order = tuple(ids[key] for key in reversed(line.runs) if key in ids)
    return BranchHistory(rows, order, tuple(filter(None, (line.note, omitted))))


def _points(
    session: Session,
    series: Mapping[int, SeriesRow],
    line: Sequence[int],  # runs, newest first
    wanted: Collection[int],  # runs
) -> list[PointRow]:
    """Return the points of the wanted runs on a line, and those before them to which a change is relative."""
    points = _read(session, series, [run for run in line if run in wanted])
    of_run = grouped(points, lambda point: point.run.pk)
    missing: dict[int, set[Hashable]] = {}  # what is sought before, by series: any point, or one measured alike

    def found(point: PointRow) -> bool:
        sought = missing.get(point.series.pk, set())
        hits = sought & {None, _alike(point)}
        sought -= hits
        if not sought:
            missing.pop(point.series.pk, None)
        return bool(hits)

    for is_wanted, stretch in groupby(line, lambda run: run in wanted):
        runs, size = list(stretch), 1
        for point in (point for run in runs if is_wanted for point in of_run.get(run, ())):
            found(point)
            missing.setdefault(point.series.pk, set()).update({None, _alike(point)})
        while missing and runs and not is_wanted:
            block, runs, size = runs[:size], runs[size:], min(2 * size, AT_ONCE)
            older = grouped(_read(session, {key: series[key] for key in missing}, block), lambda point: point.run.pk)
            points += [point for run in block for point in older.get(run, ()) if found(point)]
    return points


def _alike(point: PointRow) -> Hashable:
    """Return the facts that a latency shares with those that it is compared with, or None without a latency."""
    return (point.environment.identity, point.timing) if point.timed else None


def _read(session: Session, series: Mapping[int, SeriesRow], runs: Collection[int]) -> list[PointRow]:
    return [
        point
        for some in chunks(runs)
        for keys in chunks(series)
        for point in points_where(session, Point.run_id.in_(some), Point.series_id.in_(keys), series=series)
    ]


def _choice(session: Session, where: Filter) -> Callable[[RunRow], bool]:
    """Return whether a filter's dates and commits select a run. Raises QueryError for an unknown commit."""
    states = [resolve_commit(session, text, git.rev_parse) for text in where.named]
    ranges = [commits_between(session, text) for text in where.ranges]

    def chosen(run: RunRow) -> bool:
        return (
            (where.since is None or run.started >= where.since)
            and (where.until is None or run.started < where.until)
            and all(run.commit in hashes for hashes in ranges)
            and (not states or run.state in states)
        )

    return chosen


def _line(session: Session, where: Filter, all_branches: bool) -> CommitLine:
    """Return a history's runs, in order."""
    on_branch(session, where)  # raises QueryError for an unknown branch
    if all_branches or len(where.branch) > 1:
        return every_line(session)
    branch = where.branch[0] if where.branch else None
    newest = run_select().order_by(*NEWEST_FIRST).limit(1)
    row = session.execute(newest if branch is None else newest.where(Commit.branch == branch)).first()
    if row is None:
        return CommitLine(())
    line = line_through(session, run_row(row), git.first_parents, branch)
    ends = [commit_range(text)[1] for text in where.ranges]
    named = {resolve_commit(session, text, git.rev_parse).commit for text in (*where.named, *filter(None, ends))}
    runs = set(session.scalars(select(Run.id).join(Commit).where(Commit.hash.in_(named))))
    return line if runs <= set(line.runs) else every_line(session)


def changes(points: Iterable[PointRow], lists: LoadedLists | None = None) -> list[HistoryRow]:
    """Return points with their changes since earlier points of the series.

    Args:
        points: Points by series, oldest first.
        lists: Files and packages that their processes loaded; None to leave out their differences.
    """
    rows: list[HistoryRow] = []
    before: PointRow | None = None
    speeds: dict[tuple[str, str | None], float] = {}
    for point in points:
        if before is None or before.series.pk != point.series.pk:
            before, speeds = None, {}
        loaded = () if lists is None or before is None else lists.difference(before, point).texts
        rows.append(HistoryRow(point, _change(point, speeds), _differences(before, point), loaded))
        before = point
    return rows


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


def _baseline_series(session: Session, backend: str, series: Collection[SeriesRow]) -> dict[tuple[str, ...], int]:
    """Return the baseline's series keys by problem, for the problems in `series`."""
    query = series_select().where(Series.backend == backend)
    for name in ("operator", "mode", "dtype", "shape"):
        values = {getattr(row, name) for row in series}
        if len(values) <= 500:
            query = query.where(getattr(Series, name).in_(values))
    baselines = [SeriesRow(**row._mapping) for row in session.execute(query)]
    if not baselines and session.scalar(select(Series.id).where(Series.backend == backend).limit(1)) is None:
        raise QueryError(no_such("no backend", backend, names(session, "backend")))
    return {row.problem: row.pk for row in baselines}


def _with_speedups(session: Session, rows: list[HistoryRow], over: Mapping[tuple[str, ...], int]) -> list[HistoryRow]:
    """Add speed-ups: the baseline's latency over each row's, in the same run, problem, environment and timing."""
    baseline_of = {
        pk: over[key] for pk, key in {r.point.series.pk: r.point.series.problem for r in rows}.items() if key in over
    }
    base = {
        (point.series.pk, point.run.pk): point
        for chunk in chunks(set(baseline_of.values()))
        for point in points_where(session, Point.series_id.in_(chunk), TIMED_POINT)
    }

    def speedup(point: PointRow) -> float | None:
        return speedup_over(point, base.get((baseline_of.get(point.series.pk, -1), point.run.pk)))

    return [replace(row, speedup=speedup(row.point)) for row in rows]
