"""Group series of equal length into batches, segment them, and estimate their noise."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy import special

from groupbench.tracker.stats import noise
from groupbench.tracker.stats.changepoints import LEVEL, MIN_SEGMENT, partition, tamed, without_neighbours
from groupbench.tracker.stats.histories import SeriesHistory
from groupbench.tracker.stats.records import RECENT, newer_record, records, standing_record

Floats = NDArray[np.float64]

MIN_POINTS = 4
"""Smallest number of points to judge: three earlier results and the newest."""
HELD_OUT = 5
"""Smallest number of newest points that noise estimates exclude, because these points are being judged."""
SETTLED = MIN_SEGMENT + 3
"""Number of points from which the newest segment is a level of its own that newer points are judged by."""
MANY = 50
"""Number of series from which a pool has its own tail estimate."""
TICKS = 0.3
"""Fraction of the floor below which scatter is rounding, so that a clock tick is not an outlier."""
ONSET = 0.003
"""p-value below which points after a new level's onset are excluded from noise estimates."""


@dataclass(eq=False)
class SeriesBatch:
    """m series of equal length n, each in one environment. `_segment` fills in the fields with defaults."""

    which: NDArray[np.int64]  # [m] index of the history
    y: Floats  # [m, n] log_ms less `shift`
    error: Floats  # [m, n] standard error of a point, 0 if unknown
    floor: Floats  # [m] smallest scatter to assume
    shift: Floats  # [m] log_ms at y = 0
    least: Floats  # [m] smallest log change that counts
    gross: Floats  # [m] log change so large that it needs less evidence
    worse: Floats  # [m] 1 or -1, sign of a change for the worse
    doubles: NDArray[np.bool_]  # [m] a point beyond a few scattered ones by a factor of two is a record
    rough_rho: float = 0.0  # typical autocorrelation of the batch, estimated without levels
    starts: list[tuple[int, ...]] = field(default_factory=list)  # [m] first points of all segments but the first
    # [m] start of the level to judge by
    begin: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    # [m] end of that level; newer points are judged
    onset: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    # [m] place of a standing record, or -1
    record: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    residual: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # [m, n] relative to the segment's centre
    used: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), bool))  # [m, n] used for noise estimates
    begins: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), bool))  # [m, n] first of a segment


@dataclass
class Noise:
    """The noise estimates of m series. noise.py explains them."""

    sigma: Floats  # [m] scatter of a point, at least the floor
    df: Floats  # [m] degrees of freedom of sigma
    rho: Floats  # [m] autocorrelation of successive points
    rho_high: Floats  # [m] one standard error above the estimate
    weights: Floats  # [m, 2, tails] posterior weights of noise.TAILS below and above the level
    count: NDArray[np.int64]  # [m] number of residuals behind the estimates


def make_batches(histories: Sequence[SeriesHistory], places: Sequence[NDArray[np.int64]]) -> list[SeriesBatch]:
    """Return the segmented batches, the shortest series first.

    Args:
        places: Indices of the points to judge in each history, all in one environment; fewer than `MIN_POINTS` are left
            out.
    """
    lengths: dict[int, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        if len(place) >= MIN_POINTS:
            lengths[len(place)].append(number)
    made = []
    for _, numbers in sorted(lengths.items()):
        y = np.array([_at(histories[i].log_ms, places[i]) for i in numbers])
        error = np.array([_at(histories[i].error, places[i]) for i in numbers])
        error = np.where(np.isfinite(error), error, np.nan)
        ordered = np.sort(error, axis=1)  # NaN last
        count = np.isfinite(error).sum(axis=1)
        middle = np.take_along_axis(ordered, (np.maximum(count - 1, 0) // 2)[:, None], axis=1)[:, 0]
        floor = np.fmax(np.array([histories[i].floor for i in numbers], dtype=np.float64), middle)
        shift = np.median(y, axis=1)
        least = np.array([histories[i].min_effect for i in numbers])
        gross = np.array([histories[i].gross for i in numbers])
        worse = np.array([histories[i].worse for i in numbers], dtype=np.float64)
        doubles = np.array([histories[i].doubles for i in numbers])
        batch = SeriesBatch(
            np.array(numbers), y - shift[:, None], np.nan_to_num(error), floor, shift, least, gross, worse, doubles
        )
        batch.rough_rho = float(noise.rough_scale(batch.y)[1].mean())
        _segment(batch)
        made.append(batch)
    return made


def _at(values: Floats, place: NDArray[np.int64]) -> Floats:
    values = np.asarray(values, dtype=np.float64)
    return values if len(place) == len(values) else values[place]


def as_of(batch: SeriesBatch, rows: NDArray[np.int64], ago: int) -> SeriesBatch:
    """Return some series as they were `ago` results earlier."""
    made = SeriesBatch(
        batch.which[rows], batch.y[rows, :-ago], batch.error[rows, :-ago], batch.floor[rows], batch.shift[rows],
        batch.least[rows], batch.gross[rows], batch.worse[rows], batch.doubles[rows], batch.rough_rho,
    )  # fmt: skip
    if len(rows) == len(batch.y):
        made.rough_rho = float(noise.rough_scale(made.y)[1].mean())
    _segment(made)
    return made


def _segment(batch: SeriesBatch) -> None:
    """Partition a batch, choose the level to judge by, and compute residuals."""
    y, (m, n) = batch.y, batch.y.shape
    sigma, rho = noise.rough_scale(y)
    rho = np.maximum(rho, batch.rough_rho)  # a few differences do not show it
    sigma, slow = np.maximum(sigma, batch.floor), np.sqrt((1 + rho) / (1 - rho))
    # For the onset, the batch's autocorrelation: a series' own may come from the step.
    typical = float(np.sqrt((1 + batch.rough_rho) / (1 - batch.rough_rho)))
    batch.starts = [()] * m
    if n >= 2 * MIN_SEGMENT - 2:
        whitened = tamed(y, sigma) / (sigma * slow)[:, None]
        starts_of = partition(whitened, penalty(n))
        batch.starts = [without_neighbours(*each) if each[1] else () for each in zip(whitened, starts_of, strict=True)]
    batch.residual, batch.used = np.zeros(y.shape), np.ones(y.shape, dtype=bool)
    batch.begins = np.zeros(y.shape, dtype=bool)
    batch.begin, batch.onset, batch.record = np.zeros(m, np.int64), np.zeros(m, np.int64), np.full(m, -1)
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, starts in enumerate(batch.starts):
        alike[starts].append(row)
    for starts, members in alike.items():
        rows = np.array(members)
        ends = [0, *starts]
        shortest = SETTLED  # of a level to judge by; the one before the newest may have fewer points
        while n - ends[-1] < shortest and len(ends) > 1:
            ends.pop()
            shortest = MIN_POINTS
        for start, stop in itertools.pairwise(ends):
            batch.residual[rows, start:stop] = y[rows, start:stop] - _midmean(y[rows, start:stop])[:, None]
            batch.begins[rows, start] = True
        begin = ends[-1]
        seen = records(y[rows], batch.error[rows], batch.floor[rows], batch.gross[rows], begin, batch.doubles[rows])
        for at in np.flatnonzero(seen.any(axis=1)).tolist():
            batch.record[rows[at]] = standing_record(y[rows[at]], seen[at], begin, float(batch.least[rows[at]]))
        onset = begin + _onset(y[rows, begin:], batch.floor[rows], typical)
        onset = np.where(batch.record[rows] >= 0, batch.record[rows], onset)
        batch.begin[rows], batch.onset[rows], batch.begins[rows, begin] = begin, onset, True
        for first in np.unique(onset):
            some = rows[onset == first]
            batch.residual[some, begin:] = y[some, begin:] - _midmean(y[some, begin:first])[:, None]
            batch.used[some, first:] = False
        for row in rows[(batch.record[rows] >= 0) & (batch.record[rows] < n - 1)].tolist():
            _follow(batch, row)


def _follow(batch: SeriesBatch, row: int) -> None:
    """Judge a series by the level since its record, as long as a newer point is a record of that level."""
    y = batch.y[row]
    settings = float(batch.floor[row]), float(batch.gross[row]), int(batch.begin[row])
    worse, least = float(batch.worse[row]), float(batch.least[row])
    while (newer := newer_record(y, batch.error[row], *settings, int(batch.record[row]), worse, least)) >= 0:
        since = batch.record[row]
        batch.residual[row, since:] = y[since:] - _midmean(y[since:newer])
        batch.begins[row, since], batch.used[row, since:newer] = True, True
        batch.begin[row], batch.onset[row], batch.record[row] = since, newer, newer


def _onset(y: Floats, floor: Floats, slow: float) -> NDArray[np.int64]:
    """Return where the newest level most likely begins, [m]; for quiet series, where the held-out points begin.

    y: [m, n] from the start of a segment; slow: factor by which autocorrelation widens a mean. Each place is judged by
    Student's t with the scatter of earlier points only, so that newer points do not widen the noise.
    """
    m, n = y.shape
    held = min(HELD_OUT, n // 3)
    first = max(MIN_POINTS - 1, n - RECENT)
    places = np.arange(first, n)
    places = places[(places >= LEVEL) | (n - places <= places)]
    before, after = places.astype(np.float64), n - places.astype(np.float64)
    y = y - y[:, :first].mean(axis=1, keepdims=True)
    sums, squares = np.cumsum(y, axis=1), np.cumsum(y * y, axis=1)
    level = sums[:, places - 1] / before
    scatter = np.maximum((squares[:, places - 1] - before * level**2) / (before - 1), 0.0)
    distance = (sums[:, -1:] - sums[:, places - 1]) / after - level
    distance /= slow * np.maximum(np.sqrt(scatter), floor[:, None]) * np.sqrt(1 / before + 1 / after)
    p = np.ones(distance.shape)
    row, column = np.nonzero(np.abs(distance) > 2)
    p[row, column] = 2 * special.stdtr(before[column] - 1, -np.abs(distance[row, column]))
    best = p.argmin(axis=1)
    # p may underflow; argmin then returns the first of the certain places.
    return np.where(p[np.arange(m), best] < ONSET, places[best], n - held)


def _midmean(y: Floats) -> Floats:
    """Return the mean of the middle half along the last axis. A median would be one of the points, with residual 0."""
    quarter = y.shape[-1] // 4
    return np.sort(y, axis=-1)[..., quarter : y.shape[-1] - quarter].mean(axis=-1)


def penalty(n: int) -> float:
    """Return the penalty of a segment in squared sigma, which the best split of pure noise rarely exceeds."""
    return 2 * np.log(n) + 6.0


def segments(starts: Sequence[int], n: int) -> list[tuple[int, int]]:
    """Return the segments [start, stop) of n points, given the first points of all segments but the first."""
    ends = [0, *starts, n]
    return list(itertools.pairwise(ends))


@dataclass
class Shared:
    """The estimates that the series of a night share. `learn` fills in missing ones and keeps the others."""

    pools: Sequence[Hashable]  # pool of each history
    rho: noise.RhoPrior | None = None
    tails: noise.TailPrior | None = None  # of all series
    variances: dict[Hashable, tuple[float, float] | None] = field(default_factory=dict)  # by pool
    pool_tails: dict[Hashable, noise.TailPrior] = field(default_factory=dict)  # by large pool


def learn(batches: list[SeriesBatch], shared: Shared | None) -> list[Noise]:
    """Return the noise of each batch. Pools span batches. With `shared` None, each series is estimated alone."""
    if not batches:
        return []
    sizes = [len(batch.y) for batch in batches]
    ends = np.cumsum([0, *sizes])
    parts = [slice(a, b) for a, b in itertools.pairwise(ends.tolist())]
    floor = np.concatenate([batch.floor for batch in batches])
    count = np.concatenate([batch.used.sum(axis=1) for batch in batches])
    levels = np.concatenate([np.maximum((batch.used & batch.begins).sum(axis=1), 1) for batch in batches])
    variance, df, raw_rho = _alone(batches, levels, parts)
    rho = _shrunk_rho(raw_rho, count, shared)
    # Correlated points scatter too little about a fitted level, and carry less information.
    each = np.maximum(count // levels, 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = (1 - 1 / each) / np.maximum(1 - noise.mean_variance(each, rho), 0.05)
    variance *= np.where(each > 1, np.maximum(lost, 1.0), 1.0)
    df *= (1 - rho**2) / (1 + rho**2)
    pools = [] if shared is None else _rows_of([shared.pools[i] for batch in batches for i in batch.which])
    if shared is not None:
        _moderate(variance, df, pools, shared)
    scatter_of_series = np.sqrt(variance)
    sigma = np.maximum(scatter_of_series, floor)
    # Residuals about a fitted level are smaller than the noise.
    freed = np.sqrt(each / np.maximum(each - 1, 1))
    likelihood = np.concatenate(
        [_tails(batch, scatter_of_series[a], freed[a]) for batch, a in zip(batches, parts, strict=True)]
    )
    weights = _tail_weights(likelihood, count, pools, shared)
    # Autocorrelation below the floor does not matter.
    share = np.minimum(variance / sigma**2, 1.0)
    high = np.clip(np.maximum(raw_rho + 1 / np.sqrt(np.maximum(count, 1)), rho) * share, 0.0, noise.MAX_RHO)
    rho, df = rho * share, np.maximum(df, 1.0)
    return [Noise(sigma[a], df[a], rho[a], high[a], weights[a], count[a]) for a in parts]


def _alone(batches: list[SeriesBatch], levels: NDArray[np.int64], parts: list[slice]) -> tuple[Floats, Floats, Floats]:
    """Return (variance, its degrees of freedom, autocorrelation) of each series, from its own residuals."""
    measured = [noise.scatter(batch.residual, batch.used, levels[a]) for batch, a in zip(batches, parts, strict=True)]
    variance = np.concatenate([each for each, _ in measured])
    df = np.concatenate([each for _, each in measured])
    rho = [
        noise.autocorrelation(batch.residual / _positive(np.sqrt(variance[a]))[:, None], batch.used, batch.begins)
        for batch, a in zip(batches, parts, strict=True)
    ]
    return variance, df, np.concatenate(rho)


def _moderate(variance: Floats, df: Floats, pools: list[tuple[Hashable, NDArray[np.int64]]], shared: Shared) -> None:
    """Move the variances towards those of their pools, in place."""
    for key, rows in pools:
        if key not in shared.variances:
            shared.variances[key] = noise.variance_prior(variance[rows], df[rows])
        variance[rows], df[rows] = noise.moderate(variance[rows], df[rows], shared.variances[key])


def _shrunk_rho(raw: Floats, count: NDArray[np.int64], shared: Shared | None) -> Floats:
    if shared is None:
        alone = [noise.rho_prior(raw[i : i + 1], count[i : i + 1]) for i in range(len(raw))]
        shrunk = [noise.shrunk_rho(raw[i : i + 1], count[i : i + 1], prior) for i, prior in enumerate(alone)]
        return np.concatenate([np.zeros(0), *shrunk])
    shared.rho = shared.rho or noise.rho_prior(raw, count)
    return noise.shrunk_rho(raw, count, shared.rho)


def _tail_weights(
    likelihood: Floats,
    count: NDArray[np.int64],
    pools: Sequence[tuple[Hashable, NDArray[np.int64]]],
    shared: Shared | None,
) -> Floats:
    """Return the tail weights, [m, 2, tails], with a prior from all series or from a large pool."""
    if shared is None:
        return noise.tail_weights(likelihood, noise.ALONE, count)
    if shared.tails is None:
        shared.tails = noise.tail_prior(likelihood, count)
        for key, rows in pools:
            if len(rows) >= MANY:
                shared.pool_tails[key] = noise.tail_prior(likelihood[rows], count[rows])
    weights = np.empty((len(likelihood), 2, len(noise.TAILS)))
    for key, rows in pools:
        prior = shared.pool_tails.get(key, shared.tails)
        weights[rows] = noise.tail_weights(likelihood[rows], prior, count[rows])
    return weights


def _tails(batch: SeriesBatch, scatter: Floats, freed: Floats) -> Floats:
    """Return the log likelihood of pairs of tails, [m, pairs], from the series' own scatter, even below the floor."""
    scale = np.maximum(scatter, TICKS * batch.floor)[:, None]
    scale = np.where(batch.error > batch.floor[:, None], np.maximum(batch.error, scale), scale)
    return noise.tail_likelihood(freed[:, None] * batch.residual / _positive(scale), batch.used)


def _positive(scale: Floats) -> Floats:
    return np.maximum(scale, 1e-12)


def _rows_of(keys: list[Hashable]) -> list[tuple[Hashable, NDArray[np.int64]]]:
    """Return the rows of each key."""
    numbers: dict[Hashable, int] = {}
    group = np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)
    order = np.argsort(group, kind="stable")
    return list(zip(numbers, np.split(order, np.flatnonzero(np.diff(group[order])) + 1), strict=True))
