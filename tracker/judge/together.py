"""Remove a run's common deviation from the histories of its series.

A metric that is relative to a measurement of the whole run, such as `sol_gap`, errs by that measurement's error in
every series at once. Without this, one run with a disturbed canary would make a suspect of each of them, and the error
would hide a change of one series.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.query.rows import PointRow

FEWEST = 6
"""Number of series on a run from which their median is a common deviation. With fewer, it would follow one of them."""

TINY, ROUNDING = 1e-300, 1e-6


def alone(measured: Sequence[tuple[PointRow, Past]]) -> list[tuple[PointRow, Past]]:
    """Return the pasts without the deviation that is common to all series of a machine with the same ceiling.

    On each run, it is the median over the series of the distance from each one's level, and 0 with few series.
    """
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for place, key in enumerate(_groups([point for point, _ in measured])):
        groups[key].append(place)
    corrected = list(measured)
    for places in groups.values():
        if len(places) >= FEWEST:
            common = _common([measured[place][1] for place in places])
            for place in places:
                point, past = measured[place]
                corrected[place] = point, past.less(np.array([common.get(run, 0.0) for run in past.run.tolist()]))
    return corrected


def _common(pasts: Sequence[Past]) -> dict[int, float]:
    """Return the median distance from the series' levels on each run that has enough of them."""
    distances: dict[int, list[float]] = defaultdict(list)
    for past in pasts:
        for run, distance in zip(past.run.tolist(), (past.log - np.median(past.log)).tolist(), strict=True):
            distances[run].append(distance)
    return {run: float(np.median(each)) for run, each in distances.items() if len(each) >= FEWEST}


def _groups(points: Sequence[PointRow]) -> list[Hashable]:
    """Return the machine of each point, and the ceiling that is the nearer one, of operations or of bandwidth.

    The highest rate and bandwidth that any point of a dtype would reach at the speed of light are the ceilings.
    """
    rate, bandwidth = _at_ceiling(points, "flops"), _at_ceiling(points, "min_bytes")
    kinds = [(point.environment.machine, point.series.dtype) for point in points]
    highest: dict[Hashable, NDArray[np.float64]] = {}
    for kind, amounts in zip(kinds, np.stack([rate, bandwidth], axis=1), strict=True):
        highest[kind] = np.maximum(highest.get(kind, amounts), amounts)
    return [
        (kind[0], bool(a / max(highest[kind][0], TINY) > b / max(highest[kind][1], TINY) - ROUNDING))
        for kind, a, b in zip(kinds, rate.tolist(), bandwidth.tolist(), strict=True)
    ]


def _at_ceiling(points: Sequence[PointRow], amount: str) -> NDArray[np.float64]:
    """Return each point's operations or bytes per ms at the speed of light, [n]; 0 if unknown."""
    gaps = [(point.metrics or {}).get("sol_gap", 0.0) / (point.median_ms or np.inf) for point in points]
    return np.array([getattr(point.series, amount) or 0 for point in points]) * np.array(gaps)
