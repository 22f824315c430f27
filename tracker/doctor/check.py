"""The result of one check of the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["fact", "better", "broken"]
"""fact: information. better: could be improved. broken: something cannot be measured or stored."""


@dataclass(frozen=True)
class Check:
    """One fact about the machine, with the reason why it matters and a command that improves it."""

    area: str
    name: str
    value: str
    level: Level = "fact"
    why: str | None = None
    command: str | None = None


def unless(bad: bool, area: str, name: str, value: str, why: str, command: str) -> Check:
    """Return a fact, or a possible improvement if it is `bad`."""
    return Check(area, name, value, "better", why, command) if bad else Check(area, name, value)
