"""Find records: points far outside everything that their series has shown, whatever other series look like.

A record is many standard deviations from the mean of the series' own earlier points, and farther out than any of them.
The standard deviation includes outliers, so a series with outliers needs a larger record. Pools and tails estimated
from other series play no role, so that a gate never misses a large change because of them. A series with many results
has shown its outliers: fewer standard deviations suffice there, if the point is several times as far out as any before.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from groupbench.tracker.stats.changepoints import MIN_SEGMENT

Floats = NDArray[np.float64]

RECENT = 20
"""Largest number of points after a change that is still new."""
RECORD = 19.0
"""Distance of a record in true sigma."""
CHANCE = 1e-3
"""Chance of a false record in the youngest series."""
SETTLED = 30
"""Number of earlier results that show how far a series' outliers reach, so that less is a record."""
SETTLED_RECORD, FARTHER = 10.0, 3.0
"""A record of such a series: standard deviations, and multiple of its farthest earlier result."""
DOUBLE = float(np.log(2))
"""Smallest distance of a record of a short history that scatters: a factor of two beyond all of its results."""
CLEAR = 6.0
"""Smallest distance of such a record from the others, in its standard errors."""
BACK = 0.4
"""Fraction of a record's distance below which a later result counts as back."""


@lru_cache(maxsize=512)
def record_distance(known: int, *, gross: bool = False) -> float:
    """Return the distance of a record, in standard deviations of `known` earlier results.

    It finds a step of `RECORD` true sigmas in 98 of 100 Gaussian series. With three or four results the measured sigma
    varies so much that the distance must be larger, unless the change is `gross`.
    """
    if known < 3:
        return np.inf
    widest = float(np.sqrt(special.chdtri(known - 1, 0.02) / (known - 1)))
    chance = float(special.stdtrit(known - 1, 1 - CHANCE / 2)) * float(np.sqrt(1 + 1 / known))
    distance = (RECORD - 2.05) / widest
    return distance if gross else max(distance, chance)


def records(
    y: Floats,  # [m, n] series whose newest level begins at the same place
    error: Floats,  # [m, n] 0 if unknown
    floor: Floats,  # [m]
    gross: Floats,  # [m]
    begin: int,
    doubles: NDArray[np.bool_],  # [m] whether a factor of two beyond a few scattered points is a record
) -> NDArray[np.bool_]:
    """Return which of the newest `RECENT` points were records when they were the newest, [m, RECENT].

    The last column is tonight. Mean and deviation are taken over the points since `begin`: at least three, or
    `MIN_SEGMENT` if another level precedes them.
    """
    m, n = y.shape
    seen = np.zeros((m, RECENT), dtype=bool)
    places = np.arange(max(begin + (MIN_SEGMENT if begin else 3), n - RECENT), n)
    if not len(places):
        return seen
    earlier = (places - begin).astype(np.float64)
    recent = y[:, begin:] - np.median(y[:, begin:], axis=1, keepdims=True)
    sums, squares = np.cumsum(recent, axis=1), np.cumsum(recent**2, axis=1)
    level = sums[:, places - begin - 1] / earlier
    scatter = np.sqrt(np.maximum((squares[:, places - begin - 1] - earlier * level**2) / (earlier - 1), 0.0))
    scatter = np.maximum(np.maximum(scatter, floor[:, None]), error[:, places])
    distance = np.abs(recent[:, places - begin] - level)
    reach = np.array([[record_distance(int(one), gross=big) for one in earlier] for big in (False, True)])
    reach = np.where((distance > gross[:, None]) & (earlier < MIN_SEGMENT), reach[1], reach[0])
    highest, lowest = np.maximum.accumulate(y, axis=1)[:, places - 1], np.minimum.accumulate(y, axis=1)[:, places - 1]
    outside = (y[:, places] > highest) | (y[:, places] < lowest)
    widest = np.maximum(
        np.maximum.accumulate(recent, axis=1)[:, places - begin - 1] - level,
        level - np.minimum.accumulate(recent, axis=1)[:, places - begin - 1],
    )
    # In a short history, an older step counts as scatter, and could hide a change of any size.
    few = (earlier > 3) & (earlier < 2 * MIN_SEGMENT) & doubles[:, None]
    apart = np.maximum(np.maximum(highest - lowest, CLEAR * error[:, places]), DOUBLE)
    doubled = few & (np.maximum(y[:, places] - highest, lowest - y[:, places]) > apart)
    settled = (earlier >= SETTLED) & (distance > SETTLED_RECORD * scatter) & (distance > FARTHER * widest)
    seen[:, places - n] = outside & ((distance > reach * scatter) | settled | doubled)
    return seen


def standing_record(y: Floats, seen: NDArray[np.bool_], begin: int, min_effect: float) -> int:
    """Return the first record that no later night has reversed, or -1. y: [n]; seen: [RECENT]."""
    n = len(y)
    for index in (np.flatnonzero(seen) + n - RECENT).tolist():
        off = y[index:] - float(np.median(y[begin:index]))
        if abs(off[0]) >= min_effect and (index == n - 1 or float((off[1:] / off[0]).min()) >= BACK):
            return int(index)
    return -1


def newer_record(
    y: Floats,  # [n]
    error: Floats,  # [n] 0 if unknown
    floor: float,
    gross: float,
    begin: int,
    record: int,
    worse: float,  # 1 or -1, sign of a change for the worse
    min_effect: float,
) -> int:
    """Return the first point after a standing record that is one of the level since, for the worse, or -1.

    Without it, the first of two changes would hide the second until its level has enough points. The scatter is that
    of the points `begin` .. `record`, or of those since if they scatter more. An improvement does not count, because it
    would hide what is left of the first change.
    """
    off = y * worse
    known = record - begin
    scatter = max(float(np.std(off[begin:record], ddof=1)), floor)
    for index in range(record + 1, len(y)):
        since = off[record:index]
        distance = off[index:] - float(np.median(since))
        widest = max(scatter, float(np.std(since, ddof=1)) if len(since) > 2 else 0.0, float(error[index]))
        reach = record_distance(known, gross=distance[0] > gross and known < MIN_SEGMENT)
        is_record = distance[0] > reach * widest * np.sqrt(1 + 1 / len(since)) and off[index] > since.max()
        if is_record and distance[0] >= min_effect and distance.min() >= BACK * distance[0]:
            return index
    return -1
