"""Simulate the noise of A/A comparisons by block, for studies of the sequential test."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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
    off = random.random((runs, blocks)) < 1 / 34
    sign = random.choice([-1.0, 1.0], (runs, blocks))
    return gaussian(random, runs, blocks, placement, burst) + off * sign * math.log(2.5)


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
