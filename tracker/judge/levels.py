"""Convert a series for the statistics, and split its results into levels.

The gate and the charts share this code: which results are comparable, and where a level ends. Levels also end where an
A/B comparison, an alert or the gate's verdict places a change, because history alone needs several results to be
certain.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.alerts import AlertRow
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.stats import scan
from groupbench.tracker.stats.thresholds import FLOOR, GROSS, YOUNG, least_effect
from groupbench.tracker.store.comparisons import DIFFERENT, Compared


def latency_history(
    past: Past,
    timing: str,
    *,
    canary: bool = False,
    min_effect: float | None = None,  # relative; None for the default of timing and latency
    pool: Hashable = 0,
) -> scan.SeriesHistory:
    """Return a series' latencies as input for `scan`.

    A canary does not run the code under test, so each of its runs counts as its own state of the code.
    """
    if min_effect is None:
        min_effect = least_effect(timing, math.exp(float(np.median(past.log))))
    return scan.SeriesHistory(
        log_ms=past.log,
        error=past.error,
        environment=past.environment,
        state=np.arange(len(past)) if canary else past.state,
        floor=FLOOR[timing],
        min_effect=math.log1p(min_effect),
        gross=math.log1p(GROSS[timing]),
        pool=pool,
        doubles=True,
    )


@dataclass(frozen=True)
class ChangeEvidence:
    """Evidence of a change of latency beyond the series' history. Its comparisons are of the past's toolchains."""

    alerts: Sequence[AlertRow] = ()
    comparisons: Sequence[Compared] = ()
    judged: Sequence[Judged] = ()


@dataclass(frozen=True)
class StableLevel:
    """Consecutive results in one environment without a change between them."""

    first: int  # key of its first run
    last: int
    ms: float  # median


@dataclass(frozen=True)
class Levels:
    """The certain changes of a series, by the first run on the new level, and the levels between all edges."""

    changes: tuple[tuple[int, scan.PastChange], ...]
    levels: tuple[StableLevel, ...]


def levels_of(
    pasts: Sequence[Past],
    timings: Sequence[str],
    canaries: Sequence[bool],
    evidence: Sequence[ChangeEvidence],
    commits: Mapping[int, str],  # clean commit of each run, by key
) -> list[Levels]:
    """Return the changes and levels of many series, searched together."""
    histories = [
        latency_history(past, timing, canary=canary)
        for past, timing, canary in zip(pasts, timings, canaries, strict=True)
    ]
    results = []
    for past, timing, changes, other in zip(pasts, timings, scan.find_all_changes(histories), evidence, strict=True):
        edges = {change.index for change in changes}
        for after, at in _changes_by(other, past, commits):
            if not any(after < edge <= at for edge in edges):
                edges.add(after + 1 + int(np.argmax(np.abs(np.diff(past.log[after : at + 1])))))  # the largest step
        for alert in other.alerts:
            back = _return(alert, past, edges)
            if back is not None:
                edges.add(back)
        stretches = (_level(past, stretch, timing) for stretch in _stretches(past, edges))
        named = tuple((int(past.run[change.index]), change) for change in changes)
        results.append(Levels(named, tuple(level for level in stretches if level is not None)))
    return results


def _changes_by(evidence: ChangeEvidence, past: Past, commits: Mapping[int, str]) -> Iterator[tuple[int, int]]:
    """Yield changes as (last place before, first place after)."""
    yield from _changes_by_verdicts(evidence, past)
    yield from _changes_by_comparisons(evidence, past, commits)


def _changes_by_verdicts(evidence: ChangeEvidence, past: Past) -> Iterator[tuple[int, int]]:
    """Yield the changes that alerts and the gate's own verdict place between two runs."""
    place = {run: at for at, run in enumerate(past.run.tolist())}
    spans = [(alert.base_run, alert.run) for alert in evidence.alerts if alert.metric == "latency"]
    for row in evidence.judged:
        if row.verdict in (Verdict.REGRESSED, Verdict.IMPROVED) and row.what == "latency" and row.span:
            spans.append((row.span.base, row.span.head))
    for base, head in spans:
        at = place.get(head.pk)
        if at:
            yield min(place.get(base.pk, at) if base else at, at - 1), at


def _changes_by_comparisons(
    evidence: ChangeEvidence, past: Past, commits: Mapping[int, str]
) -> Iterator[tuple[int, int]]:
    """Yield the changes that A/B comparisons found between two commits."""
    measured = [commits.get(run) for run in past.run.tolist()]
    for one in evidence.comparisons:
        if one.verdict == DIFFERENT and one.toolchains is None and one.base in measured:
            start = measured.index(one.base)
            at = next((i for i in range(start + 1, len(measured)) if measured[i] == one.head), None)
            if at is not None:
                yield max(i for i in range(at) if measured[i] == one.base), at


def _return(alert: AlertRow, past: Past, edges: Collection[int]) -> int | None:
    """Return the first place back on the level before a fixed alert, or None."""
    if alert.metric != "latency" or alert.state != "fixed" or not alert.before or alert.effect is None:
        return None
    since = np.flatnonzero(past.run == alert.run.pk)
    if not len(since):
        return None
    stop = min((edge for edge in edges if edge > since[0]), default=len(past))
    near = np.abs(past.log[since[0] : stop] - math.log(alert.before)) < abs(alert.effect) / 2
    count = int(np.argmin(near[::-1])) if not near.all() else 0
    return stop - count if count else None


def _stretches(past: Past, edges: Collection[int]) -> Iterable[NDArray[np.int64]]:
    """Return the places of the results between edges. A change of environment is an edge too."""
    if not len(past):
        return []
    elsewhere = np.flatnonzero(np.diff(past.environment)) + 1
    cuts = sorted({*edges, *elsewhere.tolist()} - {0})
    return np.split(np.arange(len(past)), cuts)


def _level(past: Past, stretch: NDArray[np.int64], timing: str) -> StableLevel | None:
    """Return the level of a stretch; None for a few results too far apart to be one level."""
    ms = np.exp(past.log[stretch])
    middle = float(np.median(ms))
    if len(ms) < YOUNG and float(np.abs(ms - middle).max()) > GROSS[timing] * middle:
        return None
    return StableLevel(int(past.run[stretch[0]]), int(past.run[stretch[-1]]), middle)
