"""Judge every series of a night by its history. Pure functions of arrays.

For each series, on log latency, within the newest environment:

1. Segments: optimal partitioning (changepoints.py), with noise estimated from differences, which steps do not inflate.
2. Noise: sigma, autocorrelation and tail from residuals about the segments, up to the onset of the newest level
   (batches.py, noise.py). Young series borrow from their pool.
3. Tests of the newest points against the level before them, for tonight and for earlier nights (newest.py), and of the
   newest segment against the one before.
4. A significant series is a `suspect`. It is `changed` only if at least `MIN_SEGMENT` points are on either side, it
   survives a Bonferroni correction for the whole search, a block bootstrap of residuals (which preserves their
   autocorrelation) hardly ever reaches as far, a line does not fit better than a step, and the code changed (steps.py).

Leave out missing values: NaN in log_ms raises ValueError.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import special

from groupbench.tracker.stats import fdr, noise
from groupbench.tracker.stats.batches import MIN_POINTS, Noise, SeriesBatch, Shared, learn, make_batches, segments
from groupbench.tracker.stats.changepoints import MIN_SEGMENT
from groupbench.tracker.stats.histories import (
    FindingVerdict,
    PastChange,
    Segment,
    SeriesFinding,
    SeriesHistory,
    check,
    newest_environments,
)
from groupbench.tracker.stats.newest import Suspicion, Windows, limit_of, suspicions, tests_of
from groupbench.tracker.stats.records import RECENT
from groupbench.tracker.stats.remains import left_of_changes
from groupbench.tracker.stats.standing import still_standing
from groupbench.tracker.stats.steps import (
    DRIFTS,
    NoisySeries,
    Step,
    climbing,
    confirmed,
    make_step,
    noisy_series,
    not_reported,
)

__all__ = [
    "RECENT",
    "PastChange",
    "Segment",
    "SeriesFinding",
    "SeriesHistory",
    "find_all_changes",
    "find_changes",
    "scan",
]

Floats = NDArray[np.float64]

DRIFT_LEVEL = 1e-4
"""Two-sided p-value of a trend below which the newest segment drifts."""
CLEARLY = 6.0
"""Squared sigma by which a line must fit better than a step to call a suspect a drift."""
YOUNG = 10
"""Number of results before a record below which its place counts as exact."""


def scan(histories: Sequence[SeriesHistory], *, q: float = 0.05, alpha: float | None = None) -> list[SeriesFinding]:
    """Return one finding for each history.

    Args:
        q: Chance of any false suspect in a night of 20 quiet series; see `newest.limit_of` for larger nights.
        alpha: Judge each series alone instead, with this chance of a false suspect and nothing borrowed from others.

    Raises ValueError for NaN in log_ms, or if the arrays of a history differ in length.
    """
    places = newest_environments(histories)
    batches = make_batches(histories, places)
    shared = Shared([history.pool for history in histories]) if alpha is None else None
    noises = learn(batches, shared)
    enough = {number for batch in batches for number in batch.which}
    findings = {n: _too_few(histories[n], places[n]) for n in range(len(histories)) if n not in enough}
    tests = [tests_of(batch, learnt) for batch, learnt in zip(batches, noises, strict=True)]
    limit = limit_of(sum(len(batch.y) for batch in batches), q) if alpha is None else alpha
    q_values = [_q_values(family) for family in _by_age(tests)]
    tonight = [_tonight(batch, pair, limit) for batch, pair in zip(batches, tests, strict=True)]
    earlier = still_standing(batches, noises, shared, limit, tonight)
    for batch, learnt, pair, suspects, stayed in zip(batches, noises, tests, tonight, earlier, strict=True):
        suspects[0] |= stayed
        of_batch = _findings(batch, learnt, pair, suspects, histories, places, q_values)
        findings |= dict(zip(batch.which.tolist(), of_batch, strict=True))
    return [findings[number] for number in range(len(histories))]


def _by_age(tests: Sequence[tuple[list[Windows], list[Windows]]]) -> tuple[list[Windows], list[Windows]]:
    """Return the night's tests of recent changes, and those of old ones."""
    every = [one for pair in tests for family in pair for one in family]
    return [one for one in every if one.count <= RECENT], [one for one in every if one.count > RECENT]


def _findings(
    batch: SeriesBatch,
    learnt: Noise,
    tests: tuple[list[Windows], list[Windows]],
    suspects: Sequence[Mapping[int, Suspicion]],  # by row: by the newest points, by the newest segment
    histories: Sequence[SeriesHistory],  # of the whole night, like `places`
    places: Sequence[NDArray[np.int64]],
    q_values: Sequence[Callable[[Floats], Floats]],  # for recent changes, for old ones
) -> Iterator[SeriesFinding]:
    """Yield the finding on each series of a batch."""
    p = np.full(len(batch.which), np.nan)
    for one in reversed([one for family in tests for one in family]):
        p[one.rows] = one.best()
    trend = _trends(batch, learnt)
    calm = _calm_levels(batch, learnt, [places[number] for number in batch.which.tolist()])
    loud = np.array(sorted({*suspects[0], *suspects[1], *np.flatnonzero(trend).tolist()}), dtype=np.int64)
    by_row = dict(zip(loud.tolist(), noisy_series(batch, learnt, loud), strict=True))
    recent_q = q_values[0](p)
    for row, number in enumerate(batch.which.tolist()):
        finding = None
        if row in by_row:
            judged = _Row(histories[number], places[number], batch, row, by_row[row])
            finding = judged.verdict([s.get(row) for s in suspects], float(p[row]), bool(trend[row]), q_values)
        yield finding or SeriesFinding(
            "ok", tuple(calm[row]), p=float(p[row]), q=float(recent_q[row]), sigma=float(learnt.sigma[row]),
            n_before=max(len(places[number]) - 1 - (batch.starts[row] or (0,))[-1], 0), n_after=1,
            reason="the newest level is unchanged",
        )  # fmt: skip


def _tonight(
    batch: SeriesBatch, tests: tuple[list[Windows], list[Windows]], limit: float
) -> list[dict[int, Suspicion]]:
    """Return tonight's suspects: by the newest points, and by the newest segment."""
    standing: list[dict[int, Suspicion]] = [{}, {}]
    for family, suspects in zip(tests, standing, strict=True):
        for one in family:
            suspects |= suspicions(one, limit, batch.least[one.rows])
    for row in np.flatnonzero(batch.record >= 0).tolist():
        best_p = standing[0][row].p if row in standing[0] else 1.0
        standing[0][row] = Suspicion(int(batch.record[row]), int(batch.begin[row]), best_p)
    return standing


def find_changes(history: SeriesHistory) -> list[PastChange]:
    """Return all changes of a series, oldest first. Raises ValueError as `scan` does."""
    return find_all_changes([history])[0]


def find_all_changes(histories: Sequence[SeriesHistory]) -> list[list[PastChange]]:
    """Return all changes of many series, [m] lists, each series judged alone. Raises ValueError as `scan` does.

    Faster than one `find_changes` for each.
    """
    check(histories)
    parts: list[tuple[int, int, NDArray[np.int64]]] = []  # history, environment, its points
    for number, history in enumerate(histories):
        parts += [(number, int(e), np.flatnonzero(history.environment == e)) for e in np.unique(history.environment)]
    parts = [part for part in parts if len(part[2]) >= 2 * MIN_SEGMENT]
    owners = [histories[number] for number, _, _ in parts]
    batches = make_batches(owners, [points for _, _, points in parts])
    changes_of: list[list[PastChange]] = [[] for _ in histories]
    for batch, learnt in zip(batches, learn(batches, None), strict=True):
        rows = np.array([row for row, starts in enumerate(batch.starts) if starts], dtype=np.int64)
        for row, series in zip(rows.tolist(), noisy_series(batch, learnt, rows), strict=True):
            number, environment, place = parts[batch.which[row]]
            history = histories[number]
            steps = confirmed(series, batch.starts[row])
            for step in steps:
                why = not_reported(series, step, history.state[place], steps, history.min_effect)
                if why is None:
                    changes_of[number].append(_change(series, step, place, environment))
    return [sorted(changes, key=lambda change: change.index) for changes in changes_of]


def _too_few(history: SeriesHistory, place: NDArray[np.int64]) -> SeriesFinding:
    n = len(place)
    y = history.log_ms[place]
    levels = (Segment(int(place[0]), int(place[-1]) + 1, float(np.median(y)), float("nan")),) if n else ()
    if n < 2:
        return SeriesFinding("new", levels, n_after=n, reason="no earlier result in this environment")
    return SeriesFinding(
        "insufficient", levels, n_before=n - 1, n_after=1, reason=f"{n - 1} of {MIN_POINTS - 1} earlier results"
    )


def _trends(batch: SeriesBatch, learnt: Noise) -> NDArray[np.bool_]:
    """Return whether the newest segment has a trend, [m]: a significant slope of the clipped residuals."""
    m, n = batch.y.shape
    climbs = np.zeros(m, dtype=bool)
    for begin in np.unique(batch.begin):
        rows, size = np.flatnonzero(batch.begin == begin), n - int(begin)
        if size < RECENT:
            continue
        time, rho = np.arange(size) - (size - 1) / 2, learnt.rho[rows]
        calm = np.clip(batch.residual[rows, begin:] / learnt.sigma[rows, None], -4, 4)
        slope = calm @ time / np.sqrt(time @ time) / np.sqrt((1 + rho) / (1 - rho))
        climbs[rows] = np.abs(slope) > -special.ndtri(DRIFT_LEVEL / 2)
    return climbs


def _calm_levels(batch: SeriesBatch, learnt: Noise, places: Sequence[NDArray[np.int64]]) -> list[list[Segment]]:
    """Return the levels of each series' segments; `places`: indices of its points in the history, [m]."""
    n = batch.y.shape[1]
    levels: list[list[Segment]] = [[] for _ in batch.starts]
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for row, starts in enumerate(batch.starts):
        alike[starts].append(row)
    for starts, members in alike.items():
        rows = np.array(members)
        for a, b in segments(starts, n):
            y, reach = batch.y[rows, a:b], 2.5 * learnt.sigma[rows, None]
            centre = np.median(y, axis=1, keepdims=True)
            level = (centre + np.clip(y - centre, -reach, reach)).mean(axis=1) + batch.shift[rows]
            error = learnt.sigma[rows] * np.sqrt(noise.mean_variance(np.array(b - a), learnt.rho[rows]))
            for row, at, wide in zip(members, level.tolist(), error.tolist(), strict=True):
                place = places[row]
                levels[row].append(Segment(int(place[a]), int(place[b - 1]) + 1, at, wide))
    return levels


def _q_values(family: list[Windows]) -> Callable[[Floats], Floats]:
    """Return a function from p-values to their q-values in this night."""
    p = np.sort(np.concatenate([one.best() for one in family] or [np.ones(1)]))
    q = fdr.adjusted(p)
    return lambda each: q[np.minimum(np.searchsorted(p, each), len(q) - 1)]


def _change(series: NoisySeries, step: Step, place: NDArray[np.int64], environment: int) -> PastChange:
    half = float(special.stdtrit(series.df, 0.975)) * step.error
    return PastChange(
        index=int(place[step.index]), first=int(place[step.low_index - 1]), last=int(place[step.high_index]),
        effect=step.effect, low=step.effect - half, high=step.effect + half, before=step.before,
        after=step.before + step.effect, p=step.p, n_before=step.index - step.start, n_after=step.stop - step.index,
        environment=environment,
    )  # fmt: skip


@dataclass(frozen=True)
class _Row:
    """One series of a batch, with its history."""

    history: SeriesHistory
    place: NDArray[np.int64]  # indices of its points in the history
    batch: SeriesBatch
    row: int
    series: NoisySeries

    def verdict(
        self,
        suspects: Sequence[Suspicion | None],  # by the newest points, by the newest segment
        p: float,
        trend: bool,
        q_values: Sequence[Callable[[Floats], Floats]],  # for recent changes, for old ones
    ) -> SeriesFinding | None:
        """Return the series' finding, or None if it is unchanged."""
        n, series, state = self.batch.y.shape[1], self.series, self.history.state[self.place]
        for suspect in suspects:
            if suspect is None:
                continue
            step = make_step(series, suspect.begin, suspect.index, n)
            if suspect.index == self.batch.record[self.row] and step.index - step.start < YOUNG:
                # Few results do not locate a change by their scatter, but the start of a record is certain.
                step = replace(step, low_index=step.index, high_index=step.index)
            earlier = {suspect.begin, *(s for s in self.batch.starts[self.row] if s < suspect.begin)} - {0}
            ends = [*sorted(earlier), suspect.index]
            judgement = _weighed(series, step, ends, state, self.history.min_effect)
            if judgement is not None:
                best = min(p, suspect.p)
                q = float(q_values[n - step.index > RECENT](np.array([best]))[0])
                finding = self._finding(step, judgement, ends, best, q)
                return replace(finding, left=self._left(step, ends)) if finding.moved else finding
        if trend and self._climbs_far(series):
            return self._finding(None, ("drift", DRIFTS[1]), self.batch.starts[self.row], p, float("nan"))
        return None

    def _finding(
        self,
        step: Step | None,
        judgement: tuple[FindingVerdict, str],
        starts: Sequence[int],
        p: float,
        q: float,
    ) -> SeriesFinding:
        n, place, series = self.batch.y.shape[1], self.place, self.series
        shift, levels = float(self.batch.shift[self.row]), []
        for a, b in segments(starts, n):
            level, error = series.level(a, b)
            levels.append(Segment(int(place[a]), int(place[b - 1]) + 1, level + shift, error))
        if step is None:
            newest = starts[-1] if starts else 0
            return SeriesFinding(
                judgement[0], tuple(levels), p=p, q=q, sigma=series.sigma, n_before=max(n - newest - 1, 0), n_after=1,
                reason=judgement[1],
            )  # fmt: skip
        half = float(special.stdtrit(series.df, 0.975)) * step.error
        return SeriesFinding(
            judgement[0], tuple(levels), int(place[step.index]), int(place[step.low_index - 1]),
            int(place[step.high_index]), step.effect, step.effect - half, step.effect + half, step.before + shift, p, q,
            series.sigma, step.index - step.start, n - step.index, judgement[1],
        )  # fmt: skip

    def _left(self, newest: Step, ends: Sequence[int]) -> SeriesFinding | None:
        """Return the rest of an earlier change for the worse, if the newest one is an improvement."""
        history, state = self.history, self.history.state[self.place]
        if newest.effect * history.worse > 0:
            return None
        left = left_of_changes(self.series, newest, ends, state, history.worse, history.min_effect)
        if left is None:
            return None
        step, certain = left
        reason = f"partly taken back in the last {newest.stop - newest.index} points"
        return self._finding(step, ("changed" if certain else "suspect", reason), ends, step.p, float("nan"))

    def _climbs_far(self, series: NoisySeries) -> bool:
        """Return whether the trend of the newest segment adds up to a change that counts."""
        y = series.y[int(self.batch.begin[self.row]) :]
        time = np.arange(len(y)) - (len(y) - 1) / 2
        slope = float(time @ np.clip(y - np.median(y), -4 * series.sigma, 4 * series.sigma) / (time @ time))
        return abs(slope * len(y)) >= self.history.min_effect


def _weighed(
    series: NoisySeries, step: Step, ends: Sequence[int], state: NDArray[np.int64], min_effect: float
) -> tuple[FindingVerdict, str] | None:
    """Return verdict and reason of a significant step, or None for an old one that has become uncertain."""
    after = step.stop - step.index
    if len(np.unique(state[step.low_index - 1 : step.high_index + 1])) == 1:
        return "drift", DRIFTS[2]
    if after < MIN_SEGMENT or step.index - step.start < MIN_SEGMENT:
        return "suspect", f"{after} point{'s' if after > 1 else ''} off the earlier level"
    stands = confirmed(series, ends)
    if any(other.index == step.index for other in stands):
        why = not_reported(series, step, state, stands, min_effect)
        if why is None:
            return "changed", f"new level for {after} points"
        if why in DRIFTS and (why != DRIFTS[1] or climbing(series, step, ends, clearly=CLEARLY)):
            return "drift", why
        return ("suspect", why) if after <= RECENT else ("drift", why)
    if climbing(series, step, ends, clearly=CLEARLY):
        return "drift", DRIFTS[1]
    if after > RECENT:
        return None
    return "suspect", f"the last {after} points may be a new level"
