"""Verdicts, intervals and p-values of latency ratios, of a few runs of two commits. Pure functions of arrays.

The sides differ if the distance of their centres, the medians of log(latency), exceeds the larger of min_effect and
4 sigma sqrt(1/n + 1/m). Sigma is the largest of each side's scatter (1.4826 MAD, corrected for small n), each side's
typical standard error from the spread of bursts, the scatter between other runs, and a floor. With one run per side and
few others, the prior of a young series takes the place of the scatter. This rule cannot distinguish a drift of the
machine from a code change. Only an interleaved re-run of both commits can.

Of an interval, there are two estimates of the standard error, and the larger one counts:

    runs    the scatter between runs, pooled over both sides and other runs. A side's is trimmed and
            winsorized so that one outlier in five or more runs does not widen it (Yuen and Dixon, "The approximate
            behaviour and performance of the two-sample trimmed t", Biometrika 60, 1973). It needs two runs on one
            side, or the scatter of other runs.
    bursts  the standard error of a run's latency from the spread of its bursts, and the smallest scatter between two
            runs (`thresholds.POOL_FLOOR`), added in quadrature

The scatter between runs includes that between bursts, so the first is enough for many runs. The second prevents a few
runs that agree by chance from looking exact. It never shows how much runs of the same code differ, so it is enough only
for results of one run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from groupbench.tracker.compare.between import Scatter
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.stats.student import quantile, tail
from groupbench.tracker.stats.thresholds import MAD_SD, POOL_FLOOR, least_effect, typical

LEVEL = 0.95
"""Confidence of every interval here."""
TRIM = 0.2
"""Fraction of a side's runs that is trimmed at each end."""
MEDIAN_WIDENING = 1.1726
"""Standard deviation of a median of many normal values over that of their mean trimmed by `TRIM`."""
_LARGEST = 708.0


@dataclass(frozen=True)
class Interval:
    """A confidence interval of a ratio at `LEVEL`, with the two-sided p-value of the ratio 1."""

    low: float
    high: float
    p: float | None = None


@dataclass(frozen=True)
class GeometricMean:
    """A geometric mean of the ratios of `series` series. `low` and `high` are None for fewer than two."""

    ratio: float
    series: int
    low: float | None = None
    high: float | None = None

    @property
    def is_resolved(self) -> bool:
        """Whether the interval excludes a mean of twice the size."""
        return self.high is None or self.high < 2 * self.ratio


def ratio_interval(
    before_ms: ArrayLike,  # [n] median latencies of one side's runs
    before_errors: ArrayLike,  # [n] standard errors of their logarithms, NaN if unknown
    after_ms: ArrayLike,  # [m]
    after_errors: ArrayLike,  # [m]
    *,
    timing: str,  # gpu or cpu
    others: Scatter | None = None,  # between other runs of the series; None for two results of one run
) -> Interval | None:
    """Return the interval of median(after) / median(before), or None if nothing shows the noise between them.

    The interval is symmetric on the logarithmic scale. It excludes 1 exactly if p is below 0.05.
    """
    sides = [np.log(np.asarray(ms, dtype=np.float64)) for ms in (before_ms, after_ms)]
    change = float(np.median(sides[1]) - np.median(sides[0]))
    typical_errors = [typical(errors) for errors in (before_errors, after_errors)]
    freedom = sum(map(_degrees, sides)) + (0.0 if others is None else others.freedom)
    if freedom == 0 and (others is not None or not any(typical_errors)):
        return None
    bursts = math.sqrt(
        sum(
            _median_factor(len(side)) ** 2 * ((error or max(typical_errors)) ** 2 + POOL_FLOOR[timing] ** 2) / len(side)
            for side, error in zip(sides, typical_errors, strict=True)
        )
    )
    width, p = bursts * _quantile(math.inf), _p_value(change, bursts, math.inf)
    if freedom:
        runs = _error_by_runs(sides, others, freedom)
        width, p = max(width, runs * _quantile(freedom)), max(p, _p_value(change, runs, freedom))
    return _interval(change, width, p)


def geometric_mean(ratios: Sequence[float], widths: Sequence[float] | None = ()) -> GeometricMean | None:
    """Return the geometric mean of ratios [k] and Student's t interval, or None without a ratio.

    Each ratio is one observation. The interval reflects how much the ratios differ, and their own noise: series of one
    run are slow together on a slow machine, so more of them do not average it out.

    Args:
        widths: Half of each log ratio's 95 % interval; empty for ratios within one run, None if any is unknown.
    """
    if not ratios:
        return None
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    k, mean = len(logs), math.fsum(logs) / len(logs)
    if k < 2 or widths is None:
        return GeometricMean(math.exp(mean), k)
    apart = float(logs.std(ddof=1)) / math.sqrt(k) * _quantile(k - 1)
    bounds = _interval(mean, math.hypot(apart, math.fsum(widths) / k))
    return GeometricMean(math.exp(mean), k, bounds.low, bounds.high)


def _interval(centre: float, width: float, p: float | None = None) -> Interval:
    """Return a ratio's interval from the logarithm's, clipped to finite floats."""
    return Interval(math.exp(max(centre - width, -_LARGEST)), math.exp(min(centre + width, _LARGEST)), p)


def _trimmed(n: int) -> int:
    """Return how many of n sorted values to trim at each end."""
    return int(TRIM * n)


def _degrees(side: NDArray[np.float64]) -> int:
    return len(side) - 2 * _trimmed(len(side)) - 1


def _median_factor(n: int) -> float:
    """Return how much more a median of n values scatters than their trimmed mean; 1 for one or two values."""
    return 1.0 if n < 3 else MEDIAN_WIDENING


def _error_by_runs(sides: Sequence[NDArray[np.float64]], others: Scatter | None, freedom: float) -> float:
    """Return the standard error of the difference of two medians from the pooled winsorized scatter."""
    squares = 0.0 if others is None else others.freedom * others.deviation**2
    for side in sides:
        cut = _trimmed(len(side))
        ordered = np.sort(side)
        kept = np.clip(side, ordered[cut], ordered[-1 - cut])
        squares += float(((kept - kept.mean()) ** 2).sum())
    return math.sqrt(squares / freedom * sum(_median_factor(len(side)) ** 2 / (_degrees(side) + 1) for side in sides))


def _quantile(free: float) -> float:
    """Return the half-width of an interval in standard errors, at `free` degrees of freedom."""
    return quantile((1 - LEVEL) / 2, free)


def _p_value(change: float, error: float, free: float) -> float:
    if change == 0:
        return 1.0
    if error == 0:
        return 0.0
    return 2 * tail(abs(change) / error, free)


# --- verdicts ---------------------------------------------------------------------------------------------------------

SIGMAS = 4.0
"""Standard errors that two pools of runs must differ by."""

# Finite-sample factors of the MAD: Croux and Rousseeuw, "Time-efficient algorithms for two highly robust
# estimators of scale", 1992. Without them, three nights that happen to be quiet make the fourth a regression.
_MAD_FACTOR = {2: 1.196, 3: 1.495, 4: 1.363, 5: 1.206, 6: 1.200, 7: 1.140, 8: 1.129, 9: 1.107}


@dataclass(frozen=True)
class ChangeVerdict:
    """The verdict on one side against another. Changes are logarithms."""

    verdict: Verdict
    change: float
    threshold: float | None = None


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
    others: Scatter,  # between other runs of the series
    min_effect: float | None = None,
) -> ChangeVerdict:
    """Judge one commit's runs against another's; `unresolved` if neither repeats nor bursts show the noise."""
    before = np.log(np.asarray(before_ms, dtype=np.float64))
    after = np.log(np.asarray(after_ms, dtype=np.float64))
    n, m = len(before), len(after)
    change = float(np.median(after) - np.median(before))
    scatters = [mad(before), mad(after), typical(before_errors), typical(after_errors)]
    if not any(scatters) and min(n, m) < 2:
        return ChangeVerdict(Verdict.UNRESOLVED, change)
    between = others.deviation if others.freedom or n + m == 2 else 0.0
    sigma = max(*scatters, between, POOL_FLOOR[timing])
    effect = least_effect(timing, math.exp(float(np.median(before)))) if min_effect is None else min_effect
    threshold = max(math.log1p(effect), SIGMAS * sigma * math.sqrt(1 / n + 1 / m))
    return ChangeVerdict(_direction(change, threshold), change, threshold)


def _direction(change: float, threshold: float) -> Verdict:
    if change > threshold:
        return Verdict.REGRESSED
    return Verdict.IMPROVED if change < -threshold else Verdict.OK
