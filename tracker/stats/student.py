"""Student's t, the normal distribution and ranks. To import a library for these takes longer than judging a night."""

from __future__ import annotations

import math
from functools import cache
from statistics import NormalDist

_STEPS = 500
"""Most terms of the continued fraction; a dozen are enough but for extreme arguments."""


def tail(t: float, freedom: float = math.inf) -> float:
    """Return the chance of a value above t; `freedom` may be fractional, and infinite for the normal distribution."""
    if t < 0:
        return 1 - tail(-t, freedom)
    if math.isinf(freedom) or math.isinf(t):
        return 0.5 * math.erfc(t / math.sqrt(2))
    return 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


@cache
def quantile(p: float, freedom: float = math.inf) -> float:
    """Return the value exceeded with chance p."""
    if math.isinf(freedom):
        return -NormalDist().inv_cdf(p)
    if p > 0.5:
        return -quantile(1 - p, freedom)
    low, high = 0.0, 1.0
    while tail(high, freedom) > p:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if tail(middle, freedom) > p else (low, middle)
    return high


def rank_chance(n: int, k: int) -> float:
    """Return the chance that the newest k of n + k results are beyond all others by more than the range of those.

    The factor 1 / C(n + k, k) is that of their order, if nothing changed. The others are exact for exponential noise.
    """
    if n < 1 or k < 1:
        return 1.0
    return math.comb(2 * k, k) / (math.comb(n + k, k) * math.comb(n + 2 * k - 1, k))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function by a continued fraction (Numerical Recipes, 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, _STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = 1 / (1 + term * d), 1 + term / c
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * fraction / a
