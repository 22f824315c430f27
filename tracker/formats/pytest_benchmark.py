"""pytest-benchmark's `--benchmark-json` and its saved runs.

A test is an operator, its parameters are the shape; all its rounds are one burst. Without the rounds' times
(`--benchmark-save-data` keeps them) the median is the only sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.formats.common import (
    FormatError,
    Options,
    convert,
    dims_of,
    from_iso,
    load_json,
    make_environment,
    make_record,
    make_run,
    read_bytes,
)
from groupbench.tracker.record import Cell, Record

TITLE = "pytest-benchmark JSON"


class Stats(msgspec.Struct):
    median: float | None = None
    data: list[float] | None = None


class Benchmark(msgspec.Struct):
    name: str
    fullname: str | None = None
    group: str | None = None
    params: dict[str, Any] | None = None
    stats: Stats | None = None


class Commit(msgspec.Struct):
    id: str | None = None
    time: str | None = None
    dirty: bool = False
    branch: str | None = None


class Machine(msgspec.Struct):
    node: str | None = None
    machine: str | None = None
    processor: str | None = None
    python_version: str | None = None
    system: str | None = None
    release: str | None = None
    cpu: dict[str, Any] | None = None


class Document(msgspec.Struct):
    benchmarks: list[Benchmark]
    machine_info: Machine
    datetime: str | None = None
    commit_info: Commit = msgspec.field(default_factory=Commit)


def recognise(head: bytes, path: Path) -> bool:
    return head.lstrip().startswith(b"{") and b'"machine_info"' in head


def read(path: Path, options: Options) -> Iterator[Record]:
    data = read_bytes(path)
    document = convert(load_json(data), Document)
    commit, machine = document.commit_info, document.machine_info
    run = make_run(
        "pytest-benchmark",
        data,
        options,
        commit=commit.id if commit.id not in ("", "unknown", "unversioned") else None,
        date=from_iso(document.datetime, "datetime") if document.datetime and options.date is None else None,
        branch=commit.branch if commit.branch not in ("", "(unknown)", "(detached head)") else None,
        dirty=commit.dirty,
        committed=from_iso(commit.time, "commit_info.time") if commit.time else None,
    )
    brand = (machine.cpu or {}).get("brand_raw") or (machine.cpu or {}).get("brand")
    environment = make_environment(
        options,
        cuda=False,
        cpu=brand if isinstance(brand, str) else machine.processor or machine.node,
        host=machine.node,
        python=machine.python_version,
        os=" ".join(part for part in (machine.system, machine.release) if part),
    )
    for place, benchmark in enumerate(document.benchmarks):
        name, _, bracket = (benchmark.fullname or benchmark.name).partition("[")
        params = benchmark.params or {}
        shape = ",".join(f"{key}={_text(value)}" for key, value in params.items()) or bracket.removesuffix("]") or "-"
        cell = Cell(
            operator=options.operator or name or "-",
            backend=options.backend or benchmark.group or "pytest-benchmark",
            shape=shape,
            dtype=options.dtype or "-",
            mode=options.mode or "fwd",
            host="pytest-benchmark",
            protocol="pytest-benchmark",
            dims=dims_of(shape),
        )
        stats = benchmark.stats
        if stats is None:
            yield make_record(run, environment, cell, None, timing="cpu", status="error", message="it gave no stats")
            continue
        samples = stats.data or ([stats.median] if stats.median is not None else [])
        if not samples:
            raise FormatError(f"benchmarks[{place}].stats: neither data nor median")
        yield make_record(run, environment, cell, [[seconds * 1e3 for seconds in samples]], timing="cpu")


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
