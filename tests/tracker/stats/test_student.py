"""Student's t distribution against values of scipy 1.17."""

from __future__ import annotations

import math

import pytest

from groupbench.tracker.stats.student import quantile, tail


@pytest.mark.parametrize(
    ("t", "freedom", "chance"),
    [
        (0.0, 3, 0.5),
        (2.0, 3, 0.06966298427942152),
        (-2.0, 3, 1 - 0.06966298427942152),
        (3.5, 4.37, 0.010775386695592176),
        (8.0, 33, 1.5711403073569577e-09),
        (3.0, math.inf, 0.0013498980316300957),
        (math.inf, 5, 0.0),
    ],
)
def test_the_chance_of_a_larger_value(t: float, freedom: float, chance: float) -> None:
    assert tail(t, freedom) == pytest.approx(chance, rel=1e-9)


@pytest.mark.parametrize(
    ("p", "freedom", "t"),
    [
        (0.01, 3, 4.5407028585681335),
        (0.025, 9, 2.2621571627982053),
        (0.001, 33.5, 3.3520684807161216),
        (0.975, 9, -2.2621571627982053),
        (0.01, math.inf, 2.3263478740408408),
        (0.5, 7, 0.0),
    ],
)
def test_the_value_that_is_exceeded_with_a_chance(p: float, freedom: float, t: float) -> None:
    assert quantile(p, freedom) == pytest.approx(t, rel=1e-12, abs=1e-15)
