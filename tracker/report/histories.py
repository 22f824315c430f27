"""Each series' history over a page's runs: levels, changes, environments and alerts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import environment_differences, machine_differences, toolchain_differences
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.metrics import carried
from groupbench.tracker.judge.incident_rows import OPEN, MemberRow
from groupbench.tracker.judge.pasts import Past, Pasts
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.report.levels import Levels, PastChange, levels_of
from groupbench.tracker.report.shown import Mark, MarkKind, ResultBursts, ShownHistory, ShownLevel
from groupbench.tracker.report.toolchain_lines import lines_of, names_of, toolchains_of
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.comparisons import Compared
from groupbench.tracker.store.packing import unpack_samples
from groupbench.tracker.store.schema import Point
from groupbench.tracker.text.wording import signed_change


@dataclass(frozen=True)
class HistoryContext:
    """A page's series data other than results, by series."""

    levels: Mapping[int, Levels]
    alerts: Mapping[int, Sequence[MemberRow]] = field(default_factory=dict)
    judged: Mapping[int, Sequence[Judged]] = field(default_factory=dict)
    bursts: Mapping[int, tuple[ResultBursts, ...]] = field(default_factory=dict)


def read_context(
    session: Session,
    points: Sequence[PointRow],  # by series, then time
    runs: Sequence[RunRow],  # that the page holds, the oldest first
    *,
    alerts: Iterable[MemberRow] = (),
    judged: Iterable[Judged] = (),
) -> HistoryContext:
    """Return the context for `histories`. The levels match the gate's."""
    rows = grouped(judged, lambda row: row.series.pk)
    of_series = grouped(alerts, lambda alert: alert.series.pk)
    return HistoryContext(
        levels=_read_levels(session, points, runs, of_series, rows),
        alerts=of_series,
        judged=rows,
        bursts=newest_bursts(session, points, places(runs)),
    )


def places(runs: Sequence[RunRow]) -> dict[int, int]:
    """Return each run's place on a page, by key. `runs` are sorted, oldest first."""
    return {run.pk: place for place, run in enumerate(runs)}


def histories(points: Sequence[PointRow], where: Mapping[int, int], context: HistoryContext) -> list[ShownHistory]:
    """Return each series' history. `points` are sorted by series, then time; `where` is from `places`."""
    rows = []
    for key, group in groupby(points, key=lambda point: point.series.pk):
        series_points = list(group)
        at = [where[point.run.pk] for point in series_points]
        levels = context.levels.get(key, Levels())
        lines = lines_of(series_points)
        toolchains = names_of(series_points, lines)
        marks = _environment_marks(series_points, at, lines)
        marks += _change_marks(levels, where)
        marks += _alert_marks(context.alerts.get(key, ()), where)
        marks += _verdict_marks(context.judged.get(key, ()), marks, where)
        not_ok = {i: point for i, point in enumerate(series_points) if point.status != "ok"}
        rows.append(ShownHistory(
            series=series_points[0].series,
            runs=tuple(at),
            ms=tuple(point.median_ms for point in series_points),
            low=tuple(point.low_ms for point in series_points),
            high=tuple(point.high_ms for point in series_points),
            rms=tuple(point.rms for point in series_points),
            further=_further(series_points),
            status={i: point.status for i, point in not_ok.items()},
            message={i: point.message for i, point in not_ok.items() if point.message},
            interpreted=series_points[-1].timing == "interpreted",
            marks=tuple(sorted(marks, key=lambda mark: mark.at)),
            levels=tuple(_shown_levels(levels, where, dict(zip(at, lines, strict=True)))),
            bursts=context.bursts.get(key, ()),
            toolchains=toolchains,
            lines=lines if toolchains else (),
            measured_with=toolchains_of(series_points) if toolchains else (),
        ))  # fmt: skip
    return rows


def _change_marks(levels: Levels, where: Mapping[int, int]) -> Iterator[Mark]:
    """Yield a mark at each change between the page's runs."""
    for run, change in levels.changes:
        if run in where:
            yield Mark("change", where[run], _change_text(change), good=change.effect < 0)


def _shown_levels(levels: Levels, where: Mapping[int, int], line_at: Mapping[int, int]) -> Iterator[ShownLevel]:
    """Yield the levels between the page's runs. `line_at` gives the line at each place."""
    for level in levels.levels:
        if level.first in where and level.last in where:
            first = where[level.first]
            yield ShownLevel(first, where[level.last], level.ms, line_at.get(first, 0))


def newest_bursts(
    session: Session,
    points: Sequence[PointRow],  # by series, then time
    where: Mapping[int, int],
    count: int = 2,
) -> dict[int, tuple[ResultBursts, ...]]:
    """Return samples for each series' newest timed results, newest last. Reads no other samples.

    All are on one line, so alternating toolchains are each compared with themselves.
    """
    wanted: dict[int, PointRow] = {}
    for _, group in groupby(points, key=lambda point: point.series.pk):
        series_points = list(group)
        lines = lines_of(series_points)
        line_of = {point.pk: line for point, line in zip(series_points, lines, strict=True)}
        timed = [point for point in series_points if point.timed]
        timed = [point for point in timed if line_of[point.pk] == line_of[timed[-1].pk]]
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
    alerts: Mapping[int, Sequence[MemberRow]],
    judged: Mapping[int, Sequence[Judged]],
) -> dict[int, Levels]:
    """Return the levels for each series with a speed, by key."""
    timed = {point.series.pk: point for point in points if point.timed}  # the newest of each
    if not timed:
        return {}
    pasts = Pasts(session, CommitLine(tuple(run.pk for run in reversed(runs))), list(timed), len(runs))
    commits = {run.pk: run.commit for run in runs if not run.dirty}
    compared = comparisons.of_series(session, list(timed))
    by_series: dict[int, Levels] = {}
    for past in _stretches(pasts, [point for point in points if point.series.pk in timed], runs):
        key = past.series
        stored = _on_its_line(compared.get(key, ()), pasts, past)
        levels = levels_of(past, timed[key].timing or "gpu", alerts.get(key, ()), stored, commits)
        by_series[key] = by_series.get(key, Levels()) + levels
    return by_series


def _stretches(pasts: Pasts, points: Sequence[PointRow], runs: Sequence[RunRow]) -> Iterator[Past]:
    """Yield each line's latencies in some runs, for each series."""
    shown = np.array([run.pk for run in runs])
    for key, group in groupby(points, key=lambda point: point.series.pk):
        for past in _pasts_by_line(pasts, key, list(group)):
            yield past.where(np.isin(past.run, shown))


def _on_its_line(compared: Sequence[Compared], pasts: Pasts, past: Past) -> Sequence[Compared]:
    """Return the A/Bs measured by a past's toolchains."""
    if not compared:
        return ()
    line = pasts.software_of(past.series, past.run.tolist())
    return [one for one in compared if line.includes(one)]


def _pasts_by_line(pasts: Pasts, key: int, series_points: Sequence[PointRow]) -> list[Past]:
    """Return a series' latencies by chart line."""
    lines = lines_of(series_points)
    if not any(lines):
        return [pasts.latency(key)]
    past = pasts.latencies.of(key)
    line_of = {point.run.pk: line for point, line in zip(series_points, lines, strict=True)}
    line = np.array([line_of.get(run, -1) for run in past.run.tolist()])
    return [past.where(line == each) for each in sorted(set(lines))]


def _change_text(change: PastChange) -> str:
    low, effect, high = (signed_change(float(np.expm1(value))) for value in (change.low, change.effect, change.high))
    return f"{effect} ({low} to {high})"


def _environment_marks(series_points: Sequence[PointRow], at: Sequence[int], lines: Sequence[int]) -> list[Mark]:
    """Return a mark at each machine change, and at each toolchain change on one line."""
    marks = []
    newest: dict[int, PointRow] = {}  # result of each line
    for number, (point, place, line) in enumerate(zip(series_points, at, lines, strict=True)):
        before = newest.get(line, series_points[max(number - 1, 0)])
        newest[line] = point
        if before.environment.identity == point.environment.identity:
            continue
        changed: Sequence[str] = environment_differences(before.environment.facts, point.environment.facts)
        if any(lines):  # the machine is that of all lines
            last = series_points[number - 1].environment.facts
            same_line = lines.index(line) < number
            changed = toolchain_differences(before.environment.facts, point.environment.facts) if same_line else ()
            changed = (*machine_differences(last, point.environment.facts), *changed)
        if changed:
            marks.append(Mark("environment", place, "; ".join(changed)))
    return marks


def _alert_marks(stored: Iterable[MemberRow], where: Mapping[int, int]) -> list[Mark]:
    marks = []
    for alert in stored:
        if alert.run.pk in where:
            change = "" if alert.change is None else f", {alert.metric} {signed_change(alert.change)}"
            kind: MarkKind = "alert" if alert.state in OPEN else "closed"
            marks.append(Mark(kind, where[alert.run.pk], alert.text + change))
    return marks


def _verdict_marks(rows: Iterable[Judged], marks: Sequence[Mark], where: Mapping[int, int]) -> list[Mark]:
    """Return each change listed by the gate, unless history already shows it."""
    return verdict_marks(
        [
            (row.verdict, row.change, where.get(row.span.head.pk))
            for row in rows
            if row.verdict.changed and row.what == "latency" and row.span is not None
        ],
        marks,
    )


def verdict_marks(
    changes: Iterable[tuple[str, float | None, int | None]],  # verdict, relative change, place of its run
    marks: Sequence[Mark],
) -> list[Mark]:
    """Return a mark for each latency change listed by the gate, without those already marked."""
    places = {mark.at for mark in marks if mark.kind == "change"}
    return [
        Mark("verdict", at, f"{verdict} {signed_change(change)}", good=change < 0)
        for verdict, change, at in changes
        if change is not None and at is not None and at not in places
    ]


def _further(points: Sequence[PointRow]) -> dict[str, tuple[float | None, ...]]:
    """Return values for each metric carried by name in at least one point."""
    known = {name for point in points for name, value in (point.metrics or {}).items() if value is not None}
    return {metric.name: tuple(point.value(metric) for point in points) for metric in carried() if metric.name in known}
