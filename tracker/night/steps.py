"""Find the largest step of a latency between neighbouring commits, as a hint where to look in a backfilled history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sqlalchemy.orm import Session

from groupbench.tracker.compare.comparison import SeriesPair, compare_series
from groupbench.tracker.compare.sides import by_series
from groupbench.tracker.night.stored import runs_of_plan
from groupbench.tracker.query.points import points_of_runs
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.record import Environment
from groupbench.tracker.stats.thresholds import least_effect
from groupbench.tracker.verdicts import Verdict


@dataclass(frozen=True)
class LatencyStep:
    """A significant change of one series between two commits, with no result of a commit between them."""

    pair: SeriesPair
    before: str  # hash of the commit
    after: str
    environment: Environment


@dataclass(frozen=True)
class Steps:
    """The commits with a result, and the largest step between neighbours of them; None if no change is significant."""

    commits: int
    largest: LatencyStep | None


def find_steps(session: Session, plan: str, commits: Sequence[str]) -> Steps:
    """Return the steps in the runs of a plan.

    commits  hashes, oldest first
    """
    place = {commit: number for number, commit in enumerate(commits)}
    points = points_of_runs(session, [run.pk for run in runs_of_plan(session, plan, commits)])
    neighbours = []
    for of_series in by_series([point for point in points if point.timed]).values():
        at: dict[str, list[PointRow]] = {}
        for point in of_series:
            at.setdefault(point.run.commit, []).append(point)
        pairs = [(at[a], at[b]) for a, b in pairwise(sorted(at, key=place.__getitem__))]
        neighbours += [pair for pair in pairs if _size(*pair) > 0]
    neighbours.sort(key=lambda pair: _size(*pair), reverse=True)
    steps = (_step(before, after) for before, after in neighbours)  # from the largest to the first significant one
    measured = {point.run.commit for point in points if point.status == "ok"}
    return Steps(len(measured), next((step for step in steps if step is not None), None))


def _size(before: Sequence[PointRow], after: Sequence[PointRow]) -> float:
    """Return about how much the newest results differ, as a log ratio; 0 if it is too little to count."""
    first, last, timing = before[-1].median_ms, after[-1].median_ms, after[-1].timing
    size = abs(math.log(last / first)) if first and last else 0.0
    return size if first and timing and size > math.log1p(least_effect(timing, first)) else 0.0


def _step(before: Sequence[PointRow], after: Sequence[PointRow]) -> LatencyStep | None:
    newest = after[-1]
    pair = compare_series(newest.series, before, after)
    if pair.verdict not in (Verdict.REGRESSED, Verdict.IMPROVED) or pair.note is not None:  # a note: of the accuracy
        return None
    return LatencyStep(pair, before[-1].run.commit, newest.run.commit, newest.environment.facts)
