"""The result of one check of the machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One fact about the machine.

    Attributes:
        area: The GPU or the host.
        name: The fact's name.
        value: The fact.
        level: `fact`, or `better` if it could be improved.
        why: Why it matters.
        command: A command that improves it.
    """

    area: str
    name: str
    value: str
    level: str = "fact"
    why: str | None = None
    command: str | None = None


def unless(bad: bool, area: str, name: str, value: str, why: str, command: str) -> Check:
    """Return a fact, or a possible improvement if it is `bad`."""
    return Check(area, name, value, "better", why, command) if bad else Check(area, name, value)
