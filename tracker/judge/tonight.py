"""The level of one series tonight, with the places of its results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from groupbench.tracker.judge.alerts import AlertRow
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.stats.predict import FIRST, lower_median
from groupbench.tracker.stats.screen import Followed
from groupbench.tracker.stats.walk import NIGHTS, Level, Walked


@dataclass(frozen=True)
class Tonight:
    """The level of a series tonight.

    Attributes:
        data: The night's data.
        point: Tonight's point.
        past: Results on every machine.
        own: Those on tonight's machine. A place is an index of these.
        followed: The series as it was followed.
        walked: The levels tonight.
    """

    data: GateData
    point: PointRow
    past: Past
    own: Past
    followed: Followed
    walked: Walked

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
        """Return the runs between which a change was that begins at a place."""
        before = start - 1 if base is None else base
        return Span(self.run_at(before) if before >= 0 else None, self.run_at(max(start, 0)))

    def on_level(self, start: int, level: Level | None = None) -> list[int]:
        """Return the places of the results before a change that are on the level, by default the top one.

        Results nearer to tonight's than to the level are not: an A/B with their commits says nothing of the change.
        """
        level = self.walked.stack[-1] if level is None else level
        centre = level.centre_without(start)
        pairs = [pair for pair in zip(level.places, level.values, strict=True) if pair[0] < start]
        return [place for place, value in pairs if abs(value - centre) <= abs(value - self.value)]

    @cached_property
    def base(self) -> int | None:
        """The newest result on the top level before those that are out."""
        earlier = self.on_level(self.begins)
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

    def alert_in(self, level: Level, stop: int | None) -> AlertRow | None:
        """Return the newest alert whose first run is on a level."""
        runs = self.own.run.tolist()
        stop = len(runs) if stop is None else stop
        inside = set(runs[max(level.start, 0) : stop])
        alerts = self.data.alerts.get(self.point.series.pk, ())
        of_level = [each for each in alerts if each.metric == "latency" and each.run.pk in inside]
        return next((each for each in reversed(of_level) if not self.data.accepted(each)), None)

    @property
    def accepted_here(self) -> bool:
        """Whether a person accepted a level of the series on this machine."""
        alerts = self.data.alerts.get(self.point.series.pk, ())
        runs = set(self.own.run.tolist())
        return any(each.metric == "latency" and self.data.accepted(each) and each.run.pk in runs for each in alerts)

    @property
    def steps(self) -> Sequence[Level]:
        return self.walked.stack[1:]
