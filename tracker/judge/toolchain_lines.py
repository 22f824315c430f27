"""The lines of a series that is measured alternately with several toolchains: which results continue which.

After an upgrade, a series stays one line. Once a toolchain comes back after another one, each has a line. If one of
them is upgraded then, its line continues with the new toolchain. A toolchain that the plan names (`night --toolchain`)
has lines of its own. The gate judges a result by its line, and the charts draw the lines. An A/B of two commits is
evidence for the line whose toolchain measured it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from groupbench.tracker.store.comparisons import Compared

IN_USE = 10
"""Number of newest results among which a toolchain that is still measured has one."""

_GAPS = 3
"""Number of newest intervals between results of a line that make its usual interval."""

_UNKNOWN_GAP = 2.0
"""The usual interval of a line with one result: that of two alternating toolchains."""

_GIVEN_UP = 3.0
"""A line without a result for more than this many usual intervals is no longer measured."""


def lines_of(
    toolchains: Sequence[Hashable], names: Sequence[Hashable] = (), machines: Sequence[Hashable] = ()
) -> list[int]:
    """Return the line of each result, oldest first. Lines are numbered by their first results.

    Args:
        names: The toolchain that each result's plan names; empty: all the same.
        machines: The machine of each result; empty: all the same.
    """
    names = names or [None] * len(toolchains)
    machines = machines or [None] * len(toolchains)
    lines: dict[int, tuple[Hashable, int]] = {}
    for name in set(names):
        places = [place for place, each in enumerate(names) if each == name]
        of_line = _split([toolchains[place] for place in places], [machines[place] for place in places])
        lines.update({place: (name, line) for place, line in zip(places, of_line, strict=True)})
    numbers: dict[tuple[Hashable, int], int] = {}
    return [numbers.setdefault(lines[place], len(numbers)) for place in range(len(toolchains))]


def in_turns(lines: Sequence[int]) -> set[int]:
    """Return the lines that are measured alternately with the one of the newest result.

    Such a line is among the newest results, and has come back at least once. A toolchain that was tried and given up
    has not.
    """
    since = lines[lines.index(lines[-1]) :]
    stretches = [line for line, _ in groupby(since)]
    return {line for line in set(since[-IN_USE:]) if line != since[-1] and stretches.count(line) > 1}


@dataclass(frozen=True)
class LineSoftware:
    """The software that measured some results of a line.

    Attributes:
        name: The toolchain that the plan names, as in RunRow.toolchain.
        software: Versions by package, of each toolchain that measured them.
        alone: The series has no other line.
    """

    name: str | None
    software: Sequence[Mapping[str, str]]
    alone: bool = False

    def includes(self, compared: Compared) -> bool:
        """Return whether an A/B of two commits is evidence for these results: their software measured its head.

        Its base may have an interpreter of its own (see `software_changes`). An A/B without software, from before it
        was stored, is evidence for a series with one line only. An A/B of two toolchains is looked up by their
        identities.
        """
        if compared.toolchains is not None:
            return True
        if compared.software is None:
            return self.alone
        if None not in (self.name, compared.toolchain) and self.name != compared.toolchain:
            return False
        return any(agree(compared.software[1], versions) for versions in self.software)


def software_changes(compared: Compared) -> tuple[str, ...]:
    """Return how the software of base and head differs in an A/B of two commits, such as `triton 3.7.1 → 3.8.0`.

    `confirm --base-python` may measure such an A/B, whose effect is not that of the code alone.
    """
    if compared.toolchains is not None or compared.software is None:
        return ()
    base, head = compared.software
    return tuple(f"{name} {base[name]} → {head[name]}" for name in base if name in head and base[name] != head[name])


def of_one_toolchain(comparisons: Iterable[Compared]) -> list[Compared]:
    """Return the A/Bs of two toolchains, and those of two commits that ran both with the same software."""
    return [one for one in comparisons if not software_changes(one)]


def agree(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether no package has two versions. A package that only one of them knows does not count."""
    return all(one[package] == other[package] for package in one.keys() & other.keys())


def _split(toolchains: Sequence[Hashable], machines: Sequence[Hashable]) -> list[int]:
    """Return the line of each result; all 0 unless a toolchain comes back after another one on a machine."""
    of_machines: dict[Hashable, list[Hashable]] = {}
    for toolchain, machine in zip(toolchains, machines, strict=True):
        of_machines.setdefault(machine, []).append(toolchain)
    if not any(map(_alternate, of_machines.values())):
        return [0] * len(toolchains)
    last = {toolchain: place for place, toolchain in enumerate(toolchains)}
    line_of: dict[Hashable, int] = {}
    places: list[list[int]] = []  # of the results of each line
    ends: list[int] = []  # place of the last result of each line's newest toolchain
    for place, toolchain in enumerate(toolchains):
        if toolchain not in line_of:
            due = {line: _wait(places[line], place) for line, end in enumerate(ends) if end < place}
            due = {line: wait for line, wait in due.items() if wait <= _GIVEN_UP}
            line = max(due, key=lambda line: (due[line], len(places[line])), default=len(ends))
            if line == len(ends):
                places.append([])
                ends.append(place)
            ends[line] = last[toolchain]
            line_of[toolchain] = line
        places[line_of[toolchain]].append(place)
    return [line_of[toolchain] for toolchain in toolchains]


def _alternate(toolchains: Iterable[Hashable]) -> bool:
    stretches = [toolchain for toolchain, _ in groupby(toolchains)]
    return len(set(stretches)) < len(stretches)


def _wait(places: Sequence[int], now: int) -> float:
    """Return the time since a line's newest result, in its usual intervals: 1 if its next result is due."""
    gaps = [after - before for before, after in pairwise(places[-_GAPS - 1 :])]
    return (now - places[-1]) / (median(gaps) if gaps else _UNKNOWN_GAP)
