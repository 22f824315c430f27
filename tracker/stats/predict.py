"""The distribution of a level's next result, robust against outliers and useful from the first result on.

Every judgement asks whether a result belongs to a level. The level's centre is the median of its first results, so a
level cannot drift away from the first ones. The scatter is the median absolute deviation of the newest results, which
one outlier in ten hardly moves. With few results, a prior takes the place of the scatter. The newest nights are left
out of both, so that a change does not hide itself. All values are logarithms. Pure functions.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

from groupbench.tracker.stats import student
from groupbench.tracker.stats.thresholds import MAD_SD

FIRST = 10
"""Number of results, from the beginning of a level, whose median is its centre."""
LAST = 30
"""Number of newest results that show the scatter."""
LEFT_OUT, LEFT_OUT_FROM = 2, 6
"""Number of newest results that do not count, and the number of results beyond which they do not."""
PRIOR_WEIGHT = 4
"""Number of results that the prior of the scatter is worth."""
PRECEDENTS, AS_FAR = 2, 0.8
"""Number of earlier results at least this share as far from the centre from which a deviation is nothing unusual."""
MEDIAN_VARIANCE = 1.57
"""Variance of a median over that of the mean of as many normal values."""
MAD_WORTH = 0.37
"""Efficiency of the median absolute deviation: the share of the results that it is worth."""
ENOUGH = 5
"""Number of earlier results from which they show their tail, and nights alone can be certain."""
TAIL = 10
"""One result in this many, and at least one, is farther than the value that shows the tail."""


@dataclass(frozen=True)
class Predicted:
    """The distribution of a level's next result.

    Attributes:
        centre: The level.
        deviation: Standard deviation of the next result.
        freedom: Degrees of freedom of the t distribution.
        residuals: Deviations of the newest results from the centre.
        prior: Standard deviation to assume without results.
        uncertain: Factor on the variance, since the centre is not known exactly.
    """

    centre: float
    deviation: float
    freedom: int
    residuals: Sequence[float] = ()
    prior: float = 0.0
    uncertain: float = 1.0

    @property
    def few(self) -> bool:
        """Whether the results are too few to show their tail."""
        return self.freedom < ENOUGH + PRIOR_WEIGHT - 1

    def p(self, value: float, error: float = 0.0) -> float:
        """Return the chance of a result at least as far from the centre, in the direction of `value`.

        Args:
            value: The result.
            error: Its own standard error, if that is larger than the deviation.
        """
        distance = value - self.centre
        chance = student.tail(abs(distance) / max(self.deviation, error), self.freedom)
        far = AS_FAR * abs(distance)
        as_far = [r >= far if distance > 0 else r <= -far for r in self.residuals]
        while as_far and as_far[-1]:  # a precedent has ended: the newest results may be of a level that drifts
            as_far.pop()
        like = sum(as_far)
        return max(chance, like / (len(self.residuals) + 1)) if like >= PRECEDENTS else chance

    def alone(self, value: float, error: float = 0.0) -> float:
        """Return the chance by which history alone decides; never less than `p`.

        Noise has longer tails than its middle shows. So the scatter is at least that of a normal distribution with the
        same value that one result in ten exceeds, and it counts for as few results as it is worth. One outlier never
        counts. If each result is like the one before, the centre is less certain.
        """
        n, deviation = len(self.residuals), max(self.deviation, error)
        if n >= ENOUGH:
            side, farther = math.copysign(1, value - self.centre), max(n // TAIL, 1)
            tail = sorted(side * each for each in self.residuals)[-1 - farther]
            tail /= student.quantile((farther + 0.625) / (n + 0.25))
            variance = (PRIOR_WEIGHT * self.prior**2 + (n - 1) * max(tail, 0.0) ** 2) / (n + PRIOR_WEIGHT - 1)
            deviation = max(deviation, math.sqrt(variance * self.uncertain))
        if n > LEFT_OUT_FROM:
            alike = correlation(self.residuals)
            worth = (1 + alike) / (1 - alike)  # results of which each is like the one before count for fewer
            deviation *= math.sqrt((1 + (self.uncertain - 1) * worth) / self.uncertain)
        freedom = PRIOR_WEIGHT + MAD_WORTH * (self.freedom - PRIOR_WEIGHT)
        return max(self.p(value, error), student.tail(abs(value - self.centre) / deviation, freedom))

    def of_mean(self, count: float) -> Predicted:
        """Return the distribution of the mean of the next results; of infinitely many, that of the centre."""
        return replace(self, deviation=self.deviation * math.sqrt((1 / count + self.uncertain - 1) / self.uncertain))

    def reach(self, p: float) -> float:
        """Return the distance from the centre beyond which a result has at most this chance."""
        return student.quantile(p, self.freedom) * self.deviation


def correlation(values: Sequence[float]) -> float:
    """Return how much successive deviations [n] from a level are alike: at least 0, and without the bias of few."""
    n, square = len(values), math.fsum(each * each for each in values)
    if not square:
        return 0.0
    found = math.fsum(map(operator.mul, values, values[1:])) / square
    return min(max(found + (1 + 4 * found) / n, 0.0), 1 - 1 / n)


def settled(values: Sequence[float]) -> Sequence[float]:
    """Return the results of a level without the newest ones, which may belong to the next level."""
    return values[:-LEFT_OUT] if len(values) > LEFT_OUT_FROM else values


def lower_median(values: Sequence[float]) -> float:
    """Return the median, or the lower one of the two in the middle."""
    return sorted(values)[(len(values) - 1) // 2]


def predict(
    kept: Sequence[float],  # results of the level, oldest first, without the newest
    others: Sequence[float],  # deviations of earlier results from their own levels, oldest first
    prior: float,  # standard deviation to assume without results
    floor: float = 0.0,  # smallest standard deviation
    centre: float | None = None,  # of a level without results
) -> Predicted:
    """Return the distribution of the next result of a level. Raises ValueError if nothing shows the centre."""
    first = kept[:FIRST]
    if first:
        centre = lower_median(first)
    elif centre is None:
        raise ValueError("a level without results needs a centre")
    newest = kept[-LAST:]
    middle = lower_median(newest) if newest else centre
    scattered = [value - middle for value in newest]
    if len(scattered) < LAST:
        scattered = [*others[len(others) - (LAST - len(newest)) :], *scattered]
    n = max(len(scattered), 1)
    spread = MAD_SD * sorted(map(abs, scattered))[len(scattered) // 2] if n > 1 else 0.0
    variance = (PRIOR_WEIGHT * prior**2 + (n - 1) * spread**2) / (n + PRIOR_WEIGHT - 1)
    uncertain = 1 + MEDIAN_VARIANCE / max(len(first), 1)
    deviation = max(math.sqrt(variance), floor) * math.sqrt(uncertain)
    residuals = [value - centre for value in newest]
    return Predicted(centre, deviation, n + PRIOR_WEIGHT - 1, residuals, max(prior, floor), uncertain)
