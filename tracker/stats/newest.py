"""Test whether the newest points of a series are on another level than those before. Many series at once.

A series is judged by the level before its `onset` (batches.py), with noise estimated from the points before it. Each
run of newer points that ends tonight gets a p-value: Student's t, averaged over the possible tails of the noise with
their posterior weights. Two rules make a suspect:

    significance  p, weighted for the looks at 1, 2, 3, .. points, is below a limit that falls with the number of series
    record        a point is far outside everything that its own series has shown (records.py)

A suspect of an earlier night remains one until later points clear it (standing.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from groupbench.tracker.stats import noise
from groupbench.tracker.stats.batches import SETTLED, Noise, SeriesBatch
from groupbench.tracker.stats.records import RECENT

Floats = NDArray[np.float64]

NIGHT, SLOWLY = 20, 0.1
"""Number of series up to which the chance of a false suspect is divided evenly, and the exponent beyond.

The chance of each series falls only slowly in larger nights, because an A/B comparison clears a false suspect within a
minute."""
WORSE = 0.9
"""Fraction of that chance for changes for the worse. Possible improvements are less urgent."""
K_WEIGHTS, K_REST = (0.48, 0.22, 0.13), 0.013
"""Fractions of the chance for the last 1, 2 and 3 points, and for each longer run.

They sum to less than 1, because suspects persist and neighbouring points err together. Measured in
ci/benchmarks/judgement.py."""
LOOK = 2.0
"""Distance, in standard errors, below which p is not computed."""


def limit_of(series: int, q: float) -> float:
    """Return the p below which a series is a suspect; q is the chance of any false suspect among `NIGHT` series.

    The limit does not depend on other series' results. One that does (Benjamini and Hochberg's) would clear a suspect
    whenever other verdicts change.
    """
    return q / NIGHT * min(NIGHT / max(series, 1), 1.0) ** SLOWLY


def k_weights(count: int) -> Floats:
    """Return the weights of runs of 1 .. count points, [count]."""
    weights = np.full(max(count, len(K_WEIGHTS)), K_REST)
    weights[: len(K_WEIGHTS)] = K_WEIGHTS
    return weights[:count]


@dataclass
class Windows:
    """All runs of newest points, for series with the same `begin` and `onset`."""

    rows: NDArray[np.int64]  # [r] rows of the batch
    begin: int  # first point of the level before
    onset: int  # first of the newest points
    first: NDArray[np.int64]  # [w] first point of each run, counted from the onset
    p: Floats  # [r, w]
    effect: Floats  # [r, w] mean of the run minus the level
    deviation: Floats  # [r, k] of each point, in sigma
    level: Floats  # [r] before the onset
    sigma: Floats  # [r]
    rho: Floats  # [r]

    @property
    def count(self) -> int:
        return self.deviation.shape[1]

    def best(self) -> Floats:
        """Return the smallest p of each series, [r]."""
        return self.p.min(axis=1)


def tests_of(batch: SeriesBatch, learnt: Noise) -> tuple[list[Windows], list[Windows]]:
    """Test the newest points of the newest segment, and the newest segment itself if it has its own level.

    Returns the windows of both families, grouped by `begin` and `onset`.
    """
    n = batch.y.shape[1]
    newest = [windows(batch, learnt, rows, *ends) for ends, rows in _alike(batch.begin, batch.onset)]
    settled = np.array([len(one) > 0 and n - one[-1] >= SETTLED for one in batch.starts], dtype=bool)
    rows = np.flatnonzero(settled)
    begin = np.array([(0, *batch.starts[row])[-2] for row in rows.tolist()], dtype=np.int64)
    onset = np.array([batch.starts[row][-1] for row in rows.tolist()], dtype=np.int64)
    segment = [windows(batch, learnt, rows[some], *ends) for ends, some in _alike(begin, onset)]
    return newest, segment


def _alike(begin: NDArray[np.int64], onset: NDArray[np.int64]) -> list[tuple[tuple[int, int], NDArray[np.int64]]]:
    """Group the rows by equal places."""
    order = np.lexsort((onset, begin))
    cuts = np.flatnonzero((np.diff(begin[order]) != 0) | (np.diff(onset[order]) != 0)) + 1
    return [((int(begin[rows[0]]), int(onset[rows[0]])), rows) for rows in np.split(order, cuts) if len(rows)]


def windows(batch: SeriesBatch, learnt: Noise, rows: NDArray[np.int64], begin: int, onset: int) -> Windows:
    """Test all runs of points from `onset` to the end; for an old onset only the longest."""
    base, new = batch.y[rows, begin:onset], batch.y[rows, onset:]
    sigma, rho, df = learnt.sigma[rows], learnt.rho[rows], learnt.df[rows]
    count, earlier = new.shape[1], onset - begin
    level = _level(base, sigma)
    deviation = (new - level[:, None]) / np.maximum(sigma[:, None], batch.error[rows, onset:])
    first = np.arange(count) if count <= RECENT else np.zeros(1, np.int64)
    size = count - first
    reach = noise.own_reach(batch.residual[rows] / sigma[:, None], batch.used[rows], deviation)
    scores = noise.tail_scores(deviation, learnt.count[rows])
    scores = np.copysign(np.minimum(np.abs(scores), reach), scores)
    sums = np.cumsum(scores[:, :, ::-1], axis=2)[:, :, size - 1]  # [tails, r, w]
    error = size * np.sqrt(
        noise.mean_variance(size, rho[:, None]) + noise.mean_variance(np.array(earlier), rho)[:, None]
    )
    p = np.ones((len(rows), len(size)))
    row, run = np.nonzero(np.abs(sums[0]) > LOOK * error)
    distance = sums[:, row, run] / error[row, run]
    each = special.stdtr(df[row], -np.abs(distance))
    worse = np.sign(distance[0]) == batch.worse[rows[row]]
    weights = learnt.weights[rows[row], (distance[0] > 0).astype(np.int64)]  # of the tail on this side
    p[row, run] = (each * weights.T).sum(axis=0) / np.where(worse, WORSE, 1 - WORSE)
    # In correlated noise, a false suspect persists longer.
    p *= ((1 + rho) / (1 - rho))[:, None] / k_weights(count)[size - 1]
    effect = np.cumsum((new - level[:, None])[:, ::-1], axis=1)[:, size - 1] / size
    return Windows(rows, begin, onset, first, np.clip(p, 1e-300, 1.0), effect, deviation, level, sigma, rho)


def _level(base: Floats, sigma: Floats) -> Floats:
    """Return the mean of each row about its median, with outliers clipped at 2.5 sigma, [r]."""
    centre = np.median(base, axis=1)
    reach = 2.5 * sigma[:, None]
    return centre + np.clip(base - centre[:, None], -reach, reach).mean(axis=1)


@dataclass(frozen=True)
class Suspicion:
    """A suspect series: its newest points, as one run that ends tonight."""

    index: int  # first point
    begin: int  # first point of the level before
    p: float  # after weights
    level: float = 0.0  # level before the index
    size: float = 0.0  # mean of the run minus the level, in sigma
    sigma: float = 0.0
    rho: float = 0.0


def suspicions(one: Windows, limit: float, min_effect: Floats) -> dict[int, Suspicion]:
    """Return the suspects by tonight's points, by row of the batch.

    Args:
        limit: P below which a series is a suspect.
        min_effect: [r] smallest change that counts.
    """
    news = (one.p <= limit) & (np.abs(one.effect) >= min_effect[:, None]) & _newest_agrees(one)
    # Among several significant runs, the level most likely begins where the difference of means is clearest.
    size = one.count - one.first
    clear = np.where(news, np.abs(one.effect) / np.sqrt(1 / size + 1 / (one.onset - one.begin)), -1.0).argmax(axis=1)
    suspects = {}
    for r in np.flatnonzero(news.any(axis=1)).tolist():
        w = int(clear[r])
        p = float(np.where(news[r], one.p[r], np.inf).min())
        first = int(one.first[w])
        suspects[int(one.rows[r])] = Suspicion(
            one.onset + first, one.begin, p, float(one.level[r]), float(one.deviation[r, first:].mean()),
            float(one.sigma[r]), float(one.rho[r]),
        )  # fmt: skip
    return suspects


def _newest_agrees(one: Windows) -> NDArray[np.bool_]:
    """Return whether the newest point deviates too, [r, w]. An outlier before a normal point is not a new level."""
    size = one.count - one.first
    mean = np.cumsum(one.deviation[:, ::-1], axis=1)[:, size - 1] / size
    slack = np.sqrt((1 + one.rho) / (1 - one.rho))[:, None]
    return one.deviation[:, -1:] * np.sign(mean) >= np.abs(mean) / 4 - slack
