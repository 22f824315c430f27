"""The rule: quiet on unchanged code, awake to a planted change. Seeds are fixed: these are counts, not chances."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.judge import burst_error, judge_latency, judge_pools, judge_rms, mad

UNKNOWN = math.nan


def verdicts(noise: float, n: int, slowdown: float = 0.0, trials: int = 500, timing: str = "gpu") -> list[str]:
    """Verdicts on Gaussian series of `n` results and one more."""
    rng = np.random.default_rng(7)
    found = []
    for _ in range(trials):
        history, now = np.exp(rng.normal(0, noise, n)), (1 + slowdown) * math.exp(rng.normal(0, noise))
        found.append(judge_latency(now, None, history, [UNKNOWN] * n, timing=timing).verdict)
    return found


@pytest.mark.parametrize("n", [3, 5, 20])
@pytest.mark.parametrize("noise", [0.0005, 0.003])
def test_unchanged_code_is_left_alone(noise: float, n: int) -> None:
    alarms = sum(verdict != "ok" for verdict in verdicts(noise, n))
    assert alarms / 500 < 0.01


def test_unchanged_code_on_a_noisy_machine() -> None:
    assert sum(verdict != "ok" for verdict in verdicts(0.02, 20)) / 500 < 0.01
    assert sum(verdict != "ok" for verdict in verdicts(0.03, 5, timing="cpu")) / 500 < 0.01


@pytest.mark.parametrize(("change", "verdict"), [(0.03, "regressed"), (-0.03, "improved")])
def test_a_planted_change_is_found(change: float, verdict: str) -> None:
    assert verdicts(0.003, 20, change).count(verdict) / 500 > 0.99
    assert verdicts(0.003, 3, change).count(verdict) / 500 > 0.80


def test_too_little_history_says_so() -> None:
    found = [judge_latency(1.0, None, [1.0] * n, [UNKNOWN] * n, timing="gpu") for n in range(4)]
    assert [one.verdict for one in found] == ["new", "insufficient", "insufficient", "ok"]
    assert [one.n for one in found] == [0, 1, 2, 3]


def test_a_change_below_the_least_effect_is_ok() -> None:
    flat = {"history_ms": [1.0] * 9, "history_errors": [UNKNOWN] * 9}
    assert judge_latency(1.009, None, **flat, timing="gpu").verdict == "ok"
    assert judge_latency(1.011, None, **flat, timing="gpu").verdict == "regressed"
    assert judge_latency(1.011, None, **flat, timing="gpu", min_effect=0.05).verdict == "ok"
    assert judge_latency(1.09, None, **flat, timing="cpu").verdict == "ok"
    assert judge_latency(1.005, None, **flat, timing="gpu", min_effect=0.0).verdict == "regressed"


@pytest.mark.parametrize(("own", "theirs"), [(0.02, UNKNOWN), (None, 0.02)])
def test_scattered_bursts_widen_the_threshold(own: float | None, theirs: float) -> None:
    found = judge_latency(1.05, own, [1.0] * 9, [theirs] * 9, timing="gpu")
    assert found.verdict == "ok"
    assert found.threshold == pytest.approx(4 * 0.02 * math.sqrt(10 / 9))


def test_one_bad_night_neither_moves_the_centre_nor_blinds_the_rule() -> None:
    history = [1.0, 1.001, 0.999, 1.4, 1.0, 1.001, 0.999]
    errors = [UNKNOWN] * 7
    assert judge_latency(1.0, None, history, errors, timing="gpu").verdict == "ok"
    assert judge_latency(1.03, None, history, errors, timing="gpu").verdict == "regressed"


@given(
    st.lists(st.floats(0.01, 100), min_size=3, max_size=25),
    st.floats(0.01, 100),
    st.sampled_from([2.0, 0.5, 1024.0]),
)
def test_units_do_not_matter(history: list[float], now: float, scale: float) -> None:
    errors = [UNKNOWN] * len(history)
    one = judge_latency(now, None, history, errors, timing="gpu")
    other = judge_latency(now * scale, None, [ms * scale for ms in history], errors, timing="gpu")
    assert other.change == pytest.approx(one.change, abs=1e-9)
    assert other.threshold == pytest.approx(one.threshold, abs=1e-9)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=25), st.randoms())
def test_order_of_history_does_not_matter(history: list[float], random: object) -> None:
    shuffled = list(history)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    errors = [UNKNOWN] * len(history)
    assert judge_latency(1.0, None, shuffled, errors, timing="gpu") == judge_latency(
        1.0, None, history, errors, timing="gpu"
    )


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
