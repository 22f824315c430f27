"""Sequential A/B tests: decide block by block, during the measurement, whether two sides differ.

A *block* is one difference d = log(head) - log(base), with both sides freshly placed in memory and their bursts in a
random order. In an A/A comparison, that order alone decides the sign of d: + and - are equally likely, whatever the
noise. So the tests use signs and ranks (Wilcoxon's signed ranks, 1945), whose null distribution is known exactly for
any number of blocks with independent signs. Two blocks that follow each other have opposite orders. If being first
matters, their signs tend to differ, so the sums vary less and the tests are careful. Heavy tails, outliers, two
levels of placement or a drifting machine change the power of the tests, but not their false-positive rate. Intervals
come from inverting the tests (Hodges and Lehmann, 1963): they are order statistics of the averages of all pairs of
blocks.

    different  the interval at `alpha`, over all looks together, excludes -floor..floor
    same       the interval at `beta` per side is within -min_effect..min_effect
    continue   neither

Alpha is spent over the looks (after Lan and DeMets, "Discrete sequential boundaries for clinical trials", 1983): half
of it when all of the first blocks agree in sign (12 blocks for 0.001), the rest in equal levels over all later looks.
`LATER_SHARE` comes from a simulation of the joint distribution, which ci/benchmarks/ab.py repeats. No size of a
change ends a comparison sooner: to stop because the first blocks are far apart is to choose those with the most noise.

The random order does not cover offsets that a process keeps for life. On a CPU, a process may share a core
with other work for seconds, so each block begins with new processes. An H100 runs the same 0.055 ms kernel a
few tenths of a per cent faster in one process than in the next, whatever the addresses. More blocks do not average
this out, but more processes do. So each side uses several processes, and `different` requires an interval widened in
quadrature by the possible offset of that many processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

BlockVerdict = Literal["same", "different", "continue"]

MAX_BLOCKS = 160
"""Largest number of blocks of a comparison: further looks would exceed the alpha that is reserved."""
FIRST_SAME = 7
LATER_SHARE = 0.05
"""Level of each look after the first, as a fraction of alpha."""


@dataclass(frozen=True)
class Rule:
    """The stopping rule of a comparison. Effects are logs of ratios.

    Attributes:
        alpha: False-positive rate of a comparison (A/A).
        beta: Chance per look of calling a difference of min_effect "same"; three to six times that over all looks.
        floor: Difference that two processes of the same code may have.
        min_effect: Smallest difference that counts.
        resolution: Clock tick over latency; no interval is narrower.
        process_sd: Standard deviation of the offset that a process keeps for its lifetime.
        renewed: Number of blocks after which a side's process is replaced.
    """

    alpha: float = 0.001
    beta: float = 0.008
    floor: float = 0.001
    min_effect: float = 0.005
    resolution: float = 0.0
    process_sd: float = 0.0
    renewed: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 0.2 or not 0 < self.beta <= 0.2:
            raise ValueError("alpha and beta must be above 0 and at most 0.2")
        if not 0 <= self.floor < self.min_effect < math.inf:
            raise ValueError("the floor must be at least 0 and below min_effect")
        if not 0 <= self.resolution < math.inf:
            raise ValueError("the resolution must be at least 0")
        if not 0 <= self.process_sd < math.inf or self.renewed < 1:
            raise ValueError("process_sd must be at least 0, and renewed at least 1")


@dataclass(frozen=True)
class Decision:
    """The decision after the blocks so far. The interval is that of the verdict; initially (-inf, inf).

    Attributes:
        effect: Median of all pairwise averages of blocks; NaN without blocks.
    """

    verdict: BlockVerdict
    effect: float
    low: float
    high: float
    blocks: int


def decide(differences: ArrayLike, rule: Rule) -> Decision:
    """Return the decision after the last of `differences` [n]. Raises ValueError if one is not finite."""
    d = np.asarray(differences, dtype=np.float64).reshape(-1)
    n = len(d)
    if not np.isfinite(d).all():
        raise ValueError("a block's difference is not finite")
    if n == 0:
        return Decision("continue", math.nan, -math.inf, math.inf, 0)
    pairs = pair_averages(d)
    effect = middle(pairs)
    wide = _interval(pairs, effect, n, alpha_at(n, rule.alpha), rule)
    luck = processes_width(n, rule)
    wide = (effect - math.hypot(effect - wide[0], luck), effect + math.hypot(wide[1] - effect, luck))
    if wide[0] > rule.floor or wide[1] < -rule.floor:
        return Decision("different", effect, *wide, n)
    if FIRST_SAME <= n <= MAX_BLOCKS:
        narrow = _interval(pairs, effect, n, 2 * rule.beta, rule)
        if -rule.min_effect < narrow[0] and narrow[1] < rule.min_effect:
            return Decision("same", effect, *narrow, n)
    return Decision("continue", effect, *wide, n)


def processes_width(n: int, rule: Rule) -> float:
    """Return the half-width, at alpha, of the mean offset of the processes of n blocks."""
    met = 1 + (n - 1) // rule.renewed
    return NormalDist().inv_cdf(1 - rule.alpha / 2) * rule.process_sd * math.sqrt(2 / met)


def estimate(differences: ArrayLike, confidence: float = 0.95, resolution: float = 0.0) -> tuple[float, float, float]:
    """Return (effect, low, high) of blocks [n >= 1] for a single look; the ends are infinite if n is too small."""
    d = np.asarray(differences, dtype=np.float64).reshape(-1)
    pairs = pair_averages(d)
    effect = middle(pairs)
    return effect, *_interval(pairs, effect, len(d), 1 - confidence, Rule(resolution=resolution))


def bursts_per_block(placement_sd: float, burst_sd: float, reload_s: float, burst_s: float) -> int:
    """Return the number of bursts per side, 1 to 8, that gives the most information per time.

    A block of b bursts per side takes reload_s + 2 b burst_s, and its difference has the variance
    2 (placement_sd^2 + burst_sd^2 / b). The number of blocks is proportional to the variance, so minimise the product:
    b = burst_sd / placement_sd * sqrt(reload_s / (2 burst_s)). Raises ValueError for a negative argument.
    """
    if min(placement_sd, burst_sd, reload_s, burst_s) < 0:
        raise ValueError("standard deviations and times must not be negative")
    if placement_sd == 0 or burst_s == 0:
        return 8 if burst_sd > 0 and reload_s > 0 else 1
    return max(1, min(8, round(burst_sd / placement_sd * math.sqrt(reload_s / (2 * burst_s)))))


def first_look(alpha: float) -> int:
    """Return the smallest number of blocks for `different`: all in one direction."""
    return math.ceil(1 - math.log2(alpha / 2))


def alpha_at(n: int, alpha: float) -> float:
    """Return the two-sided level of the look after block n; 0 without a look."""
    first = first_look(alpha)
    if n == first:
        return alpha / 2
    return LATER_SHARE * alpha if first < n <= MAX_BLOCKS and _is_look(n) else 0.0


def _is_look(n: int) -> bool:
    """Return whether to look after block n: after each at first, later after every second and fourth to save alpha."""
    return n <= 24 or (n <= 48 and n % 2 == 0) or n % 4 == 0


def pair_averages(d: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the n (n + 1) / 2 averages of all pairs, including each value with itself, sorted."""
    rows, columns = np.triu_indices(len(d))
    return np.sort((d[rows] + d[columns]) / 2)


def middle(ordered: NDArray[np.float64]) -> float:
    n = len(ordered)
    return float((ordered[(n - 1) // 2] + ordered[n // 2]) / 2)


def _interval(pairs: NDArray[np.float64], effect: float, n: int, level: float, rule: Rule) -> tuple[float, float]:
    k = rank(n, level)
    if k == 0:
        return -math.inf, math.inf
    return _widened(effect, float(pairs[k - 1]), float(pairs[-k]), rule)


def _widened(effect: float, low: float, high: float, rule: Rule) -> tuple[float, float]:
    """Widen an interval to the clock's resolution, because equal readings do not mean equal times."""
    return min(low, effect - rule.resolution), max(high, effect + rule.resolution)


def rank(n: int, level: float) -> int:
    """Return the order statistic of the pair averages that ends the interval at a two-sided level; 0 if none does."""
    if level <= 0:
        return 0
    return int(np.searchsorted(_signed_rank_cdf(n), level / 2, side="right"))


@cache
def _signed_rank_cdf(n: int) -> NDArray[np.float64]:
    """Return P(W <= w) for w = 0.. n (n + 1) / 2, where W is the sum of ranks of 1..n that a fair coin picks."""
    chances = np.ones(1)
    for rank in range(1, n + 1):
        wider = np.zeros(len(chances) + rank)
        wider[: len(chances)] += chances / 2
        wider[rank:] += chances / 2
        chances = wider
    return np.cumsum(chances)
