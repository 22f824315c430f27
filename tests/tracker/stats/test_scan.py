"""The scan of histories: quiet on unchanged noise, awake to planted steps, and never across environments."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from cases import rarely
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from groupbench.tracker.stats.histories import newest_environments
from groupbench.tracker.stats.scan import SeriesFinding, SeriesHistory, find_all_changes, find_changes, scan

Floats = NDArray[np.float64]


def history(
    y: Floats,
    *,
    environment: object = 0,
    state: object = None,
    error: float = math.nan,
    pool: int = 0,
    worse: Literal[1, -1] = 1,
) -> SeriesHistory:
    n = len(y)
    states = np.arange(n) if state is None else np.asarray(state)
    environments = np.broadcast_to(np.asarray(environment, dtype=np.int64), n).copy()
    return SeriesHistory(
        np.asarray(y, dtype=np.float64), np.full(n, error), environments, states, pool=pool, worse=worse
    )


def gauss(seed: int, m: int, n: int, sigma: float = 0.01) -> Floats:
    return np.random.default_rng(seed).normal(0, sigma, (m, n))


def alone(y: Floats, **kind: object) -> SeriesFinding:
    return scan([history(y, **kind)], alpha=0.01)[0]  # type: ignore[arg-type]


def verdicts(findings: list[SeriesFinding]) -> list[str]:
    return [one.verdict for one in findings]


def ar1(seed: int, m: int, n: int) -> Floats:
    e = gauss(seed, m, n + 50)
    for i in range(1, n + 50):
        e[:, i] += 0.5 * e[:, i - 1]
    return e[:, 50:]


QUIET = {
    "gaussian": lambda rng, m, n: rng.normal(0, 0.01, (m, n)),
    "t3": lambda rng, m, n: 0.01 * rng.standard_t(3, (m, n)),
    "lognormal": lambda rng, m, n: np.log1p(0.01 * np.exp(rng.normal(0, 1, (m, n)))),
    "ar1": lambda rng, m, n: ar1(5, m, n),
    "bimodal": lambda rng, m, n: rng.normal(0, 0.003, (m, n)) + 0.03 * (rng.random((m, n)) < 0.3),
    "outliers": lambda rng, m, n: rng.normal(0, 0.01, (m, n)) + 0.1 * (rng.random((m, n)) < 0.01),
    "ticks": lambda rng, m, n: 0.01 * np.round(rng.normal(0, 0.7, (m, n))),
    "flicker": lambda rng, m, n: 0.01 * (rng.random((m, n)) < 0.1),
    "constant": lambda rng, m, n: np.zeros((m, n)),
}


# Of all with 30 points, ar1 shows best that a limit is too lax.
FEW = [("ar1", 30), ("t3", 100)]
MORE = [(kind, n) for kind in QUIET for n in (30, 100) if (kind, n) not in FEW]


@pytest.mark.parametrize(("kind", "n"), [*FEW, *rarely(*MORE)])
def test_unchanged_noise_is_reported_by_no_one(kind: str, n: int) -> None:
    made = [history(y) for y in QUIET[kind](np.random.default_rng(11), 400, n)]
    findings = scan(made, alpha=0.01)
    reported = sum(bool(c) or f.verdict == "changed" for c, f in zip(find_all_changes(made), findings, strict=True))
    assert reported <= 4
    assert verdicts(findings).count("suspect") <= 28
    assert verdicts(scan(made)).count("suspect") <= 6


def test_a_quiet_night_of_mixed_noise_is_quiet() -> None:
    made = [history(y) for make in QUIET.values() for y in make(np.random.default_rng(3), 200, 100)]
    assert sum(one.verdict in ("suspect", "changed") for one in scan(made)) <= 6


@pytest.mark.parametrize(("after", "least"), [(1, 0.42), (3, 0.93), *rarely((2, 0.78), (5, 0.98))])
def test_a_step_of_three_sigma_is_found(after: int, least: float) -> None:
    y = gauss(1, 500, 100 + after)
    y[:, 100:] += math.log(1.03)
    findings = scan([history(one) for one in y], alpha=0.01)
    assert sum(one.verdict in ("suspect", "changed") for one in findings) / 500 >= least


def test_steps_of_a_few_among_many_are_found_and_few_others() -> None:
    y = gauss(2, 3000, 100)
    y[:30, -3:] += math.log(1.03)
    findings = np.array([one.verdict in ("suspect", "changed") for one in scan([history(one) for one in y])])
    assert findings[:30].sum() >= 24
    assert findings[30:].sum() <= 5


@pytest.mark.parametrize("n", [30, *rarely(100)])
def test_one_last_point_off_is_a_suspect_and_no_change(n: int) -> None:
    y = gauss(4, 300, n)
    y[:, -1] = 0.06
    findings = scan([history(one) for one in y])
    assert verdicts(findings).count("suspect") >= 297
    assert "changed" not in verdicts(findings)
    assert sum(one.index == n - 1 and one.n_after == 1 for one in findings) >= 285


@pytest.mark.parametrize(("seeds", "least"), [(40, 38), *rarely((100, 95))])
def test_big_steps_are_reported_at_their_index(seeds: int, least: int) -> None:
    """Except for one in hundreds whose noise looks restless by chance: a suspect, or an old drift."""
    draw = np.random.default_rng(11)
    right = 0
    for seed in range(seeds):
        before, after, scale = int(draw.integers(25, 60)), int(draw.integers(8, 40)), float(draw.choice([0.002, 0.01]))
        size = max(float(draw.uniform(10, 100)) * scale, 0.03) * float(draw.choice([-1, 1]))
        y = stepped(seed, before, after, scale, size)
        findings = alone(y)
        if findings.verdict == "changed" and findings.index == before:
            assert findings.first is not None and findings.last is not None and findings.first < before <= findings.last
            assert findings.effect == pytest.approx(size, abs=2.5 * scale)
            right += [change.index for change in find_changes(history(y))] == [before]
    assert right >= least


def stepped(seed: int, before: int, after: int, scale: float, size: float) -> Floats:
    """Gaussian noise without its tail, and a step."""
    y = gauss(seed, 1, before + after, scale)[0].clip(-2.5 * scale, 2.5 * scale)
    y[before:] += size
    return y


@settings(max_examples=min(25, settings().max_examples // 3), deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    shift=st.floats(-20, 20),
    step=st.sampled_from([0.0, 0.05, 0.2]),
    n=st.integers(4, 60),
)
def test_a_constant_changes_only_levels_and_a_sign_only_effects(seed: int, shift: float, step: float, n: int) -> None:
    # Binary fractions, so that adding a constant rounds nothing away. Examples are the same in every run: within a
    # rounding of its threshold a series may fall to either side, as one of ten points in thousands was seen to.
    y = np.round(gauss(seed, 1, n)[0] * 2**20) / 2**20
    y[n - n // 3 :] += step
    shift = round(shift)
    plain, moved, turned = alone(y), alone(y + shift), alone(-y, worse=-1)
    assert plain.verdict == moved.verdict == turned.verdict
    assert plain.index == moved.index == turned.index
    assert (plain.first, plain.last) == (moved.first, moved.last) == (turned.first, turned.last)
    assert moved.sigma == pytest.approx(plain.sigma) == turned.sigma
    for one, other in zip(plain.levels, moved.levels, strict=False):
        assert other.log_ms == pytest.approx(one.log_ms + shift, abs=1e-6)
    if plain.effect is not None and moved.effect is not None and turned.effect is not None:
        assert moved.effect == pytest.approx(plain.effect, abs=1e-6)
        assert turned.effect == pytest.approx(-plain.effect, abs=1e-6)


@settings(max_examples=settings().max_examples // 8)  # each scans every series alone too
@given(seed=st.integers(0, 2**32 - 1))
def test_order_and_company_do_not_matter(seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = []
    for n in rng.integers(1, 70, 6):
        y = rng.normal(0, 10 ** rng.uniform(-4, 0), n)
        y[n // 2 :] += rng.choice([0, 0.1])
        made.append(history(y, pool=int(rng.integers(2))))
    order = rng.permutation(len(made))
    together, shuffled = scan(made), scan([made[i] for i in order])
    assert verdicts(shuffled) == [together[i].verdict for i in order]
    each, together = [scan([one], alpha=0.05)[0] for one in made], scan(made, alpha=0.05)
    assert verdicts(each) == verdicts(together)
    assert [one.p for one in each] == pytest.approx([one.p for one in together])


@settings(max_examples=min(25, settings().max_examples // 3), deadline=None, derandomize=True)
@given(
    value=st.floats(-50, 50), lengths=st.lists(st.integers(0, 45), max_size=6),
    ticks=st.lists(st.integers(0, 2), min_size=1, max_size=60),
)  # fmt: skip
def test_constants_ticks_and_short_series_never_raise(value: float, lengths: list[int], ticks: list[int]) -> None:
    made = [history(np.full(n, value)) for n in lengths] + [history(np.array(ticks) * 0.01)]
    for findings in (scan(made), scan(made, alpha=0.01)):
        assert len(findings) == len(made)
        assert all(one.verdict in ("new", "insufficient", "ok") for one in findings[:-1])
        assert all(one.sigma > 0 for one in findings if one.verdict not in ("new", "insufficient"))
    find_all_changes(made)


def test_a_level_of_one_point_before_the_newest_is_not_judged_by() -> None:
    """The fourth point from the end is a level of its own, and three points since are too few for an onset."""
    percent = [
        -0.2, 0.16, -0.1, 1.02, 1.72, -0.34, 0.2, 0.76, 0.42, 0.12, 0.0, 0.26, -0.36,
        -0.11, -0.34, 0.1, 0.81, -0.45, -0.38, -0.0, -0.54, -0.41, 0.7, 0.28, -0.14, -0.53,
        -0.03, -0.21, 0.73, -0.27, 0.04, 0.16, 2.87, 2.63, 3.22, 8.47, -0.25, -0.34,
    ]  # fmt: skip
    (finding,) = scan([history(np.array(percent) / 100)])
    assert finding.verdict in ("ok", "suspect")


def test_the_newest_environment_of_each_history_is_judged() -> None:
    environments: list[list[int]] = [[], [1, 2, 1, 1], [2], [3, 3], [1, 2], []]
    histories = [history(np.zeros(len(each)), environment=np.array(each, dtype=np.int64)) for each in environments]
    assert [place.tolist() for place in newest_environments(histories)] == [[], [0, 2, 3], [0], [0, 1], [1], []]
    assert newest_environments([]) == []


def test_environments_are_never_compared() -> None:
    y = gauss(6, 1, 60)[0]
    y[30:] += 1.0
    assert alone(y).verdict == "changed"
    findings = alone(y, environment=np.arange(60) // 30)
    assert findings.verdict == "ok"
    assert [(one.start, one.stop) for one in findings.levels] == [(30, 60)]
    assert find_changes(history(y, environment=np.arange(60) // 30)) == []
    # Two machines in turn, one of them slower: each is compared with itself.
    y = gauss(7, 1, 120)[0] + np.arange(120) % 2
    assert alone(y, environment=np.arange(120) % 2).verdict == "ok"
    y[80:] += 0.2
    turns = history(y, environment=np.arange(120) % 2)
    assert [change.index for change in find_changes(turns)] == [80, 81]
    assert scan([turns], alpha=0.01)[0].index == 81


def test_too_few_points_say_so() -> None:
    assert verdicts([alone(np.zeros(n)) for n in range(5)]) == ["new", "new", "insufficient", "insufficient", "ok"]


def test_a_shift_within_one_state_is_the_machine() -> None:
    y = gauss(8, 1, 60)[0]
    y[33:] += 0.1
    assert alone(y, state=np.arange(60)).verdict == "changed"
    assert alone(y, state=np.arange(60) // 20).verdict == "drift"
    assert find_changes(history(y, state=np.arange(60) // 20)) == []
    # Between two states, but no larger than a change by the machine within one state.
    y = gauss(9, 1, 100)[0]
    y[30:] += 0.1
    y[60:] += 0.1
    states = np.arange(100) // 20
    assert find_changes(history(y, state=states)) == []
    assert alone(y, state=states).verdict != "changed"


def test_a_slow_trend_is_drift() -> None:
    y = gauss(10, 50, 100, 0.005) + np.linspace(0, 0.06, 100)
    findings = [alone(one) for one in y]
    assert verdicts(findings).count("drift") >= 30
    assert verdicts(findings).count("changed") <= 3


def test_an_earlier_step_does_not_hide_a_later_one() -> None:
    y = gauss(12, 1, 100)[0]
    y[60:] += 2.0
    stepped = y.copy()
    stepped[96:] += 0.06
    assert alone(y).sigma < 0.015
    assert alone(stepped).verdict == "suspect"
    assert alone(stepped).index == 96
    assert alone(stepped).effect == pytest.approx(0.06, abs=0.02)


def test_all_changes_of_a_series() -> None:
    y = gauss(13, 1, 200)[0]
    y[50:120] += 0.08
    y[160:] -= 0.1
    changes = find_changes(history(y))
    assert [change.index for change in changes] == [50, 120, 160]
    assert [change.effect for change in changes] == pytest.approx([0.08, -0.08, -0.1], abs=0.01)
    assert all(
        change.first < change.index <= change.last and change.low < change.effect < change.high for change in changes
    )


def test_intervals_have_their_coverage() -> None:
    y = gauss(14, 300, 80)
    y[:, 60:] += 0.04
    findings = [f for f in scan([history(one) for one in y], alpha=0.01) if f.verdict == "changed"]
    assert len(findings) > 280
    assert np.mean([f.first < 60 <= f.last for f in findings]) > 0.93  # type: ignore[operator]
    assert np.mean([f.low < 0.04 < f.high for f in findings]) > 0.90  # type: ignore[operator]


def test_bursts_that_scatter_excuse_a_point() -> None:
    y = gauss(15, 1, 60, 0.002)[0]
    y[-1] += 0.05
    one = history(y)
    assert scan([one], alpha=0.01)[0].verdict == "suspect"
    noisy = one.error.copy()
    noisy[-1] = 0.05
    assert scan([replace(one, error=noisy)], alpha=0.01)[0].verdict == "ok"


def test_young_series_borrow_from_their_pool() -> None:
    y = gauss(16, 400, 8, 0.005)
    y[0, -1] += 0.06
    pooled = scan([history(one) for one in y])
    assert pooled[0].verdict == "suspect"
    assert np.std([one.sigma for one in pooled]) < 0.3 * np.std([alone(one).sigma for one in y[240:]])


def test_missing_values_must_be_left_out() -> None:
    with pytest.raises(ValueError, match="leave out"):
        scan([history(np.array([1.0, math.nan, 1.0, 1.0, 1.0]))])
    with pytest.raises(ValueError, match="differ in length"):
        scan([replace(history(np.zeros(5)), state=np.arange(4))])
    assert scan([]) == []


@pytest.mark.parametrize("apart", [1, 3, 6, *rarely(2, 5)])
@pytest.mark.parametrize("first", [0.1, -0.35])
def test_a_large_slowdown_soon_after_a_change_is_a_suspect(first: float, apart: int) -> None:
    y = gauss(9, 20, 21 + apart, 0.004)
    y[0, 20:] += first
    y[0, 20 + apart :] += 0.2
    finding = scan([history(row) for row in y])[0]
    assert (finding.verdict, finding.index) == ("suspect", 20 + apart)
    assert finding.effect == pytest.approx(0.2, abs=0.03)
    assert [level.start for level in finding.levels] == [0, 20, 20 + apart]


def test_a_partial_improvement_does_not_replace_the_slowdown_before_it() -> None:
    y = gauss(9, 20, 24, 0.004)
    y[0, 20:] += [0.5, 0.5, 0.5, 0.35]
    finding = scan([history(row) for row in y])[0]
    assert (finding.verdict, finding.index) == ("suspect", 20)
    y[1:, 20:] -= [0.5, 0.5, 0.5, 0.7]
    assert all(one.effect < 0 for one in scan([history(row) for row in y])[1:]), "nor is a further one"


def test_a_slowdown_inside_the_newest_level_stays_a_suspect() -> None:
    y = gauss(9, 20, 32, 0.004)
    y[0, 20:24] -= 0.35
    y[0, 24:] -= 0.17
    for stop in range(25, 31):
        finding = scan([history(row[:stop]) for row in y])[0]
        assert (finding.verdict, finding.index) == ("suspect", 24), stop
