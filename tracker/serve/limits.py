"""The limits of the server, so that one request cannot hold up the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Load limits, chosen for people waiting for a page.

    Pages from a database with a million points take 5 to 200 ms, and judging 20,000 series takes about 10 s.
    """

    # The database.
    request_s: float = 5.0  # database time of a request
    background_s: float = 60.0  # database time of a verdict
    busy_ms: int = 5_000  # wait for the lock of another process
    threads: int = 8  # requests that work at once; others wait. Fewer than the connections of SQLAlchemy's pool (15)
    steps: int = 1_000_000  # of SQLite's virtual machine between two looks at the clock: about 20 ms

    # Requests.
    path: int = 2_000  # characters
    value: int = 1_000  # characters of a parameter
    token: int = 16  # fewest characters
    session_s: int = 12 * 3600  # from signing in
    sessions: int = 1_000  # at once

    # Pages.
    rows: int = 50  # of a list, unless asked for more
    most_rows: int = 500
    runs: int = 8  # in the overview
    points: int = 5_000  # of a history
    again_s: int = 2  # until a page asks again for an unfinished verdict

    # Caches: the most recently requested entries.
    answers: int = 12
    counted_runs: int = 2_000
    lists: int = 24
    lines: int = 8  # of commits


LIMITS = Limits()
