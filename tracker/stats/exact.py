"""Follow a value which depends on the code alone: each change begins or ends a level.

The levels are those of `walk`: the reference, and on top of it the changes for the worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from groupbench.tracker.stats.walk import Level, Mark, Walked

Worse = Callable[[float, float], bool]
"""Whether the second value is worse than the first."""


def walk_exact(
    y: Sequence[float],  # [n] oldest first, larger for the worse
    worse: Worse,
    codes: Sequence[object] | None,  # [n] equal for the same code and toolchain; None if it may change with them
    marks: Mapping[int, Sequence[Mark]],  # alerts and accepted levels, by place
    recent: int,  # number of newest results in which changes count as alternations
) -> Walked:
    """Follow a series to its newest result.

    These do not count: a change without the code, and the same change as before, as when a tuner picks a config on
    every run. A regression, its fix and the same regression again are such; an alert already covers the last one.
    """
    before = next((mark.before for mark in marks.get(0, ()) if mark.before is not None), None)
    levels = _Levels(Level(-1, known=before) if before is not None else Level(0, known=y[0]), worse)
    changes: list[tuple[int, float, float]] = []  # place, and the values before and after
    loose = -1  # place of the newest change which does not count
    for place, value in enumerate(y):
        of_place, top, was = marks.get(place, ()), levels.stack[-1], y[max(place - 1, 0)]
        moved, current = worse(was, value) or worse(value, was), _at(top)
        changes = [each for each in changes if each[0] > place - recent]
        same_code = codes is not None and codes[place] == codes[max(place - 1, 0)]
        no_change = same_code or any(_as_far(each, was, value, worse) for each in changes)
        changes += [(place, was, value)] * moved
        accepted = next((mark for mark in of_place if mark.kind == "reference"), None)
        if accepted is not None:
            levels.begin(Level(place, known=value, by="reference", was=current, tag=accepted.tag), 0)
        elif moved and no_change and not of_place:
            top.known, loose = max(current, value), place
        elif loose >= 0 and not moved:
            if place - loose >= recent:  # it has settled
                top.known, loose = value, -1
        elif worse(current, value):
            levels.begin(Level(place, known=value, by="nights", was=current), len(levels.stack))
        elif worse(value, current):
            levels.improve(place, value)
        loose = loose if levels.stack[-1] is top else -1
        top = levels.stack[-1]
        if len(levels.stack) > 1 and top.tag is None:
            top.tag = next((mark.tag for mark in of_place if mark.kind == "slower"), None)
        top.values.append(value)
        top.places.append(place)
    return Walked(tuple(levels.every), tuple(levels.stack), None, None, results=len(y) - 1)


def _as_far(change: tuple[int, float, float], was: float, value: float, worse: Worse) -> bool:
    """Return whether an earlier change was in the same direction and at least as far."""
    _, before, after = change
    if (after > before) != (value > was):
        return False
    return not worse(after, value) if value > was else not worse(value, after)


def _at(level: Level) -> float:
    assert level.known is not None
    return level.known


class _Levels:
    def __init__(self, first: Level, worse: Worse) -> None:
        self.stack, self.every, self.worse = [first], [first], worse

    def begin(self, level: Level, depth: int) -> None:
        """Put a level on the stack, in the place of those from `depth` on."""
        level.replaced = self.stack[0] if depth == 0 else None
        self.stack[depth:] = [level]
        self.every.append(level)

    def improve(self, place: int, value: float) -> None:
        """End the levels worse than a value, and begin a new one."""
        while len(self.stack) > 1 and not self.worse(_at(self.stack[-2]), value):
            self.stack.pop()
        top, depth = self.stack[-1], len(self.stack) - 1
        if not self.worse(value, _at(top)):
            return
        if depth:  # a part of the change was taken back
            self.begin(Level(top.start, known=value, by=top.by, was=top.was, moved=place, tag=top.tag), depth)
        else:
            self.begin(Level(place, known=value, by="faster", was=_at(top)), 0)
