"""The history of each series over the runs of a page: levels, changes, environments and alerts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.environment import environment_differences
from groupbench.tracker.judge.alerts import OPEN, AlertRow
from groupbench.tracker.judge.levels import ChangeEvidence, Levels, levels_of
from groupbench.tracker.judge.pasts import Pasts
from groupbench.tracker.judge.verdicts import CANARY, Judged
from groupbench.tracker.metrics import carried
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.report.shown import Level, Mark, MarkKind, ResultBursts, ShownHistory
from groupbench.tracker.stats.histories import PastChange
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.packing import unpack_samples
from groupbench.tracker.store.schema import Point


@dataclass(frozen=True)
class Context:
    """Data of a page's series besides their results, by series."""

    levels: Mapping[int, Levels]
    alerts: Mapping[int, Sequence[AlertRow]] = field(default_factory=dict)
    judged: Mapping[int, Judged] = field(default_factory=dict)
    bursts: Mapping[int, tuple[ResultBursts, ...]] = field(default_factory=dict)


def read_context(
    session: Session,
    points: Sequence[PointRow],  # by series, then time
    runs: Sequence[RunRow],  # that the page holds, the oldest first
    *,
    alerts: Iterable[AlertRow] = (),
    judged: Iterable[Judged] = (),
) -> Context:
    """Return the context of `histories`. Levels are those that the gate would judge by."""
    rows = {row.series.pk: row for row in judged}
    of_series: dict[int, list[AlertRow]] = {}
    for alert in alerts:
        of_series.setdefault(alert.series.pk, []).append(alert)
    return Context(
        levels=_read_levels(session, points, runs, of_series, rows),
        alerts=of_series,
        judged=rows,
        bursts=newest_bursts(session, points, places(runs)),
    )


def places(runs: Sequence[RunRow]) -> dict[int, int]:
    """Return where each run is on a page, by its key; runs are given the oldest first."""
    return {run.pk: place for place, run in enumerate(runs)}


def histories(points: Sequence[PointRow], where: Mapping[int, int], context: Context) -> list[ShownHistory]:
    """Return each series over the runs. `points` are by series, then time; `where` is from `places`."""
    rows = []
    for key, group in groupby(points, key=lambda point: point.series.pk):
        series_points = list(group)
        at = [where[point.run.pk] for point in series_points]
        levels = context.levels.get(key, Levels((), ()))
        marks = _environment_marks(series_points, at)
        marks += [Mark("change", where[run], _change_text(change)) for run, change in levels.changes if run in where]
        marks += _alert_marks(context.alerts.get(key, ()), where)
        marks += _verdict_marks(context.judged.get(key), marks, where)
        rows.append(ShownHistory(
            series=series_points[0].series,
            runs=tuple(at),
            ms=tuple(point.median_ms for point in series_points),
            low=tuple(point.low_ms for point in series_points),
            high=tuple(point.high_ms for point in series_points),
            rms=tuple(point.rms for point in series_points),
            further=_further(series_points),
            status={i: point.status for i, point in enumerate(series_points) if point.status != "ok"},
            message={
                i: point.message for i, point in enumerate(series_points) if point.status != "ok" and point.message
            },
            interpreted=series_points[-1].timing == "interpreted",
            marks=tuple(sorted(marks, key=lambda mark: mark.at)),
            levels=tuple(
                Level(where[level.first], where[level.last], level.ms)
                for level in levels.levels
                if level.first in where and level.last in where
            ),
            bursts=context.bursts.get(key, ()),
        ))  # fmt: skip
    return rows


def newest_bursts(
    session: Session,
    points: Sequence[PointRow],  # by series, then time
    where: Mapping[int, int],
    count: int = 2,
) -> dict[int, tuple[ResultBursts, ...]]:
    """Return the samples of the newest timed results of each series, the newest last. Reads those of no other."""
    wanted: dict[int, PointRow] = {}
    for _, series_points in groupby(points, key=lambda point: point.series.pk):
        timed = [point for point in series_points if point.timed]
        wanted.update((point.pk, point) for point in timed[-count:])
    packed: dict[int, bytes | None] = {}
    for chunk in chunks(wanted):
        packed.update(
            (key, blob) for key, blob in session.execute(select(Point.id, Point.samples).where(Point.id.in_(chunk)))
        )
    bursts: dict[int, tuple[ResultBursts, ...]] = {}
    for key, point in wanted.items():
        samples = packed.get(key)
        if samples is not None:
            newest = ResultBursts(where[point.run.pk], unpack_samples(samples))
            bursts[point.series.pk] = (*bursts.get(point.series.pk, ()), newest)
    return bursts


def _read_levels(
    session: Session,
    points: Sequence[PointRow],
    runs: Sequence[RunRow],
    alerts: Mapping[int, Sequence[AlertRow]],
    judged: Mapping[int, Judged],
) -> dict[int, Levels]:
    """Return the levels of each series that has a speed, by its key."""
    timed = {point.series.pk: point for point in points if point.timed}  # the newest of each
    if not timed:
        return {}
    pasts = Pasts(session, CommitLine(tuple(run.pk for run in reversed(runs))), list(timed), len(runs))
    shown = np.array([run.pk for run in runs])
    compared = comparisons.of_series(session, list(timed))
    levels = levels_of(
        [past.where(np.isin(past.run, shown)) for past in (pasts.latency(key) for key in timed)],
        [point.timing or "gpu" for point in timed.values()],
        [point.series.operator == CANARY for point in timed.values()],
        [ChangeEvidence(alerts.get(key, ()), compared.get(key, ()), judged.get(key)) for key in timed],
        {run.pk: run.commit for run in runs if not run.dirty},
    )
    return dict(zip(timed, levels, strict=True))


def _change_text(change: PastChange) -> str:
    low, effect, high = (100 * float(np.expm1(value)) for value in (change.low, change.effect, change.high))
    return f"{effect:+.1f}% ({low:+.1f} to {high:+.1f}%)"


def _environment_marks(series_points: Sequence[PointRow], at: Sequence[int]) -> list[Mark]:
    marks = []
    for before, point, place in zip(series_points, series_points[1:], at[1:], strict=False):
        if before.environment.identity != point.environment.identity:
            changed = environment_differences(before.environment.facts, point.environment.facts)
            marks.append(Mark("environment", place, "; ".join(changed)))
    return marks


def _alert_marks(stored: Iterable[AlertRow], where: Mapping[int, int]) -> list[Mark]:
    marks = []
    for alert in stored:
        if alert.run.pk in where:
            change = "" if alert.change is None else f", {alert.metric} {100 * alert.change:+.1f}%"
            kind: MarkKind = "alert" if alert.state in OPEN else "closed"
            marks.append(Mark(kind, where[alert.run.pk], alert.text + change))
    return marks


def _verdict_marks(row: Judged | None, marks: Sequence[Mark], where: Mapping[int, int]) -> list[Mark]:
    """Return the gate's verdict on the newest change, unless history shows that change already."""
    if row is None or not row.verdict.changed or row.span is None or row.what != "latency" or row.change is None:
        return []
    at = where.get(row.span.head.pk)
    if at is None or any(mark.kind == "change" and mark.at == at for mark in marks):
        return []
    return [Mark("verdict", at, f"{row.verdict} {100 * row.change:+.1f}%", good=row.change < 0)]


def _further(points: Sequence[PointRow]) -> dict[str, tuple[float | None, ...]]:
    """The metrics that records carry by name, where any of the points has a value."""
    values = {metric.name: tuple(point.value(metric) for point in points) for metric in carried()}
    return {name: each for name, each in values.items() if any(value is not None for value in each)}
