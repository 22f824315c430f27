"""Read any CSV with a header and a column mapping: `--map latency_ms=time,operator=op,M=rows --unit us`.

A field of the record without a mapping takes the column of the same name, or the option for the whole file. Other names
are sizes: they become dims and, if no column is the shape, also the text. The rows for one cell and run are bursts.
Text instead of a latency becomes a status.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from groupbench.tracker.facts.identity import cell_fields
from groupbench.tracker.facts.metrics import carried
from groupbench.tracker.facts.record import MEASURED, STATUSES, Accuracy, Cell, Environment, Run
from groupbench.tracker.formats.common import ImportedResult, Merged, Options, Read, Reader, read_runs
from groupbench.tracker.formats.values import (
    UNITS,
    FormatError,
    csv_table,
    from_iso,
    number_of,
    read_bytes,
    status_of,
    without_message,
)

TITLE = "plain CSV"

FIELDS = (
    *("latency_ms", "operator", "backend", "shape", "dtype", "mode", "host", "protocol", "seed", "flops", "min_bytes"),
    *("status", "message", "commit", "branch", "date", "gpu", "cpu", "rms", "max_abs"),
)


def fields() -> tuple[str, ...]:
    """Return the names that no size may have: the fields of a record, and the metrics that it carries by name."""
    return (*FIELDS, *(metric.name for metric in carried()))


_WHOLE = ("seed", "flops", "min_bytes")

_VARY = {"latency_ms", "status", "message", "rms", "max_abs", "commit", "branch", "date", "gpu", "cpu"}
"""Fields whose values may differ between one cell's rows, and those distinguishing runs."""


def recognise(head: bytes, path: Path) -> bool:
    """Return whether the header has groupbench's field names; any other CSV needs a mapping."""
    first = head.split(b"\n", 1)[0].decode("utf-8", "replace")
    names = {name.strip().strip('"') for name in first.split(_delimiter(first))}
    return {"latency_ms", "operator"} <= names


def read(path: Path, options: Options) -> Iterator[Read]:
    data = read_bytes(path)
    header, table = csv_table(data, _delimiter(data.split(b"\n", 1)[0].decode("utf-8", "replace")))
    header = [name.strip() for name in header]
    columns = _columns(header, options)
    if options.unit is not None and options.unit not in UNITS:
        raise FormatError(f"--unit {options.unit} is not one of {', '.join(UNITS)}")
    readers: dict[tuple[Any, ...], _CsvReader] = {}
    used = set(columns.values())
    for number, cells in table:
        if len(cells) != len(header):
            raise FormatError(f"line {number}: {len(cells)} cells for {len(header)} columns")
        row = {name: cells[place].strip() for name, place in columns.items()}
        unused = {name: cells[place].strip() for place, name in enumerate(header) if place not in used}
        try:
            facts = _RunFacts.of(row, options)
            if facts.key not in readers:
                readers[facts.key] = _CsvReader(data, number, facts)
            readers[facts.key].add(_Line(number, row, unused))
        except FormatError as error:
            raise FormatError(f"line {number}: {error.message}") from error
    yield from read_runs(readers.values())
    merged = {column for reader in readers.values() for group in reader.groups.values() for column in group.merged()}
    yield from (Merged(column) for column in header if column in merged)


@dataclass(frozen=True)
class _RunFacts:
    """The fields identifying a run within a file."""

    commit: str | None
    date: datetime | None
    branch: str | None
    options: Options  # with the row's hardware, and without values that only repeat the row's

    @classmethod
    def of(cls, row: dict[str, str], options: Options) -> _RunFacts:
        commit, branch = row.get("commit") or None, row.get("branch") or None
        date = from_iso(row["date"], "date") if row.get("date") and options.date is None else None
        gpu, cpu = options.gpu or row.get("gpu") or None, options.cpu or row.get("cpu") or None
        remaining = replace(options.beyond(commit, branch, date), gpu=gpu, cpu=cpu)
        return cls(remaining.commit or commit, remaining.date or date, branch, remaining)

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.commit, self.date, self.branch, self.options.gpu, self.options.cpu)


@dataclass(frozen=True)
class _Line:
    """A row of the table."""

    number: int
    row: dict[str, str]
    unused: dict[str, str]  # cells of columns that no field uses


@dataclass
class _Lines:
    """The rows of one cell; each is a burst."""

    cell: Cell
    lines: list[_Line] = field(default_factory=list)

    def add(self, line: _Line) -> None:
        """Add a row. Raises FormatError if it contradicts the first one."""
        for first in self.lines[:1]:
            for name in sorted(line.row.keys() - _VARY):
                if line.row[name] != first.row[name]:
                    where = f"line {first.number} of the same cell"
                    raise FormatError(f"{name} is {line.row[name]!r}, but {first.row[name]!r} in {where}")
        self.lines.append(line)

    def merged(self) -> Iterator[str]:
        """Yield the unused columns in which the rows differ."""
        first = self.lines[0].unused
        yield from (name for name in first if any(line.unused[name] != first[name] for line in self.lines))


class _CsvReader(Reader):
    """Reads the rows of one run."""

    name = "csv"

    def __init__(self, data: bytes, number: int, facts: _RunFacts) -> None:
        super().__init__(data, facts.options)
        self.number, self.facts = number, facts
        self.groups: dict[tuple[Any, ...], _Lines] = {}

    def add(self, line: _Line) -> None:
        """Add a line to a cell. Raises FormatError."""
        row = line.row
        for name in ("operator", "backend"):
            if not (getattr(self.options, name) or row.get(name)):
                raise FormatError(f"no {name}; give --map {name}=COLUMN or --{name} NAME")
        sizes = {name: value for name, value in row.items() if name not in fields() and value}
        cell = self.cell(
            row.get("operator", ""),
            row.get("backend"),
            row.get("shape") or ",".join(f"{name}={value}" for name, value in sizes.items()),
            dims={name: _whole(name, value) for name, value in sizes.items()},
            dtype=row.get("dtype"),
            mode=row.get("mode"),
            host=row.get("host"),
            protocol=row.get("protocol"),
            facts={name: _whole(name, row[name]) for name in _WHOLE if row.get(name)},
        )
        self.groups.setdefault(cell_fields(cell), _Lines(cell)).add(line)

    def run(self) -> Run:
        facts = self.facts
        try:
            return self.make_run(commit=facts.commit, date=facts.date, branch=facts.branch, options=self.options)
        except FormatError as error:
            raise FormatError(f"line {self.number}: {error.message}") from error

    def environment(self) -> Environment:
        return self.make_environment(device="cpu")

    def cells(self) -> Iterator[ImportedResult]:
        scale = UNITS[self.options.unit or "ms"]
        for group in self.groups.values():
            yield _result(group, scale)


def _result(group: _Lines, scale: float) -> ImportedResult:
    """Return the result of one cell. The first failed row gives the status."""
    status, reason = "ok", None
    bursts = []
    for line in group.lines:
        row_status, message = line.row.get("status") or "ok", line.row.get("message")
        if row_status not in STATUSES:
            raise FormatError(f"line {line.number}: status {row_status!r} is not one of {', '.join(STATUSES)}")
        if row_status in MEASURED:
            ms = number_of(line.row["latency_ms"])
            if ms is None:
                row_status, message = status_of(line.row["latency_ms"])
            else:
                bursts.append([ms * scale])
        if status == "ok" != row_status:
            status, reason = row_status, message or without_message(row_status)
    accuracy = _accuracy(group.lines)
    metrics = _metrics(group.lines[0].row, group.lines[0].number)
    return ImportedResult(group.cell, bursts, status, reason, accuracy, metrics=metrics)  # type: ignore[arg-type]


def _columns(header: list[str], options: Options) -> dict[str, int]:
    """Return the position of each field's column. Raises FormatError if a mapped column or the latency is missing."""
    columns: dict[str, int] = {}
    for name, column in {**{name: name for name in fields() if name in header}, **options.mapping}.items():
        if column not in header:
            raise FormatError(f"no column {column!r}; columns: {', '.join(header)}")
        if header.count(column) > 1:
            raise FormatError(f"{header.count(column)} columns are named {column!r}")
        columns[name] = header.index(column)
    if "latency_ms" not in columns:
        raise FormatError(f"no column for the latency; give --map latency_ms=COLUMN, one of {', '.join(header)}")
    return columns


def _accuracy(lines: Sequence[_Line]) -> Accuracy | None:
    """Return the largest error over rows, or None as the value if one is not finite."""
    largest: dict[str, float | None] = {}
    for line in lines:
        for name, value in _numbers(line.row, line.number, ("rms", "max_abs")).items():
            before = largest.setdefault(name, value)
            largest[name] = None if before is None or value is None else max(before, value)
    return Accuracy(rms=largest.get("rms"), max_abs=largest.get("max_abs")) if largest else None


def _metrics(row: dict[str, str], line: int) -> dict[str, float]:
    values = _numbers(row, line, [metric.name for metric in carried()])
    return {name: value for name, value in values.items() if value is not None}


def _numbers(row: dict[str, str], line: int, names: Sequence[str]) -> dict[str, float | None]:
    """Return the numbers in these columns, None for one that is not finite. Raises FormatError for text."""
    values: dict[str, float | None] = {}
    for name in names:
        if row.get(name):
            number = number_of(row[name])
            if number is None:
                raise FormatError(f"line {line}: {name} {row[name]!r} is not a number")
            values[name] = number if math.isfinite(number) else None
    return values


def _whole(name: str, text: str) -> int:
    number = number_of(text)
    if number is None or not math.isfinite(number) or abs(number) >= 2**63 or number != int(number):
        raise FormatError(f"{name} {text!r} is not a whole number")
    return int(number)


def _delimiter(header: str) -> str:
    return max(",;\t", key=header.count)
