"""Split a history into levels at steps that A/B comparisons measured, and at returns from them.

To statistics, a few results on another level are scatter, in which a later change of any size could hide. So each level
that is over is shifted to the level that came after it. The history then has those steps alone that last, and no
scatter but that of its levels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.stats.histories import SeriesHistory, newest_environment
from groupbench.tracker.stats.thresholds import SURE, on_level, typical

LEVEL = 10
"""Largest number of newest results on a level that describe it."""
BEGINNING = 3
"""Largest number of first results that describe the newest level, since a new step may hide in the others."""


@dataclass(frozen=True)
class KnownStep:
    """A step that an A/B measured between two results, given by their places in the newest environment."""

    first: int  # the last result before
    last: int  # the first one after
    effect: float  # log

    def shows(self, y: NDArray[np.float64]) -> bool:
        """Return whether the results moved by half of the effect or more: the two, or the medians of three each."""
        before, after = y[max(self.first + 1 - BEGINNING, 0) : self.first + 1], y[self.last : self.last + BEGINNING]
        steps = float(after[0] - before[-1]), float(np.median(after) - np.median(before))
        return max(step / self.effect for step in steps) >= 0.5


def crossing(y: NDArray[np.float64], first: int, last: int) -> int:
    """Return the first result from which all up to `last` are nearer to that than to `first`."""
    place = last
    while place - 1 > first and abs(y[place - 1] - y[last]) < abs(y[place - 1] - y[first]):
        place -= 1
    return place


def shifts(
    history: SeriesHistory, steps: Iterable[KnownStep], is_noise: Callable[[int, float], bool]
) -> NDArray[np.float64]:
    """Return log distances [m] to add to the results in the newest environment, so that only steps that last remain.

    Args:
        is_noise: Whether a return to the level before a slowdown was noise, by its first result and the slowdown's
            effect.
    """
    y = history.log_ms[newest_environment(history.environment)]
    levels = _Levels(history, y, is_noise)
    begins = {crossing(y, step.first, step.last): step for step in steps if step.shows(y)}
    for place in range(len(y)):
        levels.add(place, begins.get(place))
    return levels.shifts()


def beginning(count: int) -> int:
    """Return how many of the newest level's results, 1 to `BEGINNING`, describe it."""
    return max(1, min(BEGINNING, count // 2))


def deviation(level: NDArray[np.float64]) -> float:
    """Return the standard deviation of the results on a level; 0 for one."""
    return float(np.std(level, ddof=1)) if len(level) > 1 else 0.0


@dataclass
class _Slowdown:
    """A slowdown that is not over."""

    start: int
    effect: float
    level: int  # the one before
    height: float
    sigma: float


@dataclass
class _Levels:
    """The levels of the results so far."""

    history: SeriesHistory
    y: NDArray[np.float64]
    is_noise: Callable[[int, float], bool]
    of: list[int] = field(default_factory=list)  # the level of each result; a later result may return to it
    start: int = 0  # of the newest level's newest results
    number: int = 1  # of levels
    slowdowns: list[_Slowdown] = field(default_factory=list)  # that are not over, oldest first
    improvements: list[int] = field(default_factory=list)  # their first results

    def add(self, place: int, step: KnownStep | None) -> None:
        """Add the next result. `step` begins with it."""
        level = self.of[-1] if self.of else 0
        if step is not None:
            if step.effect > 0:
                self.slowdowns.append(self._slowdown(place, step.effect, level))
            else:
                self.improvements.append(place)
            level = self._begin(place)
        self.of.append(level)
        self._end_slowdowns(place)

    def _begin(self, place: int) -> int:
        self.start = place
        self.number += 1
        return self.number - 1

    def _slowdown(self, place: int, effect: float, level: int) -> _Slowdown:
        before = self.y[:place][np.array(self.of) == level][-LEVEL:]
        return _Slowdown(place, effect, level, float(np.median(before)), self._sigma(before))

    def _end_slowdowns(self, place: int) -> None:
        """End the slowdowns that the newest results have come back from."""
        for at, slowdown in enumerate(self.slowdowns):
            latest, least = self.y[self.start : place + 1], self.history.min_effect
            count = on_level(latest.tolist(), slowdown.height, slowdown.effect, slowdown.sigma, least)
            back = place + 1 - count
            if not count or self.is_noise(back, slowdown.effect):
                continue
            off = abs(float(np.median(self.y[back : place + 1])) - slowdown.height)
            self.improvements = [start for start in self.improvements if start < slowdown.start]
            del self.slowdowns[at:]
            level = self._begin(back)
            if off <= max(least, SURE * slowdown.sigma / math.sqrt(count)):
                level = slowdown.level
            self.of[back:] = [level] * count
            return

    def shifts(self) -> NDArray[np.float64]:
        """Return the distance of each result to the last level of its stage; stages begin with steps that last."""
        of, newest = np.array(self.of), len(self.of) - self.start
        counts = np.arange(len(of)) < self.start + beginning(newest)
        heights = {level: float(np.median(self.y[(of == level) & counts])) for level in set(self.of)}
        stages = sorted({0, len(of), *self.improvements, *(each.start for each in self.slowdowns)})
        shifts = np.zeros(len(of))
        for start, stop in pairwise(stages):
            last = int(of[stop - 1])
            sigma = self._sigma(self.y[(of == last) & counts])
            for place in range(start, stop):
                level = int(of[place])
                if level == last:
                    continue
                off = float(self.y[place]) - heights[level]
                # Parts of a slowdown may be taken back before it is over, which is not the scatter of a level.
                shifts[place] = heights[last] - heights[level] - (off if abs(off) > SURE * sigma else 0.0)
        return shifts

    def _sigma(self, level: NDArray[np.float64]) -> float:
        return max(deviation(level), typical(self.history.error), self.history.floor)
