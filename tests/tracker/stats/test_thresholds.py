"""Rules for what has little history. Seeds are fixed: these are counts, not chances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.stats.thresholds import burst_error, far_off, judge_pools, judge_rms, mad, worse_since

UNKNOWN = math.nan


def off(before: list[float], now: float, error: float = UNKNOWN, timing: str = "gpu", **given: Any) -> bool:
    log = np.log([*before, now])
    return far_off(log, np.array([error] * len(log)), timing=timing, **given) is not None


@pytest.mark.parametrize(
    ("before", "now", "given", "found"),
    [
        ([1.0, 1.001, 0.999], 1.53, {}, True),
        ([1.0, 1.001, 0.999], 0.7, {}, True),
        ([1.0, 1.001, 0.999], 1.04, {}, False),
        ([1.0, 1.001, 0.999], 1.06, {}, True),
        ([1.0, 1.001, 0.999], 1.06, {"min_effect": 0.1}, False),
        ([1.0, 1.001, 0.999], 1.06, {"error": 0.02}, False),
        ([1.0, 1.05, 0.95], 1.5, {}, False),
        ([1.0, 1.001, 0.999], 1.25, {"timing": "cpu"}, False),
        ([1.0, 1.001, 0.999], 1.5, {"timing": "cpu"}, True),
        ([1.0, 1.0], 1.5, {}, False),
        ([1.0] * 9, 1.5, {}, True),
        ([1.0] * 10, 1.5, {}, False),
        ([1.0] * 10, 1.5, {"alone": True}, True),
        ([1.0] * 29, 1.5, {"alone": True}, True),
        ([1.0] * 30, 1.5, {"alone": True}, False),
        ([1.0] * 12 + [1.5], 1.5, {"alone": True}, True),
        ([1.0] * 6 + [1.4] + [1.0] * 6, 1.5, {"alone": True}, False),
        ([1.0] * 6 + [1.2] + [1.0] * 6, 1.5, {"alone": True}, True),
        ([1.0] * 6 + [1.4] + [1.0] * 2, 1.5, {}, True),
        ([1.0], 1.5, {}, False),
        ([], 1.5, {}, False),
    ],
    ids=str,
)
def test_a_young_series_is_suspected_where_it_is_far_off(
    before: list[float], now: float, given: dict[str, Any], found: bool
) -> None:
    assert off(before, now, **given) is found


def test_unchanged_code_of_a_young_series_is_hardly_suspected() -> None:
    rng = np.random.default_rng(7)
    for noise, timing in ((0.003, "gpu"), (0.01, "gpu"), (0.03, "cpu")):
        alarms = sum(off(list(np.exp(rng.normal(0, noise, 3))), float(np.exp(rng.normal(0, noise))), timing=timing)
                     for _ in range(1000))  # fmt: skip
        assert alarms <= 3


@given(st.lists(st.floats(0.01, 100), min_size=3, max_size=9), st.floats(0.01, 100), st.sampled_from([2.0, 1024.0]))
def test_units_do_not_matter(before: list[float], now: float, scale: float) -> None:
    errors = np.full(len(before) + 1, UNKNOWN)
    one = far_off(np.log([*before, now]), errors, timing="gpu")
    other = far_off(np.log([ms * scale for ms in (*before, now)]), errors, timing="gpu")
    if one is not None and other is not None:
        assert other.change == pytest.approx(one.change, abs=1e-9)
    elif one is not other:  # on the edge
        either = one or other
        assert either is not None and abs(either.change or 0) == pytest.approx(either.threshold, abs=1e-9)


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
    assert math.isnan(burst_error(np.array([1.0])))


class TestPools:
    """One commit against another."""

    def test_several_runs(self) -> None:
        rng = np.random.default_rng(9)
        alarms = found = 0
        for _ in range(300):
            a, b = np.exp(rng.normal(0, 0.003, 5)), np.exp(rng.normal(0, 0.003, 5))
            nothing = [UNKNOWN] * 5
            alarms += judge_pools(a, nothing, b, nothing, timing="gpu").verdict != "ok"
            found += judge_pools(a, nothing, b * 1.03, nothing, timing="gpu").verdict == "regressed"
        assert alarms <= 3
        assert found >= 297

    def test_one_run_with_bursts_is_judged_by_their_spread(self) -> None:
        assert judge_pools([1.0], [0.001], [1.05], [0.001], timing="gpu").verdict == "regressed"
        assert judge_pools([1.0], [0.02], [1.05], [0.02], timing="gpu").verdict == "ok"

    def test_one_run_without_spread_says_nothing(self) -> None:
        found = judge_pools([1.0], [UNKNOWN], [1.5], [UNKNOWN], timing="gpu")
        assert (found.verdict, found.threshold) == ("unresolved", None)
        assert found.relative_change == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("now", "history", "verdict"),
    [
        (3.2e-3, [2e-3] * 3, "regressed"),
        (2.9e-3, [2e-3] * 3, "ok"),
        (1e-3, [2e-3], "ok"),
        (9e-7, [1e-7], "ok"),
        (2e-6, [0.0], "regressed"),
        (1.0, [], "new"),
        (1.0, [UNKNOWN], "new"),
        (None, [1.0], "new"),
    ],
    ids=str,
)
def test_rms(now: float | None, history: list[float], verdict: str) -> None:
    assert judge_rms(now, history).verdict == verdict


@pytest.mark.parametrize(
    ("rms", "place"),
    [
        ([1e-3], None),
        ([1e-3, 1.4e-3], None),
        ([1e-3, 1.6e-3], 1),
        ([1e-3, 1e-3, 2e-3, 2e-3], 2),
        ([1e-3, 2e-3, 1e-3], None),  # back
        ([1e-3, 2e-3, 1e-3, 2e-3, 2e-3], None),  # two levels that it had before
        ([1e-3, 1.2e-3, 1.4e-3, 1.6e-3], None),  # no step
        ([1e-3, 2e-3, 4e-3], 2),  # the newest step
        ([1e-7, 9e-7], None),  # rounding of the last bit
        ([0.0, 2e-6], 1),
    ],
    ids=str,
)
def test_worse_since(rms: list[float], place: int | None) -> None:
    assert worse_since(np.array(rms)) == place
