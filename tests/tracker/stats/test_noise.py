"""The noise model and the partition, piece by piece."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from groupbench.tracker.stats import noise
from groupbench.tracker.stats.changepoints import MIN_SEGMENT, partition, tamed


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


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_autocorrelation(rho: float) -> None:
    rng = np.random.default_rng(3)
    y = rng.normal(size=(2000, 80))
    for i in range(1, 80):
        y[:, i] = rho * y[:, i - 1] + np.sqrt(1 - rho**2) * y[:, i]
    begins = np.zeros(y.shape, dtype=bool)
    begins[:, 0] = True
    found, variance = noise.autocorrelation(y - y.mean(axis=1, keepdims=True), everything(y), begins)
    assert found.mean() == pytest.approx(rho, abs=0.05)
    shrunk = noise.shrunk_rho(found, variance, pooled=False)
    assert shrunk.mean() == pytest.approx(rho, abs=0.06)


def test_a_pool_steadies_variances() -> None:
    rng = np.random.default_rng(4)
    variance = rng.chisquare(4, 1000) / 4
    moderated, df = noise.moderate(variance, np.full(1000, 4.0))
    assert moderated.std() < 0.2 * variance.std()
    assert df.min() > 20
    mixed = variance * np.exp(rng.normal(0, 3, 1000))
    assert noise.moderate(mixed, np.full(1000, 4.0))[1].mean() < 8


def test_a_series_noisier_than_its_pool_keeps_its_own() -> None:
    variance = np.append(np.random.default_rng(5).chisquare(90, 500) / 90, 25.0)
    moderated, _ = noise.moderate(variance, np.full(501, 90.0))
    assert moderated[-1] == 25.0


def test_scores_of_heavy_tails_are_gaussian() -> None:
    y = np.random.default_rng(6).standard_t(3, (2000, 100))
    variance, _ = noise.scatter(y, everything(y), np.ones(2000, np.int64))
    x = y / np.sqrt(variance.mean())
    likelihood = noise.tail_likelihood(x, everything(x))
    weights = noise.tail_weights(likelihood, noise.tail_prior(likelihood, np.full(2000, 100)))
    z = noise.score(x, weights, np.full(2000, 100))
    for limit in (2.5, 3.5):
        assert np.mean(np.abs(z) > limit) == pytest.approx(2 * special.ndtr(-limit), rel=0.6)
    assert np.mean(np.abs(x) > 3.5) > 10 * 2 * special.ndtr(-3.5)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_scores_keep_order_and_sign(a: float, b: float) -> None:
    weights = np.full((1, len(noise.TAILS)), 1 / len(noise.TAILS))
    z = noise.score(np.array([[a, b, -a]]), weights, np.array([50]))[0]
    assert z[2] == pytest.approx(-z[0])
    assert np.isfinite(z).all()
    if a < b:
        assert z[0] <= z[1] + 1e-9


def test_calibration_only_lowers_and_leaves_honest_scores() -> None:
    rng = np.random.default_rng(7)
    honest = rng.normal(size=200_000)
    knots, worth = noise.calibration(honest)
    grid = np.linspace(-8, 8, 101)
    np.testing.assert_allclose(noise.calibrated(grid, knots, worth), grid, rtol=0.05)
    wild = np.append(honest, rng.normal(10, 1, 600))
    knots, worth = noise.calibration(wild)
    assert np.all(np.abs(noise.calibrated(grid, knots, worth)) <= np.abs(grid) + 1e-12)
    assert noise.calibrated(np.array([9.0]), knots, worth)[0] < 3.3


@settings(max_examples=60, deadline=None, derandomize=True)
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
        for starts in combinations(range(MIN_SEGMENT, n), count)
        if all(b - a >= MIN_SEGMENT for a, b in zip((0, *starts[:-1]), starts, strict=False))
    ]
    best = min(cost(starts) for starts in legal)
    found = partition(y[None], penalty)[0]
    assert cost(found) <= best + 1e-9


def test_outliers_are_tamed_and_runs_at_the_end_stay() -> None:
    y = np.zeros((1, 60))
    y[0, 30] = 50
    y[0, -6:] = 50
    calm = tamed(y, np.array([1.0]))[0]
    assert calm[30] == 3.0
    assert np.all(calm[-6:] >= 3.0)
