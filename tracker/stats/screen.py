"""Follow many series at once: only those to which something may have happened are followed night by night.

The others are on one level: no three results in a row are out, and tonight's result is not worth an A/B. Their
distributions are computed together, as `predict` would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.stats.predict import (
    FIRST,
    LAST,
    LEFT_OUT,
    LEFT_OUT_FROM,
    MEDIAN_VARIANCE,
    PRIOR_WEIGHT,
    Predicted,
)  # fmt: skip
from groupbench.tracker.stats.student import quantile
from groupbench.tracker.stats.thresholds import MAD_SD
from groupbench.tracker.stats.walk import NIGHTS, TO_SUSPECT, Level, Mark, Walked, walk

Floats = NDArray[np.float64]

FEW = 300
"""Number of series that are all followed night by night."""
APART = 2.0
"""Standard deviations beyond which three results in a row make a series worth following."""

SLACK = 1.2
"""Factor on the chance of the newest results, since the centre of the night before may have been another."""


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
    """

    y: Floats
    least: float
    prior: float
    floor: float = 0.0
    errors: Floats | None = None
    marks: Mapping[int, Sequence[Mark]] = field(default_factory=dict)

    def walked(self) -> Walked:
        errors = None if self.errors is None else self.errors.tolist()
        return walk(self.y.tolist(), self.least, self.prior, self.marks, errors, self.floor)


def follow(series: Sequence[Followed], ask: float) -> list[Walked]:
    """Return where each series is tonight.

    Args:
        series: The series.
        ask: Chance of tonight's result below which a series is worth an A/B.
    """
    if len(series) <= FEW:
        return [one.walked() for one in series]
    walked: dict[int, Walked] = {}
    by_length: dict[int, list[int]] = defaultdict(list)
    for at, one in enumerate(series):
        if one.marks or len(one.y) <= LEFT_OUT_FROM + 1:
            walked[at] = one.walked()
        else:
            by_length[len(one.y)].append(at)
    for places in by_length.values():
        for at, one_level in zip(places, _on_one_level([series[at] for at in places], ask), strict=True):
            walked[at] = one_level or series[at].walked()
    return [walked[at] for at in range(len(series))]


def _on_one_level(series: Sequence[Followed], ask: float) -> list[Walked | None]:
    """Return where series of one length are, None for those that must be followed night by night."""
    y = np.stack([one.y for one in series])
    least, prior, floor = (np.array([getattr(one, name) for one in series]) for name in ("least", "prior", "floor"))
    kept = y[:, : -1 - LEFT_OUT]
    first = kept[:, :FIRST]
    centre = np.sort(first, axis=1)[:, (first.shape[1] - 1) // 2]
    newest = kept[:, -LAST:]
    n = newest.shape[1]
    middle = np.sort(newest, axis=1)[:, (n - 1) // 2]
    spread = MAD_SD * np.sort(np.abs(newest - middle[:, None]), axis=1)[:, n // 2]
    variance = (PRIOR_WEIGHT * prior**2 + (n - 1) * spread**2) / (n + PRIOR_WEIGHT - 1)
    deviation = np.maximum(np.sqrt(variance), floor) * np.sqrt(1 + MEDIAN_VARIANCE / first.shape[1])
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
    results = y.shape[1] - 1
    followed: list[Walked | None] = []
    for at in range(len(series)):
        if follow[at]:
            followed.append(None)
            continue
        level = Level(0, known=float(centre[at]))
        predicted = Predicted(float(centre[at]), float(deviation[at]), freedom)
        followed.append(Walked((level,), (level,), predicted, predicted, float(distance[at]), results=results))
    return followed
