"""Records that were checked, with everything that storing them takes: each is decoded, hashed and packed once.

A file is checked whole before the database is opened, so that one bad line stores nothing and no other writer waits
while a file is read. Between the two, what was made of its records is kept in a temporary file once it is large.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from itertools import islice
from types import TracebackType
from typing import Any

import msgspec

from groupbench.tracker.environment import digest
from groupbench.tracker.errors import IngestError
from groupbench.tracker.identity import series_identity
from groupbench.tracker.physics import implausible
from groupbench.tracker.record import Cell, Environment, Record, RecordError, Run, read
from groupbench.tracker.store.points import point_values

Numbered = tuple[int, Record]
"""A record and its line, counted from 1."""

NOT_REACHED = "skipped"
"""The status of what a run has not come to yet: a later result of the same run replaces it."""

BATCH = 500
"""Records looked up and inserted at once: enough to make statements rare, few enough to hold in memory."""

_SMALLEST_MS, _LARGEST_MS = 1e-30, 1e30
"""Samples are kept as float32; outside these bounds they would become zero or infinite."""

_LONGEST_NAME = 1000
"""Bytes of a text that an index holds: PostgreSQL takes about 2,700 for all of an entry."""

_AHEAD = timedelta(days=1)
"""How far the clock of the measuring machine may be ahead. A run of next year would be the newest until then."""

_IN_MEMORY = 1 << 26
"""Bytes of checked records that are kept in memory; more go to a temporary file."""

encode = msgspec.json.Encoder().encode


class Checked(msgspec.Struct, frozen=True, gc=False):
    """A record that can be stored. Records that share a run or an environment share the object."""

    number: int  # of its line
    run: Run
    environment: Environment
    environment_content: str  # hash of every fact of it
    cell: Cell
    identity: str  # of its series
    kernels: bytes | None  # as JSON; None where the record names none
    values: dict[str, Any]  # columns of the point but for its keys


def clock() -> datetime:
    """Return the time by this machine."""
    return datetime.now(UTC)


def read_checked(lines: Iterable[bytes], source: str) -> Iterator[Checked]:
    """Check the records of a stream one by one and against each other.

    Keeps a hash of each and nothing else. Raises IngestError, which names the line: a record that is malformed or
    cannot be stored, or two results of one run and series that differ; or a stream without any record.
    """
    empty = True
    seen: dict[tuple[str, str], tuple[int, int]] = {}
    for checked in prepared(_storable(lines, source), source):
        empty = False
        if checked.values["status"] != NOT_REACHED:
            content = checked.values["content"]
            key = (checked.run.id, checked.identity)
            first, before = seen.setdefault(key, (checked.number, content))
            if before != content:
                problem = f"contradicts line {first}, same run and series ({named(checked.cell)})"
                raise IngestError(f"{source}: line {checked.number}: {problem}")
        yield checked
    if empty:
        raise IngestError(f"{source}: holds no record")


def _storable(lines: Iterable[bytes], source: str) -> Iterator[Numbered]:
    try:
        for number, record in read(lines):
            problem = unstorable(record)
            if problem:
                raise IngestError(f"{source}: line {number}: {problem}")
            yield number, record
    except RecordError as error:
        raise IngestError(f"{source}: {error}") from error


def prepared(records: Iterable[Numbered], source: str) -> Iterator[Checked]:
    """Hash and pack records that are known to be storable, one at a time. Raises IngestError."""
    runs, environments = _Runs(), _Environments()
    for number, record in records:
        environment, content = environments.of(record.environment)
        try:
            identity = series_identity(record)
            kernels = encode(record.kernels) if record.kernels else None
            values = point_values(record, content, identity)
        except (RecursionError, OverflowError, ValueError) as error:
            raise IngestError(f"{source}: line {number}: cannot be stored: {error}") from error
        yield Checked(
            number, runs.of(record.run), environment, content, record.cell, identity, kernels, values
        )  # fmt: skip


class _Runs:
    """One object for all runs that are equal."""

    def __init__(self) -> None:
        self._latest: Run | None = None  # records of a run come in blocks
        self._known: dict[bytes, Run] = {}

    def of(self, run: Run) -> Run:
        if self._latest is None or self._latest != run:
            self._latest = self._known.setdefault(encode(run), run)
        return self._latest


class _Environments:
    """One object, and one hash, for all environments that are equal."""

    def __init__(self) -> None:
        self._latest: tuple[Environment, str] | None = None
        self._known: dict[bytes, tuple[Environment, str]] = {}

    def of(self, environment: Environment) -> tuple[Environment, str]:
        if self._latest is None or self._latest[0] != environment:
            encoded = encode(environment)
            if encoded not in self._known:
                self._known[encoded] = environment, digest(environment)
            self._latest = self._known[encoded]
        return self._latest


class _Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A checked record with its run and its environment by number."""

    number: int
    run: int
    environment: int
    cell: Cell
    identity: str
    kernels: bytes | None
    values: dict[str, Any]


class Staged:
    """Checked records, kept until the database is open. Iterating gives them back in their order, once.

    A context: closing it frees what is kept. Making one raises what iterating `records` raises.
    """

    def __init__(self, records: Iterable[Checked]) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115 - __exit__ closes it
        self._sizes: list[int] = []  # bytes of each batch
        self._runs: list[Run] = []
        self._environments: list[tuple[Environment, str]] = []
        try:
            self._fill(iter(records))
        except BaseException:
            self._file.close()
            raise

    def _fill(self, records: Iterator[Checked]) -> None:
        encoder = msgspec.msgpack.Encoder()
        runs: dict[int, int] = {}  # by id: the objects are kept, and each is the only one of its value
        environments: dict[int, int] = {}
        while batch := list(islice(records, BATCH)):
            rows = []
            for one in batch:
                if id(one.run) not in runs:
                    runs[id(one.run)] = len(self._runs)
                    self._runs.append(one.run)
                if id(one.environment) not in environments:
                    environments[id(one.environment)] = len(self._environments)
                    self._environments.append((one.environment, one.environment_content))
                places = runs[id(one.run)], environments[id(one.environment)]
                rows.append(_Row(one.number, *places, one.cell, one.identity, one.kernels, one.values))
            encoded = encoder.encode(rows)
            self._file.write(encoded)
            self._sizes.append(len(encoded))
        self._file.seek(0)

    def __iter__(self) -> Iterator[Checked]:
        decoder = msgspec.msgpack.Decoder(list[_Row])
        for size in self._sizes:
            for row in decoder.decode(self._file.read(size)):
                yield Checked(
                    row.number, self._runs[row.run], *self._environments[row.environment],
                    row.cell, row.identity, row.kernels, row.values,
                )  # fmt: skip

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._file.close()


def unstorable(record: Record) -> str | None:
    """Return why a valid record cannot be stored, or None."""
    try:
        for instant in (record.run.started, record.run.commit.time):
            if instant is not None:
                instant.astimezone(UTC)
        encode(record.kernels)
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
                    return f"latency.bursts_ms: {ms:g} is not a valid duration"
    return implausible(record) if record.status == "ok" else None


def named(cell: Cell) -> str:
    """Return a cell as messages name it."""
    return f"{cell.operator} {cell.backend} {cell.mode} {cell.dtype} {cell.shape}"
