"""History alone: ranks, tails, and the night on which a level begins."""

from __future__ import annotations

import numpy as np
import pytest

from groupbench.tracker.stats.predict import predict
from groupbench.tracker.stats.walk import rank_chance, walk


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
    assert (walked.nights, walked.far) == (0, 2)
    assert walked.rank == rank_chance(7, 2) < 0.005
