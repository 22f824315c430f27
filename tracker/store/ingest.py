"""Records into the store: a file is one transaction, so that it is stored whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import delete, insert, select, update
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker.environment import digest, environment_identity
from groupbench.tracker.errors import IngestError
from groupbench.tracker.identity import series_fields, series_identity
from groupbench.tracker.record import Cell, Environment, Record, RecordError, Run, read
from groupbench.tracker.store import schema
from groupbench.tracker.store.engine import Store, cause
from groupbench.tracker.store.packing import unpack_samples
from groupbench.tracker.store.points import content_of, kernels_hash, point_values
from groupbench.tracker.text.wording import counted

__all__ = ["Ingested", "Numbered", "content_of", "ingest", "parse", "read_checked", "unpack_samples"]

Numbered = tuple[int, Record]

_SMALLEST_MS, _LARGEST_MS = 1e-30, 1e30
"""Samples are kept as float32; outside these bounds they would become zero or infinite."""

_LONGEST_NAME = 1000
"""Bytes of a text that an index holds: PostgreSQL takes about 2,700 for all of an entry."""

NAMED_RUNS = 5
"""Of the runs in a file, those that are named."""

NOT_REACHED = "skipped"
"""The status of what a run has not come to yet: the result of its going on takes the place of it."""

_BATCH = 500
"""Records looked up and inserted at once: enough to make statements rare, few enough to hold in memory."""

_AHEAD = timedelta(days=1)
"""How far the clock of who measured may be ahead. A run of next year would be the newest until then."""

_RUN_FIELDS = ("dirty", "started", "trigger", "plan", "command")
_COMMIT_FIELDS = ("parents", "branch", "time", "author", "subject")
_SERIES_FACTS = ("dims", "flops", "min_bytes")


@dataclass(frozen=True)
class Ingested:
    """What became of one file."""

    source: str
    records: int
    added: int  # points that were not there before
    known: int  # points that were there already, the same
    new_series: int
    runs: tuple[tuple[str, str, bool], ...]  # (run id, commit hash, dirty), in order of appearance

    @property
    def told(self) -> str:
        """`2 points added, 0 already known, 2 series new; run ... at ...`; of many runs the first are named."""
        nothing = "" if self.added else " (nothing new)"
        runs = [f"run {run} at {commit[:10]}{'+' if dirty else ''}" for run, commit, dirty in self.runs]
        more = [f"and {len(runs) - NAMED_RUNS} more"] if len(runs) > NAMED_RUNS else []
        return (
            f"{counted(self.added, 'point')} added, {self.known} already known{nothing}, {self.new_series} series new; "
            f"{'; '.join([*runs[:NAMED_RUNS], *more])}"
        )


def read_checked(lines: Iterable[bytes], source: str) -> Iterator[Numbered]:
    """The records of a stream with their line numbers, checked one by one and against each other.

    Holds none of them: what is remembered of each is a hash. Raises IngestError, which names the line: a
    record that is malformed or cannot be stored, or two results of one run and series that say different
    things; or a stream without any record.
    """
    empty = True
    seen: dict[tuple[str, str], tuple[int, int]] = {}
    try:
        for number, record in read(lines):
            problem = unstorable(record)
            if problem:
                raise IngestError(f"{source}: line {number}: {problem}")
            if record.status != NOT_REACHED:
                key = (record.run.id, series_identity(record))
                content = content_of(record)
                first, before = seen.setdefault(key, (number, content))
                if before != content:
                    said = f"contradicts line {first}, same run and series"
                    raise IngestError(f"{source}: line {number}: {said} ({_named(record.cell)})")
            empty = False
            yield number, record
    except RecordError as error:
        raise IngestError(f"{source}: {error}") from error
    if empty:
        raise IngestError(f"{source}: holds no record")


def parse(lines: Iterable[bytes], source: str) -> list[Numbered]:
    """All records of a stream that is small enough to hold. Raises IngestError, as `read_checked` does."""
    return list(read_checked(lines, source))


def ingest(store: Store, records: Iterable[Numbered], source: str) -> Ingested:
    """Store records that were checked, in one transaction. Raises IngestError; nothing is stored then."""
    with store.write() as session:
        return ingest_into(session, records, source)


def ingest_into(session: Session, records: Iterable[Numbered], source: str) -> Ingested:
    """`ingest` within a transaction that is open already. Raises IngestError; it must be undone then."""
    count = 0
    remaining = iter(records)
    writer = _Writer(session)
    while batch := list(islice(remaining, _BATCH)):
        count += len(batch)
        try:
            writer.add(batch, source)
        except (IntegrityError, OperationalError):
            raise  # another writer or the disk, not these lines
        except (SQLAlchemyError, RecursionError, OverflowError, ValueError) as error:
            said = cause(error) if isinstance(error, SQLAlchemyError) else error
            where = f"lines {batch[0][0]} to {batch[-1][0]}" if len(batch) > 1 else f"line {batch[0][0]}"
            raise IngestError(f"{source}: {where}: cannot be stored: {said}") from error
    return Ingested(
        source=source,
        records=count,
        added=writer.added,
        known=writer.known,
        new_series=writer.new_series,
        runs=tuple(writer.states),
    )


def clock() -> datetime:
    """The time by this machine."""
    return datetime.now(UTC)


def unstorable(record: Record) -> str | None:
    """Why a valid record cannot be stored, or None."""
    try:
        for instant in (record.run.started, record.run.commit.time):
            if instant is not None:
                instant.astimezone(UTC)
        msgspec.json.encode(record.kernels)
    except OverflowError:
        return "a time is out of range"
    except RecursionError:
        return "is nested too deeply"
    cell, run = record.cell, record.run
    here = clock()
    if run.started - max(here, run.commit.time or here) > _AHEAD:  # where the clock here is slow, the commit's counts
        return f"run.started is {run.started:%Y-%m-%d %H:%M %Z}, which is yet to come"
    for name, text in (
        ("cell.operator", cell.operator),
        ("cell.backend", cell.backend),
        ("run.id", run.id),
        ("run.plan", run.plan or ""),
        ("run.commit.hash", run.commit.hash),
    ):
        if len(text) > _LONGEST_NAME // 4 and len(text.encode()) > _LONGEST_NAME:
            return f"{name} is longer than {_LONGEST_NAME} bytes"
    if record.latency is not None:
        for burst in record.latency.bursts_ms:
            for ms in (min(burst), max(burst)):
                if not _SMALLEST_MS < ms < _LARGEST_MS:
                    return f"latency.bursts_ms holds {ms:g}, which is no time"
    return None


encode = msgspec.json.Encoder().encode


class _Stored(NamedTuple):
    """A point of a run, as far as another result of its cell is compared with it."""

    content: int
    status: str


class _Writer:
    """Adds records within one transaction, remembering what it has looked up."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.added = self.known = self.new_series = 0
        self.states: dict[tuple[str, str, bool], None] = {}
        self.latest: tuple[Run, int] | None = None  # runs come in blocks
        self.runs: dict[str, tuple[schema.Run, schema.Commit]] = {}
        self.points: dict[int, dict[int, _Stored]] = {}  # of each run, by series
        self.series: dict[str, tuple[int, dict[str, Any]]] = {}  # identity to key and facts
        self.environments: dict[bytes, tuple[int, str]] = {}
        self.kernels: dict[bytes, int] = {}

    def add(self, batch: list[Numbered], source: str) -> None:
        identities = [series_identity(record) for _, record in batch]
        self._look_up_series(batch, identities)
        self._look_up_kernels(batch)
        rows: dict[tuple[int, int], dict[str, Any]] = {}  # by run and series: a file may hold what took its place
        for (number, record), identity in zip(batch, identities, strict=True):
            try:
                row = self._point(record, identity)
            except IngestError as error:
                raise IngestError(f"{source}: line {number}: {error}") from error
            if row is not None:
                rows[row["run_id"], row["series_id"]] = row
        if rows:
            self.session.execute(insert(schema.table_of(schema.Point)), list(rows.values()))
        self.added += len(rows)

    def _point(self, record: Record, identity: str) -> dict[str, Any] | None:
        """Columns of a new point; None where it is stored already."""
        run = self._run(record.run)
        series, facts = self.series[identity]
        environment, environment_content = self._environment(record.environment)
        values = point_values(record, environment_content, identity)
        before = self.points[run].get(series)
        if before is not None:
            if before.content == values["content"] or record.status == NOT_REACHED:
                self.known += 1
                return None
            if before.status != NOT_REACHED:
                raise IngestError(f"run {record.run.id} is stored with another result for {_named(record.cell)}")
            # The run went on since and measured it.
            own = (schema.Point.run_id == run, schema.Point.series_id == series)
            self.session.execute(delete(schema.Point).where(*own))
        self.points[run][series] = _Stored(values["content"], record.status)
        newer = {name: getattr(record.cell, name) for name in _SERIES_FACTS}
        newer = {name: value for name, value in newer.items() if value and value != facts[name]}
        if newer:
            self.session.execute(update(schema.Series).where(schema.Series.id == series).values(newer))
            facts.update(newer)
        kernels = self.kernels[encode(record.kernels)] if record.kernels else None
        keys = {"run_id": run, "series_id": series, "environment_id": environment}
        return {**keys, "kernels_id": kernels, **values}

    def _run(self, given: Run) -> int:
        """Key of the run, made or found. A run is of one commit; what is known of a commit is only added to."""
        if self.latest is not None and self.latest[0] == given:
            return self.latest[1]
        if given.id not in self.runs:
            self.runs[given.id] = self._find_run(given)
        run, commit = self.runs[given.id]
        if commit.hash != given.commit.hash:
            raise IngestError(f"run {given.id} is of commit {commit.hash}, but this record says {given.commit.hash}")
        for field in _RUN_FIELDS:
            value = given.commit.dirty if field == "dirty" else getattr(given, field)
            if getattr(run, field) != value:
                raise IngestError(f"run {given.id} has {field} {getattr(run, field)}, but this record says {value}")
        for field in _COMMIT_FIELDS:
            value = getattr(given.commit, field)
            if value not in (None, ()) and getattr(commit, field) is None:
                setattr(commit, field, list(value) if field == "parents" else value)
        self.states[given.id, commit.hash, run.dirty] = None
        self.latest = (given, run.id)
        return run.id

    def _find_run(self, given: Run) -> tuple[schema.Run, schema.Commit]:
        run = self.session.scalar(select(schema.Run).where(schema.Run.uuid == given.id))
        if run is not None:
            columns = (schema.Point.series_id, schema.Point.content, schema.Point.status)
            points = self.session.execute(select(*columns).where(schema.Point.run_id == run.id))
            self.points[run.id] = {series: _Stored(content, status) for series, content, status in points}
            return run, self.session.get_one(schema.Commit, run.commit_id)
        known = self.session.scalar(select(schema.Commit).where(schema.Commit.hash == given.commit.hash))
        commit = known or schema.Commit(hash=given.commit.hash)
        self.session.add(commit)
        self.session.flush()
        run = schema.Run(
            uuid=given.id,
            commit_id=commit.id,
            dirty=given.commit.dirty,
            started=given.started,
            trigger=given.trigger,
            plan=given.plan,
            command=given.command,
        )
        self.session.add(run)
        self.session.flush()
        self.points[run.id] = {}
        return run, commit

    def _look_up_series(self, batch: list[Numbered], identities: list[str]) -> None:
        """Key and facts of every series of the batch, made where it is new."""
        wanted = {
            identity: record
            for (_, record), identity in zip(reversed(batch), reversed(identities), strict=True)
            if identity not in self.series
        }
        self._find_series(list(wanted))
        missing = [identity for identity in reversed(wanted) if identity not in self.series]  # in the file's order
        if missing:
            rows = [_series_values(identity, wanted[identity]) for identity in missing]
            self.session.execute(insert(schema.table_of(schema.Series)), rows)
            self.new_series += len(missing)
            self._find_series(missing)

    def _find_series(self, identities: list[str]) -> None:
        if not identities:
            return
        facts = [getattr(schema.Series, name) for name in _SERIES_FACTS]
        query = select(schema.Series.id, schema.Series.identity, *facts).where(schema.Series.identity.in_(identities))
        for row in self.session.execute(query):
            self.series[row.identity] = (row.id, {name: getattr(row, name) for name in _SERIES_FACTS})

    def _environment(self, given: Environment) -> tuple[int, str]:
        """(key, hash of every fact)."""
        encoded = encode(given)
        if encoded not in self.environments:
            content = digest(given)
            known = self.session.scalar(select(schema.Environment.id).where(schema.Environment.content == content))
            if known is None:
                columns = schema.Environment.__table__.columns.keys()
                facts = {name: getattr(given, name) for name in given.__struct_fields__ if name in columns}
                environment = schema.Environment(
                    content=content,
                    identity=environment_identity(given),
                    facts=msgspec.to_builtins(given),
                    **facts,
                )
                self.session.add(environment)
                self.session.flush()
                known = environment.id
            self.environments[encoded] = (known, content)
        return self.environments[encoded]

    def _look_up_kernels(self, batch: list[Numbered]) -> None:
        """Key of every set of kernels of the batch, made where it is new."""
        wanted = {encode(record.kernels): record.kernels for _, record in batch if record.kernels}
        wanted = {encoded: kernels for encoded, kernels in wanted.items() if encoded not in self.kernels}
        if not wanted:
            return
        rows = {}
        for encoded, kernels in wanted.items():
            plain = msgspec.to_builtins(kernels)
            rows[encoded] = {"content": digest(plain), "hash": kernels_hash(kernels), "kernels": plain}
        unlike = {row["content"]: row for row in rows.values()}
        table = schema.KernelSet
        query = select(table.content, table.id).where(table.content.in_(list(unlike)))
        known = dict(self.session.execute(query).all())
        missing = [row for content, row in unlike.items() if content not in known]
        if missing:
            self.session.execute(insert(schema.table_of(table)), missing)
            known = dict(self.session.execute(query).all())
        self.kernels.update((encoded, known[row["content"]]) for encoded, row in rows.items())


def _series_values(identity: str, record: Record) -> dict[str, Any]:
    facts = {name: getattr(record.cell, name) for name in _SERIES_FACTS}
    return {"identity": identity, **series_fields(record), **facts}


def _named(cell: Cell) -> str:
    return f"{cell.operator} {cell.backend} {cell.mode} {cell.dtype} {cell.shape}"
