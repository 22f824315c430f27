"""Thresholds of all judgements, and rules for data without a history. Pure functions of arrays.

`stats.walk` judges a run by its history. This module has the thresholds that every judgement shares, and the rules
without a history: a few runs of one commit against a few of another.

    centre     median of each side's log(latency), so that changes are percentages
    sigma      the largest of each side's scatter (1.4826 MAD, corrected for small n), each side's typical standard
               error from the spread of bursts, and a floor
    threshold  the larger of min_effect and 4 sigma sqrt(1/n + 1/m)

The sides differ if the distance of their centres exceeds the threshold. This rule cannot distinguish a drift of the
machine from a code change. Only an interleaved re-run of both commits can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from groupbench.tracker.facts.metrics import relative
from groupbench.tracker.facts.verdicts import Verdict

SIGMAS = 4.0
"""Standard errors that two pools of runs must differ by."""
FLOOR = {"gpu": 0.0003, "cpu": 0.02}
"""Smallest relative scatter to assume for a history."""
POOL_FLOOR = {"gpu": 0.001, "cpu": 0.02}
"""Smallest relative scatter to assume for a few runs, which do not show how much processes differ."""
GROSS = {"gpu": 0.05, "cpu": 0.30}
"""Relative change so large that young series need less evidence of it."""
YOUNG = 10
"""Number of earlier results from which statistics reliably detect a gross change."""
BLIND = 1.0
"""Relative change that an `ok` must exclude: without that, a factor of two would not show."""

MAD_SD = 1.4826
"""Standard deviation of a normal distribution whose median absolute deviation is 1."""

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


def step_scatter(log: NDArray[np.float64]) -> float:
    """Return the scatter from differences of successive results, which drifts and steps do not affect; 0 for one."""
    return 0.0 if len(log) < 2 else MAD_SD * float(np.median(np.abs(np.diff(log)))) / math.sqrt(2)


TOO_NOISY = 0.2
"""Standard error of a latency over its bursts beyond which it is too noisy to judge: ±20 %."""


def burst_error(burst_medians: Sequence[float]) -> float:
    """Return the standard error of the log of the median over bursts; NaN for fewer than two."""
    n = len(burst_medians)
    if n < 2:
        return math.nan
    logs = [math.log(ms) for ms in burst_medians]  # arrays take four times as long for a few bursts
    return 1.2533 * math.dist(logs, [sum(logs) / n] * n) / math.sqrt(n * (n - 1))


def least_effect(timing: str, latency_ms: float) -> float:
    """Return the smallest relative change that counts for the gate, `compare` and A/B comparisons.

    On an H100, processes differ by 0.1 % above 90 us and by ten times as much at 13 us.

    Args:
        timing: Gpu or cpu.
    """
    if timing != "gpu":
        return 0.10
    return 0.02 if latency_ms < 0.04 else 0.01 if latency_ms < 0.09 else 0.003


CPU_PRIOR = 0.08
"""Scatter to assume of a latency on a CPU without results."""


def prior_scatter(timing: str, latency_ms: float) -> float:
    """Return the scatter to assume of a latency without results: on a GPU, half of what counts."""
    return least_effect(timing, latency_ms) / 2 if timing == "gpu" else CPU_PRIOR


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


def typical(errors: ArrayLike) -> float:
    """Return the median of the known errors, or 0 if none is known."""
    finite = np.asarray(errors, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    return float(np.median(finite)) if len(finite) else 0.0


def _direction(change: float, threshold: float) -> Verdict:
    if change > threshold:
        return Verdict.REGRESSED
    return Verdict.IMPROVED if change < -threshold else Verdict.OK
