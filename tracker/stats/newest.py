"""Do the newest points of a series stand on another level than those before them? Many series at once.

A series is judged by the level before its `onset` (batches.py), with noise learnt from points before it. Each run of
newer points, ending tonight or on a night before, gets a p-value: Student's t, averaged over the tails that the noise
may have, weighted by how likely each is. Two rules make a suspect:

    significance  p, after weights for the looks at 1, 2, 3, .. points, survives false-discovery control over the night,
                  or is below `ALPHA`, however large the night
    record        a point is far outside all that its own series has shown (records.py)

What either rule would have reported on an earlier night stays until later points speak against it, so that a verdict
does not depend on the night's luck. Everything is computed from the history alone; nothing is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from groupbench.tracker.stats import fdr, noise
from groupbench.tracker.stats.batches import Batch, Noise
from groupbench.tracker.stats.records import RECENT

Floats = NDArray[np.float64]

ALPHA = 1e-3
"""Chance of a false suspect that one series has on one night, at least: in a night of thousands, control of false
discoveries alone would make a series wait for evidence that an A/B of one minute gives at once."""
K_WEIGHTS, K_REST = (0.56, 0.23, 0.18), 0.018
"""How the chance of a false alarm is spent on the last 1, 2, 3 points and on each longer run. Neighbours err together:
the sum exceeds 1. Measured in ci/benchmarks/judgement_marks.py."""
STAY = 3.0
"""How much larger the p of an earlier night may be, since noise is known better now: so that what was a suspect stays
one."""
LOOK = 2.0
"""Distances, in standard errors, below which p is not computed."""


def k_weights(count: int) -> Floats:
    """Return the weight of a run of 1 .. count points, [count]."""
    weights = np.full(max(count, len(K_WEIGHTS)), K_REST)
    weights[: len(K_WEIGHTS)] = K_WEIGHTS
    return weights[:count]


@dataclass
class Windows:
    """Runs of newest points of series that share the places of their level. Point h of the series is number 0 here."""

    rows: NDArray[np.int64]  # [r] of the batch
    begin: int  # the level before
    onset: int
    first: NDArray[np.int64]  # [w] first point of each run
    stop: NDArray[np.int64]  # [w] and its end
    p: Floats  # [r, w]
    effect: Floats  # [r, w] mean of the run against the level
    deviation: Floats  # [r, k] of each point, in sigma
    rho: Floats  # [r]

    @property
    def count(self) -> int:
        return self.deviation.shape[1]

    def asof(self, ago: int) -> Floats:
        """Return the p of each series as of a night `ago` nights before tonight, [r]; 1 where nothing was tested."""
        then = self.stop == self.count - ago
        return self.p[:, then].min(axis=1) if then.any() else np.ones(len(self.rows))


def windows(batch: Batch, learnt: Noise, rows: NDArray[np.int64], begin: int, onset: int) -> Windows:
    """Return all runs of the points from `onset` on, tested; of an onset that is no news, the run to the end."""
    base, new = batch.y[rows, begin:onset], batch.y[rows, onset:]
    sigma, rho, df = learnt.sigma[rows], learnt.rho[rows], learnt.df[rows]
    count, known = new.shape[1], onset - begin
    level = _level(base, sigma)
    scale = np.maximum(sigma[:, None], batch.error[rows, onset:])
    deviation = (new - level[:, None]) / scale
    first, stop = np.nonzero(np.arange(count)[:, None] < np.arange(1, count + 1))
    if count > RECENT:
        first, stop = np.array([0]), np.array([count - 1])
    stop += 1
    size = stop - first
    reach = noise.own_reach(batch.residual[rows] / sigma[:, None], batch.used[rows], deviation)
    scores = noise.tail_scores(deviation, learnt.count[rows])
    scores = np.copysign(np.minimum(np.abs(scores), reach), scores)
    sums = np.concatenate([np.zeros((*scores.shape[:2], 1)), np.cumsum(scores, axis=2)], axis=2)
    error = np.sqrt(
        noise.mean_variance(np.arange(1, count + 1), rho[:, None]) + noise.mean_variance(np.array(known), rho)[:, None]
    ) * np.arange(1, count + 1)
    p = np.ones((len(rows), len(size)))
    row, run = np.nonzero(np.abs(sums[0][:, stop] - sums[0][:, first]) > LOOK * error[:, size - 1])
    distance = np.abs(sums[:, row, stop[run]] - sums[:, row, first[run]]) / error[row, size[run] - 1]
    each = 2 * special.stdtr(df[row], -distance)
    p[row, run] = (each * learnt.weights[rows[row]].T).sum(axis=0)
    p /= k_weights(count)[size - 1]
    raw = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(new - level[:, None], axis=1)], axis=1)
    effect = (raw[:, stop] - raw[:, first]) / size
    return Windows(rows, begin, onset, first, stop, np.clip(p, 1e-300, 1.0), effect, deviation, rho)


def _level(base: Floats, sigma: Floats) -> Floats:
    centre = np.median(base, axis=1)
    reach = 2.5 * sigma[:, None]
    return centre + np.clip(base - centre[:, None], -reach, reach).mean(axis=1)


def limits(night: list[Windows], q: float) -> Floats:
    """Return the p that made a suspect tonight and on each of the nights before it, [RECENT]."""
    if not night:
        return np.full(RECENT, ALPHA)
    tests = sum(len(one.rows) for one in night)
    limit = np.full(RECENT, max(ALPHA, q / tests))
    for ago in range(RECENT):
        p = np.concatenate([one.asof(ago) for one in night if one.count > ago] or [np.ones(0)])
        # What was not tested as of that night was no news.
        padded = np.concatenate([p, np.ones(tests - len(p))])
        rejected = padded[fdr.adjusted(padded) <= q]
        if len(rejected):
            limit[ago] = max(limit[ago], float(rejected.max()))
    limit[1:] *= STAY
    return limit


@dataclass(frozen=True)
class Suspicion:
    """Of one series: its newest points, as one run that ends tonight."""

    index: int  # first point
    begin: int  # of the level before
    p: float  # tonight's, after weights


def suspicions(one: Windows, limit: Floats, min_effect: Floats) -> dict[int, Suspicion]:
    """Return what stands tonight, by row of the batch.

    limit: [RECENT] p that made a suspect so many nights ago; min_effect: [r] least change that is news.
    """
    count = one.count
    ago = np.minimum(count - one.stop, RECENT - 1)
    news = (one.p <= limit[ago]) & (np.abs(one.effect) >= min_effect[:, None]) & _newest_agrees(one)
    standing: dict[int, Suspicion] = {}
    tonight = np.flatnonzero(one.stop == count)
    p = np.where(news[:, tonight], one.p[:, tonight], np.inf)
    certain = p.min(axis=1) < np.inf
    # Of several runs that are news, the level most likely begins where the difference of means is clearest.
    known, size = one.onset - one.begin, count - one.first[tonight]
    best = np.where(p < np.inf, np.abs(one.effect[:, tonight]) / np.sqrt(1 / size + 1 / known), -1.0).argmax(axis=1)
    for r in np.flatnonzero(certain).tolist():
        w = int(tonight[best[r]])
        standing[int(one.rows[r])] = Suspicion(one.onset + int(one.first[w]), one.begin, float(p[r].min()))
    at = {int(one.first[w]): w for w in tonight.tolist()}
    for r, w in zip(*(each.tolist() for each in np.nonzero(news & ~certain[:, None])), strict=True):
        first, now, key = int(one.first[w]), at[int(one.first[w])], int(one.rows[r])
        if abs(one.effect[r, now]) < min_effect[r] / 2 or one.effect[r, now] * one.effect[r, w] <= 0:
            continue
        if key in standing and standing[key].p <= one.p[r, now]:
            continue
        if _stands(one.deviation[r], first, int(one.stop[w]), float(one.rho[r])):
            standing[key] = Suspicion(one.onset + first, one.begin, float(one.p[r, now]))
    return standing


def _newest_agrees(one: Windows) -> NDArray[np.bool_]:
    """[r, w] Whether the last point of a run is off as well: an outlier before a point that is back is no level."""
    sums = np.concatenate([np.zeros((len(one.rows), 1)), np.cumsum(one.deviation, axis=1)], axis=1)
    mean = (sums[:, one.stop] - sums[:, one.first]) / (one.stop - one.first)
    slack = np.sqrt((1 + one.rho) / (1 - one.rho))[:, None]
    return one.deviation[:, one.stop - 1] * np.sign(mean) >= np.abs(mean) / 4 - slack


def _stands(deviation: Floats, first: int, stop: int, rho: float) -> bool:
    """Whether what came after a suspicious run [first, stop) does not speak for the level before it."""
    size = float(deviation[first:stop].mean())
    later = np.clip(deviation[stop:] * np.sign(size), -abs(size), 2 * abs(size))
    slack = 0.3 * np.sqrt((1 + rho) / (1 - rho) / len(later))
    return float(later.mean()) >= abs(size) / 2 - slack
