"""Google Benchmark's `--benchmark_out_format=json`.

`BM_Gemm/64/N:1024/threads:8` is operator `BM_Gemm` with shape `64,N=1024,threads=8`. Each repetition is a burst of one
sample, its real time; of a file that holds aggregates alone, the median (or else the mean) is one. Errors and skipped
benchmarks become a status.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
    load_json,
    make_environment,
    make_record,
    make_run,
    read_bytes,
    status_of,
)
from groupbench.tracker.record import Cell, Record

TITLE = "Google Benchmark JSON"

_COMMIT_KEYS = ("commit", "git_commit", "commit_hash", "git_sha", "gitrev", "git_revision", "revision")
"""What people call it in `--benchmark_context=KEY=VALUE`."""


class Context(msgspec.Struct):
    date: str | None = None
    host_name: str | None = None
    executable: str | None = None
    num_cpus: int | None = None


class Benchmark(msgspec.Struct):
    name: str
    run_name: str | None = None
    run_type: str = "iteration"
    aggregate_name: str | None = None
    real_time: float | None = None
    time_unit: str = "ns"
    error_occurred: bool = False
    error_message: str | None = None
    skipped: bool = False
    skip_message: str | None = None


class Document(msgspec.Struct):
    context: dict[str, Any]
    benchmarks: list[Benchmark]


def recognise(head: bytes, path: Path) -> bool:
    keys = (b'"context"', b'"num_cpus"', b'"benchmarks"')
    return head.lstrip().startswith(b"{") and keys[0] in head and (keys[1] in head or keys[2] in head)


def read(path: Path, options: Options) -> Iterator[Record]:
    data = read_bytes(path)
    document = convert(load_json(data), Document)
    context = convert(document.context, Context, "context")
    commit = next((document.context[key] for key in _COMMIT_KEYS if isinstance(document.context.get(key), str)), None)
    date = from_iso(context.date, "context.date") if context.date and options.date is None else None
    run = make_run("google-benchmark", data, options, commit=commit, date=date)
    facts: dict[str, Any] = {"host": context.host_name, "cpu_count": context.num_cpus, "cpu": context.host_name}
    environment = make_environment(options, cuda=False, **facts)
    groups: dict[str, list[tuple[int, Benchmark]]] = {}
    for place, benchmark in enumerate(document.benchmarks):
        groups.setdefault(benchmark.run_name or benchmark.name, []).append((place, benchmark))
    program = re.split(r"[/\\]", context.executable or "")[-1] or "google-benchmark"
    for name, members in groups.items():
        operator, shape = _named(name)
        cell = Cell(
            operator=options.operator or operator,
            backend=options.backend or program,
            shape=shape,
            dtype=options.dtype or "-",
            mode=options.mode or "fwd",
            host="google-benchmark",
            protocol="google-benchmark",
            dims=dims_of(shape),
        )
        failed = next((one for _, one in members if one.error_occurred or one.skipped), None)
        if failed is not None:
            said = failed.error_message or failed.skip_message or ("skipped" if failed.skipped else "error")
            status, message = ("skipped", said) if failed.skipped else status_of(said)
            status = "error" if status == "skipped" and failed.error_occurred else status
            yield make_record(run, environment, cell, None, timing="cpu", status=status, message=message)  # type: ignore[arg-type]
            continue
        samples = _samples(members)
        if samples is not None:
            yield make_record(run, environment, cell, [[ms] for ms in samples], timing="cpu")


def _samples(members: list[tuple[int, Benchmark]]) -> list[float] | None:
    """Milliseconds of each repetition; None where the group is no time (a fitted complexity)."""
    repetitions = [member for member in members if member[1].run_type == "iteration"]
    if not repetitions:
        for wanted in ("median", "mean"):
            repetitions = [member for member in members if member[1].aggregate_name == wanted]
            if repetitions:
                break
    samples = []
    for place, one in repetitions:
        if one.time_unit not in UNITS:
            raise FormatError(f"benchmarks[{place}].time_unit: {one.time_unit!r} is no unit of time")
        if one.real_time is None:
            raise FormatError(f"benchmarks[{place}]: no real_time")
        samples.append(one.real_time * UNITS[one.time_unit])
    return samples or None


def _named(name: str) -> tuple[str, str]:
    """(operator, shape). A slash inside of `<…>` belongs to the operator."""
    depth, parts = 0, [""]
    for char in name:
        depth += {"<": 1, ">": -1}.get(char, 0)
        if char == "/" and depth <= 0:
            parts.append("")
        else:
            parts[-1] += char
    shape = ",".join(re.sub(r"^(\w+):", r"\1=", part) for part in parts[1:])
    return parts[0] or "-", shape or "-"
