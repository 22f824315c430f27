"""Suspects of earlier nights that later results have not cleared.

A verdict must not depend on the luck of one night: a step does not disappear because the next result is a little lower.
So the nights of the last `RECENT` results are judged again, each with the points known at the time. A suspect remains
one until later points favour the level before it, by a sequential test (Wald, "Sequential tests of statistical
hypotheses", 1945) of "no change" against "the observed step". Everything is computed from the history, without state.

Only places that may have been suspects are judged again. `_candidates` finds them with loose bounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special

from groupbench.tracker.stats import noise
from groupbench.tracker.stats.batches import MIN_POINTS, Noise, SeriesBatch, Shared, as_of, learn
from groupbench.tracker.stats.changepoints import MIN_SEGMENT
from groupbench.tracker.stats.newest import WORSE, Suspicion, k_weights, suspicions, tests_of
from groupbench.tracker.stats.records import RECENT, SETTLED_RECORD

Floats = NDArray[np.float64]

WHOLE = 300
"""Largest number of series for which pooled estimates are computed again for each earlier night.

Larger nights reuse tonight's pooled estimates, which hardly change."""
ODDS = 3.0
"""Likelihood ratio in favour of the earlier level at which later points clear a suspect."""
APART = 3.5
"""Standard errors required between the points before and after, once there are `MIN_SEGMENT` points after.

They count at the suspect's first point or, if that is clearer, at a segment of tonight that begins by its last point.
Points of the new level among those before the suspect would otherwise count as scatter, and clear it."""
RUNS = (1, 2, 3, 5, 8, 12, 18)
"""Lengths of the runs of points that `_candidates` considers."""
LOOSE = 0.75
"""Fraction of a suspect's distance at which `_candidates` considers a run."""


def still_standing(
    batches: list[SeriesBatch],
    noises: list[Noise],
    shared: Shared | None,
    limit: float,
    tonight: Sequence[Sequence[Collection[int]]],
) -> list[dict[int, Suspicion]]:
    """Return uncleared suspects of earlier nights by row of each batch.

    Args:
        tonight: Rows of tonight's suspects by their newest points, which are left out, and by their newest segment, of
            which only large changes for the worse inside that segment count.
    """
    after = [np.full(len(batch.y), -1) for batch in batches]
    for batch, each, (_, segment) in zip(batches, after, tonight, strict=True):
        each[list(segment)] = batch.begin[list(segment)]
    maybe = [_candidates(*each, limit) for each in zip(batches, noises, after, strict=True)]
    for possible, (newest, _) in zip(maybe, tonight, strict=True):
        possible[list(newest)] = False
    standing: list[dict[int, Suspicion]] = [{} for _ in batches]
    for ago in range(1, RECENT):
        some = [np.flatnonzero(each[:, ago]) for each in maybe]
        for i, rows, batch, learnt in _as_of_night(batches, some, shared, ago):
            wanted = set(some[i].tolist())
            for at, suspicion in _suspicions(batch, learnt, limit).items():
                row = int(rows[at])
                if row not in wanted or suspicion.index <= after[i][row]:
                    continue
                if row in standing[i] and standing[i][row].p <= suspicion.p:
                    continue
                stop, least = batch.y.shape[1], float(batch.least[at])
                if _stands(batches[i].y[row], suspicion, stop, least, batches[i].starts[row]):
                    standing[i][row] = suspicion
    return standing


def _as_of_night(
    batches: list[SeriesBatch], some: list[NDArray[np.int64]], shared: Shared | None, ago: int
) -> Iterator[tuple[int, NDArray[np.int64], SeriesBatch, Noise]]:
    """Yield (number of the batch, its rows, these rows as of an earlier night, their noise then).

    Args:
        some: Rows of each batch to judge again; all rows are included if their pooled estimates are computed again.
    """
    if not any(map(len, some)):
        return
    whole = shared is not None and sum(len(batch.y) for batch in batches) <= WHOLE
    numbers = [i for i, batch in enumerate(batches) if batch.y.shape[1] - ago >= MIN_POINTS and (whole or len(some[i]))]
    every = [np.arange(len(batches[i].y)) if whole else some[i] for i in numbers]
    then = [as_of(batches[i], rows, ago) for i, rows in zip(numbers, every, strict=True)]
    night = Shared(shared.pools) if whole and shared is not None else shared
    yield from zip(numbers, every, then, learn(then, night), strict=True)


def _suspicions(batch: SeriesBatch, learnt: Noise, limit: float) -> dict[int, Suspicion]:
    suspects: dict[int, Suspicion] = {}
    for family in reversed(tests_of(batch, learnt)):
        for one in family:
            if one.count <= RECENT:
                suspects |= suspicions(one, limit, batch.least[one.rows])
    return suspects


def _stands(y: Floats, then: Suspicion, stop: int, min_effect: float, starts: Sequence[int]) -> bool:
    """Return whether no night since `stop` has cleared a suspect.

    Args:
        y: [n].
        starts: First points of tonight's segments but the first.
    """
    effect = float(y[then.index :].mean()) - then.level
    if abs(effect) < min_effect / 2 or effect * then.size < 0:
        return False
    if len(y) - then.index >= MIN_SEGMENT:
        # By now the scatter on both sides is known. The suspect may have begun elsewhere than it seemed that night.
        places = [then.index, *(start for start in starts if then.begin < start < stop)]
        apart = max(_standard_errors(y[then.begin :], place - then.begin) * np.sign(then.size) for place in places)
        if apart < APART:
            return False
    off = (y[stop - 1 :] - then.level) / then.sigma * np.sign(then.size)
    rho = then.rho
    # The observed deviation is biased upwards, because it was selected for being large.
    size = abs(then.size) - float(np.sqrt(noise.mean_variance(np.array(stop - then.index), np.array(rho))))
    size = max(size, abs(then.size) / 2) * (1 - rho)
    innovation = np.clip(off[1:] - rho * off[:-1], -size, 2 * size)
    evidence = np.cumsum(size * innovation - size**2 / 2) / (1 - rho**2)
    return bool(np.all(evidence >= -np.log(ODDS)))


def _standard_errors(y: Floats, at: int) -> float:
    """Return how far the points from `at` on are from those before, in standard errors of that difference. y: [n]"""
    before, after = y[:at], y[at:]
    squares = ((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum()
    error = np.sqrt(squares / (len(y) - 2) * (1 / len(before) + 1 / len(after)))
    return float((after.mean() - before.mean()) / max(error, 1e-300))


def _candidates(batch: SeriesBatch, learnt: Noise, after: NDArray[np.int64], limit: float) -> NDArray[np.bool_]:
    """Return where a run of points ending that many nights ago may be a standing suspect, [m, RECENT].

    Args:
        after: [m] first point of the newest segment if only large changes for the worse inside it count, else -1.
    """
    y, (m, n) = batch.y, batch.y.shape
    maybe = np.zeros((m, RECENT), dtype=bool)
    zero = np.zeros((m, 1))
    sums = np.concatenate([zero, np.cumsum(y, axis=1)], axis=1)
    squares = np.concatenate([zero, np.cumsum(y * y, axis=1)], axis=1)
    start = np.maximum.accumulate(np.where(batch.begins, np.arange(n), 0), axis=1)
    row = np.arange(m)[:, None]
    sigma, rho, floor = learnt.sigma[:, None], learnt.rho[:, None], batch.floor[:, None]
    for size in RUNS:
        ago = np.arange(1, min(RECENT, n - size - MIN_POINTS + 2))
        if not len(ago):
            continue
        stop, end = n - ago, n - ago - size
        begin = start[:, end - 1]
        begin = np.where(end - begin >= MIN_POINTS - 1, begin, np.where(begin > 0, start[row, begin - 1], 0))
        earlier = (end - begin).astype(np.float64)
        level = (sums[:, end] - sums[row, begin]) / earlier
        scatter = (squares[:, end] - squares[row, begin] - earlier * level**2) / np.maximum(earlier - 1, 1)
        scatter = np.clip(np.sqrt(np.maximum(scatter, 0.0)), floor, sigma)
        # With few points, the scatter is close to the pooled one.
        scale = np.exp((earlier * np.log(scatter) + 4 * np.log(sigma)) / (earlier + 4))
        run = ((sums[:, stop] - sums[:, end]) / size - level) / scale
        error = np.sqrt(noise.mean_variance(np.array(size), rho) + noise.mean_variance(end - begin, rho))
        loose = -LOOSE * special.ndtri(limit * k_weights(size)[-1] * WORSE)
        since = (sums[:, -1:] - sums[:, end]) / (n - end) - level
        later = ((sums[:, -1:] - sums[:, stop]) / ago - level) / scale * np.sign(run)
        half = np.abs(run) / 2
        slack = 3 * (1 + rho) / (1 - rho) / (np.maximum(half, 0.1) * ago)
        maybe[:, ago] |= (
            np.where(
                after[:, None] < 0,
                np.abs(run) > loose * error,
                (run * batch.worse[:, None] > SETTLED_RECORD * error) & (end - after[:, None] >= MIN_POINTS - 1),
            )
            & (since * run > 0)
            & (np.abs(since) >= batch.least[:, None] / 2)
            & (later >= half / 2 - slack)
        )
    return maybe
