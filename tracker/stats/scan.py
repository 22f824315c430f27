"""What happened to each series of a night, from its history alone? Pure functions of arrays.

Per series, on log latency, within the newest environment:

1. Segments: optimal partitioning (changepoints.py) with the noise of differences, which no step inflates.
2. Noise: sigma, autocorrelation and tail from residuals about the segments (noise.py), the newest points left out;
   young series borrow from their pool. Deviations become Gaussian scores.
3. The newest points against the level before them: for each k, the last k points are compared with the rest of the
   newest segment, and the smallest weighted p-value counts (weighted Bonferroni; `K_WEIGHTS`).
4. The newest change that the partition found, in the same way, over the two segments that it divides.
5. Over the night, false-discovery control (fdr.py). What is left is `suspect`; it is `changed` only where at least
   `MIN_SEGMENT` points stand on either side, the whole search is paid for by Bonferroni, a bootstrap of blocks of
   residuals (which keeps their autocorrelation) hardly ever reaches as far, a line does not fit better than a step,
   and the code differed across it.

A value that is missing is no point: leave it out. NaN in log_ms raises ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from groupbench.tracker.stats import fdr, noise
from groupbench.tracker.stats.batches import MIN_POINTS, Batch, Noise, learn, make_batches, segments
from groupbench.tracker.stats.changepoints import MIN_SEGMENT
from groupbench.tracker.stats.histories import Change, Finding, History, Level, Verdict, check, newest_environment
from groupbench.tracker.stats.steps import (
    DRIFTS,
    One,
    Step,
    climbing,
    confirmed,
    distances,
    make_step,
    not_reported,
    one_of,
)

__all__ = ["Change", "Finding", "History", "Level", "find_all_changes", "find_changes", "scan"]

Floats = NDArray[np.float64]

RECENT = 20
"""A change with so many points after it is new; older ones are judged apart, so that they make tonight no laxer."""
K_WEIGHTS = np.array([0.34, 0.22, 0.24, 0.06, 0.03])
"""How the chance of a false alarm is spent on the last 1, 2, .. points; 0.11 is left for all longer runs, as 1 / k."""
SHARPEN = ((50, 100, 300), {"alone": (0.36, 0.54, 0.82), "pooled": (0.33, 0.40, 0.60)})
"""Neighbouring k err together, and the tail is reckoned with as heavier than it may be, so that Bonferroni asks too
much: by so much, for these numbers of points. Measured in ci/benchmarks/judgement_marks.py."""
DRIFT_LEVEL = 1e-4


def scan(histories: Sequence[History], *, q: float = 0.05, alpha: float | None = None) -> list[Finding]:
    """One finding per history.

    q: share of false ones among the suspects of the night. alpha: judge each series by itself instead, with this
    chance of a false suspect; nothing is then borrowed from other series. Raises ValueError for NaN in log_ms,
    or where the arrays of a history differ in length.
    """
    found: list[Finding | None] = [None] * len(histories)
    places = [newest_environment(history) for history in histories]
    batches = make_batches(histories, places)
    for number, place in enumerate(places):
        if len(place) < MIN_POINTS:
            found[number] = _too_few(histories[number], place)
    noises = learn(batches, [history.pool for history in histories], pooled=alpha is None)
    tests = [_test(batch, learnt, pooled=alpha is None) for batch, learnt in zip(batches, noises, strict=True)]
    rejected, q_values = _over_the_night(tests, q, alpha)
    for batch, learnt, test, reject, q_value in zip(batches, noises, tests, rejected, q_values, strict=True):
        for row, number in enumerate(batch.which):
            history, place = histories[number], places[number]
            found[number] = _verdict(history, place, batch, learnt, test, reject[:, row], q_value[:, row], row)
    return [one for one in found if one is not None]


def find_changes(history: History) -> list[Change]:
    """All changes of a series, oldest first, environment by environment."""
    return find_all_changes([history])[0]


def find_all_changes(histories: Sequence[History]) -> list[list[Change]]:
    """The same of many series, faster; each is judged by itself."""
    parts: list[tuple[int, int, NDArray[np.int64]]] = []  # history, environment, its points
    for number, history in enumerate(histories):
        check(history)
        parts += [(number, int(e), np.flatnonzero(history.environment == e)) for e in np.unique(history.environment)]
    parts = [part for part in parts if len(part[2]) >= 2 * MIN_SEGMENT]
    owners = [histories[number] for number, _, _ in parts]
    batches = make_batches(owners, [points for _, _, points in parts])
    found: list[list[Change]] = [[] for _ in histories]
    for batch, learnt in zip(batches, learn(batches, [0] * len(parts), pooled=False), strict=True):
        for row in (row for row, starts in enumerate(batch.starts) if starts):
            number, environment, place = parts[batch.which[row]]
            history, one = histories[number], one_of(batch, learnt, row)
            steps = confirmed(one, batch.starts[row])
            for step in steps:
                why = not_reported(one, step, history.state[place], steps, history.min_effect)
                if why is None:
                    found[number].append(_change(one, step, place, environment))
    return [sorted(changes, key=lambda change: change.index) for changes in found]


def _too_few(history: History, place: NDArray[np.int64]) -> Finding:
    n = len(place)
    y = history.log_ms[place]
    levels = (Level(int(place[0]), int(place[-1]) + 1, float(np.median(y)), float("nan")),) if n else ()
    if n < 2:
        return Finding("new", levels, n_after=n, reason="no earlier result in this environment")
    return Finding(
        "insufficient", levels, n_before=n - 1, n_after=1, reason=f"{n - 1} earlier results of {MIN_POINTS - 1}"
    )


@dataclass
class _Tests:
    """Two hypotheses per series, [2, m]: the newest points within the newest segment, and the newest segment itself."""

    p: Floats  # NaN where there is nothing to test
    after: NDArray[np.int64]  # points after the most likely change
    start: NDArray[np.int64]  # where the points that were looked at begin
    trend: NDArray[np.bool_]  # [m] a line climbs through the newest segment


NEWEST, SEGMENT = 0, 1


def _test(batch: Batch, learnt: Noise, *, pooled: bool) -> _Tests:
    m, n = batch.y.shape
    test = _Tests(np.full((2, m), np.nan), np.zeros((2, m), np.int64), np.zeros((2, m), np.int64), np.zeros(m, bool))
    scaled = batch.residual / np.maximum(learnt.sigma[:, None], batch.error)
    z = noise.calibrated(noise.score(scaled, learnt.weights, learnt.count), learnt.knots, learnt.worth)
    z = noise.rank_cap(z, scaled, batch.used, batch.held_out)
    starts = np.array([one[-1] if one else 0 for one in batch.starts])
    # Too young a newest segment is only looked at together with the one before it.
    young = (starts > 0) & (n - starts < MIN_SEGMENT + 3)
    for start in np.unique(starts[~young]):
        rows = np.flatnonzero((starts == start) & ~young)
        test.p[NEWEST, rows], test.after[NEWEST, rows] = tail_test(
            z[rows, start:], learnt.rho[rows], learnt.df[rows], pooled=pooled
        )
        test.start[NEWEST, rows] = start
        test.trend[rows] = _climbs(z[rows, start:], learnt.rho[rows])
    for row in np.flatnonzero(starts).tolist():
        one, ends = one_of(batch, learnt, row), batch.starts[row]
        before = ends[-2] if len(ends) > 1 else 0
        centre = float(np.median(batch.y[row, before : ends[-1]]))
        merged = one.scores(before, n, centre)[None]
        p, after = tail_test(merged, learnt.rho[[row]], learnt.df[[row]], pooled=pooled)
        test.p[SEGMENT, row], test.start[SEGMENT, row] = p[0], before
        test.after[SEGMENT, row] = after[0] if young[row] else n - ends[-1]
    return test


def k_weights(count: int) -> Floats:
    """[count] how alpha is spent over the last 1 .. count points; they sum to 1."""
    weights = np.zeros(count)
    short = min(count, len(K_WEIGHTS))
    weights[:short] = K_WEIGHTS[:short]
    if count > short:
        rest = 1 / np.arange(short + 1, count + 1)
        weights[short:] = (1 - K_WEIGHTS.sum()) * rest / rest.sum()
    return weights / weights.sum()


def tail_test(
    z: Floats,  # [m, n] scores
    rho: Floats,  # [m]
    df: Floats,  # [m]
    *,
    pooled: bool,  # the noise was learnt from a pool
) -> tuple[Floats, NDArray[np.int64]]:
    """p [m] that the last points stand on another level than those before, and how many do, [m]."""
    n = z.shape[1]
    distance = distances(z, rho)[:, ::-1][:, : n - 3]  # k = 1, 2, ..
    size = np.abs(distance)
    p = np.ones(size.shape)
    row, column = np.nonzero(size > 2)
    p[row, column] = 2 * special.stdtr(df[row], -size[row, column])
    weighted = p / k_weights(n - 3)
    best = weighted.argmin(axis=1)
    sharpen = float(np.interp(n, SHARPEN[0], SHARPEN[1]["pooled" if pooled else "alone"]))
    smallest = np.clip(sharpen * weighted[np.arange(len(z)), best], 1e-300, 1.0)
    return smallest, best + 1


def _climbs(z: Floats, rho: Floats) -> NDArray[np.bool_]:
    n = z.shape[1]
    if n < RECENT:
        return np.zeros(len(z), dtype=bool)
    time = np.arange(n) - (n - 1) / 2
    slope = np.clip(z, -4, 4) @ time / np.sqrt(time @ time) / np.sqrt((1 + rho) / (1 - rho))
    return np.abs(slope) > -special.ndtri(DRIFT_LEVEL / 2)


def _over_the_night(tests: list[_Tests], q: float, alpha: float | None) -> tuple[list[NDArray[np.bool_]], list[Floats]]:
    """[2, m] per batch: rejected, and q-values."""
    if not tests:
        return [], []
    p = np.concatenate([test.p for test in tests], axis=1)
    after = np.concatenate([test.after for test in tests], axis=1)
    recent = np.ones(p.shape, dtype=bool)
    recent[SEGMENT] = after[SEGMENT] <= RECENT
    q_values = np.full(p.shape, np.nan)
    for family in (recent, ~recent):
        q_values[family] = fdr.adjusted(p[family])
    rejected = (q_values <= q) if alpha is None else (p <= alpha)
    cuts = np.cumsum([test.p.shape[1] for test in tests])[:-1]
    return np.split(rejected, cuts, axis=1), np.split(q_values, cuts, axis=1)


def _change(one: One, step: Step, place: NDArray[np.int64], environment: int) -> Change:
    half = float(special.stdtrit(one.df, 0.975)) * step.error
    return Change(
        index=int(place[step.index]), first=int(place[step.low_index - 1]), last=int(place[step.high_index]),
        effect=step.effect, low=step.effect - half, high=step.effect + half, before=step.before,
        after=step.before + step.effect, p=step.p, n_before=step.index - step.start, n_after=step.stop - step.index,
        environment=environment,
    )  # fmt: skip


def _verdict(
    history: History,
    place: NDArray[np.int64],
    batch: Batch,
    learnt: Noise,
    test: _Tests,
    rejected: NDArray[np.bool_],  # [2]
    q_value: Floats,  # [2]
    row: int,
) -> Finding:
    n = batch.y.shape[1]
    one, starts = one_of(batch, learnt, row), batch.starts[row]
    shift = float(np.median(history.log_ms[place]))
    answer: tuple[Verdict, str] | None = None
    step: Step | None = None
    which = NEWEST if not np.isnan(test.p[NEWEST, row]) else SEGMENT
    for tried in (NEWEST, SEGMENT):
        if not rejected[tried]:
            continue
        index = n - int(test.after[tried, row])
        begin = int(test.start[tried, row])
        candidate = make_step(one, begin, index, n)
        if abs(candidate.effect) < history.min_effect:
            continue
        earlier = [s for s in starts if s < index and (tried == NEWEST or s <= begin)]
        ends = [*(s for s in earlier if s > 0), index]
        answer = _weighed(one, candidate, ends, history.state[place], history.min_effect)
        if answer is not None:
            which, step, starts = tried, candidate, tuple(ends)
            break
    if answer is None and test.trend[row]:
        begin = int(test.start[NEWEST, row])
        time = np.arange(n - begin) - (n - begin - 1) / 2
        y = one.y[begin:] - np.median(one.y[begin:])
        slope = float(time @ np.clip(y, -4 * one.sigma, 4 * one.sigma) / (time @ time))
        if abs(slope * (n - begin)) >= history.min_effect:
            answer = ("drift", "slow trend")
    verdict, reason = answer or ("ok", "no change of the newest level")
    levels = []
    for a, b in segments(starts, n):
        level, error = one.level(a, b)
        levels.append(Level(int(place[a]), int(place[b - 1]) + 1, level + shift, error))
    newest = starts[-1] if starts else 0
    p, q = float(test.p[which, row]), float(q_value[which])
    if step is None:
        return Finding(
            verdict, tuple(levels), p=p, q=q, sigma=one.sigma, n_before=max(n - newest - 1, 0), n_after=1, reason=reason
        )
    half = float(special.stdtrit(one.df, 0.975)) * step.error
    return Finding(
        verdict, tuple(levels), int(place[step.index]), int(place[step.low_index - 1]), int(place[step.high_index]),
        step.effect, step.effect - half, step.effect + half, step.before + shift, p, q, one.sigma,
        step.index - step.start, n - step.index, reason,
    )  # fmt: skip


def _weighed(
    one: One, step: Step, ends: Sequence[int], state: NDArray[np.int64], min_effect: float
) -> tuple[Verdict, str] | None:
    """A rejected hypothesis: changed, suspect or drift; None where it is old and stands no longer."""
    after = step.stop - step.index
    if len(np.unique(state[step.low_index - 1 : step.high_index + 1])) == 1:
        return "drift", DRIFTS[2]
    if after < MIN_SEGMENT or step.index - step.start < MIN_SEGMENT:
        return "suspect", f"{after} point{'s' if after > 1 else ''} off the level before"
    stands = confirmed(one, ends)
    if any(other.index == step.index for other in stands):
        why = not_reported(one, step, state, stands, min_effect)
        if why is None:
            return "changed", f"new level for {after} points"
        if why in DRIFTS:
            return "drift", why
        return ("suspect", why) if after <= RECENT else ("drift", why)
    if climbing(one, step, ends):
        return "drift", DRIFTS[1]
    if after > RECENT:
        return None
    return "suspect", f"level of the last {after} points, not certain"
