"""Judge a few runs of one commit against a few of another, without a history. Pure functions of arrays.

    centre     median of each side's log(latency), so that changes are percentages
    sigma      the largest of each side's scatter (1.4826 MAD, corrected for small n), each side's typical standard
               error from the spread of bursts, and a floor
    threshold  the larger of min_effect and 4 sigma sqrt(1/n + 1/m)

The sides differ if the distance of their centres exceeds the threshold. This rule cannot distinguish a drift of the
machine from a code change. Only an interleaved re-run of both commits can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from groupbench.tracker.facts.metrics import relative
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.stats.thresholds import MAD_SD, POOL_FLOOR, least_effect, typical

SIGMAS = 4.0
"""Standard errors that two pools of runs must differ by."""

# Finite-sample factors of the MAD: Croux and Rousseeuw, "Time-efficient algorithms for two highly robust
# estimators of scale", 1992. Without them, three nights that happen to be quiet make the fourth a regression.
_MAD_FACTOR = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}


@dataclass(frozen=True)
class ChangeVerdict:
    """The verdict on one side against another. Changes are logarithms."""

    verdict: Verdict
    n: int  # results in the history
    change: float | None = None
    threshold: float | None = None

    @property
    def relative_threshold(self) -> float | None:
        return relative(self.threshold)


def mad(values: NDArray[np.float64]) -> float:
    """Return a robust standard deviation of values [n] from their median absolute deviation; 0 for fewer than two."""
    n = len(values)
    if n < 2:
        return 0.0
    factor = _MAD_FACTOR.get(n, n / (n - 0.8))
    return float(MAD_SD * factor * np.median(np.abs(values - np.median(values))))


def judge_pools(
    before_ms: ArrayLike,  # [n] medians of one commit's runs
    before_errors: ArrayLike,  # [n] NaN if unknown
    after_ms: ArrayLike,  # [m]
    after_errors: ArrayLike,  # [m]
    *,
    timing: str,
    min_effect: float | None = None,
) -> ChangeVerdict:
    """Judge one commit's runs against another's; `unresolved` if neither repeats nor bursts show the noise."""
    before = np.log(np.asarray(before_ms, dtype=np.float64))
    after = np.log(np.asarray(after_ms, dtype=np.float64))
    n, m = len(before), len(after)
    change = float(np.median(after) - np.median(before))
    scatters = [mad(before), mad(after), typical(before_errors), typical(after_errors)]
    if not any(scatters) and min(n, m) < 2:
        return ChangeVerdict(Verdict.UNRESOLVED, min(n, m), change)
    sigma = max(*scatters, POOL_FLOOR[timing])
    effect = least_effect(timing, math.exp(float(np.median(before)))) if min_effect is None else min_effect
    threshold = max(math.log1p(effect), SIGMAS * sigma * math.sqrt(1 / n + 1 / m))
    return ChangeVerdict(_direction(change, threshold), min(n, m), change, threshold)


def _direction(change: float, threshold: float) -> Verdict:
    if change > threshold:
        return Verdict.REGRESSED
    return Verdict.IMPROVED if change < -threshold else Verdict.OK
