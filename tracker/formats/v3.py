"""Files for PyTorch's benchmark database, `oss_ci_benchmark_v3`, as TritonBench writes them and as `export` does: an
entry a metric, JSON lines or a list.

TritonBench's writer puts 0.0 wherever a value was missing or a text such as `CUDA OOM`: a latency of 0 is an error
here, and what it was is lost. Metrics of one operator, backend and input make one result. Several values of a metric
are samples. A latency is in ms unless the metric's name says a unit, `latency(us)` or `latency_us`, or the entry does
beside it. Our own say by the metric `pass` what became of a cell.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.formats.common import (
    UNITS,
    FormatError,
    Options,
    convert,
    dims_of,
    from_iso,
    from_timestamp,
    load_json,
    make_environment,
    make_record,
    make_run,
    number_of,
    read_bytes,
)
from groupbench.tracker.formats.tritonbench_json import Row, baseline_of, shape_of
from groupbench.tracker.record import STATUSES, Accuracy, Cell, Environment, Record, Run, Status

TITLE = "oss_ci_benchmark_v3"

FAILED = tuple(status for status in STATUSES if status != "ok")

_LATENCY = re.compile(r"latency(?:\s*[(_]\s*(s|ms|us|µs|ns)\s*\)?)?", re.IGNORECASE)


class Benchmark(msgspec.Struct):
    name: str
    mode: str | None = None
    dtype: str | None = None
    extra_info: dict[str, Any] = {}


class Model(msgspec.Struct):
    name: str
    type: str | None = None
    backend: str | None = None
    extra_info: dict[str, Any] = {}


class Metric(msgspec.Struct):
    name: str
    benchmark_values: list[float | int | str | None]
    extra_info: dict[str, Any] = {}


class Dependency(msgspec.Struct):
    repo: str | None = None
    branch: str | None = None
    sha: str | None = None
    version: str | None = None
    extra_info: dict[str, Any] = {}


class Runner(msgspec.Struct):
    name: str | None = None
    gpu_info: str | None = None
    cpu_info: str | None = None
    extra_info: dict[str, Any] = {}


class Entry(msgspec.Struct):
    benchmark: Benchmark
    model: Model
    metric: Metric
    runners: list[Runner] = []
    dependencies: dict[str, Dependency] = {}
    timestamp: float | None = None
    head_sha: str | None = None
    head_branch: str | None = None


def recognise(head: bytes, path: Path) -> bool:
    return head.lstrip().startswith((b"{", b"[")) and b'"benchmark_values"' in head


def read(path: Path, options: Options) -> Iterator[Record]:
    data = read_bytes(path)
    groups: dict[tuple[Any, ...], list[tuple[str, Entry]]] = {}
    contexts: dict[tuple[Any, ...], tuple[Run, Environment]] = {}
    for where, entry in _entries(data):
        facts = _facts(entry, options)
        if facts not in contexts:
            contexts[facts] = _context(data, options, entry, where)
        inputs = entry.metric.extra_info.get("input_shape")
        if entry.model.backend is None or (inputs is None and entry.model.type == "tritonbench-oss"):
            continue  # an aggregate over inputs
        shape = shape_of(str(inputs)) if inputs is not None else "-"
        how = tuple(str(entry.benchmark.extra_info.get(name, "tritonbench")) for name in ("host", "protocol"))
        named = (entry.model.name, entry.model.backend, entry.benchmark.mode, entry.benchmark.dtype, how, shape)
        key = (facts, *named)
        groups.setdefault(key, []).append((where, entry))
    found = False
    baselines = _baselines(groups)
    for (facts, operator, backend, mode, dtype, (host, protocol), shape), entries in groups.items():
        cell = Cell(
            operator=options.operator or operator or "-",
            backend=options.backend or backend or "-",
            shape=shape,
            dtype=options.dtype or dtype or "unknown",
            mode=options.mode or mode or "fwd",
            host=host,
            protocol=protocol,
            dims=dims_of(shape),
        )
        baseline = backend in baselines[facts, operator, mode, dtype, host, protocol]
        record = _record(cell, entries, *contexts[facts], baseline)
        if record is not None:
            found = True
            yield record
    if groups and not found:
        names = sorted({entry.metric.name for entries in groups.values() for _, entry in entries})
        raise FormatError(f"holds no latency; its metrics are {', '.join(names[:8])}")


def _entries(data: bytes) -> Iterator[tuple[str, Entry]]:
    if data.lstrip().startswith(b"["):
        content = load_json(data)
        for place, item in enumerate(content, 1):
            yield f"entry {place}", convert(item, Entry, f"entry {place}")
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                item = load_json(line)
            except FormatError as error:
                raise FormatError(f"line {number}: {error.message.removeprefix('line 1: ')}") from error
            yield f"line {number}", convert(item, Entry, f"line {number}")


def _baselines(groups: dict[tuple[Any, ...], list[tuple[str, Entry]]]) -> dict[tuple[Any, ...], set[str]]:
    """Of each table, the backend that others' speed-ups are over."""
    tables: dict[tuple[Any, ...], list[Row]] = {}
    for (facts, operator, backend, mode, dtype, how, shape), entries in groups.items():
        metrics = {entry.metric.name: None for _, entry in entries}
        tables.setdefault((facts, operator, mode, dtype, *how), []).append(Row(shape, backend, metrics))
    return {key: baseline_of(rows) for key, rows in tables.items()}


@dataclass
class _Told:
    """What the metrics of one result say."""

    samples: list[float] | None = None  # ms; 0 where there was no number
    passed: float | None = None
    tflops: float | None = None
    rms: float | None = None
    failed: tuple[Status, str] | None = None  # status and message, where a metric says them

    def add(self, where: str, metric: Metric) -> None:
        unit = _LATENCY.fullmatch(metric.name.strip())
        values = [number_of(value) for value in metric.benchmark_values]
        first = values[0] if values else None
        if unit:
            named = (unit[1] or str(metric.extra_info.get("unit", "ms"))).lower()
            if named not in UNITS:
                raise FormatError(f"{where}: {named!r} is no unit of time")
            if self.samples is not None:
                raise FormatError(f"{where}: a second latency of the same result")
            self.samples = [0.0 if value is None else value * UNITS[named] for value in values]
        elif metric.name == "accuracy":
            self.passed = first
        elif metric.name == "tflops":
            self.tflops = first
        elif metric.name == "rms":
            self.rms = first if first is not None and 0 <= first < math.inf else None
        elif metric.name == "pass" and first == 0 and metric.extra_info.get("status") in FAILED:
            status = metric.extra_info["status"]
            self.failed = (status, str(metric.extra_info.get("message") or f"it was {status}"))


def _record(
    cell: Cell, entries: list[tuple[str, Entry]], run: Run, environment: Environment, baseline: bool
) -> Record | None:
    told = _Told()
    for where, entry in entries:
        told.add(where, entry.metric)
    given: dict[str, Any] = {"timing": "gpu" if environment.device == "cuda" else "cpu", "baseline": baseline}
    if told.rms is not None:
        given["accuracy"] = Accuracy(rms=told.rms)
    samples = told.samples
    if told.failed is not None:
        status, message = told.failed
        return make_record(
            run, environment, cell, [samples] if samples else None, status=status, message=message, **given
        )
    if samples is None:
        return make_record(run, environment, cell, None, **given) if told.rms is not None else None
    if not samples or 0.0 in samples:
        said = "no latency: the file holds 0, which it writes for a failure and for out of memory"
        return make_record(run, environment, cell, None, status="error", message=said, **given)
    if told.tflops and len(samples) == 1 and 0 < told.tflops * samples[0] < 2**63 / 1e10:
        cell = msgspec.structs.replace(cell, flops=round(told.tflops * samples[0] * 1e9))
    if told.passed == 0:
        given |= {"status": "wrong", "message": "TritonBench's accuracy check failed"}
    return make_record(run, environment, cell, [samples], **given)


def _facts(entry: Entry, options: Options) -> tuple[Any, ...]:
    """What tells runs and environments apart."""
    shas = tuple((name, value.sha) for name, value in entry.dependencies.items())
    runner = entry.runners[0] if entry.runners else Runner()
    cuda = runner.extra_info.get("cuda_version")
    return (entry.head_sha, entry.timestamp, shas, runner.gpu_info, runner.cpu_info, str(cuda))


def _context(data: bytes, options: Options, entry: Entry, where: str) -> tuple[Run, Environment]:
    dependencies = dict(entry.dependencies)
    own = dependencies.pop(options.commit_of, None) if entry.head_sha is None else None
    if own is None and entry.head_sha is None and dependencies and options.commit is None:
        raise FormatError(f"{where}: no dependency {options.commit_of!r} to track; known: {', '.join(dependencies)}")
    committed = own.extra_info.get("commit_time") if own else None
    run = make_run(
        "v3",
        data,
        options,
        commit=entry.head_sha or (own.sha if own else None),
        branch=entry.head_branch or (own.branch if own else None),
        date=from_timestamp(entry.timestamp) if entry.timestamp is not None else None,
        committed=_time(committed),
    )
    runner = entry.runners[0] if entry.runners else Runner()
    shas = {name: value.sha or value.version for name, value in dependencies.items()}
    cuda = runner.extra_info.get("cuda_version")
    return run, make_environment(
        options,
        cuda=bool(runner.gpu_info) or not runner.cpu_info,
        gpu=runner.gpu_info,
        cpu=runner.cpu_info,
        cuda_version=str(cuda) if cuda else None,
        torch=shas.get("pytorch"),
        triton=shas.get("triton"),
        tritonbench=shas.get("tritonbench"),
    )


def _time(text: Any) -> Any:
    try:
        return from_iso(text, "commit_time") if isinstance(text, str) else None
    except FormatError:
        return None
