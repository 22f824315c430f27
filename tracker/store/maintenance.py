"""Keeping a database for years: a copy of it, another one merged into it. `verify` has a module of its own."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.errors import StoreError
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.checked import prepared
from groupbench.tracker.store.engine import Store
from groupbench.tracker.store.ingest import Ingested, ingest_into
from groupbench.tracker.store.records import stored_records
from groupbench.tracker.store.schema import ABComparison, Alert, AlertEvent, Pin, Run, Series
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
    query = (
        select(ABComparison, Series.identity)
        .join(Series, ABComparison.series_id == Series.id)
        .order_by(ABComparison.id)
    )
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
