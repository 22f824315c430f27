"""The lines of a series' charts: one for each toolchain, if the series is measured with several in turns.

After an upgrade, the series stays one line. If one of several toolchains is upgraded, its line continues with
the new version.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import groupby

from groupbench.tracker.environment import toolchain_distinctions
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.text.wording import some


def lines_of(points: Sequence[PointRow]) -> tuple[int, ...]:  # oldest first
    """Return the line of each result. All are 0 unless a toolchain comes back after another one on a machine."""
    if len({point.environment.identity for point in points}) > 1:
        used: dict[str, list[str]] = {}
        for point in points:
            used.setdefault(point.environment.machine, []).append(point.environment.toolchain)
        if any(map(_alternate, used.values())):
            return _split([point.environment.toolchain for point in points])
    return (0,) * len(points)


def names_of(points: Sequence[PointRow], lines: Sequence[int]) -> tuple[str, ...]:
    """Return the differing packages of each line's newest toolchain, `triton 3.8.0`. Empty for one line."""
    newest = dict(zip(lines, (point.environment.facts for point in points), strict=True))
    if len(newest) < 2:
        return ()
    return tuple(some(texts) for texts in toolchain_distinctions([newest[line] for line in sorted(newest)]))


def toolchains_of(points: Sequence[PointRow]) -> tuple[str, ...]:
    """Return the packages of each result's toolchain that differ between results."""
    facts = {point.environment.toolchain: point.environment.facts for point in points}
    texts = dict(zip(facts, map(some, toolchain_distinctions(list(facts.values()))), strict=True))
    return tuple(texts[point.environment.toolchain] for point in points)


def _alternate(toolchains: Iterable[Hashable]) -> bool:
    stretches = [toolchain for toolchain, _ in groupby(toolchains)]
    return len(set(stretches)) < len(stretches)


def _split(toolchains: Sequence[str]) -> tuple[int, ...]:
    """Return a line for each result, so that the toolchains of one line follow each other in time."""
    last = {toolchain: place for place, toolchain in enumerate(toolchains)}
    line_of: dict[str, int] = {}
    ends: list[int] = []  # place of the last result of each line
    for place, toolchain in enumerate(toolchains):
        if toolchain in line_of:
            continue
        free = [line for line, end in enumerate(ends) if end < place]
        line = min(free, key=ends.__getitem__, default=len(ends))  # the one that has waited longest
        ends[line : line + 1] = [last[toolchain]]
        line_of[toolchain] = line
    return tuple(line_of[toolchain] for toolchain in toolchains)
