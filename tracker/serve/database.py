"""Open the dashboard's database: read-only for pages, and writable for changes of incidents.

Every session has a time limit, which the database itself enforces within a statement. Other revisions are refused, not
migrated: a page server must not change the tables.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, event, func, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.serve.limits import LIMITS
from groupbench.tracker.store.engine import Store, open_store, revision_of
from groupbench.tracker.store.schema import HEAD, REVISIONS, ABComparison, IncidentEvent, Point, Run, Series

logger = logging.getLogger(__name__)


_END = "groupbench_end"

Version = tuple[int, ...]
"""A value that changes whenever rows are added; cached results are valid for one version."""


class SlowError(StoreError):
    """A request or a verdict reached the database-time limit."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the database takes longer than {seconds:g} s for this")
        self.seconds = seconds


@dataclass(frozen=True)
class Database:
    """An open database whose sessions have a time limit."""

    location: str
    store: Store

    @contextmanager
    def read(self, seconds: float | None = None) -> Iterator[Session]:
        """Open a read-only session on one database snapshot.

        Args:
            seconds: Time limit: a running statement is interrupted, no other one starts. Default: a request's limit.

        Raises:
            SlowError: The time is over.
            StoreError: The database cannot be read.
        """
        seconds = LIMITS.request_s if seconds is None else seconds
        end = time.monotonic() + seconds
        try:
            with self.store.read() as session, _ending(session, end, seconds):
                yield session
        except StoreError as error:
            if isinstance(error, SlowError) or time.monotonic() < end:
                raise
            logger.warning("statement interrupted after %g s: %s", seconds, error.__cause__)
            raise SlowError(seconds) from error

    def close(self) -> None:
        self.store.close()


@contextmanager
def _ending(session: Session, end: float, seconds: float) -> Iterator[None]:
    """Interrupt the session's statements at `end`, by `time.monotonic`."""
    connection = session.connection()
    driver: Any = connection.connection.driver_connection
    sqlite = connection.dialect.name == "sqlite"
    connection.info[_END] = end, seconds
    if sqlite:
        driver.set_progress_handler(lambda: time.monotonic() >= end, LIMITS.steps)
    try:
        yield
    finally:
        if sqlite:
            driver.set_progress_handler(None, 0)
        connection.info.pop(_END, None)


def _limit(connection: Connection, _cursor: Any, _statement: str, *_: Any) -> None:
    """Refuse a statement after the session's end; otherwise give PostgreSQL the remaining time."""
    limit = connection.info.get(_END)
    if limit is None:
        return
    end, seconds = limit
    left = end - time.monotonic()
    if left <= 0:
        raise SlowError(seconds)
    if connection.dialect.name == "postgresql":
        with closing(connection.connection.cursor()) as cursor:
            cursor.execute(f"SET LOCAL statement_timeout = {math.ceil(1000 * left) + 1:d}")


def open_to_read(location: str) -> Database:
    """Open a database read-only. Raises StoreError on failure, or for another revision."""
    revision = revision_of(location)
    if revision in REVISIONS and revision != HEAD:
        raise StoreError(
            f"the database is at revision {revision}; this groupbench needs {HEAD}; `groupbench list runs` migrates it"
        )
    store = open_store(location, create=False, read_only=True)
    _be_impatient(store)
    event.listen(store.engine, "before_cursor_execute", _limit)
    return Database(location, store)


def open_to_write(location: str) -> Store:
    """Open a database for incident changes. Raises StoreError on failure."""
    store = replace(open_store(location, create=False), queues=False)
    _be_impatient(store)
    return store


def version(session: Session) -> Version:
    """Return the largest key in each growing table: runs, series, points, comparisons and incident events."""
    keys = (Run.id, Series.id, Point.id, ABComparison.id, IncidentEvent.id)
    row = session.execute(select(*(select(func.max(key)).scalar_subquery() for key in keys))).one()
    return tuple(largest or 0 for largest in row)


def _be_impatient(store: Store) -> None:
    """Limit how long a connection waits for locks (SQLite), or runs a statement and on how many cores (PostgreSQL)."""
    listen = {"sqlite": _wait_briefly, "postgresql": _ask_briefly}.get(store.engine.dialect.name)
    if listen is not None:
        store.engine.dispose()  # the connection that opened it has no limit
        event.listen(store.engine, "connect", listen)


def _wait_briefly(connection: Any, _: Any) -> None:
    connection.execute(f"PRAGMA busy_timeout = {LIMITS.busy_ms:d}")


def _ask_briefly(connection: Any, _: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET statement_timeout = {round(1000 * LIMITS.request_s):d}")
        # A request uses at most one core: no parallel workers, and no compiling, which takes longer than most pages.
        cursor.execute("SET max_parallel_workers_per_gather = 0")
        cursor.execute("SET jit = off")
    connection.commit()
