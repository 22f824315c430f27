"""The lines in a series' charts, and their names: one for each alternating toolchain."""

from __future__ import annotations

from collections.abc import Sequence

from groupbench.tracker.facts.environment import toolchain_distinctions
from groupbench.tracker.facts.identity import toolchain_of
from groupbench.tracker.judge import toolchain_lines
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.text.wording import some


def lines_of(points: Sequence[PointRow]) -> tuple[int, ...]:  # oldest first
    """Return each result's line, as the gate does."""
    if len({(point.environment.identity, point.run.plan) for point in points}) < 2:
        return (0,) * len(points)
    return tuple(toolchain_lines.lines_of(
        [point.environment.toolchain for point in points],
        [toolchain_of(point.run.plan) for point in points],
        [point.environment.machine for point in points],
    ))  # fmt: skip


def names_of(points: Sequence[PointRow], lines: Sequence[int]) -> tuple[str, ...]:
    """Return each line's name: the plan's toolchain, and the differing packages in the newest one.

    For example `nightly, triton 3.8.0`. Empty for one line.
    """
    newest = dict(zip(lines, points, strict=True))
    if len(newest) < 2:
        return ()
    of_lines = [newest[line] for line in sorted(newest)]
    packages = toolchain_distinctions([point.environment.facts for point in of_lines])
    names = [toolchain_of(point.run.plan) for point in of_lines]
    texts = [", ".join(filter(None, (name, some(own)))) for name, own in zip(names, packages, strict=True)]
    return tuple(text or "default" for text in texts)


def toolchains_of(points: Sequence[PointRow]) -> tuple[str, ...]:
    """Return the toolchain packages with differences between results."""
    facts = {point.environment.toolchain: point.environment.facts for point in points}
    texts = dict(zip(facts, map(some, toolchain_distinctions(list(facts.values()))), strict=True))
    return tuple(texts[point.environment.toolchain] for point in points)
