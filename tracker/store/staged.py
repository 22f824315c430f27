"""Check a whole records file, and keep the records until the database is open.

So a bad line stores nothing, and no other writer waits while a file is read. The file is checked part by part: a large
one in several processes, which halve the time on two cores.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from io import BufferedReader, BytesIO
from typing import Any, NamedTuple

import msgspec

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import Cell, Environment, Loaded, Run
from groupbench.tracker.store.checked import NOT_REACHED, Checked, Hashed, hashed, named, packed, storable

_PART = 1 << 20
"""Most bytes of a part, but for the last line: hundreds of records, which take a twentieth of a second."""

_SPLIT_FROM_BYTES = 8 << 20
"""Bytes of a file for which processes pay."""

_PARTS_AHEAD = 8
"""Parts that wait for a process."""

_IN_MEMORY = 1 << 26
"""Bytes of checked records kept in memory; more go to a temporary file."""

_Numbered = tuple[int, bytes]
"""The number of the first line of a part, and the lines."""


class _Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A checked record, with run and environment by index."""

    number: int
    run: int
    environment: int
    cell: Cell
    identity: str
    kernels: tuple[str, bytes] | None
    values: dict[str, Any]
    loaded: Loaded | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Row]).decode


class Part(NamedTuple):
    """A part's records, up to the first bad line."""

    results: list[tuple[int, str, str, int]]  # (line, run, series, content) of cells that the run has reached
    runs: list[Run]
    environments: list[tuple[Environment, str]]  # with the hash of all facts
    rows: bytes
    problem: IngestError | None  # of the bad line


@contextmanager
def checking(stream: BufferedReader | BytesIO, source: str) -> Iterator[Iterator[Part]]:
    """Check a stream's records, part by part. If it is a large file, processes begin when the context is entered.

    Raises ChildProcessError if a process is killed.
    """
    check = partial(check_part, source=source)
    size = _size(stream)
    # Records of a pipe are checked as they come.
    read = stream.read1 if size is None else stream.read
    with ExitStack() as stack:
        checked: Iterator[Part] = map(check, _parts(read, stream.readline))
        if size is not None and size >= _SPLIT_FROM_BYTES:
            from groupbench.tracker.store.processes import mapped, processes

            start = stream.tell()
            try:
                if processes() > 1:
                    checked = stack.enter_context(mapped(check, _parts(read, stream.readline), ahead=_PARTS_AHEAD))
            except (OSError, NotImplementedError):  # none can be started
                stream.seek(start)
        yield checked


def _size(stream: BufferedReader | BytesIO) -> int | None:
    """Return a regular file's size in bytes; None for other streams."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _parts(read: Callable[[int], bytes], rest_of_line: Callable[[], bytes]) -> Iterator[_Numbered]:
    first = 1
    while lines := read(_PART):
        lines += rest_of_line()
        yield first, lines
        first += lines.count(b"\n")


def check_part(part: _Numbered, source: str) -> Part:
    first, lines = part
    pairs, problem = [], None
    try:
        for each in hashed(storable(BytesIO(lines), source, first), source):
            pairs.append(each)  # a bad line keeps those before it
    except IngestError as error:
        problem = error
    return part_of(pairs, problem)


def part_of(pairs: Iterable[Hashed], problem: IngestError | None = None) -> Part:
    """Pack hashed records as a part."""
    results, rows = [], []
    runs: dict[int, tuple[int, Run]] = {}  # by id(): equal ones are one object
    environments: dict[int, tuple[int, tuple[Environment, str]]] = {}
    for one in packed(pairs):
        if one.values["status"] != NOT_REACHED:
            results.append((one.number, one.run.id, one.identity, one.values["content"]))
        run, _ = runs.setdefault(id(one.run), (len(runs), one.run))
        facts = one.environment, one.environment_content
        environment, _ = environments.setdefault(id(one.environment), (len(environments), facts))
        rows.append(_Row(one.number, run, environment, one.cell, one.identity, one.kernels, one.values, one.loaded))
    return Part(
        results,
        [run for _, run in runs.values()],
        [environment for _, environment in environments.values()],
        _encode(rows),
        problem,
    )


def unpacked(part: Part) -> Iterator[Checked]:
    """Yield the records of a part."""
    return _unpacked(part.rows, part.runs, part.environments)


def _unpacked(rows: bytes, runs: list[Run], environments: list[tuple[Environment, str]]) -> Iterator[Checked]:
    for row in _decode(rows):
        yield Checked(
            row.number, runs[row.run], *environments[row.environment],
            row.cell, row.identity, row.kernels, row.values, row.loaded,
        )  # fmt: skip


class Staged(AbstractContextManager["Staged"]):
    """Checked records, kept until the database is open. Iterate once to get them back in order.

    A context manager: the exit frees the storage. The constructor iterates `parts` and checks them against each other.
    It keeps only one hash per record in memory. Raises IngestError with the line number for a bad line and for two
    different results in one run and series, and IngestError for a file without records.
    """

    def __init__(self, parts: Iterable[Part], source: str) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115 - __exit__ closes it
        self._parts: list[tuple[int, list[Run], list[tuple[Environment, str]]]] = []  # with the bytes of the rows
        try:
            self._fill(parts, source)
        except BaseException:
            self._file.close()
            raise

    def _fill(self, parts: Iterable[Part], source: str) -> None:
        seen: dict[tuple[str, str], tuple[int, int]] = {}
        for part in parts:
            for number, run, identity, content in part.results:
                first, before = seen.setdefault((run, identity), (number, content))
                if before != content:
                    cell = next(row.cell for row in _decode(part.rows) if row.number == number)
                    problem = f"contradicts line {first} (same run and series: {named(cell)})"
                    raise IngestError(f"{source}: line {number}: {problem}")
            if part.problem is not None:
                raise part.problem
            self._parts.append((len(part.rows), part.runs, part.environments))
            self._file.write(part.rows)
        if not any(runs for _, runs, _ in self._parts):
            raise IngestError(f"{source}: contains no records")
        self._file.seek(0)

    def __iter__(self) -> Iterator[Checked]:
        for size, runs, environments in self._parts:
            yield from _unpacked(self._file.read(size), runs, environments)

    def __exit__(self, *_: object) -> None:
        self._file.close()
