"""Read files for PyTorch's benchmark database, `oss_ci_benchmark_v3`: by TritonBench, `export` and others (see `hud`).

A file has an entry for each metric, as JSON lines or a list. The metrics of one operator, backend and input make one
result, and several values of a metric are samples. A latency is in ms unless the metric's name has a unit,
`latency(us)` or `latency_us`, or the entry gives one in `extra_info`. TritonBench writes 0.0 for a missing value or a
text such as `CUDA OOM`, so a latency of 0 becomes an error without the original reason. Files by `export` have the
metric `pass`, which holds the status of a cell.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.facts.metrics import METRICS
from groupbench.tracker.facts.record import STATUSES, Accuracy, Environment, Record, Run, Status
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Read, Reader, read_runs
from groupbench.tracker.formats.tritonbench_json import DERIVED, TableRow, baseline_of, shape_of
from groupbench.tracker.formats.values import (
    UNITS,
    FormatError,
    convert,
    date_if_valid,
    from_timestamp,
    json_lines,
    load_json,
    number_of,
    read_bytes,
    without_message,
)

TITLE = "oss_ci_benchmark_v3"

FAILED = tuple(status for status in STATUSES if status != "ok")

_LATENCY = re.compile(r"latency(?:\s*[(_]\s*(s|ms|us|µs|ns)\s*\)?)?", re.IGNORECASE)


class V3Benchmark(msgspec.Struct):
    name: str
    mode: str | None = None
    dtype: str | None = None
    extra_info: dict[str, Any] = {}


class V3Model(msgspec.Struct):
    name: str
    type: str | None = None
    backend: str | None = None
    extra_info: dict[str, Any] = {}


class V3Metric(msgspec.Struct):
    name: str
    benchmark_values: list[float | int | str | None]
    unit: str | None = None
    extra_info: dict[str, Any] = {}


class V3Dependency(msgspec.Struct):
    repo: str | None = None
    branch: str | None = None
    sha: str | None = None
    version: str | None = None
    extra_info: dict[str, Any] = {}


class V3Runner(msgspec.Struct):
    name: str | None = None
    type: str | None = None
    gpu_info: str | None = None
    cpu_info: str | None = None
    extra_info: dict[str, Any] = {}


class V3Entry(msgspec.Struct):
    benchmark: V3Benchmark
    model: V3Model
    metric: V3Metric
    runners: list[V3Runner] = []
    dependencies: dict[str, V3Dependency] = {}
    timestamp: float | None = None
    head_sha: str | None = None
    head_branch: str | None = None


def recognise(head: bytes, path: Path) -> bool:
    return head.lstrip().startswith((b"{", b"[")) and b'"benchmark_values"' in head


def read(path: Path, options: Options) -> Iterator[Read]:
    data = read_bytes(path)
    readers: dict[tuple[Any, ...], _V3Reader] = {}
    others: dict[tuple[Any, ...], list[V3Entry]] = {}
    entries = []
    for where, entry in _entries(data):
        if entry.model.type == "tritonbench-oss" or (entry.model.backend and "input_shape" in entry.metric.extra_info):
            entries.append((where, entry))
        else:
            others.setdefault((*_facts(entry), entry.benchmark.extra_info.get("device")), []).append(entry)
    if not any("input_shape" in entry.metric.extra_info for _, entry in entries):
        entries = _without_shapes(entries)
    for where, entry in entries:
        facts = _facts(entry)
        if facts not in readers:
            readers[facts] = _V3Reader(data, options, where, entry)
        readers[facts].add(where, entry)
    yield from _records(list(readers.values()))
    if others:
        from groupbench.tracker.formats.hud import HudReader

        yield from read_runs(HudReader(data, options, of_run) for of_run in others.values())


def _without_shapes(entries: list[tuple[str, V3Entry]]) -> list[tuple[str, V3Entry]]:
    """Return the entries of a file in which TritonBench names no inputs, with the inputs numbered in its order."""
    seen: Counter[tuple[Any, ...]] = Counter()
    for _, entry in entries:
        if entry.model.type == "tritonbench-oss" and entry.model.backend is not None:
            benchmark = entry.benchmark
            key = (entry.model.name, entry.model.backend, benchmark.mode, benchmark.dtype, entry.metric.name)
            seen[key] += 1
            entry.metric.extra_info["input_shape"] = f"input={seen[key]}"
    return entries


def _records(readers: list[_V3Reader]) -> Iterator[Read]:
    """Yield the results of all runs. Raises FormatError if none has a latency."""
    names: dict[tuple[Any, ...], set[str | None]] = {}
    for reader in readers:
        names.setdefault(reader.moment, set()).add(reader.run_name)
    for reader in readers:
        reader.part = reader.run_name if len(names[reader.moment]) > 1 else None
    any_record = False
    for result in read_runs(readers):
        any_record = any_record or isinstance(result, Record)
        yield result
    metrics = sorted({name for reader in readers for name in reader.metrics()})
    if metrics and not any_record:
        raise FormatError(f"contains no latency; its metrics are {', '.join(metrics[:8])}")


def _entries(data: bytes) -> Iterator[tuple[str, V3Entry]]:
    if data.lstrip().startswith(b"[") and (whole := _list_in(data)) is not None:
        yield from ((f"entry {place}", convert(item, V3Entry, f"entry {place}")) for place, item in enumerate(whole, 1))
        return
    for number, content in json_lines(data):
        for item in content if isinstance(content, list) else [content]:
            yield f"line {number}", convert(item, V3Entry, f"line {number}")


def _list_in(data: bytes) -> list[Any] | None:
    """Return a file's list; None if the file has a list, or an object, in each line."""
    try:
        content: list[Any] = load_json(data)
        return content
    except FormatError as error:
        if "Extra data" in error.message:
            return None
        raise


@dataclass(frozen=True)
class _V3Key:
    """The fields identifying a result within a run."""

    operator: str
    backend: str
    mode: str | None
    dtype: str | None
    host: str
    protocol: str
    seed: int
    shape: str

    @property
    def table(self) -> tuple[Any, ...]:
        """The fields shared by results with the same baseline."""
        return (self.operator, self.mode, self.dtype, self.host, self.protocol, self.seed)


class EntriesReader(Reader):
    """Reads the entries of one run, the first of which has the facts of all."""

    def __init__(self, data: bytes, options: Options, entries: Sequence[V3Entry], part: str | None = None) -> None:
        super().__init__(data, options, entries[0].benchmark.extra_info)
        self.first, self.part = entries[0], part

    def run(self) -> Run:
        first = self.first
        date = None if first.timestamp is None else from_timestamp(first.timestamp)
        return self.make_run(commit=first.head_sha, branch=first.head_branch, date=date)


class _V3Reader(Reader):
    """Reads the entries of one run."""

    name = "v3"
    dtype = "unknown"

    def __init__(self, data: bytes, options: Options, where: str, entry: V3Entry) -> None:
        super().__init__(data, options)
        self.first = entry
        self.run_name, self.moment = _run_of(entry), (entry.head_sha, entry.timestamp)
        self.results: dict[_V3Key, list[tuple[str, V3Entry]]] = {}
        self.dependencies = dict(entry.dependencies)
        self.tracked = self.dependencies.pop(options.commit_of, None) if entry.head_sha is None else None
        if self.tracked is None and entry.head_sha is None and self.dependencies and options.commit is None:
            names = ", ".join(self.dependencies)
            raise FormatError(f"{where}: no dependency {options.commit_of!r} to track; known: {names}")

    def add(self, where: str, entry: V3Entry) -> None:
        """Add an entry to a result. An aggregate over inputs is skipped, since the others determine it."""
        inputs = entry.metric.extra_info.get("input_shape")
        if entry.model.backend is None or inputs is None:
            return
        benchmark, extra = entry.benchmark, entry.benchmark.extra_info
        seed = number_of(extra.get("seed"))
        key = _V3Key(
            operator=entry.model.name,
            backend=entry.model.backend,
            mode=benchmark.mode,
            dtype=benchmark.dtype,
            host=str(extra.get("host", "tritonbench")),
            protocol=str(extra.get("protocol", "tritonbench")),
            seed=int(seed) if seed is not None and abs(seed) < 2**53 else 0,
            shape=shape_of(str(inputs)),
        )
        self.results.setdefault(key, []).append((where, entry))

    def metrics(self) -> Iterator[str]:
        """Yield the names of the metrics."""
        for entries in self.results.values():
            yield from (entry.metric.name for _, entry in entries)

    def run(self) -> Run:
        entry, tracked = self.first, self.tracked
        return self.make_run(
            commit=entry.head_sha or (tracked.sha if tracked else None),
            branch=entry.head_branch or (tracked.branch if tracked else None),
            date=from_timestamp(entry.timestamp) if entry.timestamp is not None else None,
            committed=date_if_valid(tracked.extra_info.get("commit_time") if tracked else None),
        )

    def environment(self) -> Environment:
        runner = self.first.runners[0] if self.first.runners else V3Runner()
        versions = {name: value.sha or value.version for name, value in self.dependencies.items()}
        cuda = runner.extra_info.get("cuda_version")
        on_gpu = runner.type == "cuda" if runner.type in ("cuda", "cpu") else runner.gpu_info or not runner.cpu_info
        return self.make_environment(
            device="cuda" if on_gpu else "cpu",
            gpu=runner.gpu_info,
            cpu=runner.cpu_info,
            cuda=str(cuda) if cuda else None,
            torch=versions.get("pytorch"),
            triton=versions.get("triton"),
            tritonbench=versions.get("tritonbench"),
        )

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        baselines = self._baselines()
        for key, entries in self.results.items():
            metrics = _V3Metrics()
            for where, entry in entries:
                if not metrics.add(where, entry.metric):
                    yield LeftOut("of another metric", entry.metric.name)
            yield self._result(key, metrics, key.backend in baselines[key.table])

    def _baselines(self) -> dict[tuple[Any, ...], set[str]]:
        """Return each table's baseline backend."""
        tables: dict[tuple[Any, ...], list[TableRow]] = {}
        for key, entries in self.results.items():
            names = {entry.metric.name: None for _, entry in entries}
            tables.setdefault(key.table, []).append(TableRow(key.shape, key.backend, names))
        return {table: baseline_of(rows) for table, rows in tables.items()}

    def _result(self, key: _V3Key, metrics: _V3Metrics, baseline: bool) -> ImportedResult | LeftOut:
        samples, failed = metrics.samples, metrics.failed
        if samples is None and failed is None and metrics.rms is None:
            return LeftOut("without a latency", f"{key.operator} {key.backend} {key.shape}")
        flops = None
        if failed is None and samples is not None and (not samples or 0.0 in samples):
            failed = ("error", "no latency: the file holds 0, which it writes for a failure and for out of memory")
        elif failed is None and samples is not None:
            flops = metrics.flops
            failed = ("wrong", "TritonBench's accuracy check failed") if metrics.passed == 0 else None
        cell = self.cell(
            key.operator,
            key.backend,
            key.shape,
            dtype=key.dtype,
            mode=key.mode,
            host=key.host,
            protocol=key.protocol,
            facts={"seed": key.seed, "flops": flops},
        )
        status, message = failed or ("ok", None)
        accuracy = None if metrics.rms is None else Accuracy(rms=metrics.rms)
        return ImportedResult(
            cell, [samples] if samples else [], status, message, accuracy, baseline, metrics=metrics.further
        )


@dataclass
class _V3Metrics:
    """The metrics of one result."""

    samples: list[float] | None = None  # ms; 0 for a value that was not a number
    passed: float | None = None
    tflops: float | None = None
    rms: float | None = None
    failed: tuple[Status, str] | None = None  # status and message of the metric `pass`
    further: dict[str, float] = field(default_factory=dict)  # metrics that a record carries by name

    def add(self, where: str, metric: V3Metric) -> bool:
        """Add a metric; return False for one that no record holds. Raises FormatError."""
        values = [number_of(value) for value in metric.benchmark_values]
        first = values[0] if values else None
        if _LATENCY.fullmatch(metric.name.strip()):
            self._add_latency(where, metric, values)
        elif metric.name == "accuracy":
            self.passed = first
        elif metric.name == "tflops":
            self.tflops = first
        elif metric.name == "rms":
            self.rms = first if first is not None and 0 <= first < math.inf else None
        elif metric.name == "pass":
            self._add_pass(metric, first)
        elif metric.name in METRICS and METRICS[metric.name].column is None and first is not None:
            self.further[metric.name] = first
        else:
            return metric.name in DERIVED
        return True

    def _add_pass(self, metric: V3Metric, value: float | None) -> None:
        status = metric.extra_info.get("status")
        if value == 0 and status in FAILED:
            self.failed = (status, str(metric.extra_info.get("message") or without_message(status)))

    def _add_latency(self, where: str, metric: V3Metric, values: list[float | None]) -> None:
        match = _LATENCY.fullmatch(metric.name.strip())
        unit = str((match and match[1]) or metric.unit or metric.extra_info.get("unit", "ms")).lower()
        if unit not in UNITS:
            raise FormatError(f"{where}: {unit!r} is not a unit of time")
        if self.samples is not None:
            raise FormatError(f"{where}: a second latency of the same result")
        self.samples = [0.0 if value is None else value * UNITS[unit] for value in values]

    @property
    def flops(self) -> int | None:
        """Floating-point operations of one call, from the rate and the only sample; None if either is missing."""
        samples = self.samples or []
        if self.tflops and len(samples) == 1 and 0 < self.tflops * samples[0] < 2**63 / 1e10:
            return round(self.tflops * samples[0] * 1e9)
        return None


def _facts(entry: V3Entry) -> tuple[Any, ...]:
    """Return the fields identifying a run and an environment."""
    shas = tuple((name, value.sha) for name, value in entry.dependencies.items())
    runner = entry.runners[0] if entry.runners else V3Runner()
    cuda = runner.extra_info.get("cuda_version")
    hardware = (runner.type, runner.gpu_info, runner.cpu_info, str(cuda))
    return (entry.head_sha, entry.timestamp, _run_of(entry), shas, *hardware)


def _run_of(entry: V3Entry) -> str | None:
    """Return the id of the run, which `export` writes, or None."""
    run = entry.benchmark.extra_info.get("run")
    return run if isinstance(run, str) else None
