"""Follow the metrics of a run's points to their levels tonight."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

import numpy as np

from groupbench.tracker.facts.metrics import LATENCY, REPEATABLE, RMS, Metric
from groupbench.tracker.judge.evidence import OLD
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.incident_rows import MemberRow
from groupbench.tracker.judge.marks import Marks, code_marks, marks_of
from groupbench.tracker.judge.pasts import Past, codes_of
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.stats.exact import walk_exact
from groupbench.tracker.stats.predict import ENOUGH, FIRST, LAST, lower_median
from groupbench.tracker.stats.screen import Followed, OneLevel, Stacked, came_back, scatter, screen, worth
from groupbench.tracker.stats.thresholds import FLOOR, GROSS, least_effect, prior_scatter
from groupbench.tracker.stats.walk import NIGHTS, OUT, Level, Walked

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
        codes: The known code that was loaded, by series and run, if anything happened.
    """

    data: GateData
    point: PointRow
    metric: Metric
    past: Past
    own: Past
    followed: Followed
    walked: Walked
    codes: Mapping[tuple[int, int], int] = field(default_factory=dict)

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

    def since(self, start: int) -> range:
        """Return the places of the results from a place on."""
        return range(start, len(self.own))

    def span(self, start: int, base: int | None = None) -> Span:
        """Return the runs before and after a change at a place."""
        before = start - 1 if base is None else base
        return Span(self.run_at(before) if before >= 0 else None, self.run_at(max(start, 0)))

    def on_level(self, start: int, level: Level | None = None) -> list[int]:
        """Return the places of the results before a change that are on the level, by default the top one.

        Results nearer to tonight's than to the level are not: an A/B with their commits says nothing of the change.
        Nor does an A/B with those that may share tonight's level.
        """
        inside = self.walked.inside[0] if self.walked.inside and level is None else None
        level = self.walked.stack[-1] if level is None else level
        centre = level.centre_without(start)
        start = start if inside is None else min(start, inside)
        pairs = [pair for pair in zip(level.places, level.values, strict=True) if pair[0] < start]
        return [place for place, value in pairs if abs(value - centre) <= abs(value - self.value)]

    @cached_property
    def bases(self) -> list[int]:
        """The places of the results on the top level before those that are out.

        After an A/B with a newer one without an answer, only those on it by definition.
        """
        earlier, walked = self.on_level(self.begins), self.walked
        if walked.inside is not None or self.gradual:
            earlier = [place for place in earlier if place <= walked.stack[-1].sure]
        return earlier

    @property
    def base(self) -> int | None:
        """The newest of these."""
        return self.bases[-1] if self.bases else None

    @cached_property
    def gradual(self) -> bool:
        """Whether the newest nights show less than half of the distance: the level drifts."""
        top = self.walked.stack[-1]
        pairs = zip(top.places, top.values, strict=True)
        newest = [value for place, value in pairs if place < self.begins][-NIGHTS:]
        if len(top.places) <= FIRST or len(newest) < NIGHTS:
            return False
        return abs(self.value - lower_median(newest)) < abs(self.walked.distance) / 2

    def knowing(self, codes: Mapping[tuple[int, int], int]) -> Tonight:
        """Return the level with the code that was loaded: one that is back ends a change."""
        pairs = zip(self.own.run.tolist(), self.own.toolchain.tolist(), strict=True)
        loaded = [(codes.get((self.point.series.pk, run)), toolchain) for run, toolchain in pairs]
        marks = code_marks([None if code is None else (code, toolchain) for code, toolchain in loaded])
        if not marks or not self.steps:
            return replace(self, codes=codes)
        known = self.followed.marks
        every = {place: [*known.get(place, ()), *marks.get(place, ())] for place in known.keys() | marks.keys()}
        followed = replace(self.followed, marks=every)
        return replace(self, followed=followed, walked=followed.walked(), codes=codes)

    @property
    def left(self) -> float | None:
        """The distance of the level that tonight's result has left, from the one that it is on."""
        gone = [level for level in self.walked.levels if level.values and level not in self.walked.stack]
        return gone[-1].centre - self.walked.stack[-1].centre if gone else None

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

    def alert_in(self, start: int, stop: int | None = None) -> MemberRow | None:
        """Return the newest alert whose first run is at some places."""
        inside = set(self.own.run[max(start, 0) : stop].tolist())
        of_level = [each for each in self.alerts if each.run.pk in inside]
        return next((each for each in reversed(of_level) if not self.data.accepted(each)), None)

    @property
    def alerts(self) -> list[MemberRow]:
        stored = self.data.alerts.get(self.point.series.pk, ())
        return [each for each in stored if each.metric == self.metric.judged_as]

    @property
    def accepted_here(self) -> bool:
        """Whether a person accepted a level of the series on this machine."""
        runs = set(self.own.run.tolist())
        return any(self.data.accepted(each) and each.run.pk in runs for each in self.alerts)

    @property
    def accepted(self) -> MemberRow | None:
        """The alert whose level is expected and tonight's."""
        alert = self.data.alert(self.walked.stack[0].tag)
        return alert if len(self.walked.stack) == 1 and alert is not None and alert.state == "expected" else None

    @property
    def steps(self) -> Sequence[Level]:
        return self.walked.stack[1:]


def taken_back(one: Tonight) -> str | None:
    """Which slowdown an improvement takes back, if the oldest results before it are on the new level."""
    newer, top = one.walked.stack[0], one.walked.top
    slack = max(one.followed.least, 0.0 if top is None else top.deviation)
    old = [] if newer.replaced is None else zip(newer.replaced.places, newer.replaced.values, strict=True)
    places = [place for place, _ in itertools.takewhile(lambda each: abs(each[1] - newer.centre) <= slack, old)]
    if not places:
        return None
    return f"back on the level until {one.run_at(places[-1]).date}, before {one.run_at(places[-1] + 1).state}"


def same_code(one: Tonight, first: int, second: int) -> bool:
    """Return whether the results at two places are certainly of the same code."""
    loaded = [one.codes.get((one.point.series.pk, run)) for run in one.keys((first, second))]
    if loaded[0] is not None and loaded[0] == loaded[1]:
        return True
    return one.run_at(first).state.same_code(one.run_at(second).state)


def certain(one: Tonight, before: Iterable[int], level: Level | None = None) -> list[int]:
    """Return the places of earlier results too far from tonight's, or from a later level, to belong to it."""
    top = one.walked.top
    if top is None:
        return []
    now, number = (one.value, 1) if level is None else (level.centre_without(one.begins), len(level.values))
    far = top.reach(OUT) * math.sqrt(1 + 1 / max(number, 1))
    return [place for place in before if abs(float(one.followed.y[place]) - now) >= far]


def excluded(one: Tonight, before: Iterable[int], start: int) -> bool:
    """Return whether the code cannot be the reason for a change: it has an earlier result on another level."""
    return any(same_code(one, place, start) for place in certain(one, before))


def change(one: Tonight, start: int, before: Sequence[int], level: Level | None = None) -> Span:
    """Return the runs between which a change at `start` must be; `before` are the places on the level before.

    Noise may show it some results late. The first run is the oldest one with the code at `start`.
    """
    places = [] if one.exact else certain(one, before, level)
    base = places[-1] if places else start - 1
    while start - 1 > base and same_code(one, start - 1, start):
        start -= 1
    return one.span(start, base)


@dataclass(frozen=True)
class Together:
    """A metric for series that were measured in the same runs and environments.

    Attributes:
        data: The night's data.
        metric: The metric.
        points: Tonight's points [s].
        past: All series' results on every machine.
        here: Those on tonight's machine.
        stack: The series as they are followed.
        marks: Their A/Bs and alerts as marks, by place.
        level: Their levels if each is on one; None if all must be followed.
    """

    data: GateData
    metric: Metric
    points: Sequence[PointRow]
    past: Past
    here: Past
    stack: Stacked
    marks: Mapping[int, Marks]
    level: OneLevel | None = None

    @cached_property
    def calm(self) -> list[int]:
        """Places for series without A/Bs or alerts that are certainly on one level."""
        if self.level is None:
            return []
        return [at for at in np.flatnonzero(self.level.certain).tolist() if at not in self.marks]

    @property
    def eventful(self) -> list[Tonight]:
        """The other series."""
        calm = set(self.calm)
        return [self.tonight(at) for at in range(len(self.points)) if at not in calm]

    def tonight(self, at: int) -> Tonight:
        """Return one series."""
        calm = None if self.level is None else self.level.calm
        point, followed = self.points[at], self.stack.one(at, self.marks.get(at), calm)
        past, here = (each.one(at, point.series.pk) for each in (self.past, self.here))
        if _is_exact(self.metric):
            walked = _exact(here, followed, self.metric)
        elif self.level is not None and self.level.certain[at] and not self.marks.get(at):
            walked = self.level.walked(at)
        else:
            walked = followed.walked()
        return Tonight(self.data, point, self.metric, past, here, followed, walked)


def _screened(groups: Sequence[Together], ask: float) -> list[Together]:
    levels = screen([each.stack for each in groups], ask)
    return [replace(each, level=level) for each, level in zip(groups, levels, strict=True)]


class Latencies:
    """A night's latencies.

    Args:
        data: The night's data.
        ask: Chance of a result below which it is worth an A/B.

    Attributes:
        groups: All of them.
        eventful: Those that may have moved, by point key.
        calm: The others' group and place.
        returns: All series' results far from all before that came back.
    """

    def __init__(self, data: GateData, ask: float) -> None:
        self.groups = _screened(_with_priors(list(_latencies(data))), ask)
        self.eventful = {one.point.pk: one for group in self.groups for one in group.eventful}
        moved = [
            one for one in self.eventful.values()
            if one.steps or one.walked.nights or worth(one.walked, ask, one.followed.least) is not None
        ]  # fmt: skip
        codes = codes_of(data.session, {one.point.series.pk for one in moved})
        self.eventful |= {one.point.pk: one.knowing(codes) for one in moved}
        self.calm = {group.points[at].pk: (group, at) for group in self.groups for at in group.calm}
        gross = {timing: math.log1p(each) for timing, each in GROSS.items()}
        self.returns = came_back([(each.stack, gross[each.points[0].timing or "cpu"]) for each in self.groups])

    def get(self, point: int) -> Tonight | None:
        """Return a point's latency, by its key, or None without one."""
        if point not in self.calm:
            return self.eventful.get(point)
        group, at = self.calm[point]
        return group.tonight(at)


def _latencies(data: GateData) -> Iterator[Together]:
    timings = defaultdict(list)
    for point in data.points:
        if point.timed and point.timing is not None:
            timings[point.timing].append(point)
    for timing, points in timings.items():
        for places, past in data.pasts.latencies.alike([point.series.pk for point in points]):
            alike = data.pasts.of_its_toolchain(past)
            yield _of_timing(data, timing, [points[at] for at in places.tolist()], alike)


def _of_timing(data: GateData, timing: str, points: Sequence[PointRow], past: Past) -> Together:
    here = past.on_its_machine()
    ordered, n = np.sort(here.log, axis=1), len(here)  # a third of the time of np.median
    ms = np.exp((ordered[:, (n - 1) // 2] + ordered[:, n // 2]) / 2).tolist()
    counts, marks = [], {}
    for at, (point, level) in enumerate(zip(points, ms, strict=True)):
        series = point.series.pk
        by_plan = data.decisions.limits.get(series)
        least = least_effect(timing, level) if by_plan is None else by_plan
        counts.append(math.log1p(least if data.min_effect is None else data.min_effect))
        if series in data.alerts or series in data.comparisons:
            marks[at] = marks_of(data, here.one(at, series), LATENCY, counts[at])
    prior = np.array([prior_scatter(timing, level) for level in ms])
    stack = Stacked(here.log, np.array(counts), prior, np.full(len(points), FLOOR[timing]), here.error)
    return Together(data, LATENCY, points, past, here, stack, marks)


def _with_priors(groups: Sequence[Together]) -> list[Together]:
    """Return series with the prior scatter of the others of their pool, if there are enough."""
    pools: dict[tuple[object, ...], list[float]] = defaultdict(list)
    keys = []
    for group in groups:
        pairs = zip(group.points, group.stack.least.tolist(), strict=True)
        keys.append([_pool(point, least) for point, least in pairs])
        if len(group.here) > ENOUGH:
            for key, each in zip(keys[-1], scatter(group.here.log[:, -LAST - 1 : -1]).tolist(), strict=True):
                pools[key].append(each)
    priors = {key: max(median(each), 1e-9) for key, each in pools.items() if len(each) >= POOL}
    made = []
    for group, of_group in zip(groups, keys, strict=True):
        pooled = np.array([priors.get(key, math.nan) for key in of_group])
        prior = np.where(np.isnan(pooled), group.stack.prior, np.maximum(pooled, group.stack.floor))
        made.append(replace(group, stack=replace(group.stack, prior=prior)))
    return made


def _pool(point: PointRow, least: float) -> tuple[object, ...]:
    """Return the facts that series with similar noise share."""
    return point.timing, point.series.hardware, point.series.host, point.series.protocol, least


def others(data: GateData) -> dict[int, list[Tonight]]:
    """Return the other metrics' levels that may have moved, by point key."""
    by_point: dict[int, list[Tonight]] = defaultdict(list)
    for metric in (RMS, REPEATABLE, *data.metrics):
        groups = list(_changed(data, metric))
        for group in groups if _is_exact(metric) else _screened(groups, 0.0):
            for one in group.eventful:
                by_point[one.point.pk].append(one)
    return by_point


def _changed(data: GateData, metric: Metric) -> Iterator[Together]:
    """Yield the series of which a metric has changed by more than counts, or has an alert."""
    counts = 0.0 if _is_exact(metric) else math.log1p(metric.least)
    table = data.pasts.table(metric)
    maybe = table.moved(counts).union(data.alerts)
    points = [
        point for point in data.points
        if point.series.pk in maybe and point.status == "ok" and point.value(metric) is not None
    ]  # fmt: skip
    for places, past in table.alike([point.series.pk for point in points]):
        here = data.pasts.of_its_toolchain(past).on_its_machine()
        marks: dict[int, Marks] = {}
        for place, at in enumerate(places.tolist()):
            series = points[at].series.pk
            if series in data.alerts and (marks_here := marks_of(data, here.one(place, series), metric)):
                marks[place] = marks_here
        changed = np.ptp(here.log, axis=1) > counts if len(here) > 1 else np.zeros(len(places), dtype=bool)
        changed[list(marks)] = True
        kept = np.flatnonzero(changed)
        if not len(kept):
            continue
        if len(kept) < len(places):
            here = replace(here, log=here.log[kept], error=here.error[kept])
        arrays = (np.full(len(kept), each) for each in (counts, RMS_PRIOR if metric is RMS else counts, metric.floor))
        of_kept = {int(np.searchsorted(kept, place)): each for place, each in marks.items()}
        of_group = [points[at] for at in places[kept].tolist()]
        yield Together(
            data, metric, of_group, here, here, Stacked(here.log if metric.sign == 1 else -here.log, *arrays), of_kept
        )


def _exact(past: Past, followed: Followed, metric: Metric) -> Walked:

    def worse(before: float, after: float) -> bool:
        return bool(metric.worse(*(metric.level(metric.sign * y) for y in (before, after))))

    codes = None if metric is REPEATABLE else past.state.tolist()
    return walk_exact(followed.y.tolist(), worse, codes, followed.marks, OLD)


def _is_exact(metric: Metric) -> bool:
    return metric.rule == "exact" or metric is REPEATABLE
