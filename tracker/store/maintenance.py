"""Keeping a database for years: a copy of it, a check of all that it holds, another one merged into it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Select, func, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker.environment import digest, environment_identity
from groupbench.tracker.errors import StoreError
from groupbench.tracker.identity import IDENTITY, identity_of, series_identity
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.checked import prepared
from groupbench.tracker.store.engine import Store, cause
from groupbench.tracker.store.ingest import Ingested, ingest_into
from groupbench.tracker.store.points import LATENCY_COLUMNS, point_values
from groupbench.tracker.store.records import numbered_records, stored_records
from groupbench.tracker.store.schema import (
    Alert,
    AlertEvent,
    Base,
    Comparison,
    Environment,
    KernelSet,
    Pin,
    Point,
    Run,
    Series,
)
from groupbench.tracker.store.sqlite_file import copy_sqlite

_PRIVATE = ("", ":memory:")


def backup(store: Store, target: Path) -> int:
    """Copy a SQLite database while it is in use; gives the copy's bytes. Raises StoreError.

    The copy is whole and has one state of the database, or is not there. Nothing is ever overwritten.
    """
    if store.engine.dialect.name != "sqlite":
        raise StoreError(f"{store.name}: is no SQLite file; use the server's own backup, such as pg_dump")
    source = store.engine.url.database
    if source is None or source in _PRIVATE:
        raise StoreError(f"{store.name}: is only in memory; there is nothing to copy")
    if not target.parent.is_dir():
        raise StoreError(f"{target}: {target.parent} is not a directory")
    try:
        copy_sqlite(Path(store.name), target)
        return target.stat().st_size
    except FileExistsError as error:
        raise StoreError(f"{target}: exists already, and a backup overwrites nothing") from error
    except (OSError, sqlite3.Error, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise StoreError(f"{target}: the backup failed: {said}") from error


def merge(store: Store, other: Store) -> Ingested:
    """Everything that another database holds into this one, in one transaction.

    What both hold changes nothing, so that a second time adds nothing. Comparisons and alerts come along; an alert
    that both hold keeps every event, and the state of the newest. Raises IngestError where they contradict each
    other: the same run and series with other results.
    """
    with other.read() as theirs, store.write() as session:
        done = ingest_into(session, prepared(enumerate(stored_records(theirs), 1), other.name), other.name)
        _merge_alerts(session, theirs, _merge_comparisons(session, theirs))
        _merge_pins(session, theirs)
        return done


def _merge_pins(session: Session, theirs: Session) -> None:
    """Add theirs. Where both have one in force for a name, ours stays."""
    names = ("name", "commit", "max_slowdown", "created", "who")
    ours = list(session.scalars(select(Pin)))
    known = {tuple(getattr(row, name) for name in names) for row in ours}
    in_force = {row.name for row in ours if row.ended is None}
    for row in theirs.scalars(select(Pin).order_by(Pin.id)):
        facts = {name: getattr(row, name) for name in names}
        if tuple(facts.values()) not in known:
            ended = row.ended if row.ended or row.name not in in_force else row.created
            session.add(Pin(**facts, ended=ended))
    session.flush()


def _merge_comparisons(session: Session, theirs: Session) -> dict[int, int]:
    """Add theirs; gives our keys by theirs."""
    ours = dict(session.execute(select(Series.identity, Series.id)).all())
    keys = {}
    query = select(Comparison, Series.identity).join(Series, Comparison.series_id == Series.id).order_by(Comparison.id)
    for row, series in theirs.execute(query).all():
        keys[row.id] = comparisons.store(session, ours[series], comparisons.from_row(row))
    return keys


def _merge_alerts(session: Session, theirs: Session, of_comparison: dict[int, int]) -> None:
    ours = dict(session.execute(select(Series.identity, Series.id)).all())
    runs = dict(session.execute(select(Run.uuid, Run.id)).all())
    names = dict(theirs.execute(select(Run.id, Run.uuid)).all())
    query = select(Alert, Series.identity).join(Series, Alert.series_id == Series.id).order_by(Alert.id)
    for row, series in theirs.execute(query).all():
        alert = session.scalar(select(Alert).where(Alert.identity == row.identity))
        if alert is None:
            facts = {name: getattr(row, name) for name in _OF_ALERT}
            alert = Alert(
                identity=row.identity,
                series_id=ours[series],
                base_run_id=None if row.base_run_id is None else runs[names[row.base_run_id]],
                run_id=runs[names[row.run_id]],
                comparison_id=None if row.comparison_id is None else of_comparison[row.comparison_id],
                **facts,
            )
            session.add(alert)
            session.flush()
        told = select(AlertEvent).order_by(AlertEvent.at, AlertEvent.id)
        mine = list(session.scalars(told.where(AlertEvent.alert_id == alert.id)))
        known = {(event.at, event.who, event.state, event.reason) for event in mine}
        for event in theirs.scalars(told.where(AlertEvent.alert_id == row.id)):
            if (event.at, event.who, event.state, event.reason) in known:
                continue
            facts = {name: getattr(event, name) for name in ("at", "who", "state", "reason")}
            session.add(AlertEvent(alert_id=alert.id, **facts))
            if not mine or event.at > mine[-1].at:
                alert.state, alert.until_time, alert.until_commit = row.state, row.until_time, row.until_commit
        session.flush()


_OF_ALERT = (
    *("metric", "state", "cause", "before", "after", "effect", "low", "high"),
    *("opened", "until_time", "until_commit"),
)


@dataclass(frozen=True)
class Problem:
    """Something in the database that cannot be."""

    kind: str  # damage, reference, orphan, hash
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def verify(session: Session, *, quick: bool = False) -> Iterator[Problem]:
    """What is wrong, from the file's pages up to the hash of every result; nothing where all is well.

    `quick` leaves out the results, which take most of the time.
    """
    damaged = list(_damage(session))
    yield from damaged
    if damaged:
        return  # what stands in damaged pages is not worth telling
    try:
        yield from _references(session)
        yield from _orphans(session)
        yield from _identities(session)
        if not quick:
            yield from _results(session)
    except SQLAlchemyError as error:
        yield Problem("damage", cause(error))


def _damage(session: Session) -> Iterator[Problem]:
    if session.get_bind().dialect.name != "sqlite":
        return
    try:
        for (said,) in session.execute(text("PRAGMA integrity_check(20)")):
            if said != "ok":
                yield Problem("damage", " ".join(str(said).split()))
    except SQLAlchemyError as error:
        yield Problem("damage", cause(error))


def _references(session: Session) -> Iterator[Problem]:
    """Rows that refer to a row that is not there. A database that enforces its keys has none."""
    for table in Base.metadata.sorted_tables:
        for key in table.foreign_keys:
            theirs = key.column.table.alias("theirs")
            absent = ~select(theirs.c.id).where(theirs.c.id == key.parent).exists()
            query = select(table.c.id).where(key.parent.is_not(None), absent)
            yield from _told(session, query, "reference", f"{table.name} with a {key.parent.name} that does not exist")


def _orphans(session: Session) -> Iterator[Problem]:
    """Rows that nothing refers to, though they were only ever made for something."""
    for owner, key in ((Run, Point.run_id), (KernelSet, Point.kernels_id), (Environment, Point.environment_id)):
        query = select(owner.id).where(owner.id.not_in(select(key).where(key.is_not(None)).distinct()))
        yield from _told(session, query, "orphan", f"{owner.__tablename__} without any point")
    seen = select(Point.id).where(Point.series_id == Alert.series_id, Point.run_id == Alert.run_id)
    yield from _told(session, select(Alert.id).where(~seen.exists()), "orphan", "alert without its point")
    silent = Alert.id.not_in(select(AlertEvent.alert_id).distinct())
    yield from _told(session, select(Alert.id).where(silent), "orphan", "alert without any event")


def _told(session: Session, query: Select[Any], kind: str, what: str) -> Iterator[Problem]:
    number = session.scalar(select(func.count()).select_from(query.subquery())) or 0
    if number:
        some = ", ".join(str(key) for key in session.scalars(query.limit(5)))
        yield Problem(kind, f"{number} {what} (id {some}{', …' if number > 5 else ''})")


def _identities(session: Session) -> Iterator[Problem]:
    from groupbench.tracker import record as records

    for row in session.execute(select(Environment.id, Environment.content, Environment.identity, Environment.facts)):
        try:
            facts = msgspec.convert(row.facts, records.Environment)
        except msgspec.ValidationError as error:
            yield Problem("hash", f"environment {row.id} holds facts that are none: {error}")
            continue
        if digest(facts) != row.content or environment_identity(facts) != row.identity:
            yield Problem("hash", f"environment {row.id} is not what its hash says")
    for row in session.execute(select(KernelSet.id, KernelSet.content, KernelSet.kernels)):
        if digest(row.kernels) != row.content:
            yield Problem("hash", f"kernel_set {row.id} is not what its hash says")
    identities = dict(session.execute(select(Series.id, Series.identity)).all())
    for comparison in session.scalars(select(Comparison)):
        made = comparisons.content_of(identities.get(comparison.series_id), comparisons.from_row(comparison))
        if made != comparison.content:
            yield Problem("hash", f"comparison {comparison.id} is not what its hash says")
    query = select(Series.id, Series.identity, *(getattr(Series, name) for name in IDENTITY))
    for key, identity, *values in session.execute(query):
        if identity_of(dict(zip(IDENTITY, values, strict=True))) != identity:
            yield Problem("hash", f"series {key} is not what its hash says")


def _results(session: Session) -> Iterator[Problem]:
    """Every point, against the hash of what it was made of and the statistics of its samples."""
    environments = dict(session.execute(select(Environment.id, Environment.content)).all())
    series = dict(session.execute(select(Series.id, Series.identity)).all())
    seen = 0
    try:
        for row, record in numbered_records(session):
            seen = row.id
            made = point_values(record, environments[row.environment_id], series[row.series_id])
            if made["content"] != row.content:
                yield Problem("hash", f"point {row.id} is not what its hash says")
            elif series_identity(record) != series[row.series_id]:
                yield Problem("hash", f"point {row.id} was measured on other hardware than its series")
            elif any(made[name] != row._mapping[name] for name in LATENCY_COLUMNS if name not in _PACKED):
                yield Problem("hash", f"point {row.id} has statistics that are not those of its samples")
    except (ValueError, msgspec.ValidationError, KeyError) as error:
        after = f"after point {seen}" if seen else "in the first point"
        yield Problem("hash", f"{after}: what is stored is no record: {error}")


_PACKED = ("samples", "telemetry")
"""Columns that a later version may pack otherwise: the hash covers what they hold."""
