"""Intervals and p values of ratios. Seeds are fixed: these are counts, not chances."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from cases import rarely
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.compare.between import scatter_of
from groupbench.tracker.compare.ratios import Interval, geometric_mean, ratio_interval

TRIALS = 1500
LATENCIES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12)


def interval(a: list[float], b: list[float], error: float = 0.001, timing: str = "gpu") -> Interval:
    result = ratio_interval(a, [error] * len(a), b, [error] * len(b), timing=timing)
    assert result is not None
    return result


def shares(runs: tuple[int, int], between: float, within: float, truth: float, noise: str) -> tuple[float, float]:
    """Return the shares of trials whose interval excludes the true ratio, and whose p is below 0.05."""
    rng = np.random.default_rng(11)
    missed = called = 0
    for _ in range(TRIALS):
        sides = []
        for n, level in zip(runs, (0.0, math.log(truth)), strict=True):
            luck = rng.standard_t(3, n) / math.sqrt(3) if noise == "t3" else rng.normal(0, 1, n)
            log = level + between * luck + within * rng.normal(0, 1, n)
            if noise == "outliers":
                log += (rng.random(n) < 0.05) * rng.exponential(0.1, n)
            sides += [np.exp(log), within * np.sqrt(rng.chisquare(9, n) / 9)]
        result = ratio_interval(*sides, timing="gpu")
        assert result is not None and result.p is not None
        missed += not result.low <= truth <= result.high
        called += result.p < 0.05
    return missed / TRIALS, called / TRIALS


RUNS, NOISES = ((2, 2), (3, 3), (3, 6), (10, 10)), ("normal", "t3", "outliers")
WORST = (2, 2), "outliers"


@pytest.mark.parametrize(
    ("runs", "noise"), [WORST, *rarely(*(each for each in product(RUNS, NOISES) if each != WORST))]
)
def test_an_interval_of_several_runs_covers_the_true_ratio(runs: tuple[int, int], noise: str) -> None:
    for between, within in ((0.003, 0.001), (0.01, 0.002)):
        missed, called = shares(runs, between, within, 1.0, noise)
        assert missed == called <= 0.065
    assert shares(runs, 0.01, 0.002, 1.05, noise)[0] <= 0.065


def called(between: float, others: int, rng: np.random.Generator, trials: int, runs: int = 1) -> tuple[float, float]:
    """Return how often p is below 0.05 and 0.001, of A/A runs in which every run's bursts agree."""
    values = []
    for _ in range(trials):
        log = rng.normal(0, between, others + 2 * runs)
        scatter = scatter_of(np.diff(log[:others]).tolist(), "gpu", 1.0)
        a, b = np.exp(log[others : others + runs]), np.exp(log[others + runs :])
        result = ratio_interval(a, [0.001] * runs, b, [0.001] * runs, timing="gpu", others=scatter)
        values += [] if result is None else [result.p]
    return tuple(sum(p is not None and p < limit for p in values) / trials for limit in (0.05, 0.001))


@pytest.mark.parametrize("others", [6, 31, *rarely(11, 16)])
@pytest.mark.parametrize("between", [0.05, *rarely(0.02, 0.1)])
def test_the_scatter_of_other_runs_bounds_the_p_of_one_run_a_side(between: float, others: int) -> None:
    often, certain = called(between, others, np.random.default_rng(7), 4 * TRIALS)
    assert 0.01 < often < 0.06 and certain <= 0.002


@pytest.mark.parametrize("others", [0, 3, 5])
def test_one_run_a_side_and_too_few_others_have_no_p(others: int) -> None:
    assert called(0.05, others, np.random.default_rng(7), 20) == (0, 0)


def test_other_runs_make_the_p_of_few_runs_useful() -> None:
    alone = interval([1.0], [1.02, 1.021])
    others = scatter_of(np.diff(np.random.default_rng(2).normal(0, 0.002, 30)).tolist(), "gpu", 1.0)
    result = ratio_interval([1.0], [0.001], [1.02, 1.021], [0.001] * 2, timing="gpu", others=others)
    assert result is not None and alone.p is not None and result.p is not None
    assert (
        result.p < 1e-3 < alone.p and result.low > 1 and called(0.05, 31, np.random.default_rng(3), 500, 2)[1] < 0.005
    )


def test_a_step_between_other_runs_is_not_their_scatter() -> None:
    level = np.random.default_rng(2).normal(0, 0.002, 20)
    step = np.where(np.arange(20) < 9, 0.0, 0.4)
    scatters = [scatter_of(np.diff(level + each).tolist(), "gpu", 1.0).deviation for each in (0, step)]
    assert scatters[1] < 1.5 * scatters[0]


def test_more_runs_narrow_the_interval() -> None:
    rng = np.random.default_rng(3)
    widths = []
    for n in (2, 3, 10, 30):
        intervals = [interval(*(list(np.exp(rng.normal(0, 0.01, n))) for _ in "ab")) for _ in range(100)]
        widths.append(float(np.median([math.log(each.high / each.low) for each in intervals])))
    assert widths == sorted(widths, reverse=True) and widths[0] > 5 * widths[-1]


def test_a_change_far_beyond_the_noise_has_a_small_p() -> None:
    result = interval([1.0, 1.001, 0.999], [1.1, 1.101, 1.099])
    assert 1.09 < result.low < 1.1 < result.high
    assert result.p is not None and result.p < 1e-4


def test_one_outlier_in_five_runs_does_not_widen_the_interval() -> None:
    quiet = [1.0, 1.001, 0.999, 1.002, 0.998]
    spoilt = interval(quiet, [*quiet[:4], 5.0])
    assert math.log(spoilt.high / spoilt.low) < 2 * math.log(interval(quiet, quiet).high / interval(quiet, quiet).low)
    few = interval(quiet[:3], [*quiet[:2], 5.0])
    assert few.high > 2


@pytest.mark.parametrize(("timing", "least"), [("gpu", 0.001), ("cpu", 0.02)])
def test_runs_that_agree_by_chance_are_no_more_exact_than_the_floor(timing: str, least: float) -> None:
    result = interval([1.0, 1.0], [1.0, 1.0], error=0.0, timing=timing)
    assert math.log(result.high) == pytest.approx(1.96 * least, rel=0.01) and result.p == 1.0


def test_without_bursts_and_repeats_there_is_no_interval() -> None:
    unknown = [math.nan]
    assert ratio_interval([1.0], unknown, [2.0], unknown, timing="gpu") is None
    one_known = ratio_interval([1.0], unknown, [1.0], [0.01], timing="gpu")
    assert one_known is not None
    assert math.log(one_known.high) == pytest.approx(1.96 * math.hypot(0.01, 0.001) * math.sqrt(2), rel=0.01)


@given(LATENCIES, LATENCIES, st.floats(0, 10))
def test_the_interval_holds_the_ratio_and_agrees_with_p(a: list[float], b: list[float], error: float) -> None:
    result = ratio_interval(a, [error] * len(a), b, [error] * len(b), timing="gpu")
    if result is None:
        assert (len(a), len(b), error) == (1, 1, 0)
        return
    ratio = math.exp(float(np.median(np.log(b)) - np.median(np.log(a))))
    assert result.low <= ratio <= result.high < math.inf
    assert result.p is not None and 0 <= result.p <= 1
    if abs(result.p - 0.05) > 1e-6:
        assert (result.p < 0.05) == (not result.low <= 1 <= result.high)


def test_swapped_sides_give_the_inverse() -> None:
    a, b = [1.0, 1.01, 0.98], [1.1, 1.12]
    there, back = interval(a, b), interval(b, a)
    assert (1 / back.high, 1 / back.low) == pytest.approx((there.low, there.high))
    assert there.p == pytest.approx(back.p)


@pytest.mark.parametrize("k", [2, 20, *rarely(5)])
def test_an_interval_of_a_geometric_mean_covers_it(k: int) -> None:
    rng = np.random.default_rng(5)
    held = 0
    for _ in range(TRIALS):
        mean = geometric_mean(list(np.exp(rng.normal(0.02, 0.03, k))))
        assert mean is not None and mean.low is not None and mean.high is not None
        held += mean.low <= math.exp(0.02) <= mean.high
    assert held / TRIALS == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("together", [0.0, 0.7, 1.0])
def test_more_series_of_one_run_do_not_average_a_slow_machine_out(together: float) -> None:
    """The noise of a run's series is partly common. Widths of each series' own noise cover both kinds."""
    rng, covering, noise, k = np.random.default_rng(6), 0, 0.05, 8
    for _ in range(TRIALS):
        common, apart = rng.normal(0, noise * together), rng.normal(0, noise * math.sqrt(1 - together**2), k)
        mean = geometric_mean(list(np.exp(common + apart)), [1.96 * noise] * k)
        assert mean is not None and mean.low is not None and mean.high is not None
        covering += mean.low <= 1 <= mean.high
    assert covering / TRIALS >= 0.94


def test_a_geometric_mean_has_no_interval_if_a_ratio_has_none() -> None:
    mean = geometric_mean([1.1, 1.2, 1.3], None)
    assert mean is not None and (mean.series, mean.low, mean.high) == (3, None, None)


def test_a_geometric_mean_of_few() -> None:
    assert geometric_mean([]) is None
    one, two = geometric_mean([1.2]), geometric_mean([0.5, 2.0])
    assert one is not None and two is not None
    assert (one.ratio, one.series, one.low, one.high) == (pytest.approx(1.2), 1, None, None)
    assert two.ratio == pytest.approx(1.0)
    # t of one degree of freedom is 12.706, and the standard error log(2)
    assert two.high == pytest.approx(2**12.7062, rel=1e-3)
