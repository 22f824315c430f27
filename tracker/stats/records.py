"""Points that lie far outside everything their series has shown: news whatever other series are like.

A record is so many standard deviations of the series' own earlier points away from their mean, and farther than any of
them. The deviation is the plain one, outliers included, so that a series with outliers asks for more; and neither pools
nor tails that were learnt from others have a say. That is what keeps a gate from being silent about a large change.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

from groupbench.tracker.stats.changepoints import MIN_SEGMENT

Floats = NDArray[np.float64]

RECENT = 20
"""A change with at most so many points after it is new."""
RECORD = 19.0
"""Sigmas that are a record, whatever the noise of other series."""
CHANCE = 1e-3
"""How frequently the youngest series may show one by chance."""
BACK = 0.4
"""Share of a record below which a later result has gone back."""


@lru_cache(maxsize=512)
def record_distance(known: int, *, gross: bool = False) -> float:
    """Return how many standard deviations of `known` earlier results make a record.

    As many as find a step of `RECORD` true sigmas in 98 of 100 Gaussian series, in which the measured ones vary. Of
    three or four results they vary so much that it takes more, unless the change is `gross` in itself.
    """
    if known < 3:
        return np.inf
    widest = float(np.sqrt(special.chdtri(known - 1, 0.02) / (known - 1)))
    chance = float(special.stdtrit(known - 1, 1 - CHANCE / 2)) * float(np.sqrt(1 + 1 / known))
    distance = (RECORD - 2.05) / widest
    return distance if gross else max(distance, chance)


def records(
    y: Floats,  # [m, n] of series whose newest level begins at the same place
    error: Floats,  # [m, n] 0 where unknown
    floor: Floats,  # [m]
    gross: Floats,  # [m]
    begin: int,
) -> NDArray[np.bool_]:
    """Return which of the newest `RECENT` points were a record when they were the newest, [m, RECENT].

    The last column is tonight. Mean and deviation are those of the points since `begin`, at least three; at least
    `MIN_SEGMENT` where another level was before them.
    """
    m, n = y.shape
    seen = np.zeros((m, RECENT), dtype=bool)
    places = np.arange(max(begin + (MIN_SEGMENT if begin else 3), n - RECENT), n)
    if not len(places):
        return seen
    known = (places - begin).astype(np.float64)
    recent = y[:, begin:] - np.median(y[:, begin:], axis=1, keepdims=True)
    sums, squares = np.cumsum(recent, axis=1), np.cumsum(recent**2, axis=1)
    level = sums[:, places - begin - 1] / known
    own = np.sqrt(np.maximum((squares[:, places - begin - 1] - known * level**2) / (known - 1), 0.0))
    own = np.maximum(np.maximum(own, floor[:, None]), error[:, places])
    distance = np.abs(recent[:, places - begin] - level)
    reach = np.array([[record_distance(int(one), gross=big) for one in known] for big in (False, True)])
    reach = np.where((distance > gross[:, None]) & (known < MIN_SEGMENT), reach[1], reach[0])
    highest, lowest = np.maximum.accumulate(y, axis=1)[:, places - 1], np.minimum.accumulate(y, axis=1)[:, places - 1]
    outside = (y[:, places] > highest) | (y[:, places] < lowest)
    seen[:, places - n] = outside & (distance > reach * own)
    return seen


def standing_record(y: Floats, seen: NDArray[np.bool_], begin: int, min_effect: float) -> int:
    """Return the first record of a series that no night after it has taken back, or -1. y: [n]; seen: [RECENT]."""
    n = len(y)
    for index in (np.flatnonzero(seen) + n - RECENT).tolist():
        off = y[index:] - float(np.median(y[begin:index]))
        if abs(off[0]) >= min_effect and (index == n - 1 or float((off[1:] / off[0]).min()) >= BACK):
            return int(index)
    return -1
