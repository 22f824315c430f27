"""Levels between steps that A/Bs measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.stats import known
from groupbench.tracker.stats.histories import SeriesHistory
from groupbench.tracker.stats.known import KnownStep


def history(levels: Sequence[float], floor: float = 0.02) -> SeriesHistory:
    n = len(levels)
    zeros = np.zeros(n, dtype=np.int64)
    return SeriesHistory(np.log(levels), np.zeros(n), zeros, np.arange(n), floor=floor, min_effect=math.log(1.1))


def ups(levels: Sequence[float], *places: int) -> list[KnownStep]:
    """Return the steps to the results at these places, as an exact A/B measures them."""
    return [KnownStep(at - 1, at, math.log(levels[at] / levels[at - 1])) for at in places]


def flat(levels: Sequence[float], *places: int, noise: Sequence[int] = ()) -> list[float]:
    shifts = known.shifts(history(levels), ups(levels, *places), lambda back, effect: back in noise)
    return [round(each, 6) for each in np.exp(np.log(levels) + shifts).tolist()]


@pytest.mark.parametrize(
    ("levels", "places", "expected"),
    [
        ([1, 1, 2, 1, 1], [2], [1] * 5),
        ([1, 1, 2, 2], [2], [1, 1, 2, 2]),
        ([1, 1, 2, 3, 3], [2, 3], [1, 1, 2, 3, 3]),
        ([1, 1, 2, 10, 1.2, 1, 1], [2, 3], [1] * 7),
        ([1, 1, 2, 3, 1], [2, 3], [1] * 5),
        ([1, 1, 2, 3, 2], [2, 3], [1, 1, 2, 2, 2]),
        ([1, 1, 2.5, 1.5, 2.5, 1], [2], [1] * 6),
        ([1, 1, 0.5, 0.5], [2], [1, 1, 0.5, 0.5]),
        ([1, 1, 2, 0.5], [2, 3], [0.5] * 4),
    ],
    ids=[
        "over",
        "lasts",
        "two",
        "over in parts",
        "both over",
        "one over",
        "in part and back",
        "faster",
        "faster since",
    ],
)
def test_only_steps_that_last_remain(levels: list[float], places: list[int], expected: list[float]) -> None:
    assert flat(levels, *places) == pytest.approx(expected)


def test_a_step_on_the_newest_level_stays_visible() -> None:
    for newest in range(1, 8):
        levels = [1, 1, 2, 1, 1, *[1.5] * newest]
        assert flat(levels, 2)[5:] == pytest.approx([1.5] * newest)
        assert flat(levels, 2)[:5] == pytest.approx([1] * 5)


def test_a_return_that_an_ab_refutes_does_not_end_a_slowdown() -> None:
    levels = [1, 1, 2, 1, 2, 2]
    assert flat(levels, 2, noise=[3]) == pytest.approx(levels)
    assert flat(levels, 2)[2] == pytest.approx(1)


def test_a_step_that_the_results_do_not_show_is_ignored() -> None:
    levels = history([1, 0.5, 0.5])
    assert not known.shifts(levels, [KnownStep(0, 1, math.log(1.3))], lambda back, effect: False).any()


@given(st.lists(st.sampled_from([1.0, 1.4, 2.0, 3.0]), min_size=2, max_size=20), st.data())
def test_the_newest_level_is_kept_and_nothing_is_left_to_flatten(levels: list[float], data: st.DataObject) -> None:
    moves = [at for at in range(1, len(levels)) if levels[at] != levels[at - 1]]
    places = data.draw(st.lists(st.sampled_from(moves), unique=True)) if moves else []
    steps = ups(levels, *places)
    once = history(levels)
    shifts = known.shifts(once, steps, lambda back, effect: False)
    assert shifts[-1] == pytest.approx(0)
    again = history(np.exp(once.log_ms + shifts).tolist())
    assert known.shifts(again, steps, lambda back, effect: False) == pytest.approx(np.zeros(len(levels)))
