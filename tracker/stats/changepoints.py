"""Find the changes of level of a series by optimal partitioning, for many series of equal length at once.

The cost of a segment is the sum of squares about its mean, and each further segment costs a penalty (Jackson et al.,
"An algorithm for optimal partitioning of data on an interval", 2005). The best partition is found exactly in n^2 / 2
steps, each over all series. Outliers are clipped first: a point more than 3 sigma from the median of its neighbours
moves to 3 sigma. A single outlier then never makes a segment, while a run of `LEVEL` of them does.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NEIGHBOURS = 11
"""Width of the running median about which outliers are clipped."""
CLIP = 3.0
"""Distance from it, in sigma, at which they are clipped."""
LEVEL = 4
"""Smallest number of points between two changes. As many on one side are a level, not outliers.

The newest segment may be shorter."""
MIN_SEGMENT = 5
"""Smallest number of points on either side of a certain change."""


def tamed(y: Floats, sigma: Floats) -> Floats:
    """Return y [m, n] with outliers clipped to 3 sigma [m] from the running median."""
    n = y.shape[1]
    width = min(NEIGHBOURS, n)
    half, reach = width // 2, CLIP * sigma
    # A running median is at least the lowest median that any `width` points of the row have, and at most the highest.
    # Few points are far from those, and only they need their own median.
    low, high = np.partition(y, (half, n - width + half), axis=1)[:, (half, n - width + half)].T
    row, column = np.nonzero((y > (low + reach)[:, None]) | (y < (high - reach)[:, None]))
    windows = np.lib.stride_tricks.sliding_window_view(y, width, axis=1)
    start = np.clip(column - (width - 1) // 2, 0, n - width)
    centre = np.sort(windows[row, start], axis=1)[:, half]
    far = np.zeros(y.shape)
    far[row, column] = np.sign(y[row, column] - centre) * (np.abs(y[row, column] - centre) > reach[row])
    alone = ~_in_runs(far)[row, column]
    row, column, centre = row[alone], column[alone], centre[alone]
    clipped = y.copy()
    clipped[row, column] = np.clip(y[row, column], centre - reach[row], centre + reach[row])
    return clipped


def _in_runs(far: Floats) -> NDArray[np.bool_]:
    """Return which points are in a run of at least `LEVEL` on one side; far: [m, n], -1, 0 or 1."""
    m, n = far.shape
    inside = np.zeros((m, n), dtype=bool)
    if n < LEVEL:
        return inside
    sums = np.lib.stride_tricks.sliding_window_view(far, LEVEL, axis=1).sum(axis=2)
    row, column = np.nonzero(np.abs(sums) == LEVEL)
    for offset in range(LEVEL):
        inside[row, column + offset] = True
    return inside


def partition(x: Floats, penalty: float) -> list[tuple[int, ...]]:
    """Return the first points of all segments but the first, for each row of x [m, n] with unit noise variance.

    Args:
        penalty: Cost of a segment, in squared sigma.
    """
    starts: list[tuple[int, ...]] = []
    for at in range(0, len(x), 256):
        starts += _partition(x[at : at + 256], penalty)
    return starts


def without_neighbours(x: Floats, starts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first points of segments without points that only the smallest length of a segment put there.

    x: [n]. A level of three points would otherwise take one from the level before or after it.
    """
    ends = [0, *starts, len(x)]
    for at in range(1, len(ends) - 2):
        start, stop = ends[at : at + 2]
        if stop - start == LEVEL:
            inner = [(start + cut, stop) for cut in range(LEVEL)] + [(start, stop - cut) for cut in range(1, LEVEL)]
            ends[at], ends[at + 1] = min(inner, key=lambda part: _squares(x, (ends[at - 1], *part, ends[at + 2])))
    return tuple(ends[1:-1])


def _squares(x: Floats, ends: tuple[int, ...]) -> float:
    """Return the sum of squares about the mean of each segment between successive ends."""
    return sum(float(np.var(x[a:b])) * (b - a) for a, b in pairwise(ends))


def _partition(x: Floats, penalty: float) -> list[tuple[int, ...]]:
    m, n = x.shape
    sums = np.zeros((m, n + 1))
    np.cumsum(x - x.mean(axis=1, keepdims=True), axis=1, out=sums[:, 1:])
    gain = np.full((m, n + 1), -np.inf)  # of the best partition of the first t points
    gain[:, 0] = 0.0
    last = np.zeros((m, n + 1), dtype=np.int64)
    rows = np.arange(m)
    for t in range(1, n + 1):
        stop = n if t == n else max(t - LEVEL + 1, 1)
        each = sums[:, :stop] - sums[:, t, None]
        each *= each
        each /= np.arange(t, t - stop, -1)
        each += gain[:, :stop]
        best = each.argmax(axis=1)
        gain[:, t] = each[rows, best] - penalty
        last[:, t] = best
        if t < LEVEL and t < n:
            gain[:, t] = -np.inf  # too short to be a segment
    starts_by_row: list[tuple[int, ...]] = [()] * m
    for row in np.flatnonzero(last[:, n]):
        starts, t = [], int(last[row, n])
        while t > 0:
            starts.append(t)
            t = int(last[row, t])
        starts_by_row[row] = tuple(reversed(starts))
    return starts_by_row
