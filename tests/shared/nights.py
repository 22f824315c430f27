"""Series of nights for the judging commands, and the first line that they print."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from click.testing import Result

from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import Compared
from groupbench.tracker.store.engine import open_store

Cli = Callable[..., Result]
"""Runs a command of `groupbench`."""
Stored = Callable[..., Any]
"""Stores records, and gives the place of their database."""


def commit(night: int) -> str:
    return f"{night:03x}" + "c" * 37


def quiet(make: Any, nights: int, **fields: Any) -> list[Any]:
    return [make(night, ms=wobble(night), **fields) for night in range(nights)]


def suspect(make: Any, ms: float = 1.05, nights: int = 6, **facts: Any) -> list[Any]:
    """Return a series that is quiet except on its newest night."""
    return [*quiet(make, nights, **facts), make(nights, ms=ms, **facts)]


def first_line(result: Result) -> str:
    return result.stdout.split("\n")[0]


def rows(cli: Any, *args: str) -> list[dict[str, Any]]:
    """Return the rows of the gate as JSON has them."""
    listed: list[dict[str, Any]] = json.loads(cli("gate", "--format=json", *args).stdout)["series"]
    return listed


def members(cli: Any, *args: str) -> list[dict[str, Any]]:
    """Return the members of the incidents as JSON has them."""
    listed: list[dict[str, Any]] = json.loads(cli("incidents", "--each", "--format=json", *args).stdout)
    return listed


def measured(base: str, head: str, verdict: str, effect: float | None = None, half: float = 0.0, **facts: Any) -> Any:
    """Return the A/B of two commits as the database keeps it. Its interval ends `half` below and above the effect."""
    ends = {} if effect is None else {"effect": effect, "low": effect - half, "high": effect + half}
    return Compared(base, head, verdict, facts.pop("at", datetime(2026, 1, 9, tzinfo=UTC)), **ends, **facts)


def keep(database: Any, *compared: Compared, series: int = 1) -> None:
    """Store A/Bs of a series."""
    with open_store(database, create=False) as store, store.write() as session:
        for each in compared:
            comparisons.store(session, series, each)


def by_backend(cli: Any, *args: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code of the gate, and its rows by backend."""
    done = cli("gate", "--format=json", *args)
    return done.exit_code, {row["backend"]: row for row in json.loads(done.stdout)["series"]}


def wobble(night: int) -> float:
    """Return the latency of a quiet night."""
    return 1 + 0.001 * (night % 3 - 1)
