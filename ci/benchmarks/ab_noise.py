"""Noise of like sides, block by block, for studies of the sequential test: what it may meet on a machine."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# name: (standard deviation of a placement, of a burst, bursts a side, seconds a block). The deviations are those of an
# H100 at the kernel's latency, and so are the seconds: 0.4 for a block, 0.8 for new processes after every fourth.
LATENCIES: dict[str, tuple[float, float, int, float]] = {
    "0.62 ms": (0.0003, 0.0020, 2, 0.60),
    "0.40 ms": (0.0023, 0.0029, 2, 0.60),
    "0.10 ms": (0.0015, 0.0036, 2, 0.60),
    "13 us": (0.0065, 0.0110, 2, 0.60),
}

MILLISECONDS = {"0.62 ms": 0.62, "0.40 ms": 0.40, "0.10 ms": 0.10, "13 us": 0.013}


def gaussian(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """[runs, blocks] differences of like sides: both draw a placement and a burst."""
    return random.normal(0, math.sqrt(2) * math.hypot(placement, burst), (runs, blocks))


def heavy(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """Student's t with 3 degrees of freedom, whose fourth moment is infinite."""
    return random.standard_t(3, (runs, blocks)) * math.hypot(placement, burst)


def drifting(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """A machine whose bursts, one after the other, are an AR(1) with 0.8; the coin says which side is first."""
    rho = 0.8
    noise = random.normal(0, burst * math.sqrt(1 - rho**2), (runs, 2 * blocks))
    noise[:, 0] = random.normal(0, burst, runs)
    for slot in range(1, 2 * blocks):
        noise[:, slot] += rho * noise[:, slot - 1]
    coin = random.choice([-1.0, 1.0], (runs, blocks))
    places = random.normal(0, math.sqrt(2) * placement, (runs, blocks))
    return coin * (noise[:, 1::2] - noise[:, ::2]) + places


def bimodal(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """Placements of two kinds, 0.7 % apart, each as likely."""
    places = random.choice([0.0, 0.007], (2, runs, blocks))
    return places[1] - places[0] + random.normal(0, math.sqrt(2) * burst, (runs, blocks))


def outliers(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """One block in 34 off by 2.5 times, on either side."""
    off = random.random((runs, blocks)) < 1 / 34
    sign = random.choice([-1.0, 1.0], (runs, blocks))
    return gaussian(random, runs, blocks, placement, burst) + off * sign * math.log(2.5)


def constant(random: np.random.Generator, runs: int, blocks: int, placement: float, burst: float) -> Array:
    """A clock without noise but for the last bit."""
    return random.normal(0, 1e-12, (runs, blocks))


NOISES: dict[str, Callable[..., Array]] = {
    noise.__name__: noise for noise in (gaussian, heavy, drifting, bimodal, outliers, constant)
}


def luck(random: np.random.Generator, runs: int, blocks: int, sd: float, renewed: int) -> Array:
    """[runs, blocks] of what the blocks' processes are off, head's less base's."""
    base, head = random.normal(0, sd, (2, runs, -(-blocks // renewed)))
    return (head - base).repeat(renewed, axis=1)[:, :blocks]
