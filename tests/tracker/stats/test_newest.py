"""The newest points of a series: never silent about a large change, sharp where a series is quiet, and steady."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from cases import rarely
from numpy.typing import NDArray

from groupbench.tracker.stats import standing
from groupbench.tracker.stats.newest import Suspicion
from groupbench.tracker.stats.records import RECENT, record_distance, records
from groupbench.tracker.stats.scan import SeriesFinding, SeriesHistory, scan

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int, int], Floats]

HEAVY: dict[str, Noise] = {
    "t3": lambda rng, m, n: rng.standard_t(3, (m, n)),
    "outliers": lambda rng, m, n: rng.normal(0, 1, (m, n)) + (rng.random((m, n)) < 0.05) * rng.uniform(5, 50, (m, n)),
}


def night(y: Floats, least: float = 0.003) -> list[SeriesFinding]:
    n = y.shape[1]
    unknown, one, commits = np.full(n, math.nan), np.zeros(n, np.int64), np.arange(n)
    return scan([SeriesHistory(row, unknown, one, commits, min_effect=math.log1p(least)) for row in y])


def news(findings: list[SeriesFinding]) -> NDArray[np.bool_]:
    return np.array([one.verdict in ("suspect", "changed") for one in findings])


NIGHTS = [(others, earlier, size) for others in HEAVY for earlier in (5, 10, 13, 16, 22) for size in (20, 312)]
FEW = [("t3", 5, 20), ("outliers", 10, 20), ("t3", 22, 312), ("outliers", 13, 312)]


@pytest.mark.parametrize(("others", "earlier", "size"), [*FEW, *rarely(*(case for case in NIGHTS if case not in FEW))])
def test_a_large_change_is_a_suspect_on_its_first_night(others: str, earlier: int, size: int) -> None:
    """Whatever tails the other series of the night teach."""
    rng = np.random.default_rng([earlier, size])
    cases = [(2.0, 0.02), (1.5, 0.02), (1.1, 0.005), (0.5, 0.02), (2.0, 0.002)] * 3
    y = rng.uniform(0.001, 0.02, (size, 1)) * HEAVY[others](rng, size, earlier + 1)
    for row, (factor, sigma) in enumerate(cases):
        y[row] = rng.normal(0, sigma, earlier + 1)
        y[row, -1] += math.log(factor)
    findings = night(y)
    assert news(findings)[: len(cases)].all()
    assert all(one.index == earlier and one.nights == 1 for one in findings[: len(cases)])


def test_three_results_show_a_change_of_half() -> None:
    y = np.random.default_rng(2).normal(0, 0.003, (100, 4))
    y[:50, -1] += math.log(1.5)
    suspects = news(night(y))
    assert suspects[:50].all()
    assert suspects[50:].sum() <= 1


STEPS = [(earlier, effect, size) for earlier in (10, 30) for effect in (0.009, 0.018, 0.036) for size in (12, 60)]
SMALL = [(10, 0.009, 12), (30, 0.009, 60)]  # the others are larger


@pytest.mark.parametrize(
    ("earlier", "effect", "size"), [*SMALL, *rarely(*(case for case in STEPS if case not in SMALL))]
)
def test_a_quiet_series_is_the_easiest(earlier: int, effect: float, size: int) -> None:
    """0.04 % between nights, which a floor of 0.1 % would treat as noise."""
    rng = np.random.default_rng([earlier, size])
    y = rng.uniform(0.0004, 0.01, (size, 1)) * rng.normal(0, 1, (size, earlier + 2))
    y[:6] = rng.normal(0, 0.0004, (6, earlier + 2))
    y[:6, earlier:] += math.log1p(effect)
    assert (news(night(y[:, :-1]))[:6] | news(night(y))[:6]).all()


# A suspect that is forgotten shows in four histories with the middle noise, and in none with the others.
@pytest.mark.parametrize(
    ("sigma", "histories"),
    [
        (0.002, 4),
        *rarely((0.0005, 4), (0.005, 4)),
    ],
)
def test_a_suspect_whose_step_stays_is_never_ok_again(sigma: float, histories: int) -> None:
    rng = np.random.default_rng(int(1e4 * sigma))
    for _ in range(histories):
        earlier, size = int(rng.integers(6, 15)), 8 * sigma
        y = rng.uniform(0.0005, 0.005, (12, 1)) * rng.normal(0, 1, (12, earlier + 9))
        y[:4] = rng.normal(0, sigma, (4, earlier + 9))
        y[:4, earlier:] += size
        seen = np.array([news(night(y[:, :stop], 0.001))[:4] for stop in range(earlier + 1, earlier + 10)])
        assert np.all(seen[1:] >= seen[:-1])
        assert seen[1].mean() >= 0.5


def test_a_suspect_of_one_point_stands_while_later_points_agree_and_falls_with_one_that_does_not() -> None:
    """The later points are two sigma off, which is not news by itself, or back."""
    y = np.random.default_rng(10).normal(0, 0.01, (40, 33))
    y[:, -3:] = 0.0
    y[:20, -3:] = [0.06, 0.022, 0.03]
    y[20:, -3:] = [0.06, -0.005, 0.005]
    assert news(night(y[:, :-2])).all()
    assert news(night(y))[:20].all()
    assert not news(night(y))[20:].any()


def test_a_standing_suspect_does_not_depend_on_a_later_night() -> None:
    """The history as of a night gives the same verdict for good: nothing that came after it is looked at."""
    rng = np.random.default_rng(11)
    y = rng.uniform(0.001, 0.005, (8, 1)) * rng.normal(0, 1, (8, 30))
    y[:4, 16:] += 0.02
    seen = np.array([news(night(y[:, :stop]))[:4] for stop in range(17, 31)])
    assert seen.any(axis=0).all()
    assert np.all(seen[1:] >= seen[:-1])


def test_a_possible_improvement_needs_more_evidence() -> None:
    y = np.random.default_rng(12).normal(0, 0.01, (400, 41))
    slower, faster = y.copy(), y.copy()
    slower[:200, -1] += 0.032
    faster[:200, -1] -= 0.032
    assert news(night(slower))[:200].mean() > 0.4
    assert news(night(faster))[:200].mean() < 0.3
    turned = scan([replace(one, worse=-1) for one in _histories(faster)])
    assert news(turned)[:200].mean() > 0.35


def test_an_outlier_that_is_back_is_not_a_suspect() -> None:
    y = np.random.default_rng(4).normal(0, 0.005, (50, 31))
    y[:, -2] += 0.2
    assert news(night(y[:, :-1])).all()
    assert news(night(y)).sum() <= 1


def test_a_step_does_not_widen_the_noise_that_it_is_judged_by() -> None:
    """Nor its own first nights, where the history is short."""
    y = np.random.default_rng(5).normal(0, 0.001, (12, 14))
    y[0, 10:] += 0.035
    for stop in (11, 12, 13, 14):
        assert night(y[:, :stop])[0].sigma < 0.003


@pytest.mark.parametrize("kind", ["t3", *rarely("gaussian")])
def test_false_suspects_of_a_night(kind: str) -> None:
    """One in a thousand, whatever the size of the night."""
    rng = np.random.default_rng(6)
    y = 0.01 * (rng.standard_t(3, (3000, 40)) if kind == "t3" else rng.normal(0, 1, (3000, 40)))
    findings = night(y)
    assert news(findings).sum() <= 8
    assert not any(one.verdict == "changed" for one in findings)


def test_a_young_series_is_no_harder_to_judge_among_others() -> None:
    rng = np.random.default_rng(7)
    y = rng.normal(0, 0.01, (200, 9))
    y[:40, -1] += 0.07
    alone = sum(bool(news(scan([one], alpha=0.001))[0]) for one in _histories(y[:40]))
    assert news(night(y))[:40].sum() >= max(alone, 30)


def _histories(y: Floats) -> list[SeriesHistory]:
    n = y.shape[1]
    return [SeriesHistory(row, np.full(n, math.nan), np.zeros(n, np.int64), np.arange(n)) for row in y]


def test_a_finding_has_its_start() -> None:
    y = np.random.default_rng(8).normal(0, 0.002, (3, 30))
    y[0, -4:] -= 0.1
    y[1, -2:] += 0.1
    faster, slower, same = night(y)
    assert (faster.nights, slower.nights, same.nights) == (4, 2, None)


def test_a_record_is_beyond_all_that_the_series_has_shown() -> None:
    y = np.random.default_rng(9).normal(0, 0.001, (4, 25))
    y[:, -1] = 0.05
    y[1, 3] = 0.06  # as far before
    y[2, -1] = 0.008  # eight standard deviations
    error = np.zeros(y.shape)
    error[3, -1] = 0.02  # its own bursts scatter
    seen = records(y, error, np.full(4, 0.0003), np.full(4, 0.05), 0, np.zeros(4, bool))
    assert seen.shape == (4, RECENT)
    assert seen[:, -1].tolist() == [True, False, False, False]


def test_a_series_that_has_shown_its_outliers_needs_less_for_a_record() -> None:
    y = np.random.default_rng(9).normal(0, 0.001, (3, 41))
    y[:, 3] = 0.004
    y[:2, -1] = 0.014  # some 12 standard deviations
    y[1, 3] = 0.006  # a third of that was seen before
    y[2, 21:] = y[2, :20]
    y[2, 20] = 0.014  # as far, but after 20 results
    error = np.zeros(y.shape)
    seen = records(y, error, np.full(3, 0.0003), np.full(3, 0.05), 0, np.zeros(3, bool))
    assert seen[:, -1].tolist() == [True, False, False]
    assert not seen[2].any()


@pytest.mark.parametrize(
    ("times", "error", "expected"),
    [
        ((8.4, 25.8, 31.5, 25.5, 215.7), 0.0, True),  # an older step is most of the scatter
        ((215.7, 25.8, 31.5, 25.5, 5.0), 0.0, False),  # nearer to the others than these to each other
        ((8.4, 25.8, 31.5, 25.5, 60.0), 0.0, False),  # less than twice as far
        ((8.4, 25.8, 31.5, 25.5, 215.7), 0.5, False),  # its own bursts scatter
        ((8.4, 25.8, 31.5, 215.7), 0.0, False),  # three earlier results show too little
    ],
)
def test_a_factor_of_two_beyond_a_few_scattered_results_is_a_record(
    times: tuple[float, ...], error: float, expected: bool
) -> None:
    y = np.log([times, times])
    doubles = np.array([True, False])  # a cost of the host may jump
    seen = records(y, np.full(y.shape, error), np.full(2, 0.02), np.full(2, math.log1p(0.3)), 0, doubles)
    assert seen[:, -1].tolist() == [expected, False]


def test_the_distance_of_a_record_depends_on_the_number_of_results() -> None:
    assert math.isinf(record_distance(2))
    assert record_distance(3) > record_distance(4) > record_distance(5)
    assert record_distance(3, gross=True) < 10
    assert 9 < record_distance(5) < record_distance(10) < record_distance(100) < 16


def test_a_step_before_a_suspect_does_not_clear_it() -> None:
    """The suspect seemed to begin five points after the step, so the points between count neither way."""
    y = np.array([0.9, 0.2, -0.9, 0.0, 0.2, -0.2, 0.4, 2.7, 4.1, 3.1, 2.9, 5.7, 3.9, 4.2, 5.3, 4.1, 5.1])
    suspect = Suspicion(index=12, begin=0, p=0.002, level=1.4, size=3.5, sigma=0.8, rho=0.1)
    assert standing._stands(y, suspect, 15, 0.4, (7,))
    assert not standing._stands(y, suspect, 15, 0.4, ())
    assert not standing._stands(np.concatenate([y[:15], np.zeros(5)]), suspect, 15, 0.4, (7,))
    assert standing._stands(-y, replace(suspect, level=-1.4, size=-3.5), 15, 0.4, (7,))
