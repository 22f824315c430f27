"""Any CSV with a header, told which column is what: `--map latency_ms=time,operator=op,M=rows --unit us`.

A field of the record that no column is mapped to takes the column of its own name, if there is one, or what an
option says of the whole file. Names that are no field are sizes: they become dims, and, where no column is the
shape, its text. Rows of one cell and run are its bursts. A cell of the latency's column that is no number is a status.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupbench.tracker.formats.common import (
    UNITS,
    FormatError,
    Options,
    dims_of,
    from_iso,
    make_environment,
    make_record,
    make_run,
    number_of,
    read_bytes,
    status_of,
    text_lines,
)
from groupbench.tracker.record import STATUSES, Accuracy, Cell, Environment, Record, Run

TITLE = "plain CSV"

FIELDS = (
    *("latency_ms", "operator", "backend", "shape", "dtype", "mode", "host", "protocol", "seed", "flops", "min_bytes"),
    *("status", "message", "commit", "branch", "date", "gpu", "cpu", "rms", "max_abs"),
)
_WHOLE = ("seed", "flops", "min_bytes")


def recognise(head: bytes, path: Path) -> bool:
    """Only where the header names our own fields: without a mapping nothing else can be known."""
    first = head.split(b"\n", 1)[0].decode("utf-8", "replace")
    names = {name.strip().strip('"') for name in first.split(_delimiter(first))}
    return {"latency_ms", "operator"} <= names


def read(path: Path, options: Options) -> Iterator[Record]:
    data = read_bytes(path)
    text = text_lines(data)
    lines = csv.reader(text.splitlines(keepends=True), delimiter=_delimiter(text.split("\n", 1)[0]))
    try:
        table = [(lines.line_num, [cell.strip() for cell in cells]) for cells in lines if cells]
    except csv.Error as error:
        raise FormatError(f"line {lines.line_num}: {error}") from error
    if not table:
        raise FormatError("is empty")
    header = table[0][1]
    columns = _columns(header, options)
    if options.unit is not None and options.unit not in UNITS:
        raise FormatError(f"--unit {options.unit} is none of {', '.join(UNITS)}")
    groups: dict[tuple[Any, ...], _Group] = {}
    for number, cells in table[1:]:
        if len(cells) != len(header):
            raise FormatError(f"line {number}: {len(cells)} cells for {len(header)} columns")
        row = {name: cells[place] for name, place in columns.items()}
        try:
            group = _Group(number, row, options)
        except FormatError as error:
            raise FormatError(f"line {number}: {error.message}") from error
        groups.setdefault(group.key, group).lines.append((number, row["latency_ms"]))
    scale = UNITS[options.unit or "ms"]
    runs: dict[tuple[Any, ...], tuple[Run, Environment]] = {}
    for group in groups.values():
        if group.of_run not in runs:
            runs[group.of_run] = group.run(data, options)
        yield group.record(*runs[group.of_run], scale)


class _Group:
    """The rows of one cell and run."""

    def __init__(self, number: int, row: dict[str, str], options: Options) -> None:
        self.number, self.row = number, row
        self.lines: list[tuple[int, str]] = []
        said = {
            name: getattr(options, name) or row.get(name) or "" for name in ("operator", "backend", "mode", "dtype")
        }
        for name in ("operator", "backend"):
            if not said[name]:
                raise FormatError(f"no {name}; give --map {name}=COLUMN or --{name} NAME")
        whole = {name: _whole(name, row[name]) for name in _WHOLE if row.get(name)}
        sizes = {name: value for name, value in row.items() if name not in FIELDS and value}
        shape = row.get("shape") or ",".join(f"{name}={value}" for name, value in sizes.items()) or "-"
        self.cell = Cell(
            operator=said["operator"],
            backend=said["backend"],
            shape=shape,
            dtype=said["dtype"] or "-",
            mode=said["mode"] or "fwd",
            host=row.get("host") or "csv",
            protocol=row.get("protocol") or "csv",
            dims=dims_of(shape) | {name: _whole(name, value) for name, value in sizes.items()},
            **whole,
        )
        self.commit = options.commit or row.get("commit") or None
        self.date = options.date or (from_iso(row["date"], "date") if row.get("date") else None)
        self.hardware = (options.gpu or row.get("gpu") or None, options.cpu or row.get("cpu") or None)
        self.of_run = (self.commit, self.date, row.get("branch") or None, *self.hardware)
        cell = self.cell
        self.key = (*said.values(), shape, cell.host, cell.protocol, cell.seed, *self.of_run)

    def run(self, data: bytes, options: Options) -> tuple[Run, Environment]:
        commit, date, branch, gpu, cpu = self.of_run
        options = replace(options, gpu=gpu, cpu=cpu)
        try:
            run = make_run("csv", data, options, commit=commit, date=date, branch=branch)
        except FormatError as error:
            raise FormatError(f"line {self.number}: {error.message}") from error
        return run, make_environment(options, cuda=gpu is not None)

    def record(self, run: Run, environment: Environment, scale: float) -> Record:
        row = self.row
        timing = "gpu" if environment.device == "cuda" else "cpu"
        status = row.get("status") or "ok"
        if status not in STATUSES:
            raise FormatError(f"line {self.number}: status {status!r} is none of {', '.join(STATUSES)}")
        given: dict[str, Any] = {"timing": timing, "accuracy": _accuracy(row, self.number)}
        if status not in ("ok", "wrong"):
            given |= {"status": status, "message": row.get("message") or f"it was {status}"}
            return make_record(run, environment, self.cell, None, **given)
        bursts = []
        for _, text in self.lines:
            ms = number_of(text)
            if ms is None:
                failed, message = status_of(text)
                given |= {"status": failed, "message": message}
                return make_record(run, environment, self.cell, None, **given)
            bursts.append([ms * scale])
        if status == "wrong":
            given |= {"status": status, "message": row.get("message") or "it was wrong"}
        return make_record(run, environment, self.cell, bursts, **given)


def _columns(header: list[str], options: Options) -> dict[str, int]:
    """Place of the column of each field."""
    columns: dict[str, int] = {}
    for name, column in options.mapping.items():
        if column not in header:
            raise FormatError(f"no column {column!r}; its columns are {', '.join(header)}")
        columns[name] = header.index(column)
    for name in FIELDS:
        if name not in columns and name in header:
            columns[name] = header.index(name)
    if "latency_ms" not in columns:
        raise FormatError(f"no column for the latency; give --map latency_ms=COLUMN, of {', '.join(header)}")
    return columns


def _accuracy(row: dict[str, str], line: int) -> Accuracy | None:
    values: dict[str, Any] = {}
    for name in ("rms", "max_abs"):
        if row.get(name):
            number = number_of(row[name])
            if number is None:
                raise FormatError(f"line {line}: {name} {row[name]!r} is no number")
            values[name] = number if math.isfinite(number) else None
    return Accuracy(**values) if values else None


def _whole(name: str, text: str) -> int:
    number = number_of(text)
    if number is None or not math.isfinite(number) or abs(number) >= 2**63 or number != int(number):
        raise FormatError(f"{name} {text!r} is no whole number")
    return int(number)


def _delimiter(header: str) -> str:
    return max(",;\t", key=header.count)
