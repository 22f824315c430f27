"""Steps in a history of fewer than ten results."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from groupbench.tracker.stats import young
from groupbench.tracker.stats.histories import SeriesHistory

GROSS = math.log(1.3)  # of a CPU


def history(y: NDArray[np.float64], gross: float = GROSS) -> SeriesHistory:
    n = len(y)
    return SeriesHistory(y, np.full(n, 0.005), np.zeros(n, np.int64), np.arange(n), gross=gross)


def busy(seed: int, n: int) -> NDArray[np.float64]:
    """Return log latencies of a busy CPU, where other work makes a call slower by 8 % on average."""
    return np.abs(np.random.default_rng(seed).normal(0, 0.1, n))


@pytest.mark.parametrize("before", [3, 4, 5, 6])
def test_a_slowdown_shows_in_scatter_as_wide_as_a_third_of_it(before: int) -> None:
    """Before, it had to be 69 %, and twice as far as the results of one level scatter."""
    shown = 0
    for seed in range(20):
        y = busy(seed, 9)
        y[before:] += math.log(1.5)
        shown += any(young.find_step(history(y[:n])) for n in range(before + 2, 10))
    assert shown >= 17


def test_scatter_alone_is_hardly_ever_a_step() -> None:
    steps = [young.find_step(history(busy(seed, n))) for seed in range(300) for n in range(4, 10)]
    assert sum(step is not None for step in steps) <= 4


@pytest.mark.parametrize(
    ("levels", "gross", "expected"),
    [
        ([0, 0.1, 0, 0.1, 0.5, 0.4, 0.5, 0.4], GROSS, 4),
        ([0.5, 0.4, 0.5, 0.4, 0, 0.1, 0, 0.1], GROSS, 4),
        ([0, 0.1, 0, 0.1, 0.2, 0.3, 0.2, 0.3], GROSS, None),
        ([0, 0.3, 0.1, 0.2, 0.5, 0.4, 0.5, 0.4], GROSS, None),
        ([0, 0.1, 0, 0.1, 0, 0.1, 0, 0.5], GROSS, None),
        ([0, 0.01, 0, 0.01, 0.07, 0.08, 0.07, 0.08], 0.05, 4),
    ],
    ids=["slower", "faster", "too small", "too wide", "one result", "gpu"],
)
def test_two_levels_differ_from_scatter_by_their_means(levels: list[float], gross: float, expected: int | None) -> None:
    step = young.find_step(history(np.array(levels), gross))
    assert (step.index if step else None) == expected
