"""The noise model and the partition, piece by piece."""

from __future__ import annotations

from itertools import combinations, groupby, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from groupbench.tracker.stats import noise
from groupbench.tracker.stats.changepoints import LEVEL, partition, tamed, without_neighbours


def everything(y: np.ndarray) -> np.ndarray:
    return np.ones(y.shape, dtype=bool)


@pytest.mark.parametrize("n", [4, 8, 20, 100])
def test_scatter_of_gaussian_noise(n: int) -> None:
    y = np.random.default_rng(0).normal(0, 2.0, (4000, n))
    residual = y - np.median(y, axis=1, keepdims=True)
    variance, df = noise.scatter(residual, everything(y), np.ones(4000, np.int64))
    assert variance.mean() == pytest.approx(4.0, rel=0.18)
    assert 2 * variance.mean() ** 2 / variance.var() == pytest.approx(df[0], rel=0.15)


def test_an_outlier_hardly_moves_scatter() -> None:
    y = np.random.default_rng(1).normal(0, 1.0, (1, 50))
    plain, _ = noise.scatter(y, everything(y), np.array([1]))
    y[0, 20] = 1e6
    assert noise.scatter(y, everything(y), np.array([1]))[0][0] < 1.5 * plain[0]


def test_rough_scale_sees_no_steps() -> None:
    y = np.random.default_rng(2).normal(0, 1.0, (500, 100))
    y[:, 40:] += 1000
    y[:, 70] -= 500
    sigma, _ = noise.rough_scale(y)
    assert np.median(sigma) == pytest.approx(1.0, rel=0.2)


def test_variance_of_a_mean_of_correlated_points() -> None:
    lags = np.abs(np.subtract.outer(np.arange(7), np.arange(7)))
    for rho in (0.0, 0.3, 0.9):
        assert noise.mean_variance(np.array(7), np.array(rho)) == pytest.approx((rho**lags).mean())


def shrunk(rho: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Autocorrelations, each shrunk to all of them."""
    return noise.shrunk_rho(rho, count, noise.rho_prior(rho, count))


def moderate(variance: np.ndarray, df: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Variances, each shrunk to all of them."""
    return noise.moderate(variance, df, noise.variance_prior(variance, df))


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_autocorrelation(rho: float) -> None:
    rng = np.random.default_rng(3)
    y = rng.normal(size=(2000, 80))
    for i in range(1, 80):
        y[:, i] = rho * y[:, i - 1] + np.sqrt(1 - rho**2) * y[:, i]
    begins = np.zeros(y.shape, dtype=bool)
    begins[:, 0] = True
    rho_of_series = noise.autocorrelation(y - y.mean(axis=1, keepdims=True), everything(y), begins)
    assert rho_of_series.mean() == pytest.approx(rho, abs=0.05)
    closer = shrunk(rho_of_series, np.full(2000, 80))
    assert closer.mean() == pytest.approx(rho, abs=0.06)


def test_a_few_points_do_not_determine_autocorrelation() -> None:
    assert shrunk(np.array([0.8]), np.array([8]))[0] < 0.35
    assert shrunk(np.array([0.8]), np.array([200]))[0] > 0.6
    alike = shrunk(np.array([0.8, *[0.3] * 30]), np.full(31, 10))
    assert 0.2 < alike[0] < 0.5


def test_a_pool_steadies_variances() -> None:
    rng = np.random.default_rng(4)
    variance = rng.chisquare(4, 1000) / 4
    moderated, df = moderate(variance, np.full(1000, 4.0))
    assert moderated.std() < 0.2 * variance.std()
    assert df.min() > 20 or (df > 20).mean() > 0.99
    mixed = variance * np.exp(rng.normal(0, 3, 1000))
    assert moderate(mixed, np.full(1000, 4.0))[1].mean() < 8


@pytest.mark.parametrize("ratio", [25.0, 1 / 25], ids=["noisier", "quieter"])
def test_a_series_unlike_its_pool_keeps_its_own_variance(ratio: float) -> None:
    variance = np.append(np.random.default_rng(5).chisquare(90, 500) / 90, ratio)
    moderated, _ = moderate(variance, np.full(501, 90.0))
    assert moderated[-1] == ratio


def test_a_quiet_series_among_noisy_ones_stays_quiet() -> None:
    """Shrinking variances instead of their logarithms would make it six times as noisy."""
    rng = np.random.default_rng(8)
    variance = np.exp(rng.normal(0, 2, 60)) * rng.chisquare(9, 60) / 9
    variance[0] = 1e-4
    moderated, _ = moderate(variance, np.full(60, 9.0))
    assert moderated[0] < 4e-4


def test_a_narrow_core_is_not_a_heavy_tail() -> None:
    """Residuals within 1.5 sigma do not affect the tail, whatever their distribution."""
    inside = np.random.default_rng(9).normal(0, 0.4, (50, 100)).clip(-1.4, 1.4)
    likelihood = noise.tail_likelihood(inside, everything(inside))
    count = np.full(50, 100)
    weights = noise.tail_weights(likelihood, noise.tail_prior(likelihood, count), count)
    assert weights[:, :, 0].min() > 0.5


def test_scores_of_heavy_tails_are_gaussian() -> None:
    y = np.random.default_rng(6).standard_t(3, (2000, 100))
    variance, _ = noise.scatter(y, everything(y), np.ones(2000, np.int64))
    x = y / np.sqrt(variance.mean())
    likelihood = noise.tail_likelihood(x, everything(x))
    count = np.full(2000, 100)
    weights = noise.tail_weights(likelihood, noise.tail_prior(likelihood, count), count)
    curves = noise.score_curves(weights.mean(axis=1), count)
    z = np.array([noise.curve_score(row, curve) for row, curve in zip(x, curves, strict=True)])
    for limit in (2.5, 3.5):
        assert np.mean(np.abs(z) > limit) == pytest.approx(2 * special.ndtr(-limit), rel=0.6)
    assert np.mean(np.abs(x) > 3.5) > 10 * 2 * special.ndtr(-3.5)


def tails_of(y: np.ndarray) -> tuple[noise.TailPrior, np.ndarray]:
    """Return the prior of the tails that series show together, and the weights of each series."""
    residual = y - np.median(y, axis=1, keepdims=True)
    variance, _ = noise.scatter(residual, everything(y), np.ones(len(y), np.int64))
    likelihood = noise.tail_likelihood(residual / np.sqrt(variance)[:, None], everything(y))
    count = np.full(len(y), y.shape[1])
    prior = noise.tail_prior(likelihood, count)
    return prior, noise.tail_weights(likelihood, prior, count)


@pytest.mark.parametrize("series", [1, 2, 20])
def test_another_step_does_not_move_the_frequencies_of_tails(series: int) -> None:
    likelihood = np.random.default_rng(13).normal(0, 3, (series, len(noise.PAIR_PRIOR)))
    frequency, shares = noise._frequencies(likelihood)
    step = (shares.sum(axis=0) + noise.PRIOR_SERIES * noise.PAIR_PRIOR) / (series + noise.PRIOR_SERIES)
    np.testing.assert_allclose(step, frequency, rtol=1e-9)


def test_series_together_show_a_tail_that_none_shows_alone() -> None:
    rng = np.random.default_rng(10)
    one, many = (rng.normal(size=(m, 46)) for m in (1, 20))
    assert tails_of(many)[1][:, :, 2:].sum(axis=2).mean() < 0.05
    assert tails_of(one)[1][:, :, 2:].sum(axis=2).mean() > 0.08
    prior, weights = tails_of(rng.standard_t(3, (20, 46)))
    assert prior.alike > 0.5
    assert weights[:, :, 0].max() < 0.2


def test_series_that_differ_keep_their_own_tails() -> None:
    rng = np.random.default_rng(11)
    prior, weights = tails_of(np.concatenate([rng.normal(size=(15, 90)), rng.standard_t(1.5, (5, 90))]))
    assert prior.alike < 0.2
    assert weights[:15, :, 0].mean() > 0.7
    assert weights[15:, :, 0].mean() < 0.1


def test_a_tail_above_the_level_says_little_about_the_one_below() -> None:
    rng = np.random.default_rng(12)
    y = rng.normal(size=(20, 60)) + (rng.random((20, 60)) < 0.05) * rng.uniform(5, 30, (20, 60))
    below, above = tails_of(y)[1].mean(axis=0)
    assert above[0] < 0.1 and above[4:].sum() > 0.8
    assert below[0] > 0.7


@given(st.integers(1, 30), st.integers(4, 60), st.integers(0, 2**32 - 1))
def test_weights_of_tails_are_weights_in_any_order_of_the_series(m: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.standard_t(rng.choice([1.2, 3.0, 100.0]), (m, n))
    _, weights = tails_of(y)
    order = rng.permutation(m)
    np.testing.assert_allclose(weights.sum(axis=2), 1.0)
    assert np.isfinite(weights).all() and weights.min() >= 0
    np.testing.assert_allclose(tails_of(y[order])[1], weights[order], atol=1e-6)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_scores_keep_order_and_sign(a: float, b: float) -> None:
    weights = np.full((1, len(noise.TAILS)), 1 / len(noise.TAILS))
    curve = noise.score_curves(weights, np.array([50]))[0]
    z = noise.curve_score(np.array([a, b, -a]), curve)
    assert z[2] == pytest.approx(-z[0])
    assert np.isfinite(z).all()
    if a < b:
        assert z[0] <= z[1] + 1e-9


def test_each_tail_scores_its_own_deviations() -> None:
    z = noise.tail_scores(np.array([[0.0, 3.0, -3.0, 1e5]]), np.array([50]))
    assert np.all(np.diff(z[:, 0, 1]) < 0)  # the heavier the tail, the less three sigma are worth
    np.testing.assert_allclose(z[:, 0, 2], -z[:, 0, 1])
    assert np.all(z[:, 0, 0] == 0)
    assert z[0, 0, 1] == pytest.approx(3.0, abs=0.1)
    assert np.isfinite(z).all()


def test_a_second_mode_reaches_as_far_as_it_is_frequent() -> None:
    residual = np.zeros((1, 50))
    residual[0, [3, 9, 30]] = 8.0
    reach = noise.own_reach(residual, everything(residual), np.array([[7.0, -7.0, 9.0]]))[0]
    assert reach[0] == pytest.approx(-special.ndtri(3 / 51))
    assert np.isinf(reach[1:]).all()


@given(st.integers(10, 17), st.integers(0, 2**32 - 1), st.sampled_from([2.0, 6.0, 15.0]))
def test_the_partition_is_the_best_of_all(n: int, seed: int, penalty: float) -> None:
    rng = np.random.default_rng(seed)
    y = rng.normal(size=n) + 4 * (np.arange(n) >= rng.integers(0, n))

    def cost(starts: tuple[int, ...]) -> float:
        ends = [0, *starts, n]
        parts = [y[a:b] for a, b in pairwise(ends)]
        return sum(float(((part - part.mean()) ** 2).sum()) for part in parts) + penalty * len(starts)

    legal = [
        starts
        for count in range(3)
        for starts in combinations(range(LEVEL, n), count)
        if all(b - a >= LEVEL for a, b in zip((0, *starts[:-1]), starts, strict=False))
    ]
    best = min(cost(starts) for starts in legal)
    starts_of = partition(y[None], penalty)[0]
    assert cost(starts_of) <= best + 1e-9


@pytest.mark.parametrize("n", [2, 5, 8, 11, 12, 60])
def test_only_outliers_from_the_running_median_are_tamed(n: int) -> None:
    """But no run of `LEVEL` of them on one side, which is a level."""
    rng = np.random.default_rng(n)
    sigma = rng.uniform(0.05, 1.0, 40)
    y = rng.standard_t(2, (40, n)) + 3 * (np.arange(n) >= n // 2)
    width = min(11, n)
    for row, calm, one in zip(y, tamed(y, sigma), sigma, strict=True):
        starts = np.clip(np.arange(n) - (width - 1) // 2, 0, n - width)
        centre = np.array([np.sort(row[start : start + width])[width // 2] for start in starts])
        side = np.sign(row - np.clip(row, centre - 3 * one, centre + 3 * one))
        runs = [list(run) for _, run in groupby(range(n), key=lambda at: side[at])]
        kept = [at for run in runs if len(run) >= LEVEL for at in run]
        expected = np.clip(row, centre - 3 * one, centre + 3 * one)
        expected[kept] = row[kept]
        assert np.array_equal(calm, expected)


def test_a_level_of_four_between_two_others_is_kept() -> None:
    y = np.zeros((1, 60))
    y[0, 30:34], y[0, 34:] = 20.0, 10.0
    assert np.array_equal(tamed(y, np.array([1.0])), y)
    assert partition(y, 14.0) == [(30, 34)]


def test_a_level_of_three_takes_no_point_from_its_neighbours() -> None:
    x = np.concatenate([np.zeros(20), np.full(3, 10.0), np.full(20, 30.0)])
    starts = partition(x[None], 14.0)[0]
    assert starts == (19, 23)
    assert without_neighbours(x, starts) == (20, 23)
    assert without_neighbours(x, (20,)) == (20,)


def test_outliers_are_tamed_and_runs_at_the_end_stay() -> None:
    y = np.zeros((1, 60))
    y[0, 30] = 50
    y[0, -6:] = 50
    calm = tamed(y, np.array([1.0]))[0]
    assert calm[30] == 3.0
    assert np.all(calm[-6:] >= 3.0)
