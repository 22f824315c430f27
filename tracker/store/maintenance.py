"""Back up a database, and merge another one into it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.checked import prepared
from groupbench.tracker.store.engine import Store
from groupbench.tracker.store.ingest import Ingested, ingest_into
from groupbench.tracker.store.records import stored_records
from groupbench.tracker.store.schema import ABComparison, Alert, Decision, Incident, IncidentEvent, Pin, Run, Series
from groupbench.tracker.store.sqlite_file import copy_sqlite

_PRIVATE = ("", ":memory:")


def backup(store: Store, target: Path) -> int:
    """Copy a SQLite database while it is in use, and return the copy's size. Raises StoreError.

    The copy is a consistent snapshot, or is not created at all. An existing file is never overwritten.
    """
    if store.engine.dialect.name != "sqlite":
        raise StoreError(f"{store.name}: not a SQLite file; use the server's own backup, such as pg_dump")
    source = store.engine.url.database
    if source is None or source in _PRIVATE:
        raise StoreError(f"{store.name}: an in-memory database cannot be backed up")
    if not target.parent.is_dir():
        raise StoreError(f"{target}: {target.parent} is not a directory")
    try:
        copy_sqlite(Path(store.name), target)
        return target.stat().st_size
    except FileExistsError as error:
        raise StoreError(f"{target}: already exists; a backup does not overwrite files") from error
    except (OSError, sqlite3.Error, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"{target}: backup failed: {reason}") from error


def merge(store: Store, other: Store) -> Ingested:
    """Merge everything in another database into this one, in one transaction.

    Anything present in both is left unchanged, so merging twice adds nothing. Comparisons and alerts are merged too. An
    alert present in both keeps all events and the newest state. Raises IngestError for different results in the same
    run and series.
    """
    with other.read() as other_session, store.write() as session:
        done = ingest_into(session, prepared(enumerate(stored_records(other_session), 1), other.name), other.name)
        _merge_alerts(session, other_session, _merge_comparisons(session, other_session))
        _merge_pins(session, other_session)
        _merge_decisions(session, other_session)
        return done


def _merge_pins(session: Session, other: Session) -> None:
    """Add the other database's pins. If both have a pin in force under one name, ours stays."""
    names = ("name", "commit", "max_slowdown", "created", "who")
    ours = list(session.scalars(select(Pin)))
    our_facts = {tuple(getattr(row, name) for name in names) for row in ours}
    in_force = {row.name for row in ours if row.ended is None}
    for row in other.scalars(select(Pin).order_by(Pin.id)):
        facts = {name: getattr(row, name) for name in names}
        if tuple(facts.values()) not in our_facts:
            ended = row.ended if row.ended or row.name not in in_force else row.created
            session.add(Pin(**facts, ended=ended))
    session.flush()


def _merge_decisions(session: Session, other: Session) -> None:
    """Add the other database's decisions about runs and series without one of the kind here."""
    ours = dict(session.execute(select(Series.identity, Series.id)).all())
    runs = dict(session.execute(select(Run.uuid, Run.id)).all())
    stored_keys = {(row.kind, row.run_id, row.series_id) for row in session.scalars(select(Decision))}
    query = (
        select(Decision, Run.uuid, Series.identity)
        .outerjoin(Run, Decision.run_id == Run.id)
        .outerjoin(Series, Decision.series_id == Series.id)
        .order_by(Decision.id)
    )
    for row, uuid, identity in other.execute(query).all():
        keys = row.kind, runs.get(uuid), ours.get(identity)
        if keys not in stored_keys:
            facts = {name: getattr(row, name) for name in ("value", "until", "at", "who", "reason", "ended")}
            session.add(Decision(kind=row.kind, run_id=keys[1], series_id=keys[2], **facts))
    session.flush()


def _merge_comparisons(session: Session, other: Session) -> dict[int, int]:
    """Add the other database's comparisons, and return our keys by their_incident."""
    ours = dict(session.execute(select(Series.identity, Series.id)).all())
    keys = {}
    query = (
        select(ABComparison, Series.identity)
        .join(Series, ABComparison.series_id == Series.id)
        .order_by(ABComparison.id)
    )
    for row, series in other.execute(query).all():
        keys[row.id] = comparisons.store(session, ours[series], comparisons.from_row(row))
    return keys


def _merge_alerts(session: Session, other: Session, of_comparison: dict[int, int]) -> None:
    """Add the other database's alerts, with their incidents and events."""
    ours = dict(session.execute(select(Series.identity, Series.id)).all())
    runs = dict(session.execute(select(Run.uuid, Run.id)).all())
    names = dict(other.execute(select(Run.id, Run.uuid)).all())
    query = select(Alert, Series.identity).join(Series, Alert.series_id == Series.id).order_by(Alert.id)
    merged: dict[int, int] = {}  # our incidents by the other keys
    for row, series in other.execute(query).all():
        alert = session.scalar(select(Alert).where(Alert.identity == row.identity))
        their_incident = other.get_one(Incident, row.incident_id)
        if row.incident_id not in merged:
            merged[row.incident_id] = _merge_incident(session, other, their_incident, alert)
        if alert is None:
            facts = {name: getattr(row, name) for name in _OF_ALERT}
            alert = Alert(
                identity=row.identity,
                series_id=ours[series],
                base_run_id=None if row.base_run_id is None else runs[names[row.base_run_id]],
                run_id=runs[names[row.run_id]],
                comparison_id=None if row.comparison_id is None else of_comparison[row.comparison_id],
                incident_id=merged[row.incident_id],
                **facts,
            )
            session.add(alert)
        elif session.get_one(Incident, alert.incident_id).state == their_incident.state:
            alert.ended = row.ended
        session.flush()


def _merge_incident(session: Session, other: Session, row: Incident, member: Alert | None) -> int:
    """Add the other database's incident or its events to ours, by a member in both. Returns our key."""
    incident = session.scalar(select(Incident).where(Incident.identity == row.identity))
    if member is not None:
        incident = session.get_one(Incident, member.incident_id)
    if incident is None:
        incident = Incident(**{name: getattr(row, name) for name in ("identity", "opened", *_OF_INCIDENT)})
        session.add(incident)
        session.flush()
    event_query = select(IncidentEvent).order_by(IncidentEvent.at, IncidentEvent.id)
    our_events = list(session.scalars(event_query.where(IncidentEvent.incident_id == incident.id)))
    our_facts = {(event.at, event.who, event.state, event.reason) for event in our_events}
    for event in other.scalars(event_query.where(IncidentEvent.incident_id == row.id)):
        if (event.at, event.who, event.state, event.reason) in our_facts:
            continue
        facts = {name: getattr(event, name) for name in ("at", "who", "state", "reason")}
        session.add(IncidentEvent(incident_id=incident.id, **facts))
        if not our_events or event.at > our_events[-1].at:
            for name in _OF_INCIDENT:
                setattr(incident, name, getattr(row, name))
    session.flush()
    return incident.id


_OF_ALERT = ("metric", "cause", "before", "after", "effect", "low", "high", "opened", "ended")
_OF_INCIDENT = ("state", "owner", "until_time", "until_commit", "link", "posted")
