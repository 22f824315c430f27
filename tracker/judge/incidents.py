"""Group changes with one likely cause: pure functions, without I/O.

Changes have one cause if they agree in direction and surroundings (the code, or one toolchain or machine), if one
commit can explain them all, and if the files that changed under them, or else their sizes, do not part them:

- A changed file explains the changes in series whose processes loaded it. The file that does so best, as few
  unchanged series loaded it, explains the first group, and so on.
- Without such files, kernels are parted if their changes differ by more than their scatter and by a quarter.
- The sizes of an exact metric, such as a count of registers, do not part one kernel, since they depend on the shape.

A change one run too early or too late, because of noise, joins the changes of the run next to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

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

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


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
        incident: Key for the incident that has the change.
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
    incident: int | None = None
    metric: str = "latency"
    exact: bool = False
    series: int | None = None


def group(changes: Iterable[Change], quiet: Sequence[frozenset[str]] = ()) -> list[list[Change]]:
    """Return the changes by cause, the most frequent causes first.

    Args:
        changes: Changes for the better or the worse.
        quiet: Files that changed under each series without a change.
    """
    groups = [
        of_cause
        for alike in _by(changes, lambda each: (each.wrong, each.worse, each.surroundings))
        for of_cause in _with_neighbours(
            [of_cause for together in _of_one_time(alike) for of_cause in _by_commit(together, quiet)]
        )
    ]
    return sorted(groups, key=len, reverse=True)


def fits(effect: float | None, measured: Sequence[float]) -> bool:
    """Return whether a change inherits an answer: it is between two measured ones with the same cause."""
    return effect is not None and len(measured) > 1 and min(measured) <= effect <= max(measured)


def _by(items: Iterable[T], key: Callable[[T], K]) -> list[list[T]]:
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def _of_one_time(changes: Sequence[Change]) -> list[list[Change]]:
    """Return the changes by time: each group has a time in common, and the groups are as few as possible."""
    groups: list[list[Change]] = []
    for change in sorted(changes, key=lambda each: each.last):
        if groups and (change.first is None or change.first < groups[-1][0].last):
            groups[-1].append(change)
        else:
            groups.append([change])
    return groups


def _with_neighbours(groups: Iterable[list[Change]]) -> list[list[Change]]:
    """Return the groups, after joining each to a larger one of the run next to it, if noise can be the reason."""
    kept: list[list[Change]] = []
    for changes in sorted(groups, key=len, reverse=True):
        near = next((each for each in kept if _is_beside(each, changes)), None)
        kept.append(changes) if near is None else near.extend(changes)
    return kept


def _is_beside(group: Sequence[Change], late: Sequence[Change]) -> bool:
    """Return whether one cause may have changed both, of which noise shows some one run too early or too late."""
    ends = {(change.first, change.last) for change in group}
    beside = all(
        not change.exact and change.commit is None and (change.first, change.last) not in ends
        and any(change.first == last or change.last == first for first, last in ends)
        for change in late
    )  # fmt: skip
    if not beside or {change.series for change in group} & {change.series for change in late}:
        return False
    files = [frozenset[str]().union(*(change.files for change in side)) for side in (group, late)]
    kernels = [{change.kernel for change in side} for side in (group, late)]
    return (bool(files[0] & files[1]) if all(files) else bool(kernels[0] & kernels[1])) and _alike(group, late)


def _by_commit(changes: Sequence[Change], quiet: Sequence[frozenset[str]]) -> list[list[Change]]:
    """Return the changes by the commits that searches named, if several; other changes join their kernel's."""
    named = {change.commit for change in changes if change.commit}
    if len(named) < 2:
        return _by_file(changes, quiet)
    groups = _by((change for change in changes if change.commit), lambda each: each.commit)
    rest = []
    for change in changes:
        of_kernel = [each for each in groups if any(one.kernel == change.kernel for one in each)]
        if change.commit is None and len(of_kernel) == 1:
            of_kernel[0].append(change)
        elif change.commit is None:
            rest.append(change)
    return groups + (_by_file(rest, quiet) if rest else [])


def _by_file(changes: Sequence[Change], quiet: Sequence[frozenset[str]]) -> list[list[Change]]:
    """Return the changes by the file that explains the most, and the fewest series without a change."""
    still = Counter(file for files in quiet for file in files)
    groups: list[list[Change]] = []
    specific: list[bool] = []
    rest = [change for change in changes if change.files]
    unknown = [change for change in changes if not change.files]
    while rest:
        numbers = Counter(file for change in rest for file in change.files)
        best = max(sorted(numbers), key=lambda file: numbers[file] ** 1.5 / (numbers[file] + still[file]))
        explained = [change for change in rest if best in change.files]
        rest = [change for change in rest if best not in change.files]
        share = numbers[best] / (numbers[best] + still[best])
        parts = _by_size(explained, lambda each: each.files)
        groups += parts
        specific += [share >= SPECIFIC] * len(parts)
    groups = _merged(groups, specific)
    if not groups:
        return _by_size(unknown, lambda each: each.kernel)
    for part in _by_size(unknown, lambda each: each.kernel):
        near = [each for each in groups if _alike(each, part)]
        near[0].extend(part) if near else groups.append(part)
    return groups


def _merged(groups: list[list[Change]], specific: Sequence[bool]) -> list[list[Change]]:
    """Return the groups, those joined that no specific file parts: they share a file, and their sizes agree."""
    kept: list[tuple[list[Change], bool]] = []
    for changes, alone in zip(groups, specific, strict=True):
        files = frozenset[str]().union(*(change.files for change in changes))
        for other, other_alone in kept:
            shared = files & frozenset[str]().union(*(change.files for change in other))
            if shared and not (alone and other_alone) and _alike(changes, other):
                other.extend(changes)
                break
        else:
            kept.append((changes, alone))
    return [changes for changes, _ in kept]


def _by_size(changes: Sequence[Change], unit: Callable[[Change], Hashable]) -> list[list[Change]]:
    """Return the changes parted where units differ in size. A unit's changes stay together."""
    groups: list[list[Change]] = []
    for one in sorted(_by(changes, unit), key=_size):
        near = next((each for each in reversed(groups) if _alike(each, one)), None)
        if near is None:
            groups.append(list(one))
        else:
            near.extend(one)
    return groups


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
