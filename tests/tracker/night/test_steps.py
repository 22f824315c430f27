"""Test the largest step between neighbouring commits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from groupbench.tracker.night.steps import Steps, find_steps
from groupbench.tracker.store.engine import open_store

COMMITS = [f"{number:03x}" + "c" * 37 for number in range(6)]


@pytest.fixture
def steps(stored: Callable[..., Any], make: Any) -> Callable[..., Steps]:
    """Find the steps in records: each is the number of a commit, a latency, and other facts."""

    def find(*results: tuple[int, float, dict[str, Any]]) -> Steps:
        database = stored([make(n, ms=ms, **facts) for n, ms, facts in results])
        with open_store(database, create=False) as store, store.read() as session:
            return find_steps(session, "nightly", COMMITS)

    return find


def test_the_largest_of_all_series_in_either_direction(steps: Callable[..., Steps]) -> None:
    slower = [(n, 1.0 if n < 2 else 1.1, {}) for n in range(5)]
    faster = [(n, 1.0 if n < 3 else 0.8, {"backend": "other"}) for n in range(5)]
    summary = steps(*slower, *faster)
    assert summary.commits == 5 and summary.largest is not None
    assert (summary.largest.before, summary.largest.after) == (COMMITS[2], COMMITS[3])
    assert summary.largest.pair.series.backend == "other"
    assert summary.largest.pair.ratio == pytest.approx(0.8, rel=0.01)


def test_commits_without_a_result_are_passed_over(steps: Callable[..., Steps]) -> None:
    summary = steps((0, 1.0, {}), (1, 1.0, {"status": "error"}), (3, 1.5, {}))
    assert summary.commits == 2 and summary.largest is not None
    assert (summary.largest.before, summary.largest.after) == (COMMITS[0], COMMITS[3])


QUIET = {
    "one commit": [(0, 1.0, {})],
    "a level": [(n, 1.0, {}) for n in range(5)],
    "another toolchain": [(0, 1.0, {}), (1, 1.5, {"environment": {"triton": "9"}})],
    "another plan": [(0, 1.0, {}), (1, 1.5, {"plan": "weekly"})],
    "a commit of another range": [(0, 1.0, {}), (9, 1.5, {})],
    "interpreted": [(0, 1.0, {"timing": "interpreted"}), (1, 1.5, {"timing": "interpreted"})],
    "less accurate": [(0, 1.0, {}), (1, 1.0, {"rms": 1.0})],
}


@pytest.mark.parametrize("results", QUIET.values(), ids=QUIET)
def test_a_change_that_is_not_a_step(results: Any, steps: Callable[..., Steps]) -> None:
    assert steps(*results).largest is None


def _noisy(level: float, wide: bool) -> dict[str, Any]:
    spread = 0.5 if wide else 0.05
    bursts = [[level * (1 + spread * place)] for place in (-1, -0.1, 0.1, 1)]
    return {"latency": {"timing": "cpu", "bursts_ms": bursts}}


def test_the_results_around_a_step_outweigh_two_noisy_neighbours(steps: Callable[..., Steps]) -> None:
    commits = [(n, ms, _noisy(ms, n in (2, 3))) for n, ms in enumerate((1.0, 1.05, 0.95, 2.0, 2.1, 1.9))]
    assert steps(*commits[2:4]).largest is None
    largest = steps(*commits).largest
    assert largest is not None and (largest.before, largest.after) == (COMMITS[2], COMMITS[3])
    assert largest.ratio == pytest.approx(2.0 / 0.95), "of the two commits, as `history` shows them"


def test_one_noisy_commit_is_no_step(steps: Callable[..., Steps]) -> None:
    commits = [(n, ms, _noisy(ms, n == 3)) for n, ms in enumerate((1.0, 1.05, 0.95, 2.0, 1.0, 1.02))]
    assert steps(*commits).largest is None
