"""Open the dashboard's database: read-only for pages, and writable for changes of alerts.

A database of another revision is refused, not migrated: a server of pages must not change the tables.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import event, func, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.store.engine import Store, open_store, revision_of
from groupbench.tracker.store.schema import HEAD, REVISIONS, ABComparison, AlertEvent, Point, Run, Series

BUSY_MS = 5_000
"""Maximum time in ms that a request waits for the lock of another process."""

READERS = 4
"""Maximum number of requests that read the database at once. Further ones wait; none is refused."""

Version = tuple[int, ...]
"""A value that changes whenever rows are added; cached results are valid for one version."""


@dataclass(frozen=True)
class Database:
    """An open database that limits the number of concurrent readers."""

    location: str
    store: Store
    _readers: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(READERS))

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a read-only session, which sees one snapshot of the database. Waits while `READERS` are open."""
        with self._readers, self.store.read() as session:
            yield session

    def close(self) -> None:
        self.store.close()


def open_to_read(location: str) -> Database:
    """Open a database read-only. Raises StoreError if that fails, or if the database has another revision."""
    _check_revision(location)
    store = open_store(location, create=False, read_only=True)
    _be_impatient(store)
    return Database(location, store)


def open_to_write(location: str) -> Store:
    """Open a database for changes of alerts. Raises StoreError if that fails."""
    store = open_store(location, create=False)
    if store.engine.dialect.name == "sqlite":
        _be_impatient(store)
    return store


def version(session: Session) -> Version:
    """Return the largest key of each table that grows: runs, series, points, comparisons and alert events."""
    keys = (Run.id, Series.id, Point.id, ABComparison.id, AlertEvent.id)
    row = session.execute(select(*(select(func.max(key)).scalar_subquery() for key in keys))).one()
    return tuple(largest or 0 for largest in row)


def _check_revision(location: str) -> None:
    """Raise StoreError if the database has an older revision, which must be migrated first."""
    revision = revision_of(location)
    if revision in REVISIONS and revision != HEAD:
        raise StoreError(
            f"the database is at revision {revision}; this groupbench needs {HEAD}; `groupbench list runs` migrates it"
        )


def _be_impatient(store: Store) -> None:
    """Limit how long a connection waits for locks (SQLite), or runs a statement and on how many cores (PostgreSQL)."""
    listen = {"sqlite": _wait_briefly, "postgresql": _ask_briefly}.get(store.engine.dialect.name)
    if listen is not None:
        store.engine.dispose()  # the connection that opened it has no limit
        event.listen(store.engine, "connect", listen)


def _wait_briefly(connection: Any, _: Any) -> None:
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS:d}")


def _ask_briefly(connection: Any, _: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = '30s'")
        # A request uses at most one core: no parallel workers, and no compiling, which takes longer than most pages.
        cursor.execute("SET max_parallel_workers_per_gather = 0")
        cursor.execute("SET jit = off")
    connection.commit()
