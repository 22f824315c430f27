"""Follow many series at once: only those to which something may have happened are followed night by night.

The others are on one level: no three results in a row are out, and tonight's result is not worth an A/B. Their
distributions are computed together, as `predict` would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.stats import predict
from groupbench.tracker.stats.predict import FIRST, LAST, LEFT_OUT, LEFT_OUT_FROM, PRIOR_WEIGHT, Predicted
from groupbench.tracker.stats.student import quantile
from groupbench.tracker.stats.thresholds import BLIND, MAD_SD
from groupbench.tracker.stats.walk import NIGHTS, OUT, TO_SUSPECT, Level, Mark, Walked, walk

Floats = NDArray[np.float64]

FEW = 300
"""Number of series that are all followed night by night."""
APART = 2.0
"""Standard deviations beyond which three results in a row make a series worth following."""

ASKED = 3.0
"""Number of A/Bs in a quiet night by chance, in each direction."""
LEAST_ASKED, MOST_ASKED = 0.01, 0.3
"""Bounds of the chance below which a result is worth an A/B."""
BETTER = 5.0
"""A result for the better is worth an A/B at a chance this much smaller."""
YOUNG = 2
"""Number of earlier results up to which every slowdown that counts is worth an A/B."""
NEARLY = 1 - 1e-9
"""Factor for rounding: sums of arrays and of single values differ."""
SLACK = 1.2
"""Factor on the chance of the newest results, since the centre of the night before may have been another."""


def ask_of(series: int) -> float:
    """Return the chance of a result below which it is worth an A/B, in a night of this many latencies."""
    return min(max(ASKED / max(series, 1), LEAST_ASKED), MOST_ASKED)


def worth(walked: Walked, ask: float, least: float) -> float | None:
    """Return the chance of tonight's result and the nights before it, or None if it is not worth an A/B."""
    if not walked.results:
        return None
    ask = ask if walked.distance > 0 else ask / BETTER
    hides = walked.results <= YOUNG or (walked.top is not None and walked.top.reach(OUT) > math.log1p(BLIND))
    if walked.far or (hides and walked.distance > least):
        ask = 1.0
    runs = range(1, len(walked.ps) + 1)
    return min((max(walked.ps[:k]) ** k for k in runs if max(walked.ps[:k]) <= ask ** (1 / k)), default=None)


@dataclass(frozen=True)
class Followed:
    """A series to follow.

    Attributes:
        y: Logarithms [n] of the results on one machine, oldest first.
        least: Smallest distance that counts.
        prior: Standard deviation to assume without results.
        floor: Smallest standard deviation.
        errors: Standard errors [n] of the results; NaN if unknown.
        marks: The known facts, by place.
        calm: Results [n] certainly on the first level, if those before are; see `calm_nights`.
    """

    y: Floats
    least: float
    prior: float
    floor: float = 0.0
    errors: Floats | None = None
    marks: Mapping[int, Sequence[Mark]] = field(default_factory=dict)
    calm: NDArray[np.bool_] | None = None

    def walked(self) -> Walked:
        errors, calm = (None if each is None else each.tolist() for each in (self.errors, self.calm))
        return walk(self.y.tolist(), self.least, self.prior, self.marks, errors, self.floor, calm)


@dataclass(frozen=True)
class Stacked:
    """Equally long series [s] to follow, with the fields in `Followed` as arrays: y and errors [s, n], others [s]."""

    y: Floats
    least: Floats
    prior: Floats
    floor: Floats
    errors: Floats | None = None

    def __len__(self) -> int:
        return len(self.y)

    def one(
        self,
        at: int,
        marks: Mapping[int, Sequence[Mark]] | None = None,
        calm: NDArray[np.bool_] | None = None,  # [s, n]
    ) -> Followed:
        """Return one series, with marks."""
        errors, calm = (None if each is None else each[at] for each in (self.errors, calm))
        least, prior, floor = (float(each[at]) for each in (self.least, self.prior, self.floor))
        return Followed(self.y[at], least, prior, floor, errors, marks or {}, calm)


@dataclass(frozen=True)
class OneLevel:
    """Series [s] as they are if they are on one level.

    Attributes:
        certain: Whether a series certainly is. The others must be followed night by night.
        calm: Results [s, n] of the others certainly on the first level, if those before are.
        centre: The level.
        deviation: Standard deviation of the next result.
        distance: Of tonight's result from the level.
        freedom: The deviation's degrees of freedom.
        results: Number of earlier results.
    """

    certain: NDArray[np.bool_]
    calm: NDArray[np.bool_]
    centre: Floats
    deviation: Floats
    distance: Floats
    freedom: int
    results: int

    def predicted(self, at: int) -> Predicted:
        """Return the distribution of one series' next result."""
        return Predicted(float(self.centre[at]), float(self.deviation[at]), self.freedom)

    def walked(self, at: int) -> Walked:
        """Return one series' level."""
        level = Level(0, known=float(self.centre[at]))
        predicted = self.predicted(at)
        return Walked((level,), (level,), predicted, predicted, float(self.distance[at]), results=self.results)


def screen(stacks: Sequence[Stacked], ask: float) -> list[OneLevel | None]:
    """Return the series that are certainly on one level, for each stack; None if all must be followed.

    Args:
        stacks: A night's series.
        ask: Chance of tonight's result below which a series is worth an A/B.
    """
    few = sum(map(len, stacks)) <= FEW
    return [None if few or each.y.shape[1] <= LEFT_OUT_FROM + 1 else _on_one_level(each, ask) for each in stacks]


@dataclass(frozen=True)
class Returns:
    """All series' results that were farther from all before than those from each other, and came back.

    Attributes:
        distance: Of each from the lowest result before, [k].
        seen: Number of all series' results after the first, without the newest.
    """

    distance: Floats
    seen: int

    def share(self, distance: float) -> float:
        """Return the share of all results that were about as far and came back.

        It is a count, so whatever the noise, first nights that are rarer raise no more false alarms than their limit.
        One result alone never counts.
        """
        number = int((self.distance >= predict.AS_FAR * distance).sum())
        return number / self.seen if number >= predict.PRECEDENTS else 0.0


def came_back(stacks: Sequence[tuple[Stacked, float]]) -> Returns:
    """Find the results far from all before that came back.

    Args:
        stacks: A night's series, with the gross distance that counts after fewer than `ENOUGH` results.
    """
    distance, seen = [np.zeros(0)], 0
    for series, gross in stacks:
        y = series.y
        high, low = (extreme.accumulate(y, axis=1)[:, :-2] for extreme in (np.maximum, np.minimum))
        limit = low + np.maximum(2 * (high - low), series.least[:, None])
        limit[:, : predict.ENOUGH - 1] = np.maximum(limit, low + gross)[:, : predict.ENOUGH - 1]
        rows, columns = np.nonzero((y[:, 1:-1] > limit) & (y[:, 2:] <= limit))
        distance.append(y[rows, columns + 1] - low[rows, columns])
        seen += limit.size
    return Returns(np.concatenate(distance), seen)


def scatter(values: Floats) -> Floats:
    """Return each row's robust standard deviation, as `predict` does."""
    n = values.shape[1]
    middle = np.sort(values, axis=1)[:, (n - 1) // 2]
    return MAD_SD * np.sort(np.abs(values - middle[:, None]), axis=1)[:, n // 2]


def _on_one_level(series: Stacked, ask: float) -> OneLevel:
    y, least = series.y, series.least
    kept = y[:, : -1 - LEFT_OUT]
    first = kept[:, :FIRST]
    centre = np.sort(first, axis=1)[:, (first.shape[1] - 1) // 2]
    newest = kept[:, -LAST:]
    n = newest.shape[1]
    deviation = _deviation(newest, series.prior, series.floor, first.shape[1])
    away = y - centre[:, None]
    limit = np.maximum(least, APART * deviation)[:, None]
    follow = np.zeros(len(series), dtype=bool)
    for out in (away > limit, away < -limit):
        in_a_row = out[:, NIGHTS - 1 :]
        for shift in range(1, NIGHTS):
            in_a_row = in_a_row & out[:, NIGHTS - 1 - shift : y.shape[1] - shift]
        follow |= in_a_row.any(axis=1)
    follow |= (away[:, -1 - TO_SUSPECT : -1] < -limit).all(axis=1)  # tonight may have lost an improvement
    distance = away[:, -1]
    freedom = n + PRIOR_WEIGHT - 1
    far = np.abs(away[:, -NIGHTS:])
    for number in range(1, NIGHTS + 1):
        side = np.sign(away[:, -number:])
        nearest = far[:, -number:].min(axis=1)
        needed = quantile(min(SLACK * ask ** (1 / number), 0.5), freedom) * deviation
        follow |= (side == side[:, -1:]).all(axis=1) & (nearest > least) & (nearest >= needed)
    high, low = y[:, :-NIGHTS].max(axis=1), y[:, :-NIGHTS].min(axis=1)
    follow |= (y[:, -1] > 2 * high - low) & (distance > least)  # it may be beyond all others
    follow |= (quantile(OUT, freedom) * deviation > math.log1p(BLIND)) & (distance > least)  # the scatter may hide it
    calm = np.zeros(y.shape, dtype=bool)
    calm[follow] = calm_nights(Stacked(y[follow], least[follow], series.prior[follow], series.floor[follow]))
    return OneLevel(~follow, calm, centre, deviation, distance, freedom, y.shape[1] - 1)


def calm_nights(series: Stacked) -> NDArray[np.bool_]:  # [s, n]
    """Return the results to add to the first level without a look at their chance.

    They are neither out nor beyond the others, if no result has left the first level and the one before is neither. The
    newest results are followed one by one, since their chances are shown.
    """
    y = series.y
    calm = np.zeros(y.shape, dtype=bool)
    first = np.sort(y[:, :FIRST], axis=1)
    low, high = np.minimum.accumulate(y, axis=1), np.maximum.accumulate(y, axis=1)
    for place in range(LEFT_OUT_FROM + 1, y.shape[1] - NIGHTS):
        number = min(place - LEFT_OUT, FIRST)
        ordered = first if number == y[:, :FIRST].shape[1] else np.sort(y[:, :number], axis=1)
        distance = y[:, place] - ordered[:, (number - 1) // 2]
        calm[:, place] = np.abs(distance) <= series.least
        rows = np.flatnonzero(~calm[:, place])
        kept = y[rows, max(place - LEFT_OUT - LAST, 0) : place - LEFT_OUT]
        n = kept.shape[1]
        reach = quantile(OUT, n + PRIOR_WEIGHT - 1) * _deviation(kept, series.prior[rows], series.floor[rows], number)
        span = high[rows, place - 1] - low[rows, place - 1]
        inside = (y[rows, place] <= high[rows, place - 1] + span) & (y[rows, place] >= low[rows, place - 1] - span)
        calm[rows, place] = inside & (np.abs(distance[rows]) < NEARLY * reach)
    return calm


def _deviation(kept: Floats, prior: Floats, floor: Floats, first: int) -> Floats:
    """Return the standard deviation of the next results, as `predict` does."""
    n = kept.shape[1]
    variance = (PRIOR_WEIGHT * prior**2 + (n - 1) * scatter(kept) ** 2) / (n + PRIOR_WEIGHT - 1)
    deviation: Floats = np.maximum(np.sqrt(variance), floor) * np.sqrt(1 + predict.MEDIAN_VARIANCE / first)
    return deviation
