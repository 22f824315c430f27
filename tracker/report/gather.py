"""From the store to what pages show: a report on a run that was judged.

`histories`, `speed` and `roofline` take points in hand, so that a page of one operator, or of a few series, can be made
of fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sqlalchemy.orm import Session

from groupbench.tracker.judge import alerts
from groupbench.tracker.judge.verdicts import CANARY, Gate
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.points import points_of_runs
from groupbench.tracker.query.rows import PointRow, RunRow, RunSummary
from groupbench.tracker.query.runs import summaries_of_runs
from groupbench.tracker.report.histories import histories, places, read_context
from groupbench.tracker.report.roofline import find_roofline
from groupbench.tracker.report.shown import OperatorPage, RunLabel, SeriesHistory, label_of
from groupbench.tracker.report.speed import speed_maps

POINTS = 100_000
"""Results that one page holds: of more series it holds fewer runs."""


@dataclass(frozen=True)
class Report:
    """What the report is made of."""

    gate: Gate
    newest: RunSummary  # the run that is judged
    runs: tuple[RunRow, ...]  # those that the plots hold, the oldest first; the judged one is the last
    labels: tuple[RunLabel, ...]  # of the same
    points: tuple[PointRow, ...]  # of the judged run
    pages: tuple[OperatorPage, ...]  # of every operator that the plots hold; canaries last


def gather(session: Session, judged: Gate, *, limit: int = 200) -> Report:
    """Return a report on a run as the gate judged it, with the history of the `limit` runs up to it."""
    run = judged.run
    shown = _runs_of(session, judged.line, limit)
    runs = tuple(summary.run for summary in shown)
    points = judged.line.along(points_of_runs(session, [row.pk for row in runs]))
    stored = alerts.find(session, runs=set(judged.line.runs))
    context = read_context(session, points, runs, alerts=stored, judged=judged.rows)
    return Report(
        gate=judged,
        newest=shown[-1],
        runs=runs,
        labels=run_labels(runs),
        points=tuple(point for point in points if point.run.pk == run.pk),
        pages=tuple(operator_pages(points, histories(points, places(runs), context), run)),
    )


def _runs_of(session: Session, line: CommitLine, limit: int) -> list[RunSummary]:
    """The newest `limit` runs of a line, the oldest first; fewer where they hold more than `POINTS`."""
    newest = summaries_of_runs(session, line.runs[:limit])
    held = list(accumulate(sum(each.counts.values()) for each in newest))
    return [each for each, points in zip(newest, held, strict=True) if points <= max(POINTS, held[0])][::-1]


def run_labels(runs: Iterable[RunRow]) -> tuple[RunLabel, ...]:
    return tuple(label_of(run) for run in runs)


def operator_pages(
    points: Sequence[PointRow],  # of any operators and runs
    shown: Sequence[SeriesHistory],  # of the same
    run: RunRow,  # the run that the pages are about
) -> list[OperatorPage]:
    """Return a page for each operator, canaries last."""
    names = sorted({point.series.operator for point in points}, key=lambda name: (name == CANARY, name))
    canaries = [point for point in points if point.series.operator == CANARY]
    pages = []
    for name in names:
        own = [point for point in points if point.series.operator == name]
        page = OperatorPage(
            name=name,
            speeds=tuple(speed_maps(own, run)),
            roofline=find_roofline(own, canaries, run),
            histories=tuple(history for history in shown if history.series.operator == name),
        )
        pages.append(page)
    return pages
