"""Read a report's data for a judged run.

`histories`, `speed` and `roofline` take loaded points, so a page for one operator, or a few series, can use fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.judge import members, triage
from groupbench.tracker.judge.verdicts import CANARY, Gate
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.points import by_series_and_time, points_of_runs, points_where
from groupbench.tracker.query.rows import PointRow, RunRow, RunSummary
from groupbench.tracker.query.runs import run_rows, summaries_of_runs
from groupbench.tracker.query.traffic import NO_TRAFFIC, Traffic
from groupbench.tracker.report import selection
from groupbench.tracker.report.histories import histories, places, read_context
from groupbench.tracker.report.roofline import find_roofline
from groupbench.tracker.report.selection import Coverage
from groupbench.tracker.report.shown import OperatorPage, RunLabel, ShownHistory, label_of
from groupbench.tracker.report.speed import speed_maps
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import Point

POINTS = 100_000
"""Maximum number of results on a page. With more series, it shows fewer runs."""

_SERIES_AT_ONCE = 200
"""Maximum number of series in one statement, in addition to the runs of a page."""

_RUN = Point.run_id + 0
"""A point's run in statements about few series. With the plain column, SQLite reads all points in the runs."""


@dataclass(frozen=True)
class Report:
    """A report's data."""

    gate: Gate
    newest: RunSummary  # the run that is judged
    runs: tuple[RunRow, ...]  # those that the plots hold, the oldest first; the judged one is the last
    labels: tuple[RunLabel, ...]  # of the same
    points: tuple[PointRow, ...]  # of the judged run
    pages: tuple[OperatorPage, ...]  # of every operator that is shown; canaries last
    coverage: Coverage
    incidents: tuple[str, ...] = ()  # lines of the first screen


def gather(session: Session, judged: Gate, *, limit: int = 200, traffic: Traffic = NO_TRAFFIC) -> Report:
    """Return a report on a run as the gate judged it, with the history over `limit` runs up to it."""
    run = judged.run
    newest_first = judged.line.runs[:limit]
    held = _within(newest_first, _counts_of_runs(session, newest_first))
    keys = _series_of_runs(session, held)
    if len(keys) <= selection.FULL:
        coverage = Coverage(len(keys))
        points = points_of_runs(session, held)
    else:
        chosen = selection.choose(judged)
        coverage = Coverage(len(keys | {row.series.pk for row in judged.rows}), frozenset(chosen))
        held = _within(newest_first, _counts_of_runs(session, newest_first, chosen))
        points = _points_of_series(session, chosen, held)
    rows = run_rows(session, held)
    runs = tuple(rows[key] for key in reversed(held))
    points = judged.line.along(points)
    stored = members.find(session, series=set(coverage.full or keys), runs=set(judged.line.runs))
    context = read_context(session, points, runs, alerts=stored, judged=judged.rows)
    of_run = tuple({row.series.pk: row.point for row in judged.rows if row.point is not None}.values())
    shown = histories(points, places(runs), context)
    return Report(
        gate=judged,
        newest=summaries_of_runs(session, [run.pk])[0],
        runs=runs,
        labels=tuple(map(label_of, runs)),
        points=of_run,
        pages=tuple(operator_pages([*points, *_other_backends(of_run, points)], shown, run, judged.line)),
        coverage=coverage,
        incidents=_incidents(session, judged, traffic),
    )


def _incidents(session: Session, judged: Gate, traffic: Traffic) -> tuple[str, ...]:
    """Return the open incidents of the run's series, and what was not measured, as lines."""
    calls, series = traffic.resolve(session), {row.series.pk for row in judged.rows}
    incidents = triage.of(session, calls, series=series, states=members.OPEN)
    return tuple(triage.screen(incidents, triage.notes(session, calls)))


def _within(runs: Sequence[int], counts: Mapping[int, int]) -> list[int]:
    """Return the first runs with at most `POINTS` results together, at least one run."""
    held = list(accumulate(counts.get(key, 0) for key in runs))
    return [key for key, points in zip(runs, held, strict=True) if points <= max(POINTS, held[0])]


def _counts_of_runs(session: Session, runs: Sequence[int], series: Sequence[int] | None = None) -> Counter[int]:
    """Return result counts by run, for all series or the given ones."""
    counts: Counter[int] = Counter()
    of_run = Point.run_id if series is None else _RUN
    of_series = [()] if series is None else [(Point.series_id.in_(chunk),) for chunk in chunks(series, _SERIES_AT_ONCE)]
    for chunk in chunks(runs):
        for condition in of_series:
            query = select(of_run, func.count()).where(of_run.in_(chunk), *condition)
            for run, number in session.execute(query.group_by(of_run)):
                counts[run] += number
    return counts


def _series_of_runs(session: Session, runs: Sequence[int]) -> set[int]:
    query = select(Point.series_id).distinct()
    return {key for chunk in chunks(runs) for key in session.scalars(query.where(Point.run_id.in_(chunk)))}


def _points_of_series(session: Session, series: Sequence[int], runs: Sequence[int]) -> list[PointRow]:
    """Return the points for these series and runs, by series and time."""
    points = [
        point
        for of_series in chunks(series, _SERIES_AT_ONCE)
        for of_runs in chunks(runs)
        for point in points_where(session, Point.series_id.in_(of_series), _RUN.in_(of_runs))
    ]
    return by_series_and_time(points)


def _other_backends(of_run: Iterable[PointRow], points: Sequence[PointRow]) -> list[PointRow]:
    """Return the run's results from other backends on the shown problems, since speed-ups compare all backends."""
    keys = {point.series.pk for point in points}
    problems = {point.series.problem for point in points}
    return [point for point in of_run if point.series.pk not in keys and point.series.problem in problems]


def operator_pages(
    points: Sequence[PointRow],  # of any operators and runs
    shown: Sequence[ShownHistory],  # of the same
    run: RunRow,  # the run that the pages are about
    line: CommitLine,  # of the runs
) -> list[OperatorPage]:
    """Return a page for each operator, canaries last."""
    names = sorted({point.series.operator for point in points}, key=lambda name: (name == CANARY, name))
    canaries = [point for point in points if point.series.operator == CANARY]
    pages = []
    for name in names:
        of_operator = [point for point in points if point.series.operator == name]
        page = OperatorPage(
            name=name,
            speeds=tuple(speed_maps(of_operator, run, line)),
            roofline=find_roofline(of_operator, canaries, run, line),
            histories=tuple(history for history in shown if history.series.operator == name),
        )
        pages.append(page)
    return pages
