"""Find the rest of a change for the worse after a partial improvement.

A finding is about the newest level and the one before it. After an improvement that takes back a part of a slowdown,
the finding is the improvement, although the series is still slower than it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.stats.records import RECENT
from groupbench.tracker.stats.steps import TOO_FEW, NoisySeries, Step, confirmed, not_reported

APART = 3.5
"""Standard errors by which the newest level must be worse than the one before the earlier change."""


def left_of_changes(
    series: NoisySeries, newest: Step, ends: Sequence[int], state: NDArray[np.int64], worse: int, min_effect: float
) -> tuple[Step, bool] | None:
    """Return the distance to the best level that a recent change for the worse left, and whether that was certain.

    Args:
        newest: An improvement.
        ends: First points of the segments before it.
        worse: 1 or -1, the sign of a change for the worse.
    """
    at = newest.index
    before = replace(series, y=series.y[:at], scale=series.scale[:at])
    changes = confirmed(before, [end for end in ends if end < at])
    now, error_now = series.level(at, newest.stop)
    left = []
    for change in changes:
        why = not_reported(before, change, state[:at], changes, min_effect)
        if change.effect * worse < 0 or newest.stop - change.index > RECENT or why not in (None, TOO_FEW):
            continue
        _, error_before = series.level(change.start, change.index)
        effect, error = now - change.before, float(np.hypot(error_now, error_before))
        if effect * worse > max(min_effect, APART * error):
            left.append((replace(change, stop=newest.stop, effect=effect, error=error), why is None))
    return max(left, key=lambda one: one[0].effect * worse, default=None)
