"""TritonBench's `--output-json`: one flat object, or its CI's object with that under `metrics`.

Keys are `tritonbench_{operator}_{mode}[x_{x_val}-{backend}]_{metric}`. A latency is text (the median in ms); where a
backend failed, the text of the error stands in place of its first metric. Rows `average` and keys `…-avg` are left
out, as is every metric but latency, accuracy and tflops: the others follow from these or from the baseline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
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
    number_of,
    read_bytes,
    status_of,
)
from groupbench.tracker.record import Cell, Environment, Record, Run

TITLE = "TritonBench JSON"

MODES = ("fwd_no_grad", "fwd_bwd", "fwd", "bwd")
DTYPES = ("fp16", "fp32", "bf16", "int8", "int4", "fp8")
_BUILTIN = ("fp8", "int8", "int4")
"""Prefixes that belong to the operator's name."""

_KEY = re.compile(r"tritonbench_(.+?)\[x_(.*)-([^-\[\]]+)\]_(.*)", re.DOTALL)
_NOT_INPUTS = ("average", "hashes")


@dataclass
class Row:
    """One input and backend: its metrics, in the file's order."""

    x_val: str
    backend: str
    metrics: dict[str, Any] = field(default_factory=dict)


class Envelope(msgspec.Struct):
    """What TritonBench's CI writes around the metrics."""

    metrics: dict[str, Any]
    env: dict[str, Any] = {}


def recognise(head: bytes, path: Path) -> bool:
    return head.lstrip().startswith(b"{") and re.search(rb'"tritonbench_[^"]+\[(x_)?', head) is not None


def read(path: Path, options: Options) -> Iterator[Record]:
    data = read_bytes(path)
    content = load_json(data)
    if not isinstance(content, dict):
        raise FormatError("is not a JSON object")
    env: dict[str, Any] = {}
    if "metrics" in content:
        envelope = convert(content, Envelope)
        content, env = envelope.metrics, envelope.env
    tables: dict[str, dict[tuple[str, str], Row]] = {}
    for key, value in content.items():
        found = _KEY.fullmatch(key)
        if found is None or found[2] in _NOT_INPUTS:
            if not key.startswith("tritonbench_"):
                raise FormatError(f"key {key!r} is none of TritonBench's")
            continue
        benchmark, x_val, backend, metric = found.groups()
        rows = tables.setdefault(benchmark, {})
        rows.setdefault((x_val, backend), Row(x_val, backend)).metrics[metric] = value
    if not tables:
        raise FormatError("holds no result of an input")
    run, environment = context_of(data, options, env)
    for benchmark, rows in tables.items():
        yield from records_of(benchmark, list(rows.values()), run, environment, options)


def context_of(data: bytes, options: Options, env: dict[str, Any]) -> tuple[Run, Environment]:
    """Run and environment from what TritonBench's CI says. The commit that is tracked is no part of the environment:
    every night would be another one."""
    said = {key: value for key, value in env.items() if isinstance(value, str) and value not in ("", "unknown")}
    commits = {name: said.get(f"{name}_commit") for name in ("tritonbench", "triton", "pytorch")}
    if options.commit_of not in commits:
        raise FormatError(f"--commit-of is one of {', '.join(commits)}, not {options.commit_of}")
    own = commits.pop(options.commit_of)
    date = said.get("benchmark_date")
    run = make_run(
        "tritonbench",
        data,
        options,
        commit=own,
        date=_date(date) if date else None,
        branch=said.get(f"{options.commit_of}_branch"),
    )
    return run, make_environment(
        options,
        cuda=True,
        gpu=said.get("device"),
        cuda_version=said.get("cuda_version"),
        torch=commits.get("pytorch"),
        triton=commits.get("triton"),
        tritonbench=commits.get("tritonbench"),
    )


def records_of(
    benchmark: str, rows: Iterable[Row], run: Run, environment: Environment, options: Options
) -> Iterator[Record]:
    """The records of one operator's table: a row is one input and backend."""
    rows = list(rows)
    operator, mode, dtype = named(benchmark)
    baselines = baseline_of(rows)
    for row in rows:
        yield record_of(
            row, run, environment, options, operator=operator, mode=mode, dtype=dtype, baseline=row.backend in baselines
        )


def record_of(
    row: Row,
    run: Run,
    environment: Environment,
    options: Options,
    *,
    operator: str,
    mode: str,
    dtype: str | None,
    baseline: bool,
) -> Record:
    latency = row.metrics.get("latency")
    texts = [value for value in row.metrics.values() if isinstance(value, str) and number_of(value) is None]
    ms = number_of(latency)
    passed = number_of(row.metrics.get("accuracy"))
    tflops = number_of(row.metrics.get("tflops"))
    shape = shape_of(row.x_val)
    flops = round(tflops * ms * 1e9) if ms and tflops and 0 < tflops * ms < 2**63 / 1e10 else None
    cell = Cell(
        operator=options.operator or operator,
        backend=row.backend,
        shape=shape,
        dtype=options.dtype or dtype or "unknown",
        mode=options.mode or mode,
        host="tritonbench",
        protocol="tritonbench",
        dims=dims_of(shape),
        flops=flops,
    )
    if ms is None:
        failed = next((text for text in texts if text.strip()), "")
        status, message = status_of(failed)
        message = message if failed else "TritonBench gave no latency"
        return make_record(run, environment, cell, None, timing="gpu", status=status, message=message)
    timing = "gpu" if environment.device == "cuda" else "cpu"
    wrong = passed == 0
    return make_record(
        run,
        environment,
        cell,
        [[ms]],
        timing=timing,  # type: ignore[arg-type]
        status="wrong" if wrong else "ok",
        message="TritonBench's accuracy check failed" if wrong else None,
        baseline=baseline,
    )


def named(benchmark: str) -> tuple[str, str, str | None]:
    """(operator, mode, dtype or None) of the name that TritonBench gives to a benchmark, `bf16_gemm_fwd`."""
    mode = next((mode for mode in MODES if benchmark.endswith(f"_{mode}") and benchmark != f"_{mode}"), None)
    operator = benchmark.removesuffix(f"_{mode}") if mode else benchmark
    for dtype in DTYPES:
        if operator.startswith(f"{dtype}_") and operator != f"{dtype}_":
            return operator if dtype in _BUILTIN else operator.removeprefix(f"{dtype}_"), mode or "fwd", dtype
    return operator, mode or "fwd", None


def baseline_of(rows: Iterable[Row]) -> set[str]:
    """The one backend without a speed-up where others have one."""
    has: dict[str, bool] = {}
    for row in rows:
        has[row.backend] = has.get(row.backend, False) or "speedup" in row.metrics
    without = {backend for backend, found in has.items() if not found}
    return without if len(without) == 1 and any(has.values()) else set()


def shape_of(x_val: str) -> str:
    """The text of TritonBench's x value; a number alone gets its name, since it does not say the whole problem."""
    text = " ".join(x_val.split())
    return f"x_val={text}" if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else text or "-"


def _date(text: str) -> Any:
    digits = re.fullmatch(r"(\d{4})(\d\d)(\d\d)(\d\d)(\d\d)(\d\d)", text, re.ASCII)  # as its CI writes it
    if digits:
        year, month, day, hour, minute, second = digits.groups()
        text = f"{year}-{month}-{day}T{hour}:{minute}:{second}"
    return from_iso(text, "env.benchmark_date")
