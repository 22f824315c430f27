"""Levels of a series, with the answers of A/Bs."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.stats.predict import correlation, predict, settled
from groupbench.tracker.stats.screen import FEW, Stacked, calm_nights, came_back, screen
from groupbench.tracker.stats.student import rank_chance
from groupbench.tracker.stats.walk import NIGHTS, OUT, Mark, walk

CPU_MS = (0.302, 0.285, 0.293, 0.506, 0.773, 0.709, 0.625, 0.684, 0.738, 0.500, 0.715, 0.713)
"""A CPU kernel that became 2.4 times as slow at place 3, whose first night was too near to begin the level."""


def test_an_ab_inside_a_slowdown_does_not_end_it() -> None:
    same = {10: [Mark("same", 3, None, math.log(0.7))]}
    for marks in ({}, same):
        walked = walk([math.log(ms) for ms in CPU_MS], math.log1p(0.1), 0.17, marks, floor=0.02)
        reference, slower = walked.stack
        assert (reference.start, slower.start) == (0, 4)
        assert math.exp(slower.centre) > 2 * math.exp(reference.centre)


def test_an_ab_with_a_commit_of_the_level_below_ends_a_slowdown() -> None:
    same = {10: [Mark("same", 2, None, math.log(0.3))]}
    walked = walk([math.log(ms) for ms in CPU_MS], math.log1p(0.1), 0.17, same, floor=0.02)
    assert len(walked.stack) == 1


def test_a_slowdown_that_an_ab_finds_undone_leaves_no_improvement() -> None:
    """The A/B's effect and the centres of both levels have errors, by which the level seems to be below the first."""
    y = [*np.random.default_rng(3).normal(0, 0.002, 13), 0.026, 0.026, 0.027, 0.026, 0.001, 0.0]
    marks = {13: [Mark("slower", 12, 0.026, tag=1)], 17: [Mark("faster", 16, -0.0305, half=0.005)]}
    walked = walk(y, 0.003, 0.0015, marks, floor=0.0003)
    assert [level.by for level in walked.levels] == [None, "slower"] and len(walked.stack) == 1


def test_results_far_outside_count_if_two_as_far_came_back() -> None:
    """After fewer than five results, only gross ones do."""
    y = np.zeros((20, 14))
    y[3, 5], y[4, 2], y[5, 3], y[6, 8:], y[7, 5], y[8, 6] = 0.5, 0.01, 0.5, 0.5, 0.4, 0.1
    stack = Stacked(y, *(np.full(20, each) for each in (0.003, 0.0015, 0.0003)))
    found = came_back([(stack, 0.05)])
    assert sorted(found.distance.tolist()) == [0.1, 0.4, 0.5, 0.5]
    shares = [20 * 12 * found.share(distance) for distance in (0.1, 0.5, 0.51, 0.7)]
    assert shares == pytest.approx([4, 3, 2, 0])
    assert came_back([(stack.__class__(y[:, :1], stack.least, stack.prior, stack.floor), 0.05)]).share(1.0) == 0


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_results_like_those_before_make_the_centre_less_certain(rho: float) -> None:
    rng = np.random.default_rng(1)
    y = rng.normal(size=2000)
    for place in range(1, len(y)):
        y[place] += rho * y[place - 1]
    assert correlation(y.tolist()) == pytest.approx(rho, abs=0.05)
    assert correlation([]) == correlation([0.0, 0.0]) == correlation([1.0, -1.0] * 5) == 0.0
    assert correlation([1.0] * 8) == 1 - 1 / 8


def logs(*ms: float) -> list[float]:
    return [math.log(each) for each in ms]


NOISY_REVERT = logs(1, 1.05, 0.97, 1.02, 1.1, 0.95, 1, 1.04, 0.98, 1.02, 1.5, 1.46, 1.55, 1.2)
SLOWER = Mark("slower", 9, math.log(1.5), math.log(1.5))


BETWEEN = logs(0.966, 1.056, 0.991, 0.988, 0.974, 0.998, 0.983, 1.02, 1.121, 0.997, 1.005, 1.015, 1.184, 1.053)


@pytest.mark.parametrize("known", [[], [Mark("slower", 11, 0.113, tag=1)]])
def test_one_result_between_two_levels_ends_none(known: list[Mark]) -> None:
    """The A/B of +12 % is not known if only the first result, a high one, shows the level: 1.05 was seen before."""
    assert len(walk(BETWEEN, 0.003, 0.0015, {12: known or [Mark("slower", 11, 0.169)]}, floor=0.0003).stack) == 2
    back = [*BETWEEN[:13], 0.0, 0.01, -0.01]
    assert len(walk(back, 0.003, 0.0015, {12: known}, floor=0.0003).stack) == 1


@pytest.mark.parametrize(("base", "fixed", "starts"), [(1, False, [0, 12]), (17, False, [0, 18]), (1, True, [0, 18])])
def test_an_ab_over_a_known_slowdown_is_not_a_new_one(base: int, fixed: bool, starts: list[int]) -> None:
    """Results seemed to be back. An A/B with a commit from before the slowdown shows that they were not.

    One with a commit that was back, or after another A/B has shown the fix, has found a new one.
    """
    y = [*BETWEEN[:12], *logs(1.3, 1.28, 1.0, 1.02, 0.99, 1.01, 1.31)]
    marks = {12: [Mark("slower", 11, math.log(1.3), math.log(1.3))], 18: [Mark("slower", base, math.log(1.3))]}
    if fixed:
        marks[14] = [Mark("faster", 13, -math.log(1.3))]
    assert [level.start for level in walk(y, math.log1p(0.1), 0.1, marks, floor=0.02).stack] == starts


@pytest.mark.parametrize(
    ("tonight", "half", "moved"), [(1.0, 0.2, False), (1.19, 0.0, True), (1.3, 0.2, True), (1.19, 0.2, False)]
)
def test_a_part_remains_only_if_neither_the_ab_nor_tonight_may_be_on_the_level_below(
    tonight: float, half: float, moved: bool
) -> None:
    """The A/Bs find +50 % and then -20 %, so that +20 % seem to remain."""
    y = [*NOISY_REVERT[:13], math.log(tonight)]
    marks = {10: [SLOWER], 13: [Mark("faster", 12, math.log(0.8), half=half)]}
    stack = walk(y, math.log1p(0.1), 0.1, marks, floor=0.02).stack
    assert [level.moved for level in stack[1:]] == [13] * moved


@pytest.mark.parametrize(("factor", "kind", "starts"), [(0.7, "faster", [14]), (1.3, "slower", [0, 14])])
def test_an_effect_is_that_from_the_level_which_the_ab_measured(
    factor: float, kind: Literal["faster", "slower"], starts: list[int]
) -> None:
    """The result of the revert is too noisy to end the slowdown, but the A/B with its commit measured the old level."""
    marks = {10: [SLOWER], 14: [Mark(kind, 13, math.log(factor), math.log(factor))]}
    walked = walk([*NOISY_REVERT, math.log(factor)], math.log1p(0.1), 0.1, marks, floor=0.02)
    assert [level.start for level in walked.stack] == starts
    assert walked.stack[-1].was == pytest.approx(0, abs=0.03)


def test_two_abs_of_a_slowdown_begin_the_improvement_before_it_once() -> None:
    """Its first nights are known to be an improvement by the A/B that finds the slowdown from it."""
    y = (
        -0.0082,
        -0.0028,
        -0.0016,
        -0.0019,
        -0.0019,
        -0.0021,
        -0.0012,
        0.0019,
        0.0021,
        -0.0013,
        -0.0074,
        -0.0071,
        0.329,
        0.33,
    )
    slower = [Mark("slower", 11, 0.336, tag=1), Mark("slower", 11, 0.337)]
    walked = walk(y, 0.003, 0.0015, {12: slower, 13: slower[1:]}, [0.0001] * len(y), 0.0003)
    improved, newest = walked.stack
    assert (improved.start, newest.start, newest.tag) == (10, 12, 1)
    assert improved.replaced is not None and improved.replaced.replaced is None


def test_an_accepted_improvement_needs_no_ab() -> None:
    marks = {6: [Mark("reference", tag=1), Mark("faster", 5, math.log(0.7), math.log(0.7))]}
    walked = walk(logs(*[1] * 6, 0.7, 0.7), math.log1p(0.1), 0.08, marks)
    assert [(level.start, level.tag) for level in walked.stack] == [(6, 1)]


@pytest.mark.parametrize("tonight", [1.2, 1.5])
def test_a_slowdown_ends_with_its_code_whatever_the_latency_is(tonight: float) -> None:
    y = [*NOISY_REVERT[:13], math.log(tonight)]
    walked = walk(y, math.log1p(0.1), 0.1, {10: [SLOWER], 13: [Mark("code", 9)]}, floor=0.02)
    assert len(walked.stack) == 1
    assert walked.nights == (tonight == 1.5)
    assert len(walk(y, math.log1p(0.1), 0.1, {10: [SLOWER]}, floor=0.02).stack) == 2


def test_a_level_is_found_after_the_noise_has_gone() -> None:
    loud, calm = [0.3, -0.3, 0, 0.35, -0.35, 0] * 2, [0.01, -0.01] * 20
    walked = walk([*loud, *calm, *[0.25] * 8, 0.25], 0.1, 0.08)
    assert [level.start for level in walked.stack] == [0, len(loud + calm)]


def test_a_night_of_many_series_follows_one_whose_scatter_could_hide_twice_the_latency() -> None:
    y = np.random.default_rng(1).normal(0, 0.005, (FEW + 1, 30))
    y[0] *= 100
    for tonight in (0.05, 0.2):
        y[0, -1] = tonight + np.sort(y[0, :10])[4]
        level = screen([Stacked(y, *(np.full(len(y), each) for each in (0.1, 0.08, 0.02)))], 0.01)[0]
        assert level is not None and level.certain[0] == (tonight < 0.1)
        assert level.certain[1:].mean() > 0.9


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(3, 110),
    noise=st.sampled_from(["normal", "exponential", "outliers", "rounded"]),
    steps=st.integers(0, 3),
    marked=st.integers(0, 2),
)
def test_calm_nights_change_no_level(seed: int, n: int, noise: str, steps: int, marked: int) -> None:
    rng, rows = np.random.default_rng(seed), 40
    y = rng.standard_exponential((rows, n)) if noise == "exponential" else rng.standard_normal((rows, n))
    if noise == "outliers":
        y += 10 * (rng.random(y.shape) < 0.05)
    for _ in range(steps):
        y[:, rng.integers(n) :] += rng.uniform(-8, 8, (rows, 1))
    if noise == "rounded":
        y = np.round(y)
    least, prior = rng.uniform(0, 1, rows), rng.uniform(0.3, 2, rows)
    series = Stacked(y, least, prior, np.full(rows, 0.1), None if seed % 2 else rng.uniform(0, 2, y.shape))
    marks: dict[int, list[Mark]] = {}
    for _ in range(marked):
        place, kind = int(rng.integers(1, n)), rng.choice(["slower", "faster", "same", "reference"])
        base, level = int(rng.integers(place)), float(rng.normal()) if rng.random() < 0.5 else None
        marks[place] = [Mark(kind, base, float(rng.normal(0, 3)), level)]
    calm = calm_nights(series)
    for at in range(rows):
        assert series.one(at, marks, calm).walked() == series.one(at, marks).walked()


@pytest.mark.parametrize("n", [8, 11, 20, 60])
def test_calm_nights_are_those_that_predict_calls_likely(n: int) -> None:
    y = np.random.default_rng(n).standard_t(2, (50, n))
    least, prior, floor = 0.5, 0.8, 0.1
    calm = calm_nights(Stacked(y, *(np.full(len(y), each) for each in (least, prior, floor))))
    assert not calm[:, n - NIGHTS :].any()
    for at, values in enumerate(y.tolist()):
        for place in range(7, n - NIGHTS):
            before = values[:place]
            predicted = predict(settled(before), (), prior, floor)
            distance, span = abs(values[place] - predicted.centre), max(before) - min(before)
            inside = min(before) - span <= values[place] <= max(before) + span
            likely = distance < predicted.reach(OUT)
            assert calm[at, place] == (distance <= least or (inside and likely)), (at, place)


def test_two_comparisons_of_one_result_begin_one_level() -> None:
    marks = {8: [Mark("faster", base, -0.3) for base in (5, 2)]}
    walked = walk([*[0.0] * 8, -0.3, -0.3], 0.1, 0.05, marks)
    assert [level.start for level in walked.levels] == [0, 8]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (3, 1), (2, 2), (5, 1)])
def test_the_chance_of_ranks_is_exact_in_exponential_noise(n: int, k: int) -> None:
    y = np.random.default_rng(n + 10 * k).exponential(1, (100_000, n + k))
    old, new = y[:, :n], y[:, n:]
    share = (new.min(axis=1) > 2 * old.max(axis=1) - old.min(axis=1)).mean()
    assert share == pytest.approx(rank_chance(n, k), abs=0.004)


def test_without_nights_there_is_no_chance_to_compute() -> None:
    assert rank_chance(0, 3) == rank_chance(3, 0) == 1.0


def test_history_alone_never_finds_a_result_rarer() -> None:
    rng = np.random.default_rng(5)
    for n in range(1, 40):
        one = predict(rng.exponential(0.1, n).tolist(), (), 0.05)
        for value in rng.normal(0, 1, 5).tolist():
            assert one.alone(value) >= one.p(value)


def test_one_old_outlier_does_not_widen_the_tail() -> None:
    quiet = np.random.default_rng(6).normal(0, 0.001, 12).tolist()
    with_outlier = [*quiet[:4], 0.3, *quiet[5:]]
    for values in (quiet, with_outlier):
        assert predict(values, (), 0.0015).alone(0.018) < 0.001


def test_an_outlier_before_a_step_is_not_its_first_night() -> None:
    quiet = np.random.default_rng(7).normal(0, 0.03, 20).tolist()
    walked = walk([*quiet, 0.15, 0.4, 0.42, 0.41], 0.095, 0.08)
    assert [level.start for level in walked.stack] == [0, 21]


def test_nights_far_apart_count_by_their_ranks_where_the_prior_is_too_wide() -> None:
    walked = walk([0.0, 0.01, -0.01, 0.005, 0.002, 0.0, 0.01, 0.2, 0.2], 0.095, 0.3)
    assert (walked.nights, walked.far) == (0, 2) and walked.rank == rank_chance(7, 2) < 0.005
