"""What an A/B comparison could not check, in the words that every command shows.

operators/measure/side.py gives the reasons of a side. Results, records and rows of the database keep them as they are:
a mapping of each side that has any to its reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from groupbench.tracker.text.wording import some

Unchecked = Mapping[str, Sequence[str]]
"""Reasons by side, or by commit."""


def unchecked_lines(unchecked: Unchecked) -> list[str]:
    """Return a line for each reason: `not checked in base and head: times, because other work kept the CPU busy`."""
    names: dict[str, list[str]] = {}
    for name, reasons in unchecked.items():
        for reason in reasons:
            names.setdefault(reason, []).append(name)
    return [f"not checked in {_joined(each)}: {reason}" for reason, each in names.items()]


def merged(parts: Sequence[Unchecked]) -> dict[str, list[str]]:
    """Return the reasons of several comparisons, each once."""
    whole: dict[str, list[str]] = {}
    for part in parts:
        for name, reasons in part.items():
            known = whole.setdefault(name, [])
            known += [reason for reason in reasons if reason not in known]
    return whole


def _joined(names: Sequence[str]) -> str:
    return " and ".join(names) if len(names) < 3 else some(names)
