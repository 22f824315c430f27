"""The checks that an A/B comparison could not make, in the words that every command shows.

A side (operators/measure/side.py) names each with the reason. Results, records and rows of the database keep these
texts by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.text.wording import some

Unchecked = Mapping[str, Sequence[str]]
"""The checks that could not be made, each with its reason, by side or commit."""


def unchecked_lines(unchecked: Unchecked) -> list[str]:
    """Return a line for each check: `not checked in base and head: times, because other work kept the CPU busy`."""
    pairs = [(name, reason) for name, reasons in unchecked.items() for reason in reasons]
    sides = grouped(pairs, itemgetter(1)).items()
    return [f"not checked in {_joined([name for name, _ in each])}: {reason}" for reason, each in sides]


def merged(parts: Sequence[Unchecked]) -> dict[str, list[str]]:
    """Return the checks of several comparisons, each once."""
    whole: dict[str, list[str]] = {}
    for part in parts:
        for name, reasons in part.items():
            earlier = whole.setdefault(name, [])
            earlier += [reason for reason in reasons if reason not in earlier]
    return whole


def _joined(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else some(names)
