"""The database of the dashboard: for asking one that cannot be written through, for alerts one that can.

Serving never migrates: readers must not change the database.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import event, func, select
from sqlalchemy.orm import Session

from groupbench.tracker.errors import StoreError
from groupbench.tracker.store.engine import Store, open_store, revision_of
from groupbench.tracker.store.schema import HEAD, REVISIONS, ABComparison, AlertEvent, Point, Run, Series

BUSY_MS = 5_000
"""How long a request waits for another process's lock before it fails."""

READERS = 4
"""Requests that ask the database at one time; others queue, and none is refused."""

Version = tuple[int, ...]
"""Equal as long as nothing was added: the key of cached results."""


@dataclass(frozen=True)
class Database:
    """An open database, and how many may ask at once."""

    location: str
    store: Store
    _readers: threading.BoundedSemaphore = field(default_factory=lambda: threading.BoundedSemaphore(READERS))

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one state of the database, and cannot write."""
        with self._readers, self.store.read() as session:
            yield session

    def close(self) -> None:
        self.store.close()


def open_to_read(location: str) -> Database:
    """A database whose connections refuse to write. Raises StoreError, also for one of another revision."""
    _check_revision(location)
    store = open_store(location, create=False, read_only=True)
    _be_impatient(store)
    return Database(location, store)


def open_to_write(location: str) -> Store:
    """The same for alerts alone. Raises StoreError."""
    store = open_store(location, create=False)
    if store.engine.dialect.name == "sqlite":
        _be_impatient(store)
    return store


def version(session: Session) -> Version:
    """Return a value that changes with every stored run, point, comparison and alert: a few look-ups by key."""
    keys = (Run.id, Series.id, Point.id, ABComparison.id, AlertEvent.id)
    return tuple(session.scalar(select(func.max(key))) or 0 for key in keys)


def _check_revision(location: str) -> None:
    """Raises StoreError for one that this version would have to migrate first."""
    revision = revision_of(location)
    if revision in REVISIONS and revision != HEAD:
        raise StoreError(
            f"the database is at revision {revision}; this groupbench needs {HEAD}; `groupbench runs` migrates it"
        )


def _be_impatient(store: Store) -> None:
    """Limit how long a connection waits: a request must not."""
    listen = {"sqlite": _wait_briefly, "postgresql": _ask_briefly}.get(store.engine.dialect.name)
    if listen is not None:
        store.engine.dispose()  # the connection that opened it has no limit
        event.listen(store.engine, "connect", listen)


def _wait_briefly(connection: Any, _: Any) -> None:
    connection.execute(f"PRAGMA busy_timeout = {BUSY_MS:d}")


def _ask_briefly(connection: Any, _: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = '30s'")
    connection.commit()
