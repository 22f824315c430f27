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

from groupbench.tracker.facts.record import Environment, Run, Status
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Read, Reader, read_runs
from groupbench.tracker.formats.usual import usual
from groupbench.tracker.formats.values import (
    UNITS,
    FormatError,
    convert,
    load_json,
    read_bytes,
    status_of,
)

TITLE = "Google Benchmark JSON"

_AGGREGATES = ("mean", "median", "stddev", "cv", "BigO", "RMS", "min", "max")
"""Ends of the names of aggregates. Files before version 1.5 mark them in no other way."""


class GoogleContext(msgspec.Struct):
    date: str | None = None
    host_name: str | None = None
    executable: str | None = None
    num_cpus: int | None = None


class GoogleBenchmark(msgspec.Struct):
    name: str
    run_name: str | None = None
    run_type: str | None = None
    family_index: int | None = None
    per_family_instance_index: int | None = None
    repetition_index: int | None = None
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


def read(path: Path, options: Options) -> Iterator[Read]:
    return read_runs([_GoogleReader(read_bytes(path), options)])


class _GoogleReader(Reader):
    name = "google-benchmark"
    timing = "cpu"

    def __init__(self, data: bytes, options: Options) -> None:
        self.document = convert(load_json(data), GoogleDocument)
        super().__init__(data, options, self.document.context)
        self.context = convert(self.document.context, GoogleContext, "context")

    def run(self) -> Run:
        return self.make_run(date=self.own_date(self.context.date, "context.date"))

    def environment(self) -> Environment:
        context = self.context
        cpu = usual(self.loose).cpu or context.host_name
        return self.make_environment(device="cpu", host=context.host_name, cpu_count=context.num_cpus, cpu=cpu)

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        program = re.split(r"[/\\]", self.context.executable or "")[-1] or "google-benchmark"
        for name, number, members in _groups(self.document.benchmarks):
            operator, shape = _named(name)
            failure = next((_failure(one) for _, one in members if one.error_occurred or one.skipped), None)
            timed = [] if failure else _timed(members)
            shape = shape if number == 1 else f"{shape}#{number}"
            cell = self.cell(operator, program, shape, facts={"min_bytes": _bytes_moved(name, timed)})
            if failure:
                yield ImportedResult(cell, status=failure[0], message=failure[1])
            elif timed:
                yield ImportedResult(cell, [[_milliseconds(place, one)] for place, one in timed])
            else:
                yield LeftOut("without a time", name)


def _groups(benchmarks: list[GoogleBenchmark]) -> Iterator[tuple[str, int, Members]]:
    """Yield the name of each benchmark, its number among those of this name, and its repetitions and aggregates.

    Two families of one name, registered in two places of a program, are two benchmarks. They differ in
    `family_index`; in files without one, the second begins where a repetition does not follow the one before.
    """
    old = _old_aggregates(benchmarks)
    groups: dict[str, dict[Any, Members]] = {}
    for place, one in enumerate(benchmarks):
        aggregate = old.get(place)
        name = aggregate[0] if aggregate else one.run_name or one.name
        families = groups.setdefault(name, {})
        if one.family_index is not None:
            key: Any = (one.family_index, one.per_family_instance_index or 0)
        else:
            key = max(len(families) - 1, 0)
            if families and aggregate is None and _begins_again(one, families[key], (name, "mean") in old.values()):
                key += 1
        if aggregate:
            one = msgspec.structs.replace(one, run_type="aggregate", aggregate_name=aggregate[1])
        families.setdefault(key, []).append((place, one))
    for name, families in groups.items():
        ordered = sorted(families) if all(isinstance(key, tuple) for key in families) else list(families)
        yield from ((name, number, families[key]) for number, key in enumerate(ordered, 1))


def _begins_again(one: GoogleBenchmark, members: Members, repeated: bool) -> bool:
    """Return whether a row is not a repetition of the benchmark of the same name before it.

    Args:
        one: The row.
        members: The rows of that benchmark.
        repeated: Whether a file without indices has the mean of this benchmark, and so its repetitions.
    """
    if one.run_type == "aggregate":
        return False
    last = members[-1][1]
    if one.repetition_index is not None:
        return last.run_type == "aggregate" or one.repetition_index <= (last.repetition_index or 0)
    return not repeated if one.run_type is None else last.run_type == "aggregate"


def _old_aggregates(benchmarks: list[GoogleBenchmark]) -> dict[int, tuple[str, str]]:
    """Return the benchmark and kind of rows whose name alone shows an aggregate, by position.

    `BM_X_mean` is the mean of `BM_X` if the file has `BM_X` itself or a second aggregate of it.
    """
    names = {one.name for one in benchmarks}
    aggregates = {}
    for place, one in enumerate(benchmarks):
        base, _, kind = one.name.rpartition("_")
        if one.run_type is not None or kind not in _AGGREGATES or not base:
            continue
        if base in names or any(f"{base}_{other}" in names for other in _AGGREGATES if other != kind):
            aggregates[place] = (base, kind)
    return aggregates


def _failure(benchmark: GoogleBenchmark) -> tuple[Status, str]:
    """Return status and message of a skipped or failed benchmark."""
    text = benchmark.error_message or benchmark.skip_message or ("skipped" if benchmark.skipped else "error")
    if benchmark.skipped:
        status: Status = "skipped"
    else:
        status, text = status_of(text)
    return "error" if status == "skipped" and benchmark.error_occurred else status, text


def _timed(members: Members) -> Members:
    """Return the entries whose times are the result; none for a group without times, such as a fitted complexity."""
    for kind in ("iteration", "median", "mean"):
        chosen = [
            member for member in members if kind == (member[1].aggregate_name or member[1].run_type or "iteration")
        ]
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
