"""Group changes with one likely cause: pure functions, without I/O.

Changes have one cause if they agree in direction and surroundings (the code, or one toolchain or machine), if one
commit can explain them all, and if the files that changed under them, or else their sizes, do not part them:

- A changed file explains the changes in series whose processes loaded it. The file that does so best, as few
  unchanged series loaded it, explains the first group, and so on.
- Without such files, kernels are parted if their changes differ by more than their scatter and by a quarter.
- The sizes of an exact metric, such as a count of registers, do not part one kernel, since they depend on the shape.

A change one run too early or too late, because of noise, joins the changes of the run next to it, and one with a wide
range those of the same kernel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.stats.thresholds import MAD_SD

NOISE = 0.003
"""Least standard error of a change, as a logarithm."""
SURE = 4.0
"""Number of standard errors by which the changes of two causes differ at least."""
APART = 0.25
"""Share of the larger change by which they differ at least."""
LEAST = 0.01
"""Logarithm by which they differ at least."""
SPECIFIC = 0.5
"""Share of the series that loaded a file and changed, from which the file alone parts a cause from another."""


@dataclass(frozen=True)
class Change:
    """The facts about a change that show the cause.

    Attributes:
        key: Names the change.
        kernel: Operator and backend.
        metric: The metric that changed, and `exact` if it has no noise.
        series: Key of the series.
        effect: Logarithm of the change, positive for the worse; None if unknown.
        first: Place among the runs of the last one before the change; None without one.
        last: Place of the first run after it.
        surroundings: The toolchain or machine that changed; "" for the code.
        worse: The change is for the worse.
        wrong: A result became wrong.
        files: Changed files that the process loaded.
        commit: Named by a search.
        noise: Standard error of the effect.
    """

    key: Hashable
    kernel: tuple[str, str]
    effect: float | None
    first: float | None
    last: float
    surroundings: str = ""
    worse: bool = True
    wrong: bool = False
    files: frozenset[str] = field(default=frozenset())
    commit: str | None = None
    noise: float = NOISE
    metric: str = "latency"
    exact: bool = False
    series: int | None = None


def group(changes: Iterable[Change], quiet: Sequence[frozenset[str]] = ()) -> list[list[Change]]:
    """Return the changes by cause, the most frequent causes first.

    Args:
        changes: Changes for the better or the worse.
        quiet: Files that changed under each series without a change.
    """
    groups = []
    for alike in grouped(changes, lambda each: (each.wrong, each.worse, each.surroundings)).values():
        times = enumerate(_of_one_time(alike))
        groups += _joined_times([(time, part) for time, together in times for part in _by_commit(together, quiet)])
    return sorted(groups, key=len, reverse=True)


def fits(ends: tuple[float, float], measured: Sequence[float]) -> bool:
    """Return whether a change inherits an answer: the interval excludes 0 and meets that of measured ones.

    Args:
        ends: Interval of the change.
        measured: Changes with the same cause that an A/B found.
    """
    low, high = ends
    return len(measured) > 1 and low * high > 0 and low <= max(measured) and min(measured) <= high


def _joined(
    parts: Iterable[Sequence[Change]], joins: Callable[[list[Change], Sequence[Change]], bool], newest: bool = False
) -> list[list[Change]]:
    """Return the parts as groups: each part joins the first group, or the newest one, that takes it."""
    groups: list[list[Change]] = []
    for part in parts:
        near = next((each for each in (reversed(groups) if newest else groups) if joins(each, part)), None)
        groups.append(list(part)) if near is None else near.extend(part)
    return groups


def _of_one_time(changes: Iterable[Change]) -> list[list[Change]]:
    """Return the changes by time: each group has a time in common, and the groups are as few as possible."""

    def overlaps(group: list[Change], part: Sequence[Change]) -> bool:
        return _start(part[0]) < group[0].last

    def narrow_first(change: Change) -> tuple[float, float]:
        return change.last, -_start(change)

    return _joined(([each] for each in sorted(changes, key=narrow_first)), overlaps, newest=True)


def _start(change: Change) -> float:
    return -math.inf if change.first is None else change.first


def _joined_times(parts: Sequence[tuple[int, list[Change]]]) -> list[list[Change]]:
    """Return the parts of several times, after joining each to a larger one of another time, if one cause can be both.

    A series changes once by one cause: any other change stays apart.
    """
    joined: list[tuple[int, list[Change]]] = []
    for time, rest in sorted(parts, key=lambda each: len(each[1]), reverse=True):
        for other, group in joined:
            series = {change.series for change in group}
            late = [change for change in rest if change.series not in series]
            if late and other != time and _is_beside(group, late):
                group += late
                rest = [change for change in rest if change.series in series]
        joined += [(time, rest)] if rest else []
    return [group for _, group in joined]


def _is_beside(group: Sequence[Change], late: Sequence[Change]) -> bool:
    """Return whether one cause may have changed both: at one time, or noise shows some one run off."""
    ends = {(_start(change), change.last) for change in group}
    for change in late:
        overlaps = any(_start(change) < last and first < change.last for first, last in ends)
        touches = any(_start(change) == last or first == change.last for first, last in ends)
        if change.commit is not None or not (overlaps or (touches and not change.exact)):
            return False
    files = files_of(group), files_of(late)
    kernels = [{change.kernel for change in side} for side in (group, late)]
    return (bool(files[0] & files[1]) if all(files) else bool(kernels[0] & kernels[1])) and _alike(group, late)


def _by_commit(changes: Sequence[Change], quiet: Sequence[frozenset[str]]) -> list[list[Change]]:
    """Return the changes by the commits that searches named, if several; other changes join their kernel's."""
    named = {change.commit for change in changes if change.commit}
    if len(named) < 2:
        return _by_file(changes, quiet)
    groups = list(grouped((change for change in changes if change.commit), lambda each: each.commit).values())
    rest = []
    for change in changes:
        of_kernel = [each for each in groups if any(one.kernel == change.kernel for one in each)]
        if change.commit is None and len(of_kernel) == 1:
            of_kernel[0].append(change)
        elif change.commit is None:
            rest.append(change)
    return groups + (_by_file(rest, quiet) if rest else [])


def _by_file(changes: Sequence[Change], quiet: Sequence[frozenset[str]]) -> list[list[Change]]:
    """Return the changes by the file that explains the most, and the fewest series without a change.

    Groups that no specific file parts are one, if they share a file and their sizes agree.
    """
    still = Counter(file for files in quiet for file in files)
    parts: list[list[Change]] = []
    specific: set[int] = set()
    rest = [change for change in changes if change.files]
    while rest:
        numbers = Counter(file for change in rest for file in change.files)
        best = max(sorted(numbers), key=lambda file: numbers[file] ** 1.5 / (numbers[file] + still[file]))
        of_file = _by_size((change for change in rest if best in change.files), lambda each: each.files)
        rest = [change for change in rest if best not in change.files]
        parts += of_file
        if numbers[best] / (numbers[best] + still[best]) >= SPECIFIC:
            specific |= {id(part[0]) for part in of_file}

    def are_one(group: list[Change], part: Sequence[Change]) -> bool:
        parted = id(group[0]) in specific and id(part[0]) in specific
        return not parted and bool(files_of(group) & files_of(part)) and _alike(group, part)

    groups = _joined(parts, are_one)
    unknown = _by_size((change for change in changes if not change.files), lambda each: each.kernel)
    return _joined([*groups, *unknown], lambda group, part: not part[0].files and _alike(group, part))


def files_of(changes: Sequence[Change]) -> frozenset[str]:
    """Return the changed files of all of some changes."""
    return frozenset[str]().union(*(change.files for change in changes))


def _by_size(changes: Iterable[Change], unit: Callable[[Change], Hashable]) -> list[list[Change]]:
    """Return the changes parted where units differ in size. A unit's changes stay together."""
    return _joined(sorted(grouped(changes, unit).values(), key=_size), _alike, newest=True)


def _size(changes: Sequence[Change]) -> float:
    effects = [change.effect for change in changes if change.effect is not None]
    return median(effects) if effects else 0.0


def _alike(one: Sequence[Change], other: Sequence[Change]) -> bool:
    """Return whether two groups' sizes agree within the scatter, in a common metric, or the kernel is one."""
    metrics = {change.metric for change in one} & {change.metric for change in other}
    one_kernel = bool({change.kernel for change in one} & {change.kernel for change in other})
    if one_kernel:
        metrics -= {change.metric for change in one if change.exact}
    if not metrics:
        return one_kernel
    return all(
        _agree(*([each for each in side if each.metric == metric] for side in (one, other))) for metric in metrics
    )


def _agree(one: Sequence[Change], other: Sequence[Change]) -> bool:
    """Return whether two groups' sizes agree in one metric, or are not known."""
    sides = [[change.effect for change in side if change.effect is not None] for side in (one, other)]
    if not all(sides):
        return True
    levels = [median(side) for side in sides]
    errors = [_error(side, changes) for side, changes in zip(sides, (one, other), strict=True)]
    limit = max(SURE * math.hypot(*errors), APART * max(map(abs, levels)), LEAST)
    return abs(levels[0] - levels[1]) <= limit


def _error(effects: Sequence[float], changes: Sequence[Change]) -> float:
    """Return the median effect's standard error: by scatter, or by the noise."""
    level = median(effects)
    scatter = MAD_SD * median(abs(effect - level) for effect in effects) if len(effects) > 2 else 0.0
    return max(scatter, median(change.noise for change in changes)) / math.sqrt(len(effects))
