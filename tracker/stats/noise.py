"""How does a series scatter when nothing changes? Pure functions of arrays, many series of equal length at once.

Four things are learnt of each series, all from points that no change touches:

    sigma   scatter of a point, from winsorised residuals about the level of its segment
    df      how well sigma is known, in degrees of freedom
    rho     autocorrelation of successive points
    tail    weights over `TAILS`: which of these t distributions its residuals look like

`score` turns a deviation into the Gaussian score of equal probability under them, so that everything later may reckon
with Gaussian noise: in a series with heavy tails six sigma are worth 3.5, in a Gaussian one six.

A young series tells little of itself; `moderate`, `mean_rho` and `tail_prior` let it borrow from series that are
alike. The first is Smyth's moderated variance ("Linear models and empirical Bayes methods", 2004).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]

TAILS = (200.0, 12.0, 6.0, 4.0, 3.0, 2.0, 1.3)
"""Degrees of freedom: Gaussian to nearly Cauchy."""
TAIL_PRIOR = np.array([0.55, 0.15, 0.10, 0.08, 0.06, 0.04, 0.02])
"""Of a series judged by itself."""
MAX_RHO = 0.97
BODY = 1.5
"""Up to so many sigma the score is proportional to the deviation: no distribution is told apart there."""


def _trim(n: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of n residuals are capped: one outlier or 4 %, none where there is too little to spare."""
    return np.where(n >= 8, 1 + n // 25, 0)


@lru_cache(maxsize=4096)
def _winsorised_variance(df: float, level: float) -> float:
    """E min(|t|, Q(level))^2 of a t distribution, Q its quantile of |t|."""
    u = (np.arange(4000) + 0.5) / 4000
    t = special.stdtrit(df, 0.5 + 0.5 * np.minimum(u, level))
    return float(np.mean(t * t))


@lru_cache(maxsize=512)
def _kappa(n: int) -> Floats:
    """[tails] sigma of the standard t distributions, as `scatter` measures it from n residuals; a Gaussian's is 1."""
    trim = int(_trim(np.array(n)))
    level = 1 - (trim + 0.5) / max(n, 1) if trim else 1 - 0.25 / max(n, 1)
    gauss = _winsorised_variance(1e6, level)
    return np.sqrt([_winsorised_variance(df, level) / gauss for df in TAILS])


def scatter(
    residual: Floats,  # [m, n]
    used: NDArray[np.bool_],  # [m, n] residuals that count
    levels: NDArray[np.int64],  # [m] how many levels were fitted to them
) -> tuple[Floats, Floats]:
    """Variance of a point and its degrees of freedom, [m] each. 0 residuals give variance 0 with 0 degrees."""
    n = residual.shape[1]
    size = np.abs(residual)
    count = used.sum(axis=1)
    ordered = np.sort(np.where(used, size, -1.0), axis=1)
    trim = _trim(count)
    cap = np.take_along_axis(ordered, np.clip(n - 1 - trim, 0, n - 1)[:, None], axis=1)
    total = np.where(used, np.minimum(size, np.maximum(cap, 0)) ** 2, 0.0).sum(axis=1)
    table = np.array([_gauss_share(c) for c in range(n + 1)])
    free = np.maximum(count - levels, 0)
    variance = np.where(free > 0, total / (np.maximum(free, 1) * table[count]), 0.0)
    return variance, free * np.where(trim > 0, 0.85, 1.0)


@lru_cache(maxsize=4096)
def _gauss_share(n: int) -> float:
    """The share of a Gaussian variance that is left by the cap."""
    trim = int(_trim(np.array(n)))
    return _winsorised_variance(1e6, 1 - (trim + 0.5) / n) if trim else 1.0


def rough_scale(y: Floats) -> tuple[Floats, Floats]:
    """Scatter of a point and autocorrelation, from differences alone: no level is needed, steps hardly matter.

    y: [m, n]; returns sigma [m], rho [m]. The half mean square of differences over a lag h, the largest (a step or
    two and 4 %) capped, is sigma^2 (1 - rho^h): two lags give both.
    """
    n = y.shape[1]
    gamma = []
    for lag in (1, 2):
        count = max(n - lag, 0)
        if count < 2:
            gamma.append(np.zeros(len(y)))
            continue
        size = np.abs(y[:, lag:] - y[:, :-lag])
        trim = min(lag * (2 + n // 25), count // 3)
        cap = np.partition(size, count - 1 - trim, axis=1)[:, count - 1 - trim, None]
        share = _winsorised_variance(1e6, 1 - (trim + 0.5) / count)
        gamma.append(np.mean(np.minimum(size, cap) ** 2, axis=1) / (2 * share))
    first, second = gamma
    rho = np.where(first > 0, second / np.where(first > 0, first, 1.0) - 1, 0.0) * (n / (n + 16))
    rho = np.clip(rho, 0.0, 0.8)
    return np.sqrt(first / (1 - rho)), rho


def autocorrelation(
    residual: Floats,  # [m, n] in sigma
    used: NDArray[np.bool_],  # [m, n]
    first: NDArray[np.bool_],  # [m, n] where a segment begins
) -> tuple[Floats, Floats]:
    """rho of successive points within a segment, and its variance, [m] each; outliers are capped at 3 sigma."""
    z = np.where(used, np.clip(residual, -3.0, 3.0), 0.0)
    count = np.maximum(used.sum(axis=1), 1)
    pairs = np.where(first[:, 1:], 0.0, z[:, 1:] * z[:, :-1]).sum(axis=1)
    square = (z * z).sum(axis=1)
    rho = np.where(square > 0, pairs / np.where(square > 0, square, 1.0), 0.0)
    # Kendall's correction: about a fitted mean, rho comes out too small by (1 + 3 rho) / n.
    rho = np.where(count > 6, (rho + 1 / count) / (1 - 3 / np.maximum(count, 7)), 0.0)
    return np.clip(rho, -MAX_RHO, MAX_RHO), 1 / count


def shrunk_rho(rho: Floats, variance: Floats, pooled: bool) -> Floats:
    """rho as it is reckoned with: shrunk to that of the pool, or to 0; never negative."""
    if pooled and len(rho) >= 20:
        spread = float(np.var(rho))
        excess = max(spread - float(np.mean(variance)), 0.0) + 1e-4
        centre = float(np.mean(rho))
        return np.clip((rho * excess + centre * variance) / (excess + variance), 0.0, MAX_RHO)
    # James and Stein's: what is within one standard error of 0 is 0, what is far from it stays.
    return np.clip(rho * np.maximum(1 - variance / np.maximum(rho**2, 1e-12), 0.0), 0.0, MAX_RHO)


def mean_variance(k: NDArray[np.int64], rho: Floats) -> Floats:
    """Variance of the mean of k successive points of unit variance and autocorrelation rho^lag; shapes broadcast."""
    k = np.maximum(k, 1)
    inside = (1 - rho**k) / (1 - rho)
    return (1 + rho - 2 * rho * inside / k) / (1 - rho) / k


def moderate(variance: Floats, df: Floats) -> tuple[Floats, Floats]:
    """Variances shrunk to the pool's, and the degrees of freedom that they then have; [m] each.

    A series that is noisier than the pool allows (1 in 1000) keeps its own.
    """
    known = (df >= 1) & (variance > 0)
    if known.sum() < 8:
        return variance, df
    half = df[known] / 2
    e = np.log(variance[known]) - special.digamma(half) + np.log(half)
    low, high = np.quantile(e, [0.02, 0.98])
    e = np.clip(e, low, high)
    spread = float(np.var(e, ddof=1) * 1.15 - np.mean(special.polygamma(1, half)))
    prior_df = min(2 * _inverse_trigamma(spread), 500.0) if spread > 0 else 500.0
    prior = float(np.exp(np.mean(e) + special.digamma(prior_df / 2) - np.log(prior_df / 2)))
    ratio = np.where(known, variance / prior, 1.0)
    odd = known & (special.fdtrc(np.maximum(df, 1), prior_df, np.maximum(ratio, 0.0)) < 1e-3)
    mixed = (prior_df * prior + df * variance) / (prior_df + df)
    return np.where(odd, variance, mixed), np.where(odd, df, df + prior_df)


def _inverse_trigamma(x: float) -> float:
    y = 0.5 + 1 / x
    for _ in range(20):
        value = float(special.polygamma(1, y))
        y += value * (1 - value / x) / float(special.polygamma(2, y))
    return y


def tail_likelihood(residual: Floats, used: NDArray[np.bool_]) -> Floats:
    """Log likelihood of residuals (in sigma, [m, n]) under each of TAILS, [m, tails], each scaled to the same sigma."""
    count = used.sum(axis=1)
    kappa = np.array([_kappa(int(c)) for c in range(residual.shape[1] + 1)])[count]  # [m, tails]
    square = np.where(used, residual, 0.0) ** 2
    found = np.empty((len(residual), len(TAILS)))
    for i, df in enumerate(TAILS):
        constant = special.gammaln((df + 1) / 2) - special.gammaln(df / 2) - 0.5 * np.log(df)
        spread = np.log1p(square * (kappa[:, i, None] ** 2 / df)).sum(axis=1)
        found[:, i] = count * (constant + np.log(kappa[:, i])) - (df + 1) / 2 * spread
    return found


def tail_weights(likelihood: Floats, prior: Floats) -> Floats:
    """[m, tails] posterior weights."""
    log = likelihood + np.log(np.maximum(prior, 1e-300))
    weights = np.exp(log - log.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def tail_prior(likelihood: Floats, count: NDArray[np.int64]) -> Floats:
    """[tails] how frequent each is among series that are alike, by expectation-maximisation.

    `count` [m] residuals of each series: with few, no series tells its own tail, and all are taken to share one.
    """
    together = 0.5 * likelihood.sum(axis=0)  # half: neighbours are not independent
    shared = TAIL_PRIOR * (np.exp(together - together.max()) + 1e-3)
    own = min(float(count.mean()) / 40, 1.0)
    likelihood = np.exp(likelihood - likelihood.max(axis=1, keepdims=True))
    m, prior = len(likelihood), TAIL_PRIOR
    for _ in range(min(max(400_000 // m, 40), 400)):
        share = (prior * (likelihood / (likelihood @ prior)[:, None]).sum(axis=0) + 4 * TAIL_PRIOR) / (m + 4)
        # Longer steps than the algorithm's own: proportions of a mixture are found slowly, and bear it.
        prior = prior * (share / prior) ** 1.8
        prior = prior / prior.sum()
    return own * prior + (1 - own) * shared / shared.sum()


@lru_cache(maxsize=1)
def _tables() -> tuple[Floats, Floats]:
    """log |t| [grid], log P(T > t) [tails, grid]"""
    grid = np.linspace(np.log(0.3), np.log(1e9), 1500)
    return grid, np.array([np.log(np.maximum(special.stdtr(df, -np.exp(grid)), 1e-300)) for df in TAILS])


def score(
    deviation: Floats,  # [m, n] in sigma
    weights: Floats,  # [m, tails]
    count: NDArray[np.int64],  # [m] residuals that sigma was measured from
) -> Floats:
    """[m, n] the Gaussian deviation that is as improbable."""
    size = np.maximum(np.abs(deviation), BODY)
    row, column = np.nonzero(size > BODY)
    kappa = np.array([_kappa(c) for c in range(int(count.max()) + 1)])[count]
    edge = _mixture_score(np.full(len(deviation), BODY), weights, kappa)
    out = deviation * (edge / BODY)[:, None]
    if len(row):
        far = _mixture_score(size[row, column], weights[row], kappa[row])
        out[row, column] = np.copysign(far, deviation[row, column])
    return out


def _mixture_score(size: Floats, weights: Floats, kappa: Floats) -> Floats:
    """[k] Gaussian score of a deviation of `size` sigma; weights, kappa: [k, tails]."""
    grid, tails = _tables()
    log_size = np.log(size)
    log_p = np.full(len(size), -np.inf)
    for i in range(len(TAILS)):
        each = np.interp(log_size + np.log(kappa[:, i]), grid, tails[i])
        log_p = np.logaddexp(log_p, each + np.log(np.maximum(weights[:, i], 1e-300)))
    return -special.ndtri_exp(log_p)


def calibration(scores: Floats) -> tuple[Floats, Floats]:
    """What scores are worth, given many that arose where nothing changed: knots [k] and their worth [k].

    A model of the tail that is wrong shows here: where 3 in 1000 unchanged points score 10, a score of 10 is worth
    that of 3 in 1000. Only ever lowers. Beyond the largest scores the last ratio is kept.
    """
    size = np.sort(np.abs(scores))
    n = len(size)
    if n < 2000:
        return np.array([0.0, 1.0]), np.array([0.0, 1.0])
    rank = np.unique(np.geomspace(10, n * 0.05, 24).astype(int))[::-1]  # exceedances, many first
    knots = size[n - rank]
    worth = -special.ndtri(rank / (2.0 * n))
    ratio = np.minimum.accumulate(np.minimum(worth / np.maximum(knots, 1e-9), 1.0))
    # Within three standard errors of an honest tail, the tail is honest.
    slack = 3 / np.sqrt(rank)
    honest = 2 * n * special.ndtr(-knots) * (1 + slack) >= rank
    ratio = np.where(honest, 1.0, ratio)
    ratio = np.minimum.accumulate(ratio)
    knots, index = np.unique(knots, return_index=True)
    return np.concatenate([[0.0], knots]), np.maximum.accumulate(np.concatenate([[0.0], knots * ratio[index]]))


def calibrated(z: Floats, knots: Floats, worth: Floats) -> Floats:
    size = np.abs(z)
    beyond = size * (worth[-1] / max(knots[-1], 1e-9))
    return np.copysign(np.where(size > knots[-1], beyond, np.interp(size, knots, worth)), z)


def rank_cap(z: Floats, residual: Floats, used: NDArray[np.bool_], last: int) -> Floats:
    """z [m, n], the `last` points held to what the series' own residuals show: a second mode is no news."""
    n = z.shape[1]
    count = np.maximum(used.sum(axis=1), 1)[:, None]
    sign = np.sign(z[:, n - last :])
    own = np.where(used, residual, 0.0)
    now = residual[:, n - last :]
    out = z.copy()
    for j in range(last):
        as_far = ((own * sign[:, j, None] >= np.abs(now[:, j, None])) & used).sum(axis=1)[:, None]
        cap = np.where(as_far >= 2, -special.ndtri(np.minimum(as_far / (count + 1.0), 0.5)), np.inf)[:, 0]
        out[:, n - last + j] = sign[:, j] * np.minimum(np.abs(z[:, n - last + j]), cap)
    return out
