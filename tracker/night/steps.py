"""Find the largest step of a latency between neighbouring commits, as a hint where to look in a backfilled history."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

from sqlalchemy.orm import Session

from groupbench.tracker.compare.comparison import UNREPEATED, SeriesPair, compare_series
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.record import Environment
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.night.stored import runs_of_plan
from groupbench.tracker.query.points import points_of_runs
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.stats.thresholds import least_effect

NEIGHBOURS = 5
"""Number of commits on each side of a step whose results are compared."""


@dataclass(frozen=True)
class LatencyStep:
    """A significant change of one series between two commits, with no result of a commit between them."""

    pair: SeriesPair
    before: str  # hash of the commit
    after: str
    ratio: float  # of the latencies of the two, as `history` shows them
    environment: Environment


@dataclass(frozen=True)
class Steps:
    """The commits with a result, and the largest step between neighbours of them; None if no change is significant."""

    commits: int
    largest: LatencyStep | None


def find_steps(session: Session, plan: str, commits: Sequence[str]) -> Steps:
    """Return the steps in the runs of a plan.

    Args:
        commits: Hashes, oldest first.
    """
    place = {commit: number for number, commit in enumerate(commits)}
    points = points_of_runs(session, [run.pk for run in runs_of_plan(session, plan, commits)])
    candidates: list[_Candidate] = []
    timed = (point for point in points if point.timed and point.median_ms)
    for of_series in grouped(timed, lambda point: point.series.sort_key).values():
        comparable: dict[Hashable, dict[str, list[PointRow]]] = {}
        for point in of_series:
            comparable.setdefault(point.environment.identity, {}).setdefault(point.run.commit, []).append(point)
        for at in comparable.values():
            candidates += _candidates([at[commit] for commit in sorted(at, key=place.__getitem__)])
    candidates.sort(key=lambda candidate: candidate.size, reverse=True)
    steps = (candidate.step() for candidate in candidates)  # from the largest to the first significant one
    measured = {point.run.commit for point in points if point.status == "ok"}
    return Steps(len(measured), next((step for step in steps if step is not None), None))


@dataclass(frozen=True)
class _Candidate:
    """The results of one series at some commits before a step and at some since, oldest first."""

    size: float  # difference of their mean logarithms
    before: Sequence[Sequence[PointRow]]
    after: Sequence[Sequence[PointRow]]

    def step(self) -> LatencyStep | None:
        """Return the step if it is significant."""
        first = self.after[0][-1]
        before, after = ([point for of_commit in side for point in of_commit] for side in (self.before, self.after))
        pair = compare_series(first.series, before, after)
        if pair.verdict not in (Verdict.REGRESSED, Verdict.IMPROVED) or pair.note not in (None, UNREPEATED):
            return None  # the pair with a note changed in accuracy
        ratio = (first.median_ms or math.nan) / (before[-1].median_ms or math.nan)
        if (ratio > 1) != (pair.verdict is Verdict.REGRESSED):
            return None  # the two commits alone show the opposite
        return LatencyStep(pair, before[-1].run.commit, first.run.commit, ratio, first.environment.facts)


def _candidates(results: Sequence[Sequence[PointRow]]) -> Iterator[_Candidate]:
    """Yield the candidates large enough to count, of the results of each commit, oldest first.

    Two neighbours show a change that lasts for one commit. Several results on each side show a change that the noise of
    the two neighbours hides.
    """
    logs = [math.log(of_commit[-1].median_ms or 1.0) for of_commit in results]
    for at, width in product(range(1, len(results)), (1, NEIGHBOURS)):
        before, after = slice(max(at - width, 0), at), slice(at, at + width)
        level = fmean(logs[before])
        size = abs(fmean(logs[after]) - level)
        if size > math.log1p(least_effect(str(results[at][-1].timing), math.exp(level))):
            yield _Candidate(size, results[before], results[after])
