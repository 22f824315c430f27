"""Are two sides alike? Decided block by block, while they are measured. Pure functions of arrays.

A *block* is one difference d = log(head) - log(base), taken with both sides freshly placed in memory, their bursts in
an order that a coin decides. Where the sides are alike, the coin alone gives d its sign: as likely + as -, independent
from block to block, whatever the noise looks like. So the tests below look at signs and ranks (Wilcoxon's signed ranks,
1945), whose distribution under "alike" is known exactly for any number of blocks: heavy tails, outliers, two levels of
placement or a machine that drifts change their power and not their false alarms. Intervals come from inverting them
(Hodges and Lehmann, 1963): order statistics of the averages of all pairs of blocks.

    different  the interval at `alpha`, over all looks together, excludes -floor..floor
    same       the interval at `beta` a side lies within -min_effect..min_effect
    continue   neither

How alpha is spent over the looks (after Lan and DeMets, "Discrete sequential boundaries for clinical trials", 1983):
half of it where all of the first blocks agree in sign (12 blocks for 0.001), the rest in equal levels over all later
looks; `LATER_SHARE` was found by simulation of the joint distribution, and ci/benchmarks/ab_marks.py repeats it. A
gross change may end sooner: five blocks out of five beyond `gross` on one side happen to like sides once in 50 000
comparisons where one block in five is so far off (on an H100 one in 17 was).

What the coin does not randomise is what a process keeps for life: an H100 runs the same kernel at 0.055 ms a few
tenths of a per cent faster in one process than in the next, at whatever addresses. Blocks share their processes' luck,
and more of them do not average it out; more processes do. So each side has several, and `different` rests on an
interval that is widened, as errors add, by what that many processes may be off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

BlockVerdict = Literal["same", "different", "continue"]

MAX_BLOCKS = 160
"""No comparison goes on longer: further looks would spend alpha that was not set aside."""
FIRST_SAME = 7
GROSS_BLOCKS = 5
LATER_SHARE = 0.05
"""Level of each look after the first, as a share of alpha."""


@dataclass(frozen=True)
class Rule:
    """When to stop. Effects are logs of ratios, or relative changes where that is the same.

    alpha       share of like sides that are ever called different
    beta        chance, at one look, to call same what differs by min_effect; over all looks three to six times that
    floor       differences that two processes of the same code may have
    min_effect  a difference below this is of no interest
    resolution  the clock's tick over the latency: no interval is narrower
    gross       beyond it, five blocks are enough
    process_sd  standard deviation of what a process is off for as long as it lives
    renewed     blocks after which a side's process is replaced
    """

    alpha: float = 0.001
    beta: float = 0.008
    floor: float = 0.001
    min_effect: float = 0.005
    resolution: float = 0.0
    gross: float = 0.05
    process_sd: float = 0.0
    renewed: int = 8

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 0.2 or not 0 < self.beta <= 0.2:
            raise ValueError("alpha and beta are above 0, and 0.2 at most")
        if not 0 <= self.floor < self.min_effect < math.inf:
            raise ValueError("the floor is at least 0 and below min_effect")
        if not 0 <= self.resolution < math.inf or not self.gross > self.floor:
            raise ValueError("the resolution is at least 0, and gross above the floor")
        if not 0 <= self.process_sd < math.inf or self.renewed < 1:
            raise ValueError("process_sd is at least 0, and renewed at least 1")


@dataclass(frozen=True)
class Decision:
    """What the blocks say so far. The interval is the one that the verdict rests on; (-inf, inf) while there is none.

    effect  median of all pairwise averages of blocks, NaN without a block
    """

    verdict: BlockVerdict
    effect: float
    low: float
    high: float
    blocks: int


def decide(differences: ArrayLike, rule: Rule) -> Decision:
    """The look after the last of `differences` [n]. Raises ValueError where one is not finite."""
    d = np.asarray(differences, dtype=np.float64).reshape(-1)
    n = len(d)
    if not np.isfinite(d).all():
        raise ValueError("a block's difference is not finite")
    if n == 0:
        return Decision("continue", math.nan, -math.inf, math.inf, 0)
    pairs = _pair_averages(d)
    effect = _median(pairs)
    if _is_gross(d, rule):
        return Decision("different", effect, *_widened(effect, float(d.min()), float(d.max()), rule), n)
    wide = _interval(pairs, effect, n, _alpha_at(n, rule.alpha), rule)
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
    """Half the width, at alpha, of what the processes of n blocks are off by chance."""
    met = 1 + (n - 1) // rule.renewed
    return NormalDist().inv_cdf(1 - rule.alpha / 2) * rule.process_sd * math.sqrt(2 / met)


def estimate(differences: ArrayLike, confidence: float = 0.95, resolution: float = 0.0) -> tuple[float, float, float]:
    """(effect, low, high) of blocks [n >= 1], for one look at them; infinite ends where n is too small."""
    d = np.asarray(differences, dtype=np.float64).reshape(-1)
    pairs = _pair_averages(d)
    effect = _median(pairs)
    return effect, *_interval(pairs, effect, len(d), 1 - confidence, Rule(resolution=resolution))


def decide_many(
    differences: NDArray[np.float64],  # [runs, n] of comparisons, continuous
    rule: Rule,
) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """`decide` after each block of many comparisons, until each stops.

    Returns (1 different and slower, -1 different and faster, 0 same, 2 unknown; blocks used), each [runs]. For
    studies: two equal values in a row of `differences` may be ranked either way, and the resolution counts as 0.
    """
    runs, most = differences.shape
    verdict = np.full(runs, 2, dtype=np.int8)
    used = np.full(runs, most, dtype=np.int64)
    alive = np.arange(runs)
    for n in range(1, min(most, MAX_BLOCKS) + 1):
        d = differences[alive, :n]
        found = np.full(len(alive), 2, dtype=np.int8)
        if n >= FIRST_SAME and (k := _rank(n, 2 * rule.beta)):
            inside = _counted(d, rule.min_effect) >= n * (n + 1) // 2 - k + 1
            inside &= _counted(d, -rule.min_effect) <= k - 1
            found[inside] = 0
        if k := _rank(n, _alpha_at(n, rule.alpha)):
            slower = _counted(d, rule.floor) <= k - 1
            faster = _counted(d, -rule.floor) >= n * (n + 1) // 2 - k + 1
            if luck := processes_width(n, rule):
                # Few come so far: only these need the ends of their interval.
                for row in np.flatnonzero(slower | faster):
                    pairs = _pair_averages(d[row])
                    effect = _median(pairs)
                    slower[row] &= effect - math.hypot(effect - pairs[k - 1], luck) > rule.floor
                    faster[row] &= effect + math.hypot(pairs[-k] - effect, luck) < -rule.floor
            found[slower], found[faster] = 1, -1
        if n == GROSS_BLOCKS:
            found[d.min(axis=1) > rule.gross] = 1
            found[d.max(axis=1) < -rule.gross] = -1
        stop = found != 2
        verdict[alive[stop]], used[alive[stop]] = found[stop], n
        alive = alive[~stop]
        if not len(alive):
            break
    return verdict, used


def block_difference(base_bursts: Sequence[Sequence[float]], head_bursts: Sequence[Sequence[float]]) -> float:
    """log(head) - log(base) of one block's bursts [bursts][samples] in ms: the median of each burst, the mean of logs.

    Raises ValueError where a side has no burst, or a sample is not a positive number.
    """
    sides = []
    for bursts in (base_bursts, head_bursts):
        if not bursts or not all(len(burst) and all(0 < ms < math.inf for ms in burst) for burst in bursts):
            raise ValueError("each side of a block has bursts of positive, finite samples")
        sides.append(float(np.mean([math.log(float(np.median(burst))) for burst in bursts])))
    return sides[1] - sides[0]


def bursts_per_block(placement_sd: float, burst_sd: float, reload_s: float, burst_s: float) -> int:
    """How many bursts a side make blocks tell the most in the least time, 1 to 8.

    A block of b bursts a side costs reload_s + 2 b burst_s, and its difference has the variance
    2 (placement_sd^2 + burst_sd^2 / b). Blocks needed go with the variance, so their product is what to make small:
    b = burst_sd / placement_sd * sqrt(reload_s / (2 burst_s)).
    """
    if min(placement_sd, burst_sd, reload_s, burst_s) < 0:
        raise ValueError("none of them is negative")
    if placement_sd == 0 or burst_s == 0:
        return 8 if burst_sd > 0 and reload_s > 0 else 1
    return max(1, min(8, round(burst_sd / placement_sd * math.sqrt(reload_s / (2 * burst_s)))))


def components(bursts: Sequence[Sequence[float]]) -> tuple[float, float]:
    """(sd between blocks, sd of a burst) of one side's log medians, by block and burst.

    A one-way analysis of variance with robust scales (1.4826 MAD); the former is 0 where bursts alone explain all, and
    the latter NaN where no block has two bursts.
    """
    means = np.array([np.mean(block) for block in bursts])
    within = np.concatenate([np.asarray(block) - np.mean(block) for block in bursts])
    most = max(len(block) for block in bursts)
    total = 1.4826 * float(np.median(np.abs(means - np.median(means))))
    if most < 2:
        return total, math.nan
    burst = 1.4826 * float(np.median(np.abs(within))) * math.sqrt(most / (most - 1))
    return math.sqrt(max(0.0, total**2 - burst**2 / most)), burst


def _is_gross(d: NDArray[np.float64], rule: Rule) -> bool:
    return len(d) == GROSS_BLOCKS and bool(d.min() > rule.gross or d.max() < -rule.gross)


def _alpha_at(n: int, alpha: float) -> float:
    """Two-sided level of the look after block n; 0 where there is none."""
    first = math.ceil(1 - math.log2(alpha / 2))
    if n == first:
        return alpha / 2
    return LATER_SHARE * alpha if first < n <= MAX_BLOCKS and _is_look(n) else 0.0


def _is_look(n: int) -> bool:
    """Every block at first, later every second and every fourth: looks that learn little cost alpha all the same."""
    return n <= 24 or (n <= 48 and n % 2 == 0) or n % 4 == 0


def _pair_averages(d: NDArray[np.float64]) -> NDArray[np.float64]:
    """Averages of all pairs, each with itself too, sorted: n (n + 1) / 2 of them."""
    rows, columns = np.triu_indices(len(d))
    return np.sort((d[rows] + d[columns]) / 2)


def _median(ordered: NDArray[np.float64]) -> float:
    n = len(ordered)
    return float((ordered[(n - 1) // 2] + ordered[n // 2]) / 2)


def _interval(pairs: NDArray[np.float64], effect: float, n: int, level: float, rule: Rule) -> tuple[float, float]:
    k = _rank(n, level)
    if k == 0:
        return -math.inf, math.inf
    return _widened(effect, float(pairs[k - 1]), float(pairs[-k]), rule)


def _widened(effect: float, low: float, high: float, rule: Rule) -> tuple[float, float]:
    """A clock that ticks shows like values for unlike times: then equal blocks are no certainty."""
    return min(low, effect - rule.resolution), max(high, effect + rule.resolution)


def _rank(n: int, level: float) -> int:
    """Which order statistic of the pairs' averages ends the interval at that two-sided level; 0 where none does."""
    if level <= 0:
        return 0
    return int(np.searchsorted(_signed_rank_cdf(n), level / 2, side="right"))


@cache
def _signed_rank_cdf(n: int) -> NDArray[np.float64]:
    """P(W <= w) for w = 0.. n (n + 1) / 2, W the sum of the ranks that a fair coin picks of 1..n."""
    chances = np.ones(1)
    for rank in range(1, n + 1):
        wider = np.zeros(len(chances) + rank)
        wider[: len(chances)] += chances / 2
        wider[rank:] += chances / 2
        chances = wider
    return np.cumsum(chances)


def _counted(d: NDArray[np.float64], theta: float) -> NDArray[np.int64]:
    """How many of the pairs' averages are <= theta, by row: the rank sum of what lies below theta."""
    shifted = d - theta
    ranks = np.abs(shifted).argsort(axis=1).argsort(axis=1) + 1
    return (ranks * (shifted <= 0)).sum(axis=1)
