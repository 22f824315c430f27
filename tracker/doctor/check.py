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
