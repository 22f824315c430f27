"""Many series at once: those of equal length together, cut into segments, and their noise learnt."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.stats import noise
from groupbench.tracker.stats.changepoints import MIN_SEGMENT, partition, tamed
from groupbench.tracker.stats.histories import History

Floats = NDArray[np.float64]

MIN_POINTS = 4
"""Three earlier results and the newest."""
HELD_OUT = 5
"""The newest points say nothing of the noise: they are what is judged."""


@dataclass(eq=False)
class Batch:
    """Series of equal length n, one environment each. What is [m] is filled in step by step."""

    which: NDArray[np.int64]  # [m] number of the history
    y: Floats  # [m, n]
    error: Floats  # [m, n], 0 where unknown
    floor: Floats  # [m]
    starts: list[tuple[int, ...]] = field(default_factory=list)  # [m] first points of all segments but the first
    residual: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # [m, n] about the segment's centre
    used: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), bool))  # [m, n] tells of the noise
    begins: NDArray[np.bool_] = field(default_factory=lambda: np.zeros((0, 0), bool))  # [m, n]

    @property
    def held_out(self) -> int:
        return _held_out(self.y.shape[1])


@dataclass
class Noise:
    """Of series, [m]."""

    sigma: Floats
    df: Floats
    rho: Floats
    rho_high: Floats  # one standard error above what was measured
    weights: Floats  # [m, tails]
    count: NDArray[np.int64]
    knots: Floats  # [k] calibration of scores
    worth: Floats


def _held_out(n: int) -> int:
    return HELD_OUT if n >= 20 else max(1, n // 4)


def make_batches(histories: Sequence[History], places: Sequence[NDArray[np.int64]]) -> list[Batch]:
    lengths: dict[int, list[int]] = defaultdict(list)
    for number, place in enumerate(places):
        if len(place) >= MIN_POINTS:
            lengths[len(place)].append(number)
    made = []
    for _, numbers in sorted(lengths.items()):
        y = np.array([np.asarray(histories[i].log_ms, dtype=np.float64)[places[i]] for i in numbers])
        error = np.array([np.asarray(histories[i].error, dtype=np.float64)[places[i]] for i in numbers])
        error = np.where(np.isfinite(error), error, np.nan)
        ordered = np.sort(error, axis=1)  # NaN last
        known = np.isfinite(error).sum(axis=1)
        middle = np.take_along_axis(ordered, (np.maximum(known - 1, 0) // 2)[:, None], axis=1)[:, 0]
        floor = np.fmax(np.array([histories[i].floor for i in numbers], dtype=np.float64), middle)
        batch = Batch(np.array(numbers), y - np.median(y, axis=1, keepdims=True), np.nan_to_num(error), floor)
        _segment(batch)
        made.append(batch)
    return made


def _segment(batch: Batch) -> None:
    """Partition, and residuals about the levels."""
    y, (m, n), held = batch.y, batch.y.shape, batch.held_out
    sigma, rho = noise.rough_scale(y)
    sigma = np.maximum(sigma, batch.floor)
    batch.starts = [()] * m
    if n >= 2 * MIN_SEGMENT - 2:
        whitened = tamed(y, sigma) / (sigma * np.sqrt((1 + rho) / (1 - rho)))[:, None]
        batch.starts = partition(whitened, penalty(n))
    batch.residual = y - _midmean(y[:, : n - held])[:, None]
    batch.used = np.ones(y.shape, dtype=bool)
    batch.used[:, n - held :] = False
    batch.begins = np.zeros(y.shape, dtype=bool)
    batch.begins[:, 0] = True
    for row, starts in enumerate(batch.starts):
        for start, stop in segments(starts, n) if starts else ():
            known = min(stop, n - held)
            if known - start < MIN_SEGMENT:
                known = stop
                batch.used[row, start:stop] = False
            batch.residual[row, start:stop] = y[row, start:stop] - _midmean(y[row, start:known])
            batch.begins[row, start] = True


def _midmean(y: Floats) -> Floats:
    """Mean of the middle half, along the last axis. A median of few points is one of them, whose residual is then 0."""
    quarter = y.shape[-1] // 4
    return np.sort(y, axis=-1)[..., quarter : y.shape[-1] - quarter].mean(axis=-1)


def penalty(n: int) -> float:
    """Of a segment, in squared sigma: what the best of n splits of pure noise rarely gains."""
    return 2 * np.log(n) + 6.0


def segments(starts: Sequence[int], n: int) -> list[tuple[int, int]]:
    ends = [0, *starts, n]
    return list(itertools.pairwise(ends))


def learn(batches: list[Batch], pools: Sequence[Hashable], *, pooled: bool) -> list[Noise]:
    full = [_raw(batch, batch.used) for batch in batches]
    keys = [[pools[i] for i in batch.which] for batch in batches]
    learnt = _shared(batches, full, keys, [batch.used for batch in batches], pooled=pooled)
    if pooled:
        _calibrate(batches, keys, learnt)
    return learnt


@dataclass
class _Raw:
    variance: Floats
    df: Floats
    rho: Floats
    rho_variance: Floats
    count: NDArray[np.int64]
    levels: NDArray[np.int64]


def _raw(batch: Batch, used: NDArray[np.bool_]) -> _Raw:
    levels = np.maximum((used & batch.begins).sum(axis=1), 1)
    variance, df = noise.scatter(batch.residual, used, levels)
    sigma = np.maximum(np.sqrt(variance), batch.floor)
    rho, rho_variance = noise.autocorrelation(batch.residual / sigma[:, None], used, batch.begins)
    return _Raw(variance, df, rho, rho_variance, used.sum(axis=1), levels)


def _shared(
    batches: list[Batch],
    raws: list[_Raw],
    keys: list[list[Hashable]],
    used: list[NDArray[np.bool_]],
    *,
    pooled: bool,
) -> list[Noise]:
    """Noise of each batch, shared within pools that reach over batches."""
    if not batches:
        return []
    group = _groups(keys)
    everything = {name: np.concatenate([getattr(raw, name) for raw in raws]) for name in _Raw.__dataclass_fields__}
    floor = np.concatenate([batch.floor for batch in batches])
    variance, df, rho = everything["variance"].copy(), everything["df"].copy(), np.zeros(len(floor))
    rows_of = _rows_of(group) if pooled else [np.arange(len(floor))]
    for rows in rows_of:
        rho[rows] = noise.shrunk_rho(everything["rho"][rows], everything["rho_variance"][rows], pooled)
    # About a fitted level, correlated points scatter too little; and they count for fewer.
    each = np.maximum(everything["count"] // everything["levels"], 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = (1 - 1 / each) / np.maximum(1 - noise.mean_variance(each, rho), 0.05)
    variance *= np.where(each > 1, np.maximum(lost, 1.0), 1.0)
    df *= (1 - rho**2) / (1 + rho**2)
    if pooled:
        for rows in rows_of:
            variance[rows], df[rows] = noise.moderate(variance[rows], df[rows])
    sigma = np.maximum(np.sqrt(variance), floor)
    df = np.maximum(df, 1.0)
    ends = np.cumsum([0] + [len(batch.y) for batch in batches])
    # Residuals about a level that was fitted to them are smaller than the noise.
    freed = np.sqrt(each / np.maximum(each - 1, 1))
    likelihood = np.concatenate(
        [
            noise.tail_likelihood(freed[a:b, None] * batch.residual / np.maximum(sigma[a:b, None], batch.error), use)
            for batch, use, a, b in zip(batches, used, ends[:-1], ends[1:], strict=True)
        ]
    )
    weights = np.empty_like(likelihood)
    for rows in rows_of:
        prior = noise.tail_prior(likelihood[rows], everything["count"][rows]) if pooled else noise.TAIL_PRIOR
        weights[rows] = noise.tail_weights(likelihood[rows], prior)
    identity = np.array([0.0, 1.0])
    high = np.clip(np.maximum(everything["rho"] + np.sqrt(everything["rho_variance"]), rho), 0.0, noise.MAX_RHO)
    return [
        Noise(sigma[a:b], df[a:b], rho[a:b], high[a:b], weights[a:b], everything["count"][a:b], identity, identity)
        for a, b in itertools.pairwise(ends)
    ]


def _groups(keys: list[list[Hashable]]) -> NDArray[np.int64]:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for part in keys for key in part], dtype=np.int64)


def _rows_of(group: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    order = np.argsort(group, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(group[order])) + 1)


def _calibrate(batches: list[Batch], keys: list[list[Hashable]], learnt: list[Noise]) -> None:
    """What scores are worth, from points of the past that took no part in the noise that they are judged by."""
    old = [batch for batch in batches if batch.y.shape[1] >= 40]
    if not old:
        return
    used, fresh = [], []
    for batch in old:
        n, held = batch.y.shape[1], batch.held_out
        cut = n - held - (n - held) // 4
        used.append(batch.used & (np.arange(n) < cut))
        fresh.append(batch.used & (np.arange(n) >= cut))
    old_keys = [keys[batches.index(batch)] for batch in old] if len(old) < len(batches) else keys
    earlier = _shared(old, [_raw(b, u) for b, u in zip(old, used, strict=True)], old_keys, used, pooled=True)
    scores = []
    for batch, noise_then, new in zip(old, earlier, fresh, strict=True):
        start = int(np.flatnonzero(new.any(axis=0))[0]) if new.any() else batch.y.shape[1]
        deviation = batch.residual[:, start:] / np.maximum(noise_then.sigma[:, None], batch.error[:, start:])
        z = noise.score(deviation, noise_then.weights, noise_then.count)
        scores.append(z[new[:, start:]])
    knots, worth = noise.calibration(np.concatenate(scores))
    for each in learnt:
        each.knots, each.worth = knots, worth
