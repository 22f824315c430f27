"""Series of nights for the judging commands, and the first line that they print."""

from __future__ import annotations

import re
from typing import Any

from click.testing import Result

UNCHANGED = re.compile(r"GATE ok: no change above [0-9.]+ %")
"""The outcome of a run whose latencies did not change."""


def commit(night: int) -> str:
    return f"{night:03x}" + "c" * 37


def quiet(make: Any, nights: int, **fields: Any) -> list[Any]:
    return [make(night, ms=1 + 0.001 * (night % 3 - 1), **fields) for night in range(nights)]


def suspect(make: Any, ms: float = 1.05, nights: int = 6, **facts: Any) -> list[Any]:
    """Return a series that is quiet except on its newest night."""
    return [*quiet(make, nights, **facts), make(nights, ms=ms, **facts)]


def first_line(result: Result) -> str:
    return result.stdout.split("\n")[0]
