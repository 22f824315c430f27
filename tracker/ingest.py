"""Records into the store: a file is one transaction, so that it is stored whole or not at all."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session

from groupbench.tracker import schema
from groupbench.tracker.environment import digest, environment_identity, hardware_class
from groupbench.tracker.errors import IngestError
from groupbench.tracker.judge import burst_error
from groupbench.tracker.record import Accuracy, Cell, Kernel, Latency, Record, RecordError, Run, read
from groupbench.tracker.store import Store, cause

Numbered = tuple[int, Record]

_SMALLEST_MS, _LARGEST_MS = 1e-30, 1e30
"""Samples are kept as float32; outside these bounds they would become zero or infinite."""

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


def parse(lines: Iterable[bytes], source: str) -> list[Numbered]:
    """The records of a stream with their line numbers, checked one by one and against each other.

    Raises IngestError, which names the line: a record that is malformed or cannot be stored, or two records
    of one run and series that say different things.
    """
    records: list[Numbered] = []
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    try:
        for number, record in read(lines):
            problem = unstorable(record)
            if problem:
                raise IngestError(f"{source}: line {number}: {problem}")
            key = (record.run.id, series_identity(record))
            content = content_of(record)
            first, before = seen.setdefault(key, (number, content))
            if before != content:
                said = f"contradicts line {first}, same run and series"
                raise IngestError(f"{source}: line {number}: {said} ({_named(record.cell)})")
            records.append((number, record))
    except RecordError as error:
        raise IngestError(f"{source}: {error}") from error
    if not records:
        raise IngestError(f"{source}: holds no record")
    return records


def ingest(store: Store, records: Sequence[Numbered], source: str) -> Ingested:
    """Store what `parse` gave, in one transaction. Raises IngestError; nothing is stored then."""
    with store.write() as session:
        writer = _Writer(session)
        for number, record in records:
            try:
                writer.add(record)
            except IngestError as error:
                raise IngestError(f"{source}: line {number}: {error}") from error
            except (IntegrityError, OperationalError):
                raise  # another writer or the disk, not this line
            except SQLAlchemyError as error:
                raise IngestError(f"{source}: line {number}: cannot be stored: {cause(error)}") from error
            except (RecursionError, OverflowError, ValueError) as error:
                raise IngestError(f"{source}: line {number}: cannot be stored: {error}") from error
        return Ingested(
            source=source,
            records=len(records),
            added=writer.added,
            known=writer.known,
            new_series=writer.new_series,
            runs=tuple((run.uuid, hash_, run.dirty) for run, hash_ in writer.runs.values()),
        )


def unstorable(record: Record) -> str | None:
    """Why a valid record cannot be stored, or None."""
    try:
        for instant in (record.run.started, record.run.commit.time):
            if instant is not None:
                instant.astimezone(UTC)
        content_of(record)
    except OverflowError:
        return "a time is out of range"
    except RecursionError:
        return "is nested too deeply"
    if record.latency is not None:
        for burst in record.latency.bursts_ms:
            for ms in burst:
                if not _SMALLEST_MS < ms < _LARGEST_MS:
                    return f"latency.bursts_ms holds {ms:g}, which is no time"
    return None


def series_identity(record: Record) -> str:
    cell = record.cell
    return digest(
        [
            cell.operator,
            cell.backend,
            cell.mode,
            cell.dtype,
            cell.shape,
            cell.host,
            cell.protocol,
            hardware_class(record.environment),
            cell.seed,
        ]
    )


def content_of(record: Record) -> str:
    """Hash of what a record says, but for what a later one may add about its commit."""
    commit = msgspec.structs.replace(record.run.commit, parents=(), branch=None, time=None, author=None, subject=None)
    run = msgspec.structs.replace(record.run, commit=commit, started=record.run.started.astimezone(UTC))
    return digest(msgspec.structs.replace(record, run=run))


def pack_samples(bursts: Sequence[Sequence[float]]) -> tuple[bytes, list[int]]:
    """(compressed float32, length of each burst)."""
    flat = np.concatenate([np.asarray(burst, dtype="<f4") for burst in bursts])
    return zlib.compress(flat.tobytes()), [len(burst) for burst in bursts]


def unpack_samples(packed: bytes, lengths: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """The bursts back, each sample rounded to float32."""
    flat = np.frombuffer(zlib.decompress(packed), dtype="<f4")
    parts = np.split(flat, np.cumsum(lengths)[:-1])
    return tuple(tuple(part.tolist()) for part in parts)


class _Writer:
    """Adds records within one transaction, remembering what it has looked up."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.added = self.known = self.new_series = 0
        self.runs: dict[str, tuple[schema.Run, str]] = {}
        self.series: dict[str, schema.Series] = {}
        self.environments: dict[str, int] = {}
        self.points: dict[str, dict[int, str]] = {}  # of each run: series to content

    def add(self, record: Record) -> None:
        run = self._run(record.run)
        series = self._series(record)
        content = content_of(record)
        before = self.points[record.run.id].get(series.id)
        if before is not None:
            if before != content:
                raise IngestError(f"run {run.uuid} is stored with another result for {_named(record.cell)}")
            self.known += 1
            return
        for fact in _SERIES_FACTS:
            value = getattr(record.cell, fact)
            if value and value != getattr(series, fact):
                setattr(series, fact, value)
        environment = self._environment(record)
        self.session.add(_point(record, run.id, series.id, environment, content))
        self.session.flush()
        self.points[record.run.id][series.id] = content
        self.added += 1

    def _run(self, given: Run) -> schema.Run:
        if given.id in self.runs:
            run, hash_ = self.runs[given.id]
            commit = self.session.get_one(schema.Commit, run.commit_id)
        else:
            commit, run = self._find_run(given)
            hash_ = commit.hash
        if hash_ != given.commit.hash:
            raise IngestError(f"run {given.id} is of commit {hash_}, but this record says {given.commit.hash}")
        for field in _RUN_FIELDS:
            value = given.commit.dirty if field == "dirty" else getattr(given, field)
            if getattr(run, field) != value:
                raise IngestError(f"run {given.id} has {field} {getattr(run, field)}, but this record says {value}")
        for field in _COMMIT_FIELDS:
            value = getattr(given.commit, field)
            if value not in (None, ()) and getattr(commit, field) is None:
                setattr(commit, field, list(value) if field == "parents" else value)
        return run

    def _find_run(self, given: Run) -> tuple[schema.Commit, schema.Run]:
        run = self.session.scalar(select(schema.Run).where(schema.Run.uuid == given.id))
        if run is not None:
            commit = self.session.get_one(schema.Commit, run.commit_id)
            points = select(schema.Point.series_id, schema.Point.content).where(schema.Point.run_id == run.id)
            self.points[given.id] = dict(self.session.execute(points).all())
        else:
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
            self.points[given.id] = {}
        self.runs[given.id] = (run, commit.hash)
        return commit, run

    def _series(self, record: Record) -> schema.Series:
        identity = series_identity(record)
        series = self.series.get(identity)
        if series is None:
            series = self.session.scalar(select(schema.Series).where(schema.Series.identity == identity))
        if series is None:
            cell = record.cell
            series = schema.Series(
                identity=identity,
                operator=cell.operator,
                backend=cell.backend,
                mode=cell.mode,
                dtype=cell.dtype,
                shape=cell.shape,
                host=cell.host,
                protocol=cell.protocol,
                hardware=hardware_class(record.environment),
                seed=cell.seed,
                dims=cell.dims,
                flops=cell.flops,
                min_bytes=cell.min_bytes,
            )
            self.session.add(series)
            self.session.flush()
            self.new_series += 1
        self.series[identity] = series
        return series

    def _environment(self, record: Record) -> int:
        given = record.environment
        content = digest(given)
        if content not in self.environments:
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
            self.environments[content] = known
        return self.environments[content]


def _point(record: Record, run: int, series: int, environment: int, content: str) -> schema.Point:
    accuracy = record.accuracy or Accuracy()
    return schema.Point(
        run_id=run,
        series_id=series,
        environment_id=environment,
        content=content,
        status=record.status,
        message=record.message,
        baseline=record.baseline,
        **_latency_columns(record.latency),
        rms=accuracy.rms,
        max_abs=accuracy.max_abs,
        worst_block_rms=accuracy.worst_block_rms,
        mismatch=accuracy.mismatch,
        unwritten=accuracy.unwritten,
        repeatable=accuracy.repeatable,
        first_bad=None if accuracy.first_bad is None else list(accuracy.first_bad),
        kernel_hash=_kernel_hash(record.kernels),
        kernels=msgspec.to_builtins(record.kernels),
        duration_s=record.duration_s,
    )


def _latency_columns(latency: Latency | None) -> dict[str, Any]:
    if latency is None:
        names = "timing median_ms low_ms high_ms error samples burst_lengths prepare_ms enqueue_ms telemetry"
        return dict.fromkeys(names.split())
    medians = [float(np.median(burst)) for burst in latency.bursts_ms]
    samples, lengths = pack_samples(latency.bursts_ms)
    error = burst_error(np.asarray(medians))
    return {
        "timing": latency.timing,
        "median_ms": float(np.median(medians)),
        "low_ms": min(medians),
        "high_ms": max(medians),
        "error": None if math.isnan(error) else error,
        "samples": samples,
        "burst_lengths": lengths,
        "prepare_ms": latency.prepare_ms,
        "enqueue_ms": latency.enqueue_ms,
        "telemetry": msgspec.to_builtins(latency.telemetry) or None,
    }


def _kernel_hash(kernels: Sequence[Kernel]) -> str | None:
    hashes = [kernel.hash for kernel in kernels]
    if not hashes or None in hashes:
        return None
    return hashes[0] if len(hashes) == 1 else digest(hashes)


def _named(cell: Cell) -> str:
    return f"{cell.operator} {cell.backend} {cell.mode} {cell.dtype} {cell.shape}"
