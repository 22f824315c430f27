"""Check a whole file of records, and keep them until the database is open.

So a bad line stores nothing, and no other writer waits while a file is read. The file is checked part by part: a large
one in several processes, which halve the time on two cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from itertools import chain, islice
from types import TracebackType
from typing import IO, Any, NamedTuple

import msgspec

from groupbench.tracker.errors import IngestError
from groupbench.tracker.record import Cell, Environment, Run
from groupbench.tracker.store.checked import NOT_REACHED, Checked, hashed, named, packed, storable

_PART = 1 << 20
"""Bytes of a part: hundreds of records, which take a twentieth of a second."""

_LARGE = 8
"""Number of parts of a file for which processes pay."""

_IN_MEMORY = 1 << 26
"""Bytes of checked records kept in memory; more go to a temporary file."""

_Numbered = tuple[int, bytes]
"""The number of the first line of a part, and its lines."""


class _Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A checked record, with its run and environment by index."""

    number: int
    run: int
    environment: int
    cell: Cell
    identity: str
    kernels: bytes | None
    values: dict[str, Any]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[_Row]).decode


class Part(NamedTuple):
    """The records of a part, up to its first bad line."""

    results: list[tuple[int, str, str, int]]  # (line, run, series, content) of cells that the run has reached
    runs: list[Run]
    environments: list[tuple[Environment, str]]  # with the hash of all facts
    rows: bytes
    problem: IngestError | None  # of the bad line


@contextmanager
def checking(stream: IO[bytes], source: str) -> Iterator[Iterator[Part]]:
    """Check the records of a stream, part by part. If it is large, processes begin when the context is entered."""
    parts = _parts(stream)
    check = partial(check_part, source=source)
    first = list(islice(parts, _LARGE))
    everything = chain(first, parts)
    if len(first) == _LARGE:
        from concurrent.futures.process import BrokenProcessPool

        from groupbench.tracker.store.processes import mapped, processes

        if processes() > 1:
            try:
                with mapped(check, everything, ahead=_LARGE) as checked:
                    yield checked
            except BrokenProcessPool as error:
                raise IngestError(f"{source}: a process that checked it was killed") from error
            return
    yield map(check, everything)


def _parts(stream: IO[bytes]) -> Iterator[_Numbered]:
    first = 1
    while lines := stream.read(_PART):
        lines += stream.readline()
        yield first, lines
        first += lines.count(b"\n")


def check_part(part: _Numbered, source: str) -> Part:
    """Check each record of a part."""
    first, lines = part
    found, problem = [], None
    try:
        for each in hashed(storable(BytesIO(lines), source, first), source):
            found.append(each)  # a bad line keeps those before it
    except IngestError as error:
        problem = error
    results, rows = [], []
    runs: dict[int, tuple[int, Run]] = {}  # by id(): equal ones are one object
    environments: dict[int, tuple[int, tuple[Environment, str]]] = {}
    for one in packed(found):
        if one.values["status"] != NOT_REACHED:
            results.append((one.number, one.run.id, one.identity, one.values["content"]))
        run, _ = runs.setdefault(id(one.run), (len(runs), one.run))
        facts = one.environment, one.environment_content
        environment, _ = environments.setdefault(id(one.environment), (len(environments), facts))
        rows.append(_Row(one.number, run, environment, one.cell, one.identity, one.kernels, one.values))
    return Part(
        results,
        [run for _, run in runs.values()],
        [environment for _, environment in environments.values()],
        _encode(rows),
        problem,
    )


class Staged:
    """Checked records, kept until the database is open. Iterate once to get them back in order.

    A context manager that frees its storage on exit. The constructor iterates `parts` and checks them against each
    other. It keeps only a hash of each record in memory, and raises IngestError with the line number for a bad line and
    for two different results of one run and series, and IngestError for a file without records.
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
            for row in _decode(self._file.read(size)):
                yield Checked(
                    row.number, runs[row.run], *environments[row.environment],
                    row.cell, row.identity, row.kernels, row.values,
                )  # fmt: skip

    def __enter__(self) -> Staged:
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._file.close()
