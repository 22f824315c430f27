"""Read the JSON of Helion's `benchmarks/run.py` and dashboard: a list of metrics with a value for each shape.

`helion_latency_ms` is the latency of backend `helion`; other backends have theirs. An accuracy of 0 makes the result
wrong, and a compile time becomes the metric `compile_ms`. Speed-ups follow from latencies and are left out; a file with
speed-ups alone has nothing to store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.facts.record import Environment
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Read, numbered, read_runs
from groupbench.tracker.formats.v3 import EntriesReader, V3Benchmark, V3Entry, V3Metric, V3Model
from groupbench.tracker.formats.values import (
    FormatError,
    convert,
    from_iso,
    load_json,
    number_of,
    read_bytes,
)

TITLE = "Helion benchmark JSON"

_METRIC = re.compile(r"(?:(\w+?)_)?(latency_ms|latency|accuracy|compile_time_s|speedup)")


class HelionEntry(V3Entry):
    shape: list[Any] = msgspec.field(default_factory=list)


class DashboardNight(msgspec.Struct):
    full_sha: str
    date: str
    per_shape: dict[str, list[Any]]
    branch: str | None = None


class DashboardKernel(msgspec.Struct):
    kernel: str
    platform: str
    history: list[DashboardNight]


class Dashboard(msgspec.Struct):
    summary: list[DashboardKernel]


def recognise(head: bytes, path: Path) -> bool:
    if head.lstrip().startswith(b"{"):
        return b'"helion_speedup_geomean"' in head and b'"summary"' in head
    listed = head.lstrip().startswith(b"[") and b'"benchmark_values"' in head
    return listed and re.search(rb'"shape"\s*:\s*\[', head) is not None


def read(path: Path, options: Options) -> Iterator[Read]:
    data = read_bytes(path)
    content = load_json(data)
    if isinstance(content, dict):
        runs = _runs(convert(content, Dashboard).summary)
        return read_runs(
            _HelionReader(msgspec.json.encode(of_run), options, of_run, platform) for platform, of_run in runs
        )
    entries = convert(content, list[HelionEntry])
    if not entries:
        raise FormatError("contains no results")
    return read_runs([_HelionReader(data, options, entries)])


def _runs(kernels: list[DashboardKernel]) -> list[tuple[str, list[HelionEntry]]]:
    """Return the platform and the entries of each run of a dashboard."""
    runs: dict[tuple[str, str, str], list[HelionEntry]] = {}
    for kernel in kernels:
        for night in kernel.history:
            shapes = night.per_shape.get("shapes", [])
            facts = V3Benchmark(name=TITLE, extra_info={"device": kernel.platform})
            stamp = from_iso(night.date, "date").timestamp()
            runs.setdefault((night.full_sha, night.date, kernel.platform), []).extend(
                HelionEntry(facts, V3Model(kernel.kernel), V3Metric(name, values), [], {}, stamp, night.full_sha,
                            night.branch, shapes)
                for name, values in night.per_shape.items() if name != "shapes" and values
            )  # fmt: skip
    return [(platform, entries) for (_, _, platform), entries in runs.items()]


class _HelionReader(EntriesReader):
    name = "helion"
    dtype = "unknown"

    def __init__(self, data: bytes, options: Options, entries: list[HelionEntry], part: str | None = None) -> None:
        super().__init__(data, options, entries, part)
        self.entries = entries

    def environment(self) -> Environment:
        device = self.first.benchmark.extra_info.get("device")
        runner = self.first.runners[0] if self.first.runners else None
        gpu = runner.gpu_info if runner and runner.gpu_info else device
        return self.make_environment(
            device="cuda" if isinstance(gpu, str) and gpu not in ("cpu", "unknown") else None, gpu=gpu
        )

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        by_cell: dict[tuple[str, str, str], dict[str, float | None]] = {}
        for place, entry in enumerate(self.entries):
            match = _METRIC.fullmatch(entry.metric.name)
            values = entry.metric.benchmark_values
            if match is None or match[2] == "speedup":
                for _ in values:
                    yield LeftOut("of another metric", entry.metric.name)
                continue
            if len(entry.shape) not in (0, len(values)):
                raise FormatError(f"entry {place + 1}: {len(values)} values for {len(entry.shape)} shapes")
            shapes = [_shape(one) for one in entry.shape] or ["-"] * len(values)
            backend = match[1] or entry.model.backend or "helion"
            for value, _, shape in numbered((value, "", shape) for value, shape in zip(values, shapes, strict=True)):
                metrics = by_cell.setdefault((entry.model.name, backend, shape), {})
                metrics[match[2].removesuffix("_ms")] = number_of(value)
        for (operator, backend, shape), metrics in by_cell.items():
            yield self._result(operator, backend, shape, metrics)

    def _result(
        self, operator: str, backend: str, shape: str, metrics: dict[str, float | None]
    ) -> ImportedResult | LeftOut:
        mode = "bwd" if operator.endswith("-bwd") else "fwd"
        cell = self.cell(operator.removesuffix("-bwd") or "-", backend, shape, mode=mode)
        ms, compiled = metrics.get("latency"), metrics.get("compile_time_s")
        further = {} if compiled is None else {"compile_ms": compiled * 1e3}
        wrong = metrics.get("accuracy") == 0
        if ms is None and not wrong:
            return LeftOut("without a latency", f"{operator} {backend}")
        if not ms:
            reason = "Helion's accuracy check failed" if ms is None else "the file holds 0"
            return ImportedResult(cell, status="error", message=f"no latency: {reason}", metrics=further)
        if wrong:
            return ImportedResult(cell, [[ms]], "wrong", "Helion's accuracy check failed", metrics=further)
        return ImportedResult(cell, [[ms]], metrics=further)


def _shape(value: Any) -> str:
    return value if isinstance(value, str) and value.strip() else msgspec.json.encode(value).decode() if value else "-"
