"""Estimate the noise of unchanged series. Pure functions of arrays, for many series of equal length at once.

Four quantities are estimated for each series, from points without a change:

    sigma   scatter of a point, from winsorised residuals about the level of its segment
    df      degrees of freedom of sigma
    rho     autocorrelation of successive points
    tail    weights over `TAILS`, by how well each t distribution fits the residuals above the level, and those below

A young series has few points. `moderate`, `shrunk_rho` and `tail_prior` borrow strength from similar series. `moderate`
follows Smyth's moderated variance ("Linear models and empirical Bayes methods", 2004), but shrinks the logarithm of the
variance, so that a quiet series among noisy ones stays quiet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]

TAILS = (200.0, 12.0, 6.0, 4.0, 3.0, 2.0, 1.3)
"""Degrees of freedom: Gaussian to nearly Cauchy."""
TAIL_PRIOR = np.array([0.70, 0.12, 0.07, 0.05, 0.03, 0.02, 0.01])
"""Weights of one tail of a series judged alone."""
PAIR_PRIOR = (np.outer(TAIL_PRIOR, TAIL_PRIOR) / 2 + np.diag(TAIL_PRIOR) / 2).ravel()
"""Weights of the tails below and above the level: half of all series are symmetric."""
PRIOR_SERIES = 4
"""Number of series that the prior of the frequencies counts as."""
TAIL_COUNT = 20
"""Number of residuals at which a series' own tail counts half."""
MAX_RHO = 0.97
RHO_COUNT, RHO_SPREAD = 40, 0.1
"""Prior of the autocorrelation: 0 with the weight of so many points, and the smallest spread between series."""
BODY = 1.5
"""Deviation in sigma up to which scores are proportional, because all distributions look alike there."""


def _trim(n: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many of n residuals to cap: one plus 4 %, or none of fewer than eight."""
    return np.where(n >= 8, 1 + n // 25, 0)


@lru_cache(maxsize=4096)
def _winsorised_variance(df: float, level: float) -> float:
    """Return E min(|t|, Q(level))^2 of a t distribution, where Q is the quantile of |t|."""
    u, t = _quantiles(df)
    t = np.where(u < level, t, special.stdtrit(df, 0.5 + 0.5 * level))
    return float(np.mean(t * t))


@lru_cache(maxsize=16)
def _quantiles(df: float) -> tuple[Floats, Floats]:
    """Return 4,000 probabilities and their quantiles of |t|."""
    u = (np.arange(4000) + 0.5) / 4000
    return u, special.stdtrit(df, 0.5 + 0.5 * u)


@lru_cache(maxsize=512)
def _kappa(n: int) -> Floats:
    """Return the sigma that `scatter` measures from n residuals of each standard t distribution, [tails].

    A Gaussian's is 1.
    """
    trim = int(_trim(np.array(n)))
    level = 1 - (trim + 0.5) / max(n, 1) if trim else 1 - 0.25 / max(n, 1)
    gauss = _winsorised_variance(1e6, level)
    return np.sqrt([_winsorised_variance(df, level) / gauss for df in TAILS])


def scatter(
    residual: Floats,  # [m, n]
    used: NDArray[np.bool_],  # [m, n] residuals that count
    levels: NDArray[np.int64],  # [m] number of levels fitted to them
) -> tuple[Floats, Floats]:
    """Return the variance of a point and its degrees of freedom, [m] each; both 0 without residuals."""
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
    """Return the fraction of a Gaussian variance that remains after capping."""
    trim = int(_trim(np.array(n)))
    return _winsorised_variance(1e6, 1 - (trim + 0.5) / n) if trim else 1.0


def rough_scale(y: Floats) -> tuple[Floats, Floats]:
    """Estimate scatter and autocorrelation from differences, which needs no levels and hardly depends on steps.

    y: [m, n]; returns sigma [m] and rho [m]. Half the mean square of differences at lag h, with the largest ones (a
    step or two and 4 %) capped, is sigma^2 (1 - rho^h), so two lags give both.
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
    rho = np.where(first > 0, second / np.where(first > 0, first, 1.0) - 1, 0.0)
    rho = np.clip(rho, 0.0, 0.9) * (n / (n + 16))
    return np.sqrt(first / (1 - rho)), rho


def autocorrelation(
    residual: Floats,  # [m, n] in sigma
    used: NDArray[np.bool_],  # [m, n]
    first: NDArray[np.bool_],  # [m, n] first point of a segment
) -> Floats:
    """Return the autocorrelation of successive points within segments, [m], with outliers capped at 3 sigma.

    Its variance is 1 / n.
    """
    z = np.where(used, np.clip(residual, -3.0, 3.0), 0.0)
    count = np.maximum(used.sum(axis=1), 1)
    pairs = np.where(first[:, 1:], 0.0, z[:, 1:] * z[:, :-1]).sum(axis=1)
    square = (z * z).sum(axis=1)
    rho = np.where(square > 0, pairs / np.where(square > 0, square, 1.0), 0.0)
    # Kendall ("Note on bias in the estimation of autocorrelation", 1954): about a fitted mean, rho is biased low by
    # (1 + 3 rho) / n.
    rho = np.where(count > 6, (rho + 1 / count) / (1 - 3 / np.maximum(count, 7)), 0.0)
    return np.clip(rho, -MAX_RHO, MAX_RHO)


@dataclass(frozen=True)
class RhoPrior:
    """The distribution of autocorrelation over all series of a night."""

    centre: float
    excess: float  # variance between series beyond their sampling error
    series: int


def rho_prior(
    rho: Floats,  # [m]
    count: NDArray[np.int64],  # [m] number of residuals of each
) -> RhoPrior:
    """Return the common autocorrelation of all series and its spread.

    A few points do not determine rho (its standard error is 1 / sqrt(n)), so the common value starts at 0 with the
    weight of `RHO_COUNT` points.
    """
    weight = np.maximum(count, 1).astype(np.float64)
    centre = float((weight * rho).sum() / (weight.sum() + RHO_COUNT))
    excess = float((weight * (rho - centre) ** 2).sum() / weight.sum() - len(rho) / weight.sum())
    return RhoPrior(centre, max(excess, 0.0), len(rho))


def shrunk_rho(rho: Floats, count: NDArray[np.int64], prior: RhoPrior) -> Floats:
    """Return each autocorrelation shrunk towards the common one, never negative, [m].

    Empirical Bayes: a series deviates from the others only with many points of its own.
    """
    weight = np.maximum(count, 1).astype(np.float64)
    # Few series, or series with few points, do not show how much they differ.
    trust = prior.series / (prior.series + 10) * weight / (weight + RHO_COUNT)
    spread = prior.excess * trust + RHO_SPREAD**2
    return np.clip((rho * spread + prior.centre / weight) / (spread + 1 / weight), 0.0, MAX_RHO)


def mean_variance(k: NDArray[np.int64], rho: Floats) -> Floats:
    """Return the variance of the mean of k points with unit variance and autocorrelation rho^lag; shapes broadcast."""
    k = np.maximum(k, 1)
    inside = (1 - rho**k) / (1 - rho)
    return (1 + rho - 2 * rho * inside / k) / (1 - rho) / k


def variance_prior(variance: Floats, df: Floats) -> tuple[float, float] | None:
    """Return mean and variance of a pool's log variances, or None for fewer than eight; arguments [m] each."""
    usable = (df >= 1) & (variance > 0)
    if usable.sum() < 8:
        return None
    log, uncertainty = _log_variance(variance[usable], df[usable])
    low, high = np.quantile(log, [0.02, 0.98])
    log = np.clip(log, low, high)
    spread = max(float(np.var(log, ddof=1) * 1.15 - np.mean(uncertainty)), 0.004)
    weight = 1 / (spread + uncertainty)
    return float((log * weight).sum() / weight.sum()), spread


def _log_variance(variance: Floats, df: Floats) -> tuple[Floats, Floats]:
    """Return the unbiased logarithm of a variance, and the variance of that logarithm."""
    half = np.maximum(df, 1.0) / 2
    return np.log(variance) - special.digamma(half) + np.log(half), special.polygamma(1, half)


def moderate(variance: Floats, df: Floats, prior: tuple[float, float] | None) -> tuple[Floats, Floats]:
    """Return variances shrunk towards the pool's, and their new degrees of freedom; [m] each.

    Each logarithm is shrunk by its uncertainty. A series more than three standard errors from the pool keeps its own
    variance.
    """
    if prior is None:
        return variance, df
    centre, spread = prior
    usable = (df >= 1) & (variance > 0)
    log, uncertainty = _log_variance(variance[usable], df[usable])
    mixed = np.exp((log * spread + centre * uncertainty) / (spread + uncertainty))
    odd = (log - centre) ** 2 > 9 * (spread + uncertainty)
    moderated, freedom = variance.copy(), df.copy()
    moderated[usable] = np.where(odd, variance[usable], mixed)
    freedom[usable] = np.where(odd, df[usable], df[usable] + 2 / spread)
    return moderated, freedom


def tail_likelihood(residual: Floats, used: NDArray[np.bool_]) -> Floats:
    """Return the log likelihood of residuals (in sigma, [m, n]) under each pair of `TAILS`, [m, tails * tails].

    A pair is a tail below the level and one above it. Each distribution is scaled to the sigma that `scatter` would
    measure. Residuals within `BODY` sigma are only counted, at most as many as a Gaussian has for those beyond. The
    shape of the core does not show the tail, and rounding or a floor distorts it.
    """
    below, above = (_side_likelihood(residual, used & (sign * residual > BODY), used.sum(axis=1)) for sign in (-1, 1))
    return (below[:, :, None] + above[:, None, :]).reshape(len(residual), -1)


def _side_likelihood(residual: Floats, far: NDArray[np.bool_], count: NDArray[np.int64]) -> Floats:
    """Return the log likelihood of the residuals on one side, of which `far` are beyond `BODY`, [m, tails]."""
    kappa = np.array([_kappa(int(c)) for c in range(residual.shape[1] + 1)])[count]  # [m, tails]
    row, column = np.nonzero(far)
    square, beyond = residual[row, column] ** 2, far.sum(axis=1)
    inside = np.minimum(count - beyond, beyond / special.ndtr(-BODY))
    likelihood = np.empty((len(residual), len(TAILS)))
    for i, df in enumerate(TAILS):
        constant = special.gammaln((df + 1) / 2) - special.gammaln(df / 2) - 0.5 * np.log(df * np.pi)
        spread = np.bincount(row, np.log1p(square * (kappa[row, i] ** 2 / df)), minlength=len(residual))
        core = np.log1p(-special.stdtr(df, -BODY * kappa[:, i]))
        likelihood[:, i] = inside * core + beyond * (constant + np.log(kappa[:, i])) - (df + 1) / 2 * spread
    return likelihood


@dataclass(frozen=True)
class TailPrior:
    """The prior of a series' tails that a night's series show together. Pairs are those of `tail_likelihood`."""

    alike: float  # probability that all series have the same pair of tails
    common: Floats  # [pairs] probability of each pair if they do
    apart: Floats  # [pairs] frequency of each pair among the series if they do not


ALONE = TailPrior(0.0, PAIR_PRIOR, PAIR_PRIOR)
"""The prior of a series judged alone."""


def tail_weights(likelihood: Floats, prior: TailPrior, count: NDArray[np.int64]) -> Floats:
    """Return the posterior weights of the tails below and above the level, [m, 2, tails].

    The likelihood of a series with few residuals counts less.
    """
    each = _shares(_tempered(likelihood, count), prior.apart)
    pairs = (prior.alike * prior.common + (1 - prior.alike) * each).reshape(-1, len(TAILS), len(TAILS))
    return np.stack([pairs.sum(axis=2), pairs.sum(axis=1)], axis=1)


def tail_prior(likelihood: Floats, count: NDArray[np.int64]) -> TailPrior:
    """Return the prior that similar series show together: all have the same tails, or each has its own.

    Both are averaged, weighted by how well each predicts a series from the others. With few residuals, no series shows
    its own tails, and all are assumed to have the same.
    """
    mature = min(float(count.mean()) / (2 * TAIL_COUNT), 1.0)
    summed = likelihood.sum(axis=0)
    likelihood = _tempered(likelihood, count)
    together = likelihood.sum(axis=0)
    others = _log_mean(together - likelihood, PAIR_PRIOR)
    if_alike = _log_mean(together[None], PAIR_PRIOR) - others
    apart, share = _frequencies(likelihood)
    without = np.maximum((PRIOR_SERIES + len(share)) * apart - share, 1e-300) / (PRIOR_SERIES + len(share) - 1)
    if_apart = _log_mean(likelihood, without)
    apart_chance = mature * float(special.expit((if_apart - if_alike).sum()))
    return TailPrior(1 - apart_chance, _shares(summed[None], PAIR_PRIOR)[0], apart)


def _frequencies(likelihood: Floats) -> tuple[Floats, Floats]:
    """Return the frequency of each pair among series by expectation-maximisation, and the shares of each series."""
    relative = np.exp(likelihood - likelihood.max(axis=1, keepdims=True))
    m, frequency = len(likelihood), PAIR_PRIOR
    for step in range(1, min(max(400_000 // m, 40), 400) + 1):
        before = frequency
        total = frequency * ((1 / (relative @ frequency)) @ relative) + PRIOR_SERIES * PAIR_PRIOR
        # Over-relaxation: mixture proportions converge slowly, and larger steps are safe.
        frequency = frequency * (total / (m + PRIOR_SERIES) / frequency) ** 1.8
        frequency = frequency / frequency.sum()
        if step % 10 == 0 and (np.abs(frequency - before) < 1e-12 * before).all():
            break
    return frequency, relative * frequency / (relative @ frequency)[:, None]


def _tempered(likelihood: Floats, count: NDArray[np.int64]) -> Floats:
    return (count / (count + TAIL_COUNT))[:, None] * likelihood


def _log_mean(log: Floats, weights: Floats) -> Floats:
    """Return the logarithm of the weighted sum of exp(log) over the last axis."""
    top = log.max(axis=-1)
    return top + np.log((np.exp(log - top[..., None]) * weights).sum(axis=-1))


def _shares(log: Floats, prior: Floats) -> Floats:
    """Return the posterior shares of a prior, given log likelihoods [m, pairs]."""
    log = log + np.log(np.maximum(prior, 1e-300))
    weights = np.exp(log - log.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@lru_cache(maxsize=1)
def _tables() -> tuple[Floats, Floats]:
    """Return log |t| [grid] and log P(T > t) [tails, grid]."""
    grid = np.linspace(np.log(0.3), np.log(1e9), 1500)
    return grid, np.array([_log_tail(df, np.exp(grid)) for df in TAILS])


CURVE = np.log(BODY) + np.linspace(0, 14, 72)
"""Log deviations at which score curves are tabulated."""


def score_curves(
    weights: Floats,  # [m, tails]
    count: NDArray[np.int64],  # [m] number of residuals behind sigma
) -> Floats:
    """Return the Gaussian deviations as improbable as those of `CURVE`, in sigma, [m, CURVE]."""
    if not len(weights):
        return np.zeros((0, len(CURVE)))
    grid, tails = _tables()
    kappa = np.array([_kappa(c) for c in range(int(count.max()) + 1)])[count]
    log_p = np.full((len(weights), len(CURVE)), -np.inf)
    for i in range(len(TAILS)):
        each = np.interp(CURVE + np.log(kappa[:, i, None]), grid, tails[i])
        log_p = np.logaddexp(log_p, each + np.log(np.maximum(weights[:, i, None], 1e-300)))
    return -special.ndtri_exp(log_p)


def curve_score(deviation: Floats, curve: Floats) -> Floats:
    """Return the scores of one series' deviations, [n]; proportional within `BODY`."""
    size = np.abs(deviation)
    far = np.interp(np.log(np.maximum(size, BODY)), CURVE, curve)
    return np.copysign(np.where(size > BODY, far, size * (curve[0] / BODY)), deviation)


def tail_scores(
    deviation: Floats,  # [m, k] in sigma
    count: NDArray[np.int64],  # [m] number of residuals behind sigma
) -> Floats:
    """Return the Gaussian deviation that is as improbable under each of `TAILS`, [tails, m, k]."""
    kappa = np.array([_kappa(c) for c in range(int(count.max()) + 1)])[count]  # [m, tails]
    size = np.abs(deviation)
    scores = np.empty((len(TAILS), *deviation.shape))
    grid, tables = _score_tables()
    for i in range(len(TAILS)):
        scaled = size * kappa[:, i, None]
        scores[i] = np.where(scaled < grid[0], scaled * tables[i][0] / grid[0], np.interp(scaled, grid, tables[i]))
    return np.copysign(scores, deviation)


@lru_cache(maxsize=1)
def _score_tables() -> tuple[Floats, Floats]:
    """Return |t| [grid] and Gaussian scores [tails, grid]."""
    grid = np.geomspace(0.05, 1e9, 3000)
    return grid, np.array([-special.ndtri_exp(_log_tail(df, grid)) for df in TAILS])


def _log_tail(df: float, t: Floats) -> Floats:
    """Return log P(T > t), by the power law of the tail where P underflows."""
    p = special.stdtr(df, -t)
    log = np.log(np.maximum(p, 1e-290))
    far = p < 1e-280
    if far.any():
        last = int(np.flatnonzero(far)[0]) - 1
        log[far] = log[last] - df * np.log(t[far] / t[last])
    return log


def own_reach(
    residual: Floats,  # [m, n] in sigma
    used: NDArray[np.bool_],  # [m, n]
    deviation: Floats,  # [m, k] in sigma
) -> Floats:
    """Return the largest score that the series' own residuals allow each deviation, [m, k]; inf if unlimited.

    If two or more residuals are as far out in the same direction, the deviation is only as improbable as they are
    frequent. So a second mode is not news.
    """
    count = np.maximum(used.sum(axis=1), 1)
    reach = np.full(deviation.shape, np.inf)
    row, column = np.nonzero(np.abs(deviation) > BODY)
    residuals = np.where(used, residual, 0.0)
    signed = residuals[row] * np.sign(deviation[row, column])[:, None]
    as_far = (signed >= np.abs(deviation[row, column])[:, None]).sum(axis=1)
    share = np.minimum(as_far / (count[row] + 1.0), 0.5)
    reach[row, column] = np.where(as_far >= 2, -special.ndtri(np.maximum(share, 1e-12)), np.inf)
    return reach
