"""Read files of Google Benchmark's `--benchmark_out_format=json`.

`BM_Gemm/64/N:1024/threads:8` is operator `BM_Gemm` with shape `64,N=1024,threads=8`. Each repetition is a burst with
one sample, the real time. If a file has only aggregates, the median is the sample, or else the mean. Errors and skipped
benchmarks become a status. `bytes_per_second` becomes the cell's `min_bytes`: the bytes that one iteration moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from groupbench.tracker.facts.record import Environment, Record, Run, Status
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Reader, read_runs
from groupbench.tracker.formats.values import (
    UNITS,
    FormatError,
    convert,
    load_json,
    read_bytes,
    status_of,
)

TITLE = "Google Benchmark JSON"

_COMMIT_KEYS = ("commit", "git_commit", "commit_hash", "git_sha", "gitrev", "git_revision", "revision")
"""Common keys for the commit in `--benchmark_context=KEY=VALUE`."""


class GoogleContext(msgspec.Struct):
    date: str | None = None
    host_name: str | None = None
    executable: str | None = None
    num_cpus: int | None = None


class GoogleBenchmark(msgspec.Struct):
    name: str
    run_name: str | None = None
    run_type: str = "iteration"
    aggregate_name: str | None = None
    real_time: float | None = None
    cpu_time: float | None = None
    time_unit: str = "ns"
    bytes_per_second: float | None = None
    error_occurred: bool = False
    error_message: str | None = None
    skipped: bool = False
    skip_message: str | None = None


class GoogleDocument(msgspec.Struct):
    context: dict[str, Any]
    benchmarks: list[GoogleBenchmark]


Members = list[tuple[int, GoogleBenchmark]]
"""Entries of one benchmark, with their positions in the file."""


def recognise(head: bytes, path: Path) -> bool:
    keys = (b'"context"', b'"num_cpus"', b'"benchmarks"')
    return head.lstrip().startswith(b"{") and keys[0] in head and (keys[1] in head or keys[2] in head)


def read(path: Path, options: Options) -> Iterator[Record | LeftOut]:
    return read_runs([_GoogleReader(read_bytes(path), options)])


class _GoogleReader(Reader):
    name = "google-benchmark"
    timing = "cpu"

    def __init__(self, data: bytes, options: Options) -> None:
        super().__init__(data, options)
        self.document = convert(load_json(data), GoogleDocument)
        self.context = convert(self.document.context, GoogleContext, "context")

    def run(self) -> Run:
        facts = self.document.context
        commit = next((facts[key] for key in _COMMIT_KEYS if isinstance(facts.get(key), str)), None)
        return self.make_run(commit=commit, date=self.own_date(self.context.date, "context.date"))

    def environment(self) -> Environment:
        context = self.context
        return self.make_environment(
            device="cpu", host=context.host_name, cpu_count=context.num_cpus, cpu=context.host_name
        )

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        groups: dict[str, Members] = {}
        for place, benchmark in enumerate(self.document.benchmarks):
            groups.setdefault(benchmark.run_name or benchmark.name, []).append((place, benchmark))
        program = re.split(r"[/\\]", self.context.executable or "")[-1] or "google-benchmark"
        for name, members in groups.items():
            operator, shape = _named(name)
            failure = next((_failure(one) for _, one in members if one.error_occurred or one.skipped), None)
            timed = [] if failure else _timed(members)
            cell = self.cell(operator, program, shape, facts={"min_bytes": _bytes_moved(name, timed)})
            if failure:
                yield ImportedResult(cell, status=failure[0], message=failure[1])
            elif timed:
                yield ImportedResult(cell, [[_milliseconds(place, one)] for place, one in timed])
            else:
                yield LeftOut("without a time", name)


def _failure(benchmark: GoogleBenchmark) -> tuple[Status, str]:
    """Return the status and message of a benchmark that reports an error or was skipped."""
    text = benchmark.error_message or benchmark.skip_message or ("skipped" if benchmark.skipped else "error")
    if benchmark.skipped:
        status: Status = "skipped"
    else:
        status, text = status_of(text)
    return "error" if status == "skipped" and benchmark.error_occurred else status, text


def _timed(members: Members) -> Members:
    """Return the entries whose times are the result; none for a group without times, such as a fitted complexity."""
    for kind in ("iteration", "median", "mean"):
        chosen = [member for member in members if kind in (member[1].aggregate_name or member[1].run_type,)]
        if chosen:
            return chosen
    return []


def _milliseconds(place: int, benchmark: GoogleBenchmark) -> float:
    if benchmark.time_unit not in UNITS:
        raise FormatError(f"benchmarks[{place}].time_unit: {benchmark.time_unit!r} is not a unit of time")
    if benchmark.real_time is None:
        raise FormatError(f"benchmarks[{place}]: no real_time")
    return benchmark.real_time * UNITS[benchmark.time_unit]


def _bytes_moved(name: str, timed: Members) -> int | None:
    """Return the bytes of one iteration.

    Google Benchmark divides by the CPU time, or by the wall-clock time if the benchmark's name asks for it.
    """
    by_wall_clock = re.search(r"/(real|manual)_time\b", name) is not None
    moved = []
    for _, one in timed:
        time = one.real_time if by_wall_clock or one.cpu_time is None else one.cpu_time
        if one.bytes_per_second and time and one.time_unit in UNITS:
            moved.append(one.bytes_per_second * time * UNITS[one.time_unit] / 1e3)
    middle = median(moved) if moved else 0.0
    return round(middle) if 0.5 <= middle < 2**63 else None


def _named(name: str) -> tuple[str, str]:
    """Return (operator, shape). A slash inside `<…>` belongs to the operator."""
    depth, parts = 0, [""]
    for char in name:
        depth += {"<": 1, ">": -1}.get(char, 0)
        if char == "/" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += char
    shape = ",".join(re.sub(r"^(\w+):", r"\1=", part) for part in parts[1:])
    return parts[0] or "-", shape or "-"
