"""Moves of a machine that explain those of its cells: canaries moved, or all cells moved together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Literal

from groupbench.tracker.judge.evidence import OLD
from groupbench.tracker.judge.parts import Case
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.tonight import Latencies, Together, Tonight
from groupbench.tracker.judge.verdicts import CANARY
from groupbench.tracker.stats.predict import MEDIAN_VARIANCE
from groupbench.tracker.stats.thresholds import MAD_SD, SURE
from groupbench.tracker.stats.walk import OUT

EXCUSES = 2.0
"""Multiple of a canary's own move that it explains in other cells."""
TOGETHER = 6
"""Number of cells of a machine from which their median move is the machine's."""


class Machines:
    """The machines of a night."""

    def __init__(self, latencies: Latencies) -> None:
        self._moved: dict[tuple[str, bool], list[tuple[Span, float]]] = defaultdict(list)
        moves: dict[str, list[float]] = defaultdict(list)
        for group in latencies.groups:
            self._add_calm(group, moves)
        for one in latencies.eventful.values():
            machine = one.point.environment.machine
            if one.point.series.operator == CANARY:
                self._add_canary(one, machine)
                continue
            if one.walked.results and not _has_new_toolchain(one, one.last):
                moves[machine].append(_move(one))
        self._common = {machine: _common(each) for machine, each in moves.items()}

    def _add_calm(self, group: Together, moves: dict[str, list[float]]) -> None:
        """Add a group's cells that certainly did not move."""
        calm = [at for at in group.calm if group.points[at].series.operator != CANARY]
        if not calm or group.level is None:
            return
        machine = group.points[calm[0]].environment.machine
        if group.here.toolchain[-2] == group.here.toolchain[-1]:
            moves[machine] += group.level.distance[calm].tolist()

    def _add_canary(self, one: Tonight, machine: str) -> None:
        for level in one.steps:
            if not _has_new_toolchain(one, level.start) and level.was is not None:
                self._moved[machine, True].append((one.span(level.start), level.centre - level.was))
        if one.walked.nights and not _has_new_toolchain(one, one.begins):
            self._moved[machine, one.walked.nights > 0].append((one.span(one.begins), abs(one.walked.distance)))
        reference = one.walked.stack[0]
        if reference.was is not None and reference.by == "nights" and not _has_new_toolchain(one, reference.start):
            self._moved[machine, False].append((one.span(reference.start), abs(reference.was - reference.centre)))

    def canary(self, one: Tonight, span: Span, distance: float) -> Literal["canary"] | None:
        """Return `canary` if a canary moved in the same direction at the same time, and far enough."""
        if one.point.series.operator == CANARY:
            return None
        moves = self._moved.get((one.point.environment.machine, distance > 0), ())
        moved = max((size for moved_span, size in moves if moved_span.overlaps(span)), default=-math.inf)
        return "canary" if abs(distance) <= EXCUSES * moved + one.followed.least else None

    def ask_once(self, cases: dict[int, list[Case]]) -> None:
        """Ask for one A/B of each machine whose cells moved together: that of the calmest cell.

        If it finds the code slower tonight, no cell's first nights are excused. A larger move than the machine's tells
        nothing.
        """
        together: dict[str, list[tuple[int, int]]] = defaultdict(list)
        slower_on = set()
        for point, of_point in cases.items():
            for at, case in enumerate(of_point):
                machine = None if case.row.point is None else case.row.point.environment.machine
                far = abs(case.evidence.distance) > self._excused(machine, case.evidence.counts)
                if case.evidence.ab == "worse" and case.evidence.since <= 1 and not far:
                    slower_on.add(machine)
                if case.evidence.excused == "together" and machine is not None:
                    together[machine].append((point, at))
        for machine, places in together.items():
            members = [cases[point][at] for point, at in places]
            slower = machine in slower_on
            same = any(case.evidence.ab == "same" for case in members)
            calm = min(members, key=lambda case: abs(case.evidence.distance))
            for (point, at), case in zip(places, members, strict=True):
                if slower and case.evidence.kind == "tonight":
                    cases[point][at] = case.knowing(excused=None)
                elif same and case.evidence.ab is None:
                    cases[point][at] = case.knowing(ab="same").showing(ab_base=None)
                elif case is not calm:
                    cases[point][at] = case.showing(ab_base=None)

    def moved(self, one: Tonight, distance: float | None = None) -> bool:
        """Return whether a distance, by default tonight's, is at most the common one of a machine's cells."""
        distance = _move(one) if distance is None else distance
        machine, least, top = one.point.environment.machine, one.followed.least, one.walked.top
        common = self._common.get(machine, 0.0)
        if top is None or common * distance <= 0 or abs(common) < least / 2:
            return False
        return abs(distance) <= min(abs(common) + max(least, top.reach(OUT)), self._excused(machine, least))

    def explains(self, one: Tonight) -> bool:
        """Return whether tonight's distance is at most twice the move of all cells, as for a canary."""
        machine, distance = one.point.environment.machine, _move(one)
        same_way = self._common.get(machine, 0.0) * distance > 0
        return same_way and abs(distance) <= self._excused(machine, one.followed.least)

    def _excused(self, machine: str | None, least: float) -> float:
        """Return the largest distance explained by a machine's move."""
        return EXCUSES * abs(self._common.get(machine or "", 0.0)) + least


def _common(moves: Sequence[float]) -> float:
    """Return how far cells moved together: 0 unless they are enough, and their median is certainly not 0."""
    common = median(moves)
    error = MAD_SD * median(abs(move - common) for move in moves) * math.sqrt(MEDIAN_VARIANCE / len(moves))
    return common if len(moves) >= TOGETHER and abs(common) >= SURE * error else 0.0


def _move(one: Tonight) -> float:
    """Return tonight's distance, from the level before if a new one has just begun without an incident."""
    top = one.walked.stack[-1]
    if top.by != "nights" or top.was is None or top.tag is not None or one.last - top.start > OLD:
        return one.walked.distance
    return one.value - top.was


def _has_new_toolchain(one: Tonight, place: int) -> bool:
    """Return whether the toolchain changed at a place; a canary runs torch's kernels, so that may explain its move."""
    used = one.own.toolchain
    return place > 0 and bool(used[place - 1] != used[place])
