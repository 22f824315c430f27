"""The levels of a series for charts: those by which the gate judges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from groupbench.tracker.judge.incident_rows import MemberRow
from groupbench.tracker.judge.marks import comparison_marks
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.stats.screen import Followed
from groupbench.tracker.stats.thresholds import FLOOR, least_effect, prior_scatter
from groupbench.tracker.stats.walk import Mark, Walked
from groupbench.tracker.store.comparisons import Compared


@dataclass(frozen=True)
class PastChange:
    """A change between two levels, as logarithms."""

    effect: float
    low: float
    high: float


@dataclass(frozen=True)
class StableLevel:
    """Consecutive results in one environment without a change between them."""

    first: int  # key of its first run
    last: int
    ms: float  # median


@dataclass(frozen=True)
class Levels:
    """The changes and levels of a series; a change by the first run on the new level."""

    changes: tuple[tuple[int, PastChange], ...] = ()
    levels: tuple[StableLevel, ...] = ()

    def __add__(self, other: Levels) -> Levels:
        return Levels((*self.changes, *other.changes), (*self.levels, *other.levels))


def levels_of(
    past: Past,
    timing: str,
    alerts: Sequence[MemberRow],
    stored: Sequence[Compared],  # A/Bs by the past's toolchains
    commits: Mapping[int, str],  # clean commit of each run, by key
) -> Levels:
    """Return the changes and levels of a series' latency, on each machine by itself."""
    levels = Levels()
    for machine in dict.fromkeys(past.environment.tolist()):
        here = past.where(past.environment == machine)
        followed = _followed(here, timing, alerts, stored, commits)
        levels += _levels(here, followed, followed.walked())
    return levels


def _followed(
    past: Past, timing: str, alerts: Sequence[MemberRow], stored: Sequence[Compared], commits: Mapping[int, str]
) -> Followed:
    ms = math.exp(float(np.median(past.log)))
    counts = math.log1p(least_effect(timing, ms))
    runs = past.run.tolist()
    marks: dict[int, list[Mark]] = {}
    for alert in alerts:
        if alert.metric == "latency" and alert.run.pk in runs:
            accepted = alert.state in ("invalid", "expected")
            mark = Mark("reference" if accepted else "slower", None, alert.distance, tag=alert.pk)
            marks.setdefault(runs.index(alert.run.pk), []).append(mark)
    for place, mark in comparison_marks([commits.get(run) for run in runs], stored, counts):
        marks.setdefault(place, []).append(mark)
    return Followed(past.log, counts, prior_scatter(timing, ms), FLOOR[timing], past.error, marks)


def _levels(past: Past, followed: Followed, walked: Walked) -> Levels:
    """Return the stretches of consecutive results on one level, and the changes between them."""
    level_at = {place: at for at, level in enumerate(walked.levels) for place in level.places}
    stretches: list[list[int]] = []
    for place in range(len(past)):
        if stretches and level_at.get(place) == level_at.get(place - 1):
            stretches[-1].append(place)
        else:
            stretches.append([place])
    levels = tuple(
        StableLevel(int(past.run[each[0]]), int(past.run[each[-1]]), math.exp(float(np.median(past.log[each]))))
        for each in stretches
    )
    changes = []
    for old, new in pairwise(stretches):
        effect = float(np.median(past.log[new]) - np.median(past.log[old]))
        half = (walked.top.reach(0.025) if walked.top else 0.0) * math.sqrt(1 / len(old) + 1 / len(new))
        if abs(effect) >= followed.least:
            changes.append((int(past.run[new[0]]), PastChange(effect, effect - half, effect + half)))
    return Levels(tuple(changes), levels)
