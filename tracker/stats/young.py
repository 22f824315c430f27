"""Steps that statistics cannot judge: those of a short history, and those between two commits that an A/B compared.

A history of fewer than ten results has no segments, so a step inside it counts as scatter. It is a suspect if both
levels are far apart, compared with their own scatter and with the bursts of their results, or if their means differ by
more than scatter explains. The newest result alone is left to `records.py` as soon as that can judge it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy import special

from groupbench.tracker.stats.batches import MIN_POINTS
from groupbench.tracker.stats.changepoints import MIN_SEGMENT
from groupbench.tracker.stats.histories import SeriesFinding, SeriesHistory, newest_environment
from groupbench.tracker.stats.known import LEVEL, crossing, deviation
from groupbench.tracker.stats.thresholds import typical

FEWEST = 3
"""Smallest number of results in which two agree against a third."""
FAR = 2.0
"""Smallest distance of two such levels, as a multiple of a gross change; a single outlier can be a gross change."""
SIGMAS = 6.0
"""Smallest distance in standard errors of a result."""
AGREE = 2.0
"""Smallest distance as a multiple of the range of the results on a level."""
CHANCE = 1e-3
"""Chance that results of one level look like two, by Student's t, if their ranges are too wide for `AGREE`."""
NEWEST = 3
"""Number of newest results that show whether a level is still there."""


def find_step(history: SeriesHistory, since: int = 0) -> SeriesFinding | None:
    """Return the clearest step to the newest level of a short history as a suspect, or None.

    Args:
        since: The first result after a known step, which two results suffice to contradict; 0 without one.
    """
    place = newest_environment(history.environment)
    start = int(np.searchsorted(place, since))
    place = place[start:]
    n = len(place)
    if not (2 if since else FEWEST) <= n < 2 * MIN_SEGMENT:
        return None
    # An A/B decides. It is cheap enough for every change that counts, while nothing else can judge the series.
    few = since and start + n < MIN_POINTS
    far = history.min_effect if few else max(FAR * history.gross, history.min_effect)
    state = history.state[place]
    ends = (k for k in range(1, n) if state[k - 1] != state[k] and (k < n - 1 or n < MIN_POINTS))
    steps = [(gap, k) for k in ends if (gap := _clear_gap(history, place, k, far)) > 0]
    if not steps:
        return None
    k = max(steps)[1]
    before, after = f"{k} before", f"{n - k} since"
    return step_between(
        history, start + k - 1, start + k, f"far outside the scatter of few results: {before}, {after}", start=start
    )


def _clear_gap(history: SeriesHistory, place: NDArray[np.int64], k: int, far: float) -> float:
    """Return the distance between the results before `k` and since; 0 if it is not outside their scatter."""
    y, error = history.log_ms[place], history.error[place]
    errors = typical(error[:k]), typical(error[k:])
    if min(k, len(y) - k) < 2 and not all(errors):
        return 0.0
    up = float(np.median(y[k:]) - np.median(y[:k])) > 0
    gap = float(y[k:].min() - y[:k].max() if up else y[:k].min() - y[k:].max())
    scatter = float(max(np.ptp(y[:k]), np.ptp(y[k:])))
    sigma = max(*errors, history.floor)
    if gap > max(far, SIGMAS * sigma, AGREE * scatter):
        return gap
    shift = abs(float(y[k:].mean() - y[:k].mean()))
    return shift if shift > max(history.gross, _by_chance(y, k, sigma)) else 0.0


def _by_chance(y: NDArray[np.float64], k: int, sigma: float) -> float:
    """Return the distance between the means before `k` and since that scatter reaches with `CHANCE`."""
    if min(k, len(y) - k) < 2:
        return math.inf
    free = len(y) - 2
    squares = np.sum((y[:k] - y[:k].mean()) ** 2) + np.sum((y[k:] - y[k:].mean()) ** 2)
    scatter = max(math.sqrt(squares / free), sigma)
    return float(special.stdtrit(free, 1 - CHANCE / 2)) * scatter * math.sqrt(1 / k + 1 / (len(y) - k))


def step_between(
    history: SeriesHistory, first: int, last: int, reason: str = "", *, start: int = 0, stop: int | None = None
) -> SeriesFinding:
    """Return the step after one result and by another as a suspect.

    Args:
        first, last: Indices among the results in the newest environment.
        start, stop: Of these results, those whose levels the step is between.
    """
    place = newest_environment(history.environment)
    y, error = history.log_ms[place], history.error[place]
    before, after = y[max(first + 1 - LEVEL, start) : first + 1], y[last:stop]
    index = crossing(y, first, last)
    sigma = max(deviation(before), typical(error), history.floor)
    return SeriesFinding(
        "suspect", index=int(place[index]), first=int(place[first]), last=int(place[last]),
        effect=float(np.median(after) - np.median(before)), before=float(np.median(before)), sigma=sigma,
        n_before=index - start, n_after=len(y) - index, reason=reason,
    )  # fmt: skip


def is_still_there(history: SeriesHistory, step: SeriesFinding, effect: float) -> bool:
    """Return whether the results after a step, and the newest of them, moved by at least half of an effect."""
    assert step.before is not None and step.last is not None and step.effect is not None
    place = newest_environment(history.environment)
    newest = float(np.median(history.log_ms[place[place >= step.last][-NEWEST:]])) - step.before
    return min(step.effect / effect, newest / effect) >= 0.5


def is_settled(history: SeriesHistory, step: SeriesFinding) -> bool:
    """Return whether statistics can tell a step's earlier level from scatter: it and the history are long enough."""
    assert step.first is not None
    place = newest_environment(history.environment)
    return len(place) >= 2 * MIN_SEGMENT and int(np.searchsorted(place, step.first)) + 1 >= MIN_SEGMENT
