"""Read files from pytest-benchmark's `--benchmark-json` and saved runs.

A test becomes an operator, the parameters the shape, and the rounds one burst. Without the rounds' times, which
`--benchmark-save-data` keeps, the median is the only sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.facts.record import Cell, Environment, Run
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Read, Reader, distinct, read_runs
from groupbench.tracker.formats.values import FormatError, convert, from_iso, load_json, read_bytes

TITLE = "pytest-benchmark JSON"


class PytestStats(msgspec.Struct):
    median: float | None = None
    data: list[float] | None = None


class PytestBenchmark(msgspec.Struct):
    name: str
    fullname: str | None = None
    group: str | None = None
    params: dict[str, Any] | None = None
    stats: PytestStats | None = None


class PytestCommit(msgspec.Struct):
    id: str | None = None
    time: str | None = None
    dirty: bool = False
    branch: str | None = None


class PytestMachine(msgspec.Struct):
    node: str | None = None
    machine: str | None = None
    processor: str | None = None
    python_version: str | None = None
    system: str | None = None
    release: str | None = None
    cpu: dict[str, Any] | None = None


class PytestDocument(msgspec.Struct):
    benchmarks: list[PytestBenchmark]
    machine_info: PytestMachine
    datetime: str | None = None
    commit_info: PytestCommit = msgspec.field(default_factory=PytestCommit)


def recognise(head: bytes, path: Path) -> bool:
    return head.lstrip().startswith(b"{") and b'"machine_info"' in head


def read(path: Path, options: Options) -> Iterator[Read]:
    return read_runs([_PytestReader(read_bytes(path), options)])


class _PytestReader(Reader):
    name = "pytest-benchmark"
    timing = "cpu"

    def __init__(self, data: bytes, options: Options) -> None:
        super().__init__(data, options)
        self.document = convert(load_json(data), PytestDocument)

    def run(self) -> Run:
        commit = self.document.commit_info
        return self.make_run(
            commit=commit.id if commit.id not in ("", "unknown", "unversioned") else None,
            date=self.own_date(self.document.datetime, "datetime"),
            branch=commit.branch if commit.branch not in ("", "(unknown)", "(detached head)") else None,
            dirty=commit.dirty,
            committed=from_iso(commit.time, "commit_info.time") if commit.time else None,
        )

    def environment(self) -> Environment:
        machine = self.document.machine_info
        brand = (machine.cpu or {}).get("brand_raw") or (machine.cpu or {}).get("brand")
        return self.make_environment(
            device="cpu",
            cpu=brand if isinstance(brand, str) else machine.processor or machine.node,
            host=machine.node,
            python=machine.python_version,
            os=" ".join(part for part in (machine.system, machine.release) if part),
        )

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        return distinct(self._results())

    def _results(self) -> Iterator[ImportedResult]:
        for place, benchmark in enumerate(self.document.benchmarks):
            cell, stats = self._cell(benchmark), benchmark.stats
            if stats is None:
                yield ImportedResult(cell, status="error", message="it gave no stats")
                continue
            seconds = stats.data or ([] if stats.median is None else [stats.median])
            if not seconds:
                raise FormatError(f"benchmarks[{place}].stats: neither data nor median")
            yield ImportedResult(cell, [[sample * 1e3 for sample in seconds]])

    def _cell(self, benchmark: PytestBenchmark) -> Cell:
        name, _, bracket = (benchmark.fullname or benchmark.name).partition("[")
        shape = ",".join(f"{key}={_text(value)}" for key, value in (benchmark.params or {}).items())
        return self.cell(name, benchmark.group or self.name, shape or bracket.removesuffix("]"))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
