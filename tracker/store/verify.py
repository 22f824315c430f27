"""What is damaged in a database: from the file's pages up to the hash of every result.

Nothing that is stored can end a check. A row that cannot be read is itself a finding, and the next one is read.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Row, Select, func, inspect, select, text, true
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker import record as records
from groupbench.tracker.environment import digest, environment_identity
from groupbench.tracker.errors import StoreError
from groupbench.tracker.identity import IDENTITY, identity_of, series_identity
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.checksum import checksum_of
from groupbench.tracker.store.engine import cause
from groupbench.tracker.store.points import LATENCY_COLUMNS, earlier_content, kernels_hash, point_values
from groupbench.tracker.store.records import POINT_COLUMNS, RecordReader
from groupbench.tracker.store.schema import (
    ABComparison,
    Alert,
    AlertEvent,
    Base,
    Environment,
    KernelSet,
    Point,
    Run,
    Series,
    sealed_columns,
    sealed_tables,
)

_BATCH = 500
_PACKED = ("samples", "telemetry")
"""Columns that a later version may pack otherwise: the hash covers what they hold."""


@dataclass(frozen=True)
class DatabaseProblem:
    """Something in the database that cannot be."""

    kind: str  # damage, reference, orphan, hash
    what: str
    table: str | None = None
    keys: tuple[int, ...] = ()  # ids of the rows of the table that it is about

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def verify(session: Session, *, quick: bool = False, until: float = math.inf) -> Iterator[DatabaseProblem]:
    """What is wrong, from the file's pages up to the hash of every result; nothing where all is well.

    `quick` leaves out the results, which take most of the time. They are checked as far as `until`, by
    `time.monotonic`, allows.
    """
    checks: list[Callable[[Session], Iterator[DatabaseProblem]]] = [_pages, _references, _orphans, _checksums]
    checks += [_environments, _kernel_sets, _comparisons, _series]
    if not quick:
        checks.append(partial(_results, until=until))
    for check in checks:
        try:
            yield from check(session)
        except Exception as error:  # reading damage may raise anything, and the other checks still count
            yield DatabaseProblem("damage", f"a check could not be finished: {_said(error)}")


def _said(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, SQLAlchemyError):
        return " ".join(cause(error).split())
    return " ".join((str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}").split())


def _pages(session: Session) -> Iterator[DatabaseProblem]:
    if session.get_bind().dialect.name != "sqlite":
        return
    for (said,) in session.execute(text("PRAGMA integrity_check(20)")):
        if said != "ok":
            yield DatabaseProblem("damage", " ".join(str(said).split()))


def _references(session: Session) -> Iterator[DatabaseProblem]:
    """Rows that refer to a row that is not there. A database that enforces its keys has none."""
    for table in Base.metadata.sorted_tables:
        for key in table.foreign_keys:
            theirs = key.column.table.alias("theirs")
            absent = ~select(theirs.c.id).where(theirs.c.id == key.parent).exists()
            query = select(table.c.id).where(key.parent.is_not(None), absent)
            what = f"{table.name} with a {key.parent.name} that does not exist"
            yield from _listed(session, query, "reference", table.name, what)


def _orphans(session: Session) -> Iterator[DatabaseProblem]:
    """Rows that nothing refers to, though they were only ever made for something."""
    for owner, key in ((Run, Point.run_id), (KernelSet, Point.kernels_id), (Environment, Point.environment_id)):
        query = select(owner.id).where(owner.id.not_in(select(key).where(key.is_not(None)).distinct()))
        table = owner.__tablename__
        yield from _listed(session, query, "orphan", table, f"{table} without any point")
    seen = select(Point.id).where(Point.series_id == Alert.series_id, Point.run_id == Alert.run_id)
    yield from _listed(session, select(Alert.id).where(~seen.exists()), "orphan", "alert", "alert without its point")
    silent = select(Alert.id).where(Alert.id.not_in(select(AlertEvent.alert_id).distinct()))
    yield from _listed(session, silent, "orphan", "alert", "alert without any event")


def _listed(session: Session, query: Select[Any], kind: str, table: str, what: str) -> Iterator[DatabaseProblem]:
    number = session.scalar(select(func.count()).select_from(query.subquery())) or 0
    if number:
        keys = tuple(session.scalars(query))
        some = ", ".join(map(str, keys[:5]))
        yield DatabaseProblem(kind, f"{number} {what} (id {some}{', …' if number > 5 else ''})", table, keys)


def _each(
    session: Session,
    mapped: type[Base],
    columns: Sequence[Any],  # the first is the row's id
    check: Callable[[Any], str | None],  # gives what is wrong with a row
    until: float = math.inf,  # by time.monotonic
) -> Iterator[DatabaseProblem]:
    """Check every row of a table, by its id; one that cannot be read is a problem like any other."""
    name, key = mapped.__tablename__, inspect(mapped).columns["id"]
    query, beyond = select(*columns).order_by(key), true()
    while keys := list(session.scalars(select(key).where(beyond).order_by(key).limit(_BATCH))):
        rows: Mapping[int, Row[Any]] = {}
        try:
            rows = {row[0]: row for row in session.execute(query.where(beyond, key <= keys[-1]))}
        except Exception:  # one of them is damaged: each is read alone below
            session.expire_all()
        for each in keys:
            try:
                row = rows[each] if each in rows else session.execute(query.where(key == each)).one()
                wrong = check(row)
            except Exception as error:  # whatever a damaged value raises on its way here
                wrong = f"cannot be read: {_said(error)}"
            if wrong:
                yield DatabaseProblem("hash", f"{name} {each} {wrong}", name, (each,))
        if time.monotonic() > until:
            return
        beyond = key > keys[-1]


def _checksums(session: Session) -> Iterator[DatabaseProblem]:
    for mapped in sealed_tables():
        names = sealed_columns(mapped)

        def check(row: Any, names: list[str] = names) -> str | None:
            _, checksum, *values = row
            made = checksum_of(dict(zip(names, values, strict=True)))
            return None if made == checksum else "is not what its checksum says"

        columns = [getattr(mapped, name) for name in ("id", "checksum", *names)]
        yield from _each(session, mapped, columns, check)


def _environments(session: Session) -> Iterator[DatabaseProblem]:
    names = [name for name in records.Environment.__struct_fields__ if hasattr(Environment, name)]

    def check(row: Any) -> str | None:
        facts = msgspec.convert(row.facts, records.Environment)
        if digest(facts) != row.content or environment_identity(facts) != row.identity:
            return "is not what its hash says"
        differs = [name for name in names if getattr(row, name) != getattr(facts, name)]
        return f"has another {differs[0]} than its facts" if differs else None

    fixed = (Environment.id, Environment.content, Environment.identity, Environment.facts)
    yield from _each(session, Environment, [*fixed, *(getattr(Environment, name) for name in names)], check)


def _kernel_sets(session: Session) -> Iterator[DatabaseProblem]:
    def check(row: Any) -> str | None:
        if digest(row.kernels) != row.content:
            return "is not what its hash says"
        made = kernels_hash(msgspec.convert(row.kernels, tuple[records.Kernel, ...]))
        return None if made == row.hash else "has a hash that is not that of its kernels"

    yield from _each(session, KernelSet, [KernelSet.id, KernelSet.content, KernelSet.kernels, KernelSet.hash], check)


def _comparisons(session: Session) -> Iterator[DatabaseProblem]:
    identities = dict(session.execute(select(Series.id, Series.identity)).all())

    def check(row: Any) -> str | None:
        made = comparisons.content_of(identities.get(row.series_id), comparisons.from_row(row))
        return None if made == row.content else "is not what its hash says"

    yield from _each(session, ABComparison, list(ABComparison.__table__.columns), check)


def _series(session: Session) -> Iterator[DatabaseProblem]:
    def check(row: Any) -> str | None:
        _, identity, *values = row
        made = identity_of(dict(zip(IDENTITY, values, strict=True)))
        return None if made == identity else "is not what its hash says"

    columns = [getattr(Series, name) for name in ("id", "identity", *IDENTITY)]
    yield from _each(session, Series, columns, check)


def _results(session: Session, until: float) -> Iterator[DatabaseProblem]:
    """Every point, against the hash of what it was made of and the statistics of its samples."""
    environments = dict(session.execute(select(Environment.id, Environment.content)).all())
    series = dict(session.execute(select(Series.id, Series.identity)).all())
    read = RecordReader(session)

    def check(row: Any) -> str | None:
        record = read.record(row)
        environment, identity = environments[row.environment_id], series[row.series_id]
        made = point_values(record, environment, identity)
        if row.content != made["content"] and row.content != earlier_content(record, environment, identity):
            return "is not what its hash says"
        if series_identity(record) != identity:
            return "was measured on other hardware than its series"
        if any(made[name] != row._mapping[name] for name in LATENCY_COLUMNS if name not in _PACKED):
            return "has statistics that are not those of its samples"
        return None

    yield from _each(session, Point, POINT_COLUMNS, check, until)
