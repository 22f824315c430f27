"""Check records and prepare them for storage: decode, hash and pack each one once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar, cast

import msgspec

from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.identity import series_identity
from groupbench.tracker.facts.loaded import problem_of
from groupbench.tracker.facts.physics import implausible
from groupbench.tracker.facts.record import (
    LARGEST_KERNELS,
    Cell,
    Environment,
    Latency,
    Loaded,
    Record,
    RecordError,
    Run,
    WrongSchema,
    read,
)
from groupbench.tracker.facts.spelling import canonical, canonical_environment
from groupbench.tracker.store.points import packed_values, plain_values

T = TypeVar("T")
R = TypeVar("R")

Numbered = tuple[int, Record]
"""A line number, counted from 1, and the record."""

NOT_REACHED = "skipped"
"""The status of cells that a run has not reached. A later result of the same run replaces it."""

NOT_RECORDS = (
    ". Is it a file of records, as `tritonbench --records FILE` writes? "
    "`groupbench import` reads other benchmarks' files"
)
"""Added to the error of a file that does not begin with a record."""

BATCH = 500
"""Number of records looked up and inserted at once: enough for few statements, few enough for memory."""

_SMALLEST_MS, _LARGEST_MS = 1e-30, 1e30
"""Bounds of a sample. Samples are stored as float32 and would become zero or infinite beyond them."""

_INDEXED_BYTES = 1000
"""Largest number of bytes of an indexed text. PostgreSQL allows about 2,700 for a whole entry."""

_AHEAD = timedelta(days=1)
"""How far the measuring machine's clock may be ahead. A run dated next year would stay the newest until then."""

_PACKED_SAMPLES = 1 << 13
"""Samples packed together. More would only take more memory."""

encode = msgspec.json.Encoder().encode


class Checked(msgspec.Struct, frozen=True, gc=False):
    """A record ready to be stored. Records share their run and environment objects."""

    number: int  # line number
    run: Run
    environment: Environment
    environment_content: str  # hash of all facts of the environment
    cell: Cell
    identity: str  # identity of the series
    kernels: tuple[str, bytes] | None  # their hash and their JSON; None if the record has no kernels
    values: dict[str, Any]  # columns of the point except its keys
    loaded: Loaded | None = None


Hashed = tuple[Checked, Latency | None]
"""A checked record whose latency is not packed yet."""


def clock() -> datetime:
    """Return this machine's time."""
    return datetime.now(UTC)


def storable(lines: Iterable[bytes], source: str, first: int = 1) -> Iterator[Numbered]:
    """Read records from lines, the first numbered `first`.

    Raises IngestError with the line number for a malformed record, or one no database can store.
    """
    number = first - 1
    try:
        for number, record in read(lines, first):
            problem = unstorable_parts(record.run, record.cell) or unstorable_result(record)
            if problem:
                raise IngestError(f"{source}: line {number}: {problem}")
            yield number, record
    except RecordError as error:
        is_other = number == 0 and not isinstance(error.__cause__, WrongSchema)
        raise IngestError(f"{source}: {error}{NOT_RECORDS if is_other else ''}") from error


def prepared(records: Iterable[Numbered], source: str) -> Iterator[Checked]:
    """Hash and pack storable records. Raises IngestError."""
    return packed(hashed(records, source))


def hashed(records: Iterable[Numbered], source: str) -> Iterator[Hashed]:
    """Hash storable records. Raises IngestError."""
    runs, environments = _Once[Run, Run](lambda run: run), _Once(_stable)
    hashes: dict[bytes, str] = {}  # of kernels, which many records may share
    for number, original in records:
        cell = canonical(original.cell, original.run.started)
        environment, content = environments.of(original.environment)
        record = original
        if cell is not original.cell or environment.cpu != original.environment.cpu:
            record = msgspec.structs.replace(original, cell=cell, environment=environment)
        try:
            identity = series_identity(record)
            kernels = None
            if record.kernels:
                encoded = encode(record.kernels)
                if encoded not in hashes:
                    hashes[encoded] = digest(msgspec.to_builtins(record.kernels))
                kernels = hashes[encoded], encoded
            values = plain_values(record, content, identity)
        except (RecursionError, OverflowError, ValueError) as error:
            raise IngestError(f"{source}: line {number}: cannot store the record: {error}") from error
        checked = Checked(
            number, runs.of(record.run), environment, content, record.cell, identity, kernels, values, record.loaded
        )  # fmt: skip
        yield checked, record.latency


def packed(records: Iterable[Hashed]) -> Iterator[Checked]:
    for batch in _batches(records):
        values = packed_values([latency for _, latency in batch])
        for (checked, _), columns in zip(batch, values, strict=True):
            checked.values.update(columns)
            yield checked


def _batches(records: Iterable[Hashed]) -> Iterator[list[Hashed]]:
    batch: list[Hashed] = []
    samples = 0
    for checked, latency in records:
        batch.append((checked, latency))
        samples += 1 if latency is None else sum(map(len, latency.bursts_ms))
        if samples >= _PACKED_SAMPLES:
            yield batch
            batch, samples = [], 0
    if batch:
        yield batch


class _Once(Generic[T, R]):
    """Makes one object for equal values, which come in blocks."""

    def __init__(self, make: Callable[[T], R]) -> None:
        self._make, self._latest = make, cast("tuple[T | None, R]", (None, None))
        self._known: dict[bytes, R] = {}

    def of(self, value: T) -> R:
        if self._latest[0] is not value and self._latest[0] != value:
            encoded = encode(value)
            if encoded not in self._known:
                self._known[encoded] = self._make(value)
            self._latest = value, self._known[encoded]
        return self._latest[1]


def _stable(environment: Environment) -> tuple[Environment, str]:
    """Return an environment in the usual spelling, with the hash."""
    stable = canonical_environment(environment)
    return stable, digest(stable)


def unstorable_result(record: Record) -> str | None:
    """Return why the database cannot hold a record's result, or None."""
    try:
        if record.kernels and len(encode(record.kernels)) > LARGEST_KERNELS:
            return f"kernels take more than {LARGEST_KERNELS >> 10} KiB"
    except RecursionError:
        return "the record is nested too deeply"
    fingerprint = None if record.loaded is None else problem_of(record.loaded)
    problem = fingerprint or _no_duration(record)
    return implausible(record) if problem is None and record.status == "ok" else problem


def unstorable_parts(run: Run, cell: Cell) -> str | None:
    """Return why the database cannot hold the facts which a run's or a series' records share, or None."""
    try:
        for instant in (run.started, run.commit.time):
            if instant is not None:
                instant.astimezone(UTC)
    except OverflowError:
        return "a time is out of range"
    if run.started - clock() > _AHEAD:
        return f"run.started is {run.started:%Y-%m-%d %H:%M %Z}, which is in the future by this machine's clock"
    return _too_long(run, cell)


def _too_long(run: Run, cell: Cell) -> str | None:
    """Return which name is longer than the database indexes, or None."""
    for name, text in (
        ("cell.operator", cell.operator),
        ("cell.backend", cell.backend),
        ("run.id", run.id),
        ("run.plan", run.plan or ""),
        ("run.commit.hash", run.commit.hash),
    ):
        if len(text) > _INDEXED_BYTES // 4 and len(text.encode()) > _INDEXED_BYTES:
            return f"{name} is longer than {_INDEXED_BYTES} bytes"
    return None


def _no_duration(record: Record) -> str | None:
    """Return which sample cannot be a duration, or None."""
    for burst in () if record.latency is None else record.latency.bursts_ms:
        for ms in (min(burst), max(burst)):
            if not _SMALLEST_MS < ms < _LARGEST_MS:
                return f"latency.bursts_ms: {ms:g} is not a valid duration"
    return None


def named(cell: Cell) -> str:
    """Return a cell's name for messages."""
    return f"{cell.operator} {cell.backend} {cell.mode} {cell.dtype} {cell.shape}"
