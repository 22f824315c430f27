"""Read files from TritonBench's `--output-json`: one flat object, or the CI's object with one under `metrics`.

Keys are `tritonbench_{operator}_{mode}[x_{x_val}-{backend}]_{metric}`. A latency is text: the median in ms. If a
backend failed, the first metric holds the error text. Values that follow from others are ignored: rows `average`, keys
`…-avg`, speed-up and gbps. Other metrics (`gpu_peak_mem`) are left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.facts.record import Environment, Run
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Read, Reader, read_runs
from groupbench.tracker.formats.values import (
    FormatError,
    convert,
    from_iso,
    load_json,
    number_of,
    read_bytes,
    status_of,
)

TITLE = "TritonBench JSON"

MODES = ("fwd_no_grad", "fwd_bwd", "fwd", "bwd")
DTYPES = ("fp16", "fp32", "bf16", "int8", "int4", "fp8")
_BUILTIN = ("fp8", "int8", "int4")
"""Dtypes kept in the operator's name."""

_KEY = re.compile(r"tritonbench_(.+?)\[x_(.*)-([^-\[\]]+)\]_(.*)", re.DOTALL)
_NOT_INPUTS = ("average", "hashes")


_USED = ("latency", "accuracy", "tflops")
DERIVED = ("speedup", "gbps", "hashes", "best_config")
"""Metrics derived from latencies, or without a number."""


@dataclass
class TableRow:
    """One input and backend: the metrics, in file order."""

    x_val: str
    backend: str
    metrics: dict[str, Any] = field(default_factory=dict)


class Envelope(msgspec.Struct):
    """TritonBench CI's object around the metrics."""

    metrics: dict[str, Any]
    env: dict[str, Any] = {}


def recognise(head: bytes, path: Path) -> bool:
    return head.lstrip().startswith(b"{") and re.search(rb'"tritonbench_[^"]+\[(x_)?', head) is not None


def read(path: Path, options: Options) -> Iterator[Read]:
    data = read_bytes(path)
    content = load_json(data)
    if not isinstance(content, dict):
        raise FormatError("is not a JSON object")
    env: dict[str, Any] = {}
    if "metrics" in content:
        envelope = convert(content, Envelope)
        content, env = envelope.metrics, envelope.env
    tables: dict[str, dict[tuple[str, str], TableRow]] = {}
    for key, value in content.items():
        match = _KEY.fullmatch(key)
        if match is None or match[2] in _NOT_INPUTS:
            if not key.startswith("tritonbench_"):
                raise FormatError(f"key {key!r} is not one of TritonBench's")
            continue
        benchmark, x_val, backend, metric = match.groups()
        rows = tables.setdefault(benchmark, {})
        rows.setdefault((x_val, backend), TableRow(x_val, backend)).metrics[metric] = value
    if not tables:
        raise FormatError("contains no result of an input")
    return read_runs([TableReader(data, options, {name: list(rows.values()) for name, rows in tables.items()}, env)])


class TableReader(Reader):
    """Reads TritonBench's tables, by the benchmark's name. A row is one input and backend.

    `env` holds the facts about the run that TritonBench's CI adds.
    """

    name = "tritonbench"
    dtype = "unknown"

    def __init__(
        self, data: bytes, options: Options, tables: dict[str, list[TableRow]], env: dict[str, Any] | None = None
    ) -> None:
        super().__init__(data, options)
        self.tables = tables
        texts = {key: value for key, value in (env or {}).items() if isinstance(value, str)}
        self.env = {key: value for key, value in texts.items() if value not in ("", "unknown")}
        commits = {name: self.env.get(f"{name}_commit") for name in ("tritonbench", "triton", "pytorch")}
        if options.commit_of not in commits:
            raise FormatError(f"--commit-of must be one of {', '.join(commits)}, not {options.commit_of}")
        self.commit = commits.pop(options.commit_of)
        self.dependencies = commits  # without the tracked commit, which would give every run another environment

    def run(self) -> Run:
        date = self.env.get("benchmark_date")
        return self.make_run(
            commit=self.commit,
            date=from_iso(date, "env.benchmark_date") if date else None,
            branch=self.env.get(f"{self.options.commit_of}_branch"),
        )

    def environment(self) -> Environment:
        gpu, versions = self.env.get("device"), self.dependencies
        return self.make_environment(
            device="cuda" if gpu else None,
            gpu=gpu,
            cuda=self.env.get("cuda_version"),
            torch=versions.get("pytorch"),
            triton=versions.get("triton"),
            tritonbench=versions.get("tritonbench"),
        )

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        for benchmark, rows in self.tables.items():
            baselines = baseline_of(rows)
            for row in rows:
                yield self._result(benchmark, row, row.backend in baselines)
                for metric, value in row.metrics.items():
                    if metric not in (*_USED, *DERIVED) and number_of(value) is not None:
                        yield LeftOut("of another metric", metric)

    def _result(self, benchmark: str, row: TableRow, baseline: bool) -> ImportedResult:
        operator, mode, dtype = named(benchmark)
        ms, tflops = number_of(row.metrics.get("latency")), number_of(row.metrics.get("tflops"))
        flops = round(tflops * ms * 1e9) if ms and tflops and 0 < tflops * ms < 2**63 / 1e10 else None
        cell = self.cell(operator, row.backend, shape_of(row.x_val), dtype=dtype, mode=mode, facts={"flops": flops})
        if ms is None:
            texts = [text for text in row.metrics.values() if isinstance(text, str) and number_of(text) is None]
            failure = next((text for text in texts if text.strip()), "")
            status, message = status_of(failure)
            return ImportedResult(cell, status=status, message=message if failure else "TritonBench gave no latency")
        if number_of(row.metrics.get("accuracy")) == 0:
            message = "TritonBench's accuracy check failed"
            return ImportedResult(cell, [[ms]], "wrong", message, baseline=baseline)
        return ImportedResult(cell, [[ms]], baseline=baseline)


def named(benchmark: str) -> tuple[str, str, str | None]:
    """Return (operator, mode, dtype or None) of a benchmark's name in TritonBench, such as `bf16_gemm_fwd`."""
    mode = next((mode for mode in MODES if benchmark.endswith(f"_{mode}") and benchmark != f"_{mode}"), None)
    operator = benchmark.removesuffix(f"_{mode}") if mode else benchmark
    for dtype in DTYPES:
        if operator.startswith(f"{dtype}_") and operator != f"{dtype}_":
            return operator if dtype in _BUILTIN else operator.removeprefix(f"{dtype}_"), mode or "fwd", dtype
    return operator, mode or "fwd", None


def baseline_of(rows: Iterable[TableRow]) -> set[str]:
    """Return the one backend without a speed-up, if others have one; else an empty set."""
    has: dict[str, bool] = {}
    for row in rows:
        has[row.backend] = has.get(row.backend, False) or "speedup" in row.metrics
    without = {backend for backend, compared in has.items() if not compared}
    return without if len(without) == 1 and any(has.values()) else set()


def shape_of(x_val: str) -> str:
    """Return TritonBench's x value as a shape. A bare number is not the whole problem and becomes `x_val=NUMBER`."""
    text = " ".join(x_val.split())
    return f"x_val={text}" if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else text or "-"
