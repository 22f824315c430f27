"""Simulate the noise of A/A comparisons by block, and decide many at once, for studies of the sequential test."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.ab import sequential

Array = NDArray[np.float64]

# name: (standard deviation of a placement in memory, of a burst, bursts of each side, seconds per block), all measured
# on an H100 at this latency. A block takes 0.4 s, and new processes after every fourth block take 0.8 s.
LATENCIES: dict[str, tuple[float, float, int, float]] = {
    "0.62 ms": (0.0003, 0.0020, 2, 0.60),
    "0.40 ms": (0.0023, 0.0029, 2, 0.60),
    "0.10 ms": (0.0015, 0.0036, 2, 0.60),
    "13 us": (0.0065, 0.0110, 2, 0.60),
}

MILLISECONDS = {"0.62 ms": 0.62, "0.40 ms": 0.40, "0.10 ms": 0.10, "13 us": 0.013}


def gaussian(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """Return [runs, blocks] differences: each side has a random placement and a random burst, both normal."""
    return random.normal(0, math.sqrt(2) * math.hypot(placement, burst), (runs, blocks))


def heavy(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """Return differences with Student's t distribution, 3 degrees of freedom: its fourth moment is infinite."""
    return random.standard_t(3, (runs, blocks)) * math.hypot(placement, burst)


def drifting(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """Return differences of a machine whose successive bursts are AR(1) with 0.8. A coin decides the first side."""
    rho = 0.8
    noise = random.normal(0, burst * math.sqrt(1 - rho**2), (runs, 2 * blocks))
    noise[:, 0] = random.normal(0, burst, runs)
    for slot in range(1, 2 * blocks):
        noise[:, slot] += rho * noise[:, slot - 1]
    coin = random.choice([-1.0, 1.0], (runs, blocks))
    places = random.normal(0, math.sqrt(2) * placement, (runs, blocks))
    return coin * (noise[:, 1::2] - noise[:, ::2]) + places


def bimodal(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """Return differences with two equally likely placements, 0.7 % apart."""
    places = random.choice([0.0, 0.007], (2, runs, blocks))
    return places[1] - places[0] + random.normal(0, math.sqrt(2) * burst, (runs, blocks))


def outliers(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """Return normal differences in which one block in 34 is wrong by a factor of 2.5, on either side."""
    off = (random.random((runs, blocks)) < 1 / 34) * random.choice([-1.0, 1.0], (runs, blocks))
    return gaussian(random, runs, blocks, placement, burst) + off * math.log(2.5)


def constant(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """Return differences of a clock that is noisy only in its last bit."""
    return random.normal(0, 1e-12, (runs, blocks))


NOISES: dict[str, Callable[..., Array]] = {
    noise.__name__: noise for noise in (gaussian, heavy, drifting, bimodal, outliers, constant)
}


def luck(random: np.random.Generator, runs: int, blocks: int, sd: float, renewed: int) -> Array:
    """Return [runs, blocks] errors of the processes of each block, head minus base."""
    base, head = random.normal(0, sd, (2, runs, -(-blocks // renewed)))
    return (head - base).repeat(renewed, axis=1)[:, :blocks]


def busy(random: np.random.Generator, runs: int, blocks: int, renewed: int = 1) -> Array:
    """Return [runs, blocks] differences, head minus base, on a CPU that other work shares for several bursts.

    Four processes of ten share their core for as long as they live, and one burst in six is disturbed.
    """
    lives, bursts = (2, runs, -(-blocks // renewed)), (2, runs, blocks)
    shared = (random.random(lives) < 0.4) * random.uniform(0.1, 0.9, lives)
    disturbed = (random.random(bursts) < 1 / 6) * random.exponential(0.4, bursts)
    base, head = shared.repeat(renewed, axis=2)[..., :blocks] + disturbed
    return drifting(random, runs, blocks, 0.03, 0.3) + head - base


def hold(differences: Array, effect: float, rule: sequential.Rule) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return whether the interval that each comparison shows holds the effect, and whether it is called different."""
    verdicts, used = decide_many(differences, rule)
    holds = []
    for row, verdict, n in zip(differences, verdicts, used, strict=True):
        one = sequential.decide(row[:n], rule)
        low, high = sequential.estimate(row[:n])[1:] if verdict == 2 else (one.low, one.high)
        holds.append(low <= effect <= high)
    return np.array(holds), np.abs(verdicts) == 1


def decide_many(differences: Array, rule: sequential.Rule) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    """Apply `sequential.decide` after each block of many comparisons [runs, n], until each stops.

    Returns (1 different and slower, -1 different and faster, 0 same, 2 unknown; blocks used), each [runs]. Equal
    values in a row of `differences` may be ranked either way, and the resolution is taken as 0.
    """
    runs, most = differences.shape
    verdict, used = np.full(runs, 2, dtype=np.int8), np.full(runs, most, dtype=np.int64)
    alive = np.arange(runs)
    for n in range(1, min(most, sequential.MAX_BLOCKS) + 1):
        d = differences[alive, :n]
        decisions = np.full(len(alive), 2, dtype=np.int8)
        if n >= sequential.FIRST_SAME and (k := sequential.rank(n, 2 * rule.beta)):
            inside = _counted(d, rule.min_effect) >= n * (n + 1) // 2 - k + 1
            inside &= _counted(d, -rule.min_effect) <= k - 1
            decisions[inside] = 0
        if k := sequential.rank(n, sequential.alpha_at(n, rule.alpha)):
            slower = _counted(d, rule.floor) <= k - 1
            faster = _counted(d, -rule.floor) >= n * (n + 1) // 2 - k + 1
            if luck := sequential.processes_width(n, rule):
                # Only these few need the ends of their interval.
                for row in np.flatnonzero(slower | faster):
                    effect = sequential.middle(pairs := sequential.pair_averages(d[row]))
                    slower[row] &= effect - math.hypot(effect - pairs[k - 1], luck) > rule.floor
                    faster[row] &= effect + math.hypot(pairs[-k] - effect, luck) < -rule.floor
            decisions[slower], decisions[faster] = 1, -1
        stop = decisions != 2
        verdict[alive[stop]], used[alive[stop]] = decisions[stop], n
        alive = alive[~stop]
    return verdict, used


def _counted(d: NDArray[np.float64], theta: float) -> NDArray[np.int64]:
    """Return how many pair averages are <= theta, by row: the rank sum of the values below theta."""
    shifted = d - theta
    return ((np.abs(shifted).argsort(axis=1).argsort(axis=1) + 1) * (shifted <= 0)).sum(axis=1)
