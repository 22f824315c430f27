"""Queue for a device over PostgreSQL, on hosts and containers with one database and several lock folders.

A row is a process with the device, or a waiting one. The process renews its row. A killed process' row grows old: the
next process removes it and takes its turn. Processes with one lock folder take turns by files (`tools.lease`), so
their rows do not wait for each other. A night lets an urgent command on another host measure between two problems.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    DateTime,
    Identity,
    MetaData,
    Table,
    Text,
    func,
    select,
)
from sqlalchemy.exc import SQLAlchemyError

from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.store.engine import LOCK, Store, unprepared
from groupbench.tracker.tools.lease import RETURNS, URGENT, StandIn

logger = logging.getLogger(__name__)

QUEUE_POLL_S = 0.2
"""Time between two looks at the queue."""

BEAT_S = 2.0
"""Time between two signs of life, of which ten may be lost."""

STALE_S = 20.0
"""Age of a row from which the process counts as killed. The database's clock measures it."""

_METADATA = MetaData()
QUEUE = Table(
    "device_queue",
    _METADATA,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("device", Text, nullable=False),
    Column("place", Text, nullable=False),  # host and folder of locks
    Column("rank", BigInteger, nullable=False),
    Column("holds", Boolean, nullable=False),
    Column("beat", DateTime(timezone=True), nullable=False),
    Column("facts", JSON, nullable=False),
)

Wait = Callable[[float], bool]
"""Waits for a turn at most for some seconds, and returns whether it came."""


@contextlib.contextmanager
def place(
    location: str, device: str, here: str, rank: int, facts: Mapping[str, Any], stand_in: StandIn | None = None
) -> Iterator[Wait]:
    """Hold a place in a device's queue, and yield a function to wait for the turn.

    Without a database of groupbench there, each turn comes at once. Raises StoreError.

    Args:
        location: URL of the database.
        device: Name of the device.
        here: The host and its lock folder.
        rank: Lower ranks come first.
        facts: Facts to show to others.
        stand_in: Takes the device here for an urgent command on another host; None to hold it without a break.
    """
    with unprepared(location) as (store, has_tables), contextlib.ExitStack() as stack:
        if not has_tables or store.engine.dialect.name != "postgresql":
            yield lambda wait_s: True
            return
        with store.errors_translated(), store.engine.begin() as connection:
            connection.execute(select(func.pg_advisory_xact_lock(LOCK)))  # two first ones create it at once
            _METADATA.create_all(connection)
        row = _Row(
            store, {"device": device, "place": here, "rank": rank, "holds": False, "facts": dict(facts)}, stand_in
        )
        stack.callback(row.end)
        yield row.wait


def _fresh() -> ColumnElement[bool]:
    return QUEUE.c.beat > func.clock_timestamp() - timedelta(seconds=STALE_S)


class _Row:
    """The row of this process, which a thread renews. Another one gives way, if there is a `stand_in`."""

    def __init__(self, store: Store, values: dict[str, Any], stand_in: StandIn | None) -> None:
        self.store, self.values, self.stand_in = store, values, stand_in
        self.over = threading.Event()
        self.id = 0
        self.turn()
        loops = [self._beat, *([] if stand_in is None else [self._give_way])]
        self.threads = [threading.Thread(target=loop, daemon=True) for loop in loops]
        for thread in self.threads:
            thread.start()

    def turn(self, take: bool = False) -> bool:
        """Renew the row. Returns whether it is this row's turn; with `take`, it then holds the device."""
        with self.store.errors_translated(), self.store.engine.begin() as connection:
            connection.execute(select(func.pg_advisory_xact_lock(LOCK)))
            connection.execute(QUEUE.delete().where(~_fresh(), QUEUE.c.id != self.id))
            now = func.clock_timestamp()
            if not connection.execute(QUEUE.update().where(QUEUE.c.id == self.id).values(beat=now)).rowcount:
                if self.values["holds"]:
                    logger.warning("lost %s to another process, as this one did not run", self.values["device"])
                    self.values["holds"] = False
                added = connection.execute(QUEUE.insert().values(**self.values, beat=now).returning(QUEUE.c.id))
                self.id = added.scalar_one()
            others = select(QUEUE.c.id, QUEUE.c.holds, QUEUE.c.rank).where(
                QUEUE.c.device == self.values["device"], QUEUE.c.place != self.values["place"]
            )
            first = connection.execute(
                others.order_by(QUEUE.c.holds.desc(), QUEUE.c.rank, QUEUE.c.id).limit(1)
            ).one_or_none()
            key = self.values["rank"], self.id
            is_turn = first is None or (not first.holds and (first.rank, first.id) > key)
            if take and is_turn:
                connection.execute(QUEUE.update().where(QUEUE.c.id == self.id).values(holds=True))
                self.values["holds"] = True
            return is_turn

    def wait(self, wait_s: float) -> bool:
        """Wait for the turn, and hold the device."""
        end = time.monotonic() + wait_s
        while not self.turn(take=True):
            if time.monotonic() >= end:
                return False
            time.sleep(QUEUE_POLL_S)
        return True

    def _beat(self) -> None:
        while not self.over.wait(BEAT_S):
            try:
                with self.store.engine.begin() as connection:
                    now = func.clock_timestamp()
                    renewed = connection.execute(QUEUE.update().where(QUEUE.c.id == self.id).values(beat=now)).rowcount
                if not renewed and self.values["holds"]:
                    logger.warning("lost %s to another process, as this one did not run", self.values["device"])
                    return
            except SQLAlchemyError as error:  # a measurement goes on without the database
                logger.warning("the queue cannot be renewed: %s", error)

    def _give_way(self) -> None:
        while not self.over.wait(BEAT_S):
            try:
                if self.values["holds"] and (facts := self._urgent()) is not None:
                    self._pause(facts)
            except (TrackerError, OSError, SQLAlchemyError) as error:  # the measurement goes on
                logger.warning("cannot give way to another host: %s", error)

    def _urgent(self) -> dict[str, Any] | None:
        """Return the facts about an urgent command waiting elsewhere."""
        waiting = select(QUEUE.c.facts).where(
            QUEUE.c.device == self.values["device"], QUEUE.c.place != self.values["place"], _fresh(),
            QUEUE.c.rank == URGENT, ~QUEUE.c.holds,
        )  # fmt: skip
        with self.store.engine.connect() as connection:
            return connection.execute(waiting.order_by(QUEUE.c.id).limit(1)).scalar_one_or_none()

    def _pause(self, facts: Mapping[str, Any]) -> None:
        """Let the urgent commands measure, and wait for the next turn."""
        assert self.stand_in is not None
        with self.stand_in(facts, self.over) as paused:
            if not paused:
                return
            returns = {"holds": False, "rank": RETURNS}
            with self.store.engine.begin() as connection:
                connection.execute(select(func.pg_advisory_xact_lock(LOCK)))
                connection.execute(QUEUE.update().where(QUEUE.c.id == self.id).values(returns))
            self.values |= returns
            while not self.turn(take=True) and not self.over.wait(QUEUE_POLL_S):
                pass

    def end(self) -> None:
        """Leave the queue."""
        self.over.set()
        for thread in self.threads:
            thread.join()
        with contextlib.suppress(SQLAlchemyError), self.store.engine.begin() as connection:
            connection.execute(QUEUE.delete().where(QUEUE.c.id == self.id))


def places(location: str) -> list[tuple[str, str, bool, dict[str, Any]]]:
    """Return (device, place, whether it holds, facts) of each live row, in the order of turns. Raises StoreError."""
    with unprepared(location) as (store, has_tables), store.errors_translated(), store.engine.connect() as connection:
        if not has_tables or not connection.dialect.has_table(connection, QUEUE.name):
            return []
        columns = QUEUE.c.device, QUEUE.c.place, QUEUE.c.holds, QUEUE.c.facts
        order = QUEUE.c.device, QUEUE.c.holds.desc(), QUEUE.c.rank, QUEUE.c.id
        return [tuple(row) for row in connection.execute(select(*columns).where(_fresh()).order_by(*order))]
