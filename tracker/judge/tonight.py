"""Follow the metrics of a run's points to their levels tonight."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

import numpy as np

from groupbench.tracker.facts.metrics import LATENCY, REPEATABLE, RMS, Metric
from groupbench.tracker.judge.alerts import AlertRow
from groupbench.tracker.judge.evidence import OLD
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.marks import marks_of
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.stats.exact import walk_exact
from groupbench.tracker.stats.predict import ENOUGH, FIRST, LAST, lower_median, mad
from groupbench.tracker.stats.screen import Followed, follow
from groupbench.tracker.stats.thresholds import FLOOR, least_effect, prior_scatter
from groupbench.tracker.stats.walk import NIGHTS, Level, Walked

POOL = 6
"""Number of series with similar noise from which their scatter is the prior of the young ones."""
RMS_PRIOR = 0.05
"""Scatter to assume of an error without results."""


@dataclass(frozen=True)
class Tonight:
    """The level of a metric of a series tonight.

    Attributes:
        data: The night's data.
        point: Tonight's point.
        metric: The metric.
        past: Results on every machine.
        own: Those on tonight's machine. A place is an index of these.
        followed: The series as it was followed: logarithms, larger for the worse.
        walked: The levels tonight.
    """

    data: GateData
    point: PointRow
    metric: Metric
    past: Past
    own: Past
    followed: Followed
    walked: Walked

    @property
    def exact(self) -> bool:
        """Whether the value is the same whenever the code is."""
        return _is_exact(self.metric)

    @property
    def last(self) -> int:
        return len(self.own) - 1

    @property
    def value(self) -> float:
        return float(self.followed.y[-1])

    @property
    def begins(self) -> int:
        """The place of the first of the nights that are out, or of tonight."""
        return self.walked.begins if self.walked.nights else self.last

    def run_at(self, place: int) -> RunRow:
        return self.data.runs[int(self.own.run[place])]

    def keys(self, places: Iterable[int]) -> list[int]:
        """Return the keys of the runs at some places."""
        return [int(self.own.run[place]) for place in places]

    def span(self, start: int, base: int | None = None) -> Span:
        """Return the runs before and after a change at a place."""
        before = start - 1 if base is None else base
        return Span(self.run_at(before) if before >= 0 else None, self.run_at(max(start, 0)))

    def on_level(self, start: int, level: Level | None = None) -> list[int]:
        """Return the places of the results before a change that are on the level, by default the top one.

        Results nearer to tonight's than to the level are not: an A/B with their commits says nothing of the change.
        Nor does an A/B with those that may share tonight's level.
        """
        inside = self.walked.inside if level is None else None
        level = self.walked.stack[-1] if level is None else level
        centre = level.centre_without(start)
        start = start if inside is None else min(start, inside)
        pairs = [pair for pair in zip(level.places, level.values, strict=True) if pair[0] < start]
        return [place for place, value in pairs if abs(value - centre) <= abs(value - self.value)]

    @cached_property
    def base(self) -> int | None:
        """The newest result on the top level before those that are out, or one that is on it by definition.

        The second is the base if an A/B with a newer one did not tell.
        """
        earlier, walked = self.on_level(self.begins), self.walked
        if walked.inside is not None:
            earlier = [place for place in earlier if place <= walked.stack[-1].sure]
        return earlier[-1] if earlier else None

    @cached_property
    def gradual(self) -> bool:
        """Whether the newest nights show less than half of the distance: the level drifts."""
        top = self.walked.stack[-1]
        pairs = zip(top.places, top.values, strict=True)
        newest = [value for place, value in pairs if place < self.begins][-NIGHTS:]
        if len(top.places) <= FIRST or len(newest) < NIGHTS:
            return False
        return abs(self.value - lower_median(newest)) < abs(self.walked.distance) / 2

    @property
    def left(self) -> float | None:
        """The distance of the level that tonight's result has left."""
        gone = [level for level in self.walked.levels if level.values and level not in self.walked.stack]
        return gone[-1].centre - self.value if gone else None

    def undone(self, y: float) -> str | None:
        """Return which improvement a change to a level undoes, as an earlier reference is back; None if it is new."""
        newer, top = self.walked.stack[0], self.walked.top
        slack = max(self.followed.least, 1e-9, 0.0 if top is None else top.deviation)
        while (older := newer.replaced) is not None:
            if older.values and newer.centre < older.centre and abs(y - older.centre) <= slack:
                run = self.run_at(newer.start)
                return f"undone: the level accepted until {run.date} is back, which {run.state} had improved"
            newer = older
        return None

    def alert_in(self, start: int, stop: int | None = None) -> AlertRow | None:
        """Return the newest alert whose first run is at some places."""
        inside = set(self.own.run[max(start, 0) : stop].tolist())
        of_level = [each for each in self.alerts if each.run.pk in inside]
        return next((each for each in reversed(of_level) if not self.data.accepted(each)), None)

    @property
    def alerts(self) -> list[AlertRow]:
        stored = self.data.alerts.get(self.point.series.pk, ())
        return [each for each in stored if each.metric == self.metric.judged_as]

    @property
    def accepted_here(self) -> bool:
        """Whether a person accepted a level of the series on this machine."""
        runs = set(self.own.run.tolist())
        return any(self.data.accepted(each) and each.run.pk in runs for each in self.alerts)

    @property
    def accepted(self) -> AlertRow | None:
        """The alert whose level is expected and tonight's."""
        alert = self.data.alert(self.walked.stack[0].tag)
        return alert if len(self.walked.stack) == 1 and alert is not None and alert.state == "expected" else None

    @property
    def steps(self) -> Sequence[Level]:
        return self.walked.stack[1:]


def latencies(data: GateData, ask: float) -> dict[int, Tonight]:
    """Return the levels of each latency, by the key of its point.

    Args:
        data: The night's data.
        ask: Chance of a result below which it is worth an A/B.
    """
    points = [point for point in data.points if point.timed and point.timing is not None]
    pasts = [data.pasts.latency(point.series.pk) for point in points]
    alike = [past.on_its_machine() for past in pasts]
    followed = _with_priors(points, [_latency(data, point, past) for point, past in zip(points, alike, strict=True)])
    rows = zip(points, pasts, alike, followed, follow(followed, ask), strict=True)
    return {
        point.pk: Tonight(data, point, LATENCY, past, own_past, one, walked)
        for point, past, own_past, one, walked in rows
    }


def _latency(data: GateData, point: PointRow, own: Past) -> Followed:
    assert point.timing is not None
    ordered, n = np.sort(own.log), len(own)  # a third of the time of np.median
    ms = math.exp((ordered[(n - 1) // 2] + ordered[n // 2]) / 2)
    by_plan = data.decisions.limits.get(point.series.pk)
    least = least_effect(point.timing, ms) if by_plan is None else by_plan
    counts = math.log1p(least if data.min_effect is None else data.min_effect)
    marks = marks_of(data, own, LATENCY, counts)
    return Followed(own.log, counts, prior_scatter(point.timing, ms), FLOOR[point.timing], own.error, marks)


def _with_priors(points: Sequence[PointRow], followed: Sequence[Followed]) -> list[Followed]:
    """Return series with the prior scatter of the others of their pool, if there are enough."""
    pools: dict[tuple[object, ...], list[float]] = defaultdict(list)
    keys = []
    for point, one in zip(points, followed, strict=True):
        series = point.series
        keys.append((point.timing, series.hardware, series.host, series.protocol, one.least))
        if len(one.y) > ENOUGH:
            pools[keys[-1]].append(mad(one.y[-LAST - 1 : -1].tolist()))
    scatter = {key: max(median(each), 1e-9) for key, each in pools.items() if len(each) >= POOL}
    return [
        one if key not in scatter else replace(one, prior=max(scatter[key], one.floor))
        for key, one in zip(keys, followed, strict=True)
    ]


def others(data: GateData) -> dict[int, list[Tonight]]:
    """Return the levels of every other metric with a change or an alert, by the key of its point."""
    by_point: dict[int, list[Tonight]] = defaultdict(list)
    for metric in (RMS, REPEATABLE, *data.metrics):
        ones = list(_changed(data, metric))
        walks = [] if _is_exact(metric) else follow([followed for *_, followed in ones], 0.0)
        for (point, past, followed), walked in zip(ones, walks or map(_exact, ones, [metric] * len(ones)), strict=True):
            by_point[point.pk].append(Tonight(data, point, metric, past, past, followed, walked))
    return by_point


def _changed(data: GateData, metric: Metric) -> Iterator[tuple[PointRow, Past, Followed]]:
    """Yield the series of which a metric has changed by more than counts, or has an alert."""
    counts = 0.0 if _is_exact(metric) else math.log1p(metric.least)
    table = data.pasts.table(metric)
    moved = table.moved(counts)
    for point in data.points:
        series = point.series.pk
        if point.status != "ok" or point.value(metric) is None or not (series in moved or series in data.alerts):
            continue
        past = data.pasts.of_its_toolchain(table.of(series)).on_its_machine()
        marks = marks_of(data, past, metric)
        if marks or (len(past) > 1 and np.ptp(past.log) > counts):
            prior = RMS_PRIOR if metric is RMS else counts
            yield point, past, Followed(metric.sign * past.log, counts, prior, metric.floor, None, marks)


def _exact(one: tuple[PointRow, Past, Followed], metric: Metric) -> Walked:
    _, past, followed = one

    def worse(before: float, after: float) -> bool:
        return bool(metric.worse(*(metric.level(metric.sign * y) for y in (before, after))))

    codes = None if metric is REPEATABLE else past.state.tolist()
    return walk_exact(followed.y.tolist(), worse, codes, followed.marks, OLD)


def _is_exact(metric: Metric) -> bool:
    return metric.rule == "exact" or metric is REPEATABLE
