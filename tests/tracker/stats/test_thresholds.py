"""Rules for short histories. Seeds are fixed, so these are counts, not probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest

from groupbench.tracker.ab.result import defaults
from groupbench.tracker.compare.between import Scatter, scatter_of
from groupbench.tracker.compare.ratios import judge_pools, mad
from groupbench.tracker.stats.thresholds import POOL_FLOOR, burst_error, least_effect

UNKNOWN = math.nan
NO_OTHERS = Scatter(0.0015)


@pytest.mark.parametrize(
    ("timing", "ms", "least"),
    [
        *(
            ("gpu", ms, least)
            for ms, least in ((0.013, 0.02), (0.04, 0.01), (0.089, 0.01), (0.09, 0.003), (600, 0.003))
        ),
        *(("cpu", ms, 0.10) for ms in (0.013, 600)),
    ],
)
def test_the_least_effect_is_that_of_an_ab(timing: str, ms: float, least: float) -> None:
    assert least_effect(timing, ms) == least == defaults(timing, ms).min_effect


@pytest.mark.parametrize("timing", ["gpu", "cpu"])
def test_the_floors_of_an_ab_are_those_of_pools(timing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert defaults(timing, 1.0).floor == POOL_FLOOR[timing]
    monkeypatch.setitem(POOL_FLOOR, timing, 0.7)
    assert defaults(timing, 1.0).floor == 0.7


def test_mad_estimates_the_standard_deviation() -> None:
    rng = np.random.default_rng(3)
    for n in (3, 5, 9, 20):
        estimates = [mad(rng.normal(0, 1, n)) for _ in range(3000)]
        assert np.mean(estimates) == pytest.approx(1, abs=0.08)
    assert mad(np.array([1.0])) == 0


def test_burst_error_is_that_of_the_median() -> None:
    rng = np.random.default_rng(5)
    bursts = np.exp(rng.normal(0, 0.01, (4000, 9)))
    actual = np.std(np.log(np.median(bursts, axis=1)))
    assert np.mean([burst_error(one) for one in bursts]) == pytest.approx(actual, rel=0.1)
    assert math.isnan(burst_error([1.0]))


class TestPools:
    """One commit against another."""

    def test_several_runs(self) -> None:
        rng = np.random.default_rng(9)
        alarms = detected = 0
        for _ in range(300):
            a, b = np.exp(rng.normal(0, 0.003, 5)), np.exp(rng.normal(0, 0.003, 5))
            nothing = [UNKNOWN] * 5
            alarms += judge_pools(a, nothing, b, nothing, timing="gpu", others=NO_OTHERS).verdict != "ok"
            detected += (
                judge_pools(a, nothing, b * 1.03, nothing, timing="gpu", others=NO_OTHERS).verdict == "regressed"
            )
        assert alarms <= 3
        assert detected >= 297

    def test_one_run_with_bursts_is_judged_by_their_spread(self) -> None:
        assert judge_pools([1.0], [0.001], [1.05], [0.001], timing="gpu", others=NO_OTHERS).verdict == "regressed"
        assert judge_pools([1.0], [0.02], [1.05], [0.02], timing="gpu", others=NO_OTHERS).verdict == "ok"

    def test_one_run_is_judged_by_the_scatter_of_other_runs_too(self) -> None:
        noisy = scatter_of([0.05, -0.04, 0.06, -0.05, 0.03, -0.06], "gpu", 1.0)
        assert judge_pools([1.0], [0.001], [1.05], [0.001], timing="gpu", others=noisy).verdict == "ok"
        young = scatter_of([], "cpu", 1.0)
        assert judge_pools([1.0], [0.001], [1.3], [0.001], timing="cpu", others=young).verdict == "ok"
        assert judge_pools([1.0] * 2, [0.001], [1.3] * 2, [0.001], timing="cpu", others=young).verdict == "regressed"

    def test_one_run_without_spread_is_unresolved(self) -> None:
        judged = judge_pools([1.0], [UNKNOWN], [1.5], [UNKNOWN], timing="gpu", others=NO_OTHERS)
        assert (judged.verdict, judged.threshold) == ("unresolved", None)
        assert judged.change == pytest.approx(math.log(1.5))
