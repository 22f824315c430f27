"""Find database damage, from the file's pages to every result's hash.

No stored data can stop a check. An unreadable row is reported as a problem, and the check continues with the next row.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from sqlalchemy import Row, Select, func, inspect, select, text, true, union
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker.facts import record as records
from groupbench.tracker.facts.environment import digest, environment_identity
from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.facts.identity import IDENTITY, identity_of, series_identity
from groupbench.tracker.store import columns, comparisons
from groupbench.tracker.store.checksum import checksum_of
from groupbench.tracker.store.engine import cause, open_store
from groupbench.tracker.store.points import LATENCY_COLUMNS, earlier_content, kernels_hash, plain_values
from groupbench.tracker.store.records import POINT_COLUMNS, RecordReader
from groupbench.tracker.store.schema import (
    ABComparison,
    Alert,
    Base,
    Environment,
    Incident,
    IncidentEvent,
    KernelSet,
    LoadedList,
    Point,
    Run,
    RunColumns,
    Series,
    sealed_columns,
    sealed_tables,
)

_BATCH = 500  # rows read at once, one by one if any is damaged
_CHECKED_AT_ONCE = 20_000
"""Ids of results that a process checks at a time: several seconds of work, so the start costs little."""


@dataclass(frozen=True)
class DatabaseProblem:
    """An inconsistency in the database."""

    kind: str  # damage, reference, orphan, hash
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def verify(
    session: Session,
    *,
    quick: bool = False,
    until: float = math.inf,
    checked: Callable[[int], None] = lambda number: None,
) -> Iterator[DatabaseProblem]:
    """Yield a database's problems, from the file's pages to every result's hash.

    Args:
        session: A session on the database.
        quick: Skip the results, which take longest.
        until: The `time.monotonic` at which to stop checking them.
        checked: Called with the number of further results that were checked.
    """
    checks: list[Callable[[Session], Iterator[DatabaseProblem]]] = [_pages, _references, _orphans, _checksums]
    checks += [_environments, _kernel_sets, _loaded_lists, _comparisons, _series]
    if not quick:
        checks += [_copies, partial(_results, until=until, checked=checked)]
    for check in checks:
        yield from _guarded(check, session)


def _guarded(check: Callable[[Session], Iterator[DatabaseProblem]], session: Session) -> Iterator[DatabaseProblem]:
    try:
        yield from check(session)
    except Exception as error:  # damaged data may raise anything; the other checks go on
        yield DatabaseProblem("damage", f"a check did not finish: {_one_line(error)}")


def verify_results(
    location: str, session: Session, checked: Callable[[int], None] = lambda number: None
) -> Iterator[DatabaseProblem]:
    """Yield the problems of the results and their copies alone. All processors check the results.

    Args:
        location: The path or URL of the session's database, which other processes open.
        session: A session on the database.
        checked: Called with the number of further results that were checked.
    """
    yield from _guarded(_copies, session)
    first, last = session.execute(select(func.min(Point.id), func.max(Point.id))).one()
    shares = [(start, start + _CHECKED_AT_ONCE - 1) for start in range(first or 0, (last or 0) + 1, _CHECKED_AT_ONCE)]
    if len(shares) == 1:
        yield from _guarded(partial(_results, checked=checked), session)
        return
    processes = min(len(shares), len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for number, problems in pool.map(partial(_share, location), shares):
            checked(number)
            yield from problems


def _share(location: str, ids: tuple[int, int]) -> tuple[int, list[DatabaseProblem]]:
    """Return the number of results from the first to the last id, and their problems."""
    numbers: list[int] = []
    with open_store(location, create=False, read_only=True) as store, store.read() as session:
        problems = list(_guarded(partial(_results, checked=numbers.append, ids=ids), session))
    return sum(numbers), problems


def _one_line(error: Exception) -> str:
    """Return an error's message in one line."""
    if isinstance(error, SQLAlchemyError):
        return " ".join(cause(error).split())
    return " ".join((str(error) if isinstance(error, StoreError) else f"{type(error).__name__}: {error}").split())


def _pages(session: Session) -> Iterator[DatabaseProblem]:
    if session.get_bind().dialect.name != "sqlite":
        return
    for (message,) in session.execute(text("PRAGMA integrity_check(20)")):
        if message != "ok":
            yield DatabaseProblem("damage", " ".join(str(message).split()))


def _references(session: Session) -> Iterator[DatabaseProblem]:
    """Yield references to missing rows. Impossible if the database enforces foreign keys."""
    for table in Base.metadata.sorted_tables:
        for key in table.foreign_keys:
            referred = key.column.table.alias("referred")
            absent = ~select(referred.c.id).where(referred.c.id == key.parent).exists()
            query = select(table.c.id).where(key.parent.is_not(None), absent)
            what = f"{table.name} with a {key.parent.name} that does not exist"
            yield from _listed(session, query, "reference", what)


def _copies(session: Session) -> Iterator[DatabaseProblem]:
    """Yield copies of runs that differ from the points."""
    for run in session.scalars(select(RunColumns.id)).all():
        try:
            wrong = "differs from the run's points" if columns.differs(session, run) else None
        except Exception as error:  # a damaged value may raise anything
            wrong = f"cannot be read: {_one_line(error)}"
        if wrong:
            yield DatabaseProblem("hash", f"run_columns {run} {wrong}")


def _orphans(session: Session) -> Iterator[DatabaseProblem]:
    """Yield unreferenced rows in tables only meant for reference."""
    for owner, key in ((Run, Point.run_id), (KernelSet, Point.kernels_id), (Environment, Point.environment_id)):
        query = select(owner.id).where(owner.id.not_in(select(key).where(key.is_not(None)).distinct()))
        yield from _listed(session, query, "orphan", f"{owner.__tablename__} without a point")
    lists = union(*(select(key).where(key.is_not(None)) for key in (Point.code_id, Point.packages_id)))
    query = select(LoadedList.id).where(LoadedList.id.not_in(lists))
    yield from _listed(session, query, "orphan", "loaded_list without a point")
    seen = select(Point.id).where(Point.series_id == Alert.series_id, Point.run_id == Alert.run_id)
    yield from _listed(session, select(Alert.id).where(~seen.exists()), "orphan", "alert without its point")
    for table, what in ((IncidentEvent, "an event"), (Alert, "a member")):
        without = select(Incident.id).where(Incident.id.not_in(select(table.incident_id).distinct()))
        yield from _listed(session, without, "orphan", f"incident without {what}")


def _listed(session: Session, query: Select[Any], kind: str, what: str) -> Iterator[DatabaseProblem]:
    number = session.scalar(select(func.count()).select_from(query.subquery())) or 0
    if number:
        first_ids = ", ".join(map(str, session.scalars(query.limit(5))))
        yield DatabaseProblem(kind, f"{number} {what} (id {first_ids}{', …' if number > 5 else ''})")


def _each(
    session: Session,
    mapped: type[Base],
    columns: Sequence[Any],  # the first is the row's id
    check: Callable[[Any], str | None],  # returns the problem of a row
    until: float = math.inf,  # a time.monotonic
    checked: Callable[[int], None] = lambda number: None,  # called with the number of rows of each batch
    ids: tuple[int, int] | None = None,  # the first and last id
) -> Iterator[DatabaseProblem]:
    """Check a table's rows by id, and report unreadable rows as problems."""
    name, key = mapped.__tablename__, inspect(mapped).columns["id"]
    share = key.between(*ids) if ids else true()
    query, beyond = select(*columns).order_by(key), share
    while keys := list(session.scalars(select(key).where(beyond).order_by(key).limit(_BATCH))):
        rows: Mapping[int, Row[Any]] = {}
        try:
            rows = {row[0]: row for row in session.execute(query.where(beyond, key <= keys[-1]))}
        except Exception:  # one of them is damaged, so read each one alone below
            session.expire_all()
        for each in keys:
            try:
                row = rows[each] if each in rows else session.execute(query.where(key == each)).one()
                wrong = check(row)
            except Exception as error:  # a damaged value may raise anything
                wrong = f"cannot be read: {_one_line(error)}"
            if wrong:
                yield DatabaseProblem("hash", f"{name} {each} {wrong}")
        checked(len(keys))
        if time.monotonic() > until:
            return
        beyond = share & (key > keys[-1])


def _checksums(session: Session) -> Iterator[DatabaseProblem]:
    for mapped in sealed_tables():
        names = sealed_columns(mapped)

        def check(row: Any, names: list[str] = names) -> str | None:
            _, checksum, *values = row
            made = checksum_of(dict(zip(names, values, strict=True)))
            return None if made == checksum else "does not match its checksum"

        columns = [getattr(mapped, name) for name in ("id", "checksum", *names)]
        yield from _each(session, mapped, columns, check)


def _environments(session: Session) -> Iterator[DatabaseProblem]:
    names = [name for name in records.Environment.__struct_fields__ if hasattr(Environment, name)]

    def check(row: Any) -> str | None:
        facts = msgspec.convert(row.facts, records.Environment)
        if digest(facts) != row.content or environment_identity(facts) != row.identity:
            return "does not match its hash"
        differs = [name for name in names if getattr(row, name) != getattr(facts, name)]
        return f"has a {differs[0]} that differs from its facts" if differs else None

    fixed = (Environment.id, Environment.content, Environment.identity, Environment.facts)
    yield from _each(session, Environment, [*fixed, *(getattr(Environment, name) for name in names)], check)


def _kernel_sets(session: Session) -> Iterator[DatabaseProblem]:
    def check(row: Any) -> str | None:
        if digest(row.kernels) != row.content:
            return "does not match its hash"
        made = kernels_hash(msgspec.convert(row.kernels, tuple[records.Kernel, ...]))
        return None if made == row.hash else "has a hash that does not match its kernels"

    yield from _each(session, KernelSet, [KernelSet.id, KernelSet.content, KernelSet.kernels, KernelSet.hash], check)


def _loaded_lists(session: Session) -> Iterator[DatabaseProblem]:
    def check(row: Any) -> str | None:
        return None if row.items is None or digest(row.items) == row.content else "does not match its hash"

    yield from _each(session, LoadedList, [LoadedList.id, LoadedList.content, LoadedList.items], check)


def _comparisons(session: Session) -> Iterator[DatabaseProblem]:
    identities = dict(session.execute(select(Series.id, Series.identity)).all())

    def check(row: Any) -> str | None:
        made = comparisons.content_of(identities.get(row.series_id), comparisons.from_row(row))
        return None if made == row.content else "does not match its hash"

    yield from _each(session, ABComparison, list(ABComparison.__table__.columns), check)


def _series(session: Session) -> Iterator[DatabaseProblem]:
    def check(row: Any) -> str | None:
        _, identity, *values = row
        made = identity_of(dict(zip(IDENTITY, values, strict=True)))
        return None if made == identity else "does not match its hash"

    columns = [getattr(Series, name) for name in ("id", "identity", *IDENTITY)]
    yield from _each(session, Series, columns, check)


def _results(
    session: Session,
    checked: Callable[[int], None],
    until: float = math.inf,
    ids: tuple[int, int] | None = None,
) -> Iterator[DatabaseProblem]:
    """Check every point against the content hash and the sample statistics."""
    environments = dict(session.execute(select(Environment.id, Environment.content)).all())
    series = dict(session.execute(select(Series.id, Series.identity)).all())
    read = RecordReader(session)

    def check(row: Any) -> str | None:
        record = read.record(row)
        environment, identity = environments[row.environment_id], series[row.series_id]
        made = plain_values(record, environment, identity)
        if row.content != made["content"] and row.content != earlier_content(record, environment, identity):
            return "does not match its hash"
        if series_identity(record) != identity:
            return "was measured on different hardware than its series"
        if any(made[name] != row._mapping[name] for name in LATENCY_COLUMNS):
            return "has statistics that do not match its samples"
        return None

    yield from _each(session, Point, POINT_COLUMNS, check, until, checked, ids)
