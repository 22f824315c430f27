"""The changes of one series: size, certainty, place, and whether the code or the machine caused them.

A step between two segments is tested by Student's t on Gaussian scores, which heavy tails do not inflate. The p-value
is corrected for all positions (Bonferroni). A bootstrap of the residuals confirms it. It draws circular blocks, which
preserve the autocorrelation (Politis and Romano, "A circular block-resampling procedure for stationary data", 1992).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import special

from groupbench.tracker.stats import noise
from groupbench.tracker.stats.batches import Noise, SeriesBatch
from groupbench.tracker.stats.changepoints import MIN_SEGMENT

Floats = NDArray[np.float64]

CHANGE_LEVEL = 0.001
"""Significance level of a reported change, after Bonferroni over all positions."""
BOOTSTRAPS, BOOTSTRAP_LEVEL = 399, 0.01
"""Number of resampled series, and the largest share of them that may have a step as large as the observed one."""
WANDER = 0.8
"""Autocorrelation above which the machine wanders, so that history alone reports no change."""
TOO_FEW = "too few points after the change"
DRIFTS = ("the level wanders", "slow trend", "the level moved while the code stayed the same")


@dataclass(frozen=True)
class NoisySeries:
    """One series with its noise. Values are logarithms of the latency."""

    y: Floats  # [n] relative to the batch's `shift`
    scale: Floats  # [n] the larger of sigma and the point's own error
    sigma: float  # scatter of a point
    df: float  # degrees of freedom of sigma
    rho: float  # autocorrelation of successive points
    rho_high: float  # one standard error above the estimate
    curve: Floats  # [CURVE] Gaussian scores, see noise.score_curves
    spread: Floats  # [n + 1] variance of the mean of 0, 1, .. successive points
    spread_high: Floats  # [n + 1] the same with rho_high
    # Results by segment, for several uses. Copies with another spread share them, since they do not depend on it.
    _centres: dict[tuple[int, int], float] = field(default_factory=dict)
    _levels: dict[tuple[int, int], float] = field(default_factory=dict)
    _shifts: dict[tuple[int, int, int], tuple[Floats, float]] = field(default_factory=dict)

    @cached_property
    def cautious(self) -> NoisySeries:
        """The series with its autocorrelation one standard error higher."""
        return replace(self, rho=self.rho_high, spread=self.spread_high)

    def centre(self, start: int, stop: int) -> float:
        """Return the median of the points start..stop."""
        if (start, stop) not in self._centres:
            self._centres[start, stop] = median(self.y[start:stop])
        return self._centres[start, stop]

    def shifted(self, start: int, index: int, stop: int) -> tuple[Floats, float]:
        """Return the scores of the points start..stop about the centre of start..index, and their `_restless`."""
        if (start, index, stop) not in self._shifts:
            z = self.scores(start, stop, self.centre(start, index))
            self._shifts[start, index, stop] = z, _restless(z, index - start)
        return self._shifts[start, index, stop]

    def scores(self, start: int, stop: int, centre: float) -> Floats:
        """Return the Gaussian scores of the points start..stop about a centre, [stop - start]."""
        deviation = (self.y[start:stop] - centre) / self.scale[start:stop]
        return noise.curve_score(deviation, self.curve)

    def level(self, start: int, stop: int) -> tuple[float, float]:
        """Return the level of a segment and its standard error."""
        if (start, stop) not in self._levels:
            y, centre, reach = self.y[start:stop], self.centre(start, stop), 2.5 * self.sigma
            calm = np.minimum(np.maximum(y - centre, -reach), reach)
            self._levels[start, stop] = centre + mean(calm)
        return self._levels[start, stop], self.sigma * float(self.spread[stop - start]) ** 0.5


@dataclass(frozen=True)
class Step:
    """A change between two segments [start, index) and [index, stop)."""

    start: int
    index: int
    stop: int
    p: float  # after Bonferroni over all positions
    effect: float  # log change
    error: float  # standard error of the effect
    before: float  # level before
    low_index: int  # the new level begins between low_index and high_index
    high_index: int


def noisy_series(batch: SeriesBatch, learnt: Noise, rows: NDArray[np.int64]) -> list[NoisySeries]:
    """Return some rows of a batch, each with its noise, in the order of `rows`."""
    curves = noise.score_curves(learnt.weights[rows].mean(axis=1), learnt.count[rows])
    k = np.arange(batch.y.shape[1] + 1)
    spread = noise.mean_variance(k, learnt.rho[rows, None])
    high = noise.mean_variance(k, learnt.rho_high[rows, None])
    return [
        NoisySeries(
            batch.y[row], np.maximum(learnt.sigma[row], batch.error[row]), float(learnt.sigma[row]),
            float(learnt.df[row]), float(learnt.rho[row]), float(learnt.rho_high[row]), curves[i], spread[i], high[i],
        )
        for i, row in enumerate(rows.tolist())
    ]  # fmt: skip


def median(y: Floats) -> float:
    """Return the median of a one-dimensional array. Faster than np.median for thousands of short arrays."""
    ordered, half = np.sort(y), len(y) // 2
    return float(ordered[half]) if len(y) % 2 else float(ordered[half - 1] + ordered[half]) / 2


def mean(y: Floats) -> float:
    """Return the mean of a one-dimensional array, as np.mean does, in a third of its time for short arrays."""
    return float(np.add.reduce(y)) / len(y)


def distances(z: Floats, spread: Floats) -> Floats:
    """Return the difference of the mean scores of z[index:] and z[:index] in standard errors, [n - 1]."""
    n = len(z)
    index = np.arange(1, n)
    sums = np.cumsum(z)
    return ((sums[-1] - sums[:-1]) / (n - index) - sums[:-1] / index) / np.sqrt(spread[1:n] + spread[n - 1 : 0 : -1])


def make_step(series: NoisySeries, start: int, index: int, stop: int) -> Step:
    """Return the step at `index` between the segments [start, index) and [index, stop), with its p-value and place."""
    z, restless = series.shifted(start, index, stop)
    distance = np.abs(distances(z, series.spread)) / restless
    at = distance[index - start - 1]
    p = min(1.0, 2 * float(special.stdtr(series.df, -at)) * (stop - start))
    (before, e0), (after, e1) = series.level(start, index), series.level(index, stop)
    likely = np.flatnonzero(distance**2 >= max(at**2 - 7.0, 0.5 * at**2)) + 1 + start
    # The contiguous likely positions around the best series.
    near = set(likely.tolist())
    low = high = index
    while low - 1 in near:
        low -= 1
    while high + 1 in near:
        high += 1
    return Step(start, index, stop, max(p, 1e-300), after - before, float(np.hypot(e0, e1)), before, low, high)


def _restless(z: Floats, cut: int) -> float:
    """Return how much more the points around a change scatter than the whole series; at least 1."""
    before, after = z[:cut], z[cut:]
    spread = 0.0
    for part in (before, after):
        k = len(part)
        # The mean takes one degree of freedom, and few points must not look noisy by chance.
        variance = (float(np.add.reduce((part - mean(part)) ** 2)) + 4.0) / (k - 1 + 4.0)
        spread += max(variance, 1.0) / k
    return float(np.sqrt(spread / (1 / len(before) + 1 / len(after))))


def confirmed(series: NoisySeries, starts: Sequence[int]) -> list[Step]:
    """Return the significant changes, oldest first.

    Args:
        starts: First points of all segments but the first; the least certain one is removed until all are significant.
    """
    series = series.cautious
    kept = list(starts)
    n = len(series.y)
    while kept:
        ends = [0, *kept, n]
        steps = [make_step(series, ends[i], ends[i + 1], ends[i + 2]) for i in range(len(kept))]
        worst = max(range(len(steps)), key=lambda i: steps[i].p)
        if steps[worst].p <= CHANGE_LEVEL:
            return steps
        del kept[worst]
    return []


def _bootstrapped(series: NoisySeries, step: Step) -> float:
    """Return the share of block bootstraps of the residuals that have an equally large step anywhere."""
    series = series.cautious
    n, half = step.stop - step.start, step.index - step.start
    z, _ = series.shifted(step.start, step.index, step.stop)
    seen = abs(float(distances(z, series.spread)[half - 1]))
    parts = [
        series.scores(step.start, step.index, mean(series.y[step.start : step.index])),
        series.scores(step.index, step.stop, mean(series.y[step.index : step.stop])),
    ]
    # About a fitted mean, k residuals scatter less than the noise.
    residual = np.concatenate([part * np.sqrt(len(part) / (len(part) - 1)) for part in parts])
    block = min(max(3, round(n ** (1 / 3)), round(2 / (1 - series.rho))), max(n // 4, 1))
    index = np.arange(MIN_SEGMENT, n - MIN_SEGMENT + 1)
    if not len(index):
        return 1.0
    variance = series.spread[index] + series.spread[n - index]
    # A difference of two means is at most the norm of the residuals times that of its weights. The norm is largest if
    # the largest block fills every place; a block of the largest residual is a bound that takes less time.
    squares, blocks = residual**2, -(-n // block)
    weights = float(((1 / index + 1 / (n - index)) / variance).max())
    if seen**2 > squares.max() * block * blocks * weights:
        return 1 / (1 + BOOTSTRAPS)
    largest = np.convolve(np.tile(squares, 2)[: n + block - 1], np.ones(block), "valid").max() * blocks
    if seen**2 > largest * weights:
        return 1 / (1 + BOOTSTRAPS)
    places, signs = _blocks(n, block)
    sums = np.cumsum(residual[places] * signs, axis=1)
    before = sums[:, index - 1]
    distance = np.abs((sums[:, -1:] - before) / (n - index) - before / index) / np.sqrt(variance)
    return (1 + int((distance.max(axis=1) >= seen).sum())) / (1 + BOOTSTRAPS)


@lru_cache(maxsize=256)
def _blocks(n: int, block: int) -> tuple[NDArray[np.int64], Floats]:
    """Return places and signs of residuals, [bootstraps, n] each, the same for all series of a length."""
    rng = np.random.default_rng(n)
    begin = rng.integers(0, n, (BOOTSTRAPS, -(-n // block)))
    places = (begin[:, :, None] + np.arange(block)).reshape(BOOTSTRAPS, -1)[:, :n] % n
    signs = np.repeat(rng.choice([-1.0, 1.0], begin.shape), block, axis=1)[:, :n]
    return places, signs


def climbing(series: NoisySeries, step: Step, starts: Sequence[int], *, clearly: float = 0.0) -> bool:
    """Return whether a line fits no worse than the step, or than the staircase of steps that leads up to it.

    Args:
        clearly: Squared sigma by which the line must fit better, also than the best single step anywhere.
    """
    ends = sorted({0, *(s for s in starts if s < step.start), step.start, step.index, step.stop})
    levels = [series.centre(a, b) for a, b in itertools.pairwise(ends)]
    at = ends.index(step.start)
    while at > 0 and (levels[at] - levels[at - 1]) * step.effect > 0:
        at -= 1
    stairs = ends[at:]
    y = series.y[stairs[0] : step.stop]
    flat = np.concatenate([series.y[a:b] - series.centre(a, b) for a, b in itertools.pairwise(stairs)])
    calm = y - flat + np.clip(flat, -3 * series.sigma, 3 * series.sigma)
    time = np.arange(len(y)) - (len(y) - 1) / 2
    line = y - (mean(calm) + time * (time @ calm) / (time @ time))
    cap = (3 * series.sigma) ** 2
    stepped = float(np.minimum(flat**2, cap).sum())
    if clearly:
        sums, index = np.cumsum(calm - mean(calm)), np.arange(1, len(y))
        best = float((sums[:-1] ** 2 * len(y) / (index * (len(y) - index))).max())
        stepped = min(stepped, float(((calm - mean(calm)) ** 2).sum()) - best)
    # More levels always fit better: each explains about two squared sigma of noise.
    easier = 3 * series.sigma**2 * (len(stairs) - 3)
    return float(np.minimum(line**2, cap).sum()) <= stepped + easier - clearly * series.sigma**2


def _machine(step: Step, state: NDArray[np.int64], steps: Sequence[Step]) -> Literal["inside", "near", "like", None]:
    """Return why the machine may have caused a step, or None. `state`: [n].

    inside  the code is the same over the whole interval
    near    the code is the same at the likeliest place
    like    elsewhere, the machine alone moved at least half as far
    """
    if len(np.unique(state[step.low_index - 1 : step.high_index + 1])) == 1:
        return "inside"
    if state[step.index - 1] == state[step.index]:
        return "near"
    machine_effects = [abs(other.effect) for other in steps if state[other.index - 1] == state[other.index]]
    return "like" if machine_effects and max(machine_effects) >= abs(step.effect) / 2 else None


def not_reported(
    series: NoisySeries, step: Step, state: NDArray[np.int64], steps: Sequence[Step], min_effect: float
) -> str | None:
    """Return why a significant change is not certainly a code change, or None."""
    if min(step.index - step.start, step.stop - step.index) < MIN_SEGMENT:
        return TOO_FEW
    if abs(step.effect) < min_effect:
        return "smaller than the smallest relevant effect"
    machine = _machine(step, state, steps)
    if machine is not None:
        return {
            "inside": DRIFTS[2],
            "near": "the code may be the same on both sides",
            "like": "the machine alone has caused changes this large",
        }[machine]
    if series.rho > WANDER:
        return DRIFTS[0]
    if climbing(series, step, [other.index for other in steps]):
        return DRIFTS[1]
    if _bootstrapped(series, step) > BOOTSTRAP_LEVEL:
        return "noise of this series can be this large"
    return None
