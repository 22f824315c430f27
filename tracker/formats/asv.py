"""airspeed velocity's results, version 2: the folder (`benchmarks.json`, a folder a machine, a file a commit and
environment), or one such file.

A benchmark is an operator, its parameters are the shape, the environment's name is the backend: asv runs the same
commit in several beside each other. Only times are read (`time_…`, unit seconds); a result of another version of the
benchmark than `benchmarks.json` knows is left out, as asv does. null is a failure, NaN a skipped benchmark.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.formats.common import (
    FormatError,
    Options,
    convert,
    dims_of,
    from_timestamp,
    load_json,
    make_environment,
    make_record,
    make_run,
    number_of,
    read_bytes,
)
from groupbench.tracker.record import Cell, Environment, Record, Run

TITLE = "asv results"

MOST_COMBINATIONS = 1_000_000


class Results(msgspec.Struct):
    commit_hash: str
    env_name: str
    date: float  # the commit's, in ms
    params: dict[str, Any]
    result_columns: list[str]
    results: dict[str, list[Any] | None]
    version: int
    python: str | None = None
    requirements: dict[str, Any] = {}
    env_vars: dict[str, Any] = {}


class Known(msgspec.Struct):
    """What benchmarks.json says of one."""

    param_names: list[str] = []
    type: str | None = None
    unit: str | None = None
    version: str | None = None


class Columns(msgspec.Struct):
    """One benchmark's results, by column; a list has an item for each combination of parameters."""

    result: list[Any] | None = None
    params: list[list[Any]] = []
    version: str | None = None
    started_at: float | None = None
    duration: float | None = None
    samples: list[Any] | None = None


def recognise(head: bytes, path: Path) -> bool:
    if path.is_dir():
        return (path / "benchmarks.json").is_file()
    return head.lstrip().startswith(b"{") and b'"result_columns"' in head


def read(path: Path, options: Options) -> Iterator[Record]:
    if not path.is_dir():
        folder = path.parent.parent if (path.parent.parent / "benchmarks.json").is_file() else None
        yield from _file(path, options, _benchmarks(folder))
        return
    known = _benchmarks(path)
    files = [file for file in sorted(path.glob("*/*.json")) if file.name != "machine.json"]
    if not files:
        raise FormatError("no MACHINE/COMMIT-ENVIRONMENT.json in it")
    for file in files:
        try:
            yield from _file(file, options, known)
        except FormatError as error:
            raise FormatError(f"{file.relative_to(path)}: {error.message}") from error


def _benchmarks(folder: Path | None) -> dict[str, Known] | None:
    if folder is None:
        return None
    try:
        content = convert(load_json((folder / "benchmarks.json").read_bytes()), dict[str, Any])
        return {name: convert(value, Known, name) for name, value in content.items() if name != "version"}
    except FormatError as error:
        raise FormatError(f"benchmarks.json: {error.message}") from error
    except OSError as error:
        raise FormatError(f"benchmarks.json: {error.strerror}") from error


def _file(path: Path, options: Options, known: dict[str, Known] | None) -> Iterator[Record]:
    data = read_bytes(path)
    results = convert(load_json(data), Results)
    if results.version != 2:
        raise FormatError(f"version {results.version} of asv's results; version 2 is known")
    tables = {
        name: convert(dict(zip(results.result_columns, row, strict=False)), Columns, f"results.{name}")
        for name, row in results.results.items()
        if row is not None and _is_time(name, known)
    }
    starts = [table.started_at for table in tables.values() if table.started_at is not None]
    run = make_run(
        "asv",
        data,
        options,
        commit=results.commit_hash,
        date=from_timestamp(min(starts, default=results.date) / 1e3),
        committed=from_timestamp(results.date / 1e3),
    )
    environment = _environment(results, options)
    for name, table in tables.items():
        facts = (known or {}).get(name) or Known()
        if known is not None and table.version is not None and facts.version not in (None, table.version):
            continue
        yield from _benchmark(name, table, facts, results.env_name, run, environment, options)


def _benchmark(
    name: str, table: Columns, facts: Known, env_name: str, run: Run, environment: Environment, options: Options
) -> Iterator[Record]:
    number = math.prod(len(values) for values in table.params)
    if number > MOST_COMBINATIONS:
        raise FormatError(f"results.{name}: {number} combinations of parameters")
    combinations = list(itertools.product(*table.params))
    values = table.result if table.result is not None else [None] * len(combinations)
    if len(values) != len(combinations):
        raise FormatError(f"results.{name}: {len(values)} results for {len(combinations)} combinations of parameters")
    for place, (value, combination) in enumerate(zip(values, combinations, strict=True)):
        names = [*facts.param_names, *(f"param{i + 1}" for i in range(len(facts.param_names), len(combination)))]
        shape = ",".join(f"{key}={text}" for key, text in zip(names, combination, strict=False)) or "-"
        cell = Cell(
            operator=options.operator or name,
            backend=options.backend or env_name or "-",
            shape=shape,
            dtype=options.dtype or "-",
            mode=options.mode or "fwd",
            host="asv",
            protocol="asv",
            dims=dims_of(shape),
        )
        seconds = number_of(value)
        given: dict[str, Any] = {"timing": "cpu", "duration_s": table.duration}
        if seconds is None:
            given |= {"status": "error", "message": "asv: the benchmark failed"}
            yield make_record(run, environment, cell, None, **given)
        elif math.isnan(seconds):
            given |= {"status": "skipped", "message": "asv: the benchmark was skipped"}
            yield make_record(run, environment, cell, None, **given)
        else:
            samples = table.samples[place] if table.samples and place < len(table.samples) else None
            times = [number_of(sample) for sample in samples] if isinstance(samples, list) else []
            if any(sample is None for sample in times):
                raise FormatError(f"results.{name}: a sample is no number")
            burst = [sample * 1e3 for sample in times if sample is not None] or [seconds * 1e3]
            yield make_record(run, environment, cell, [burst], **given)


def _environment(results: Results, options: Options) -> Environment:
    params = {key: value for key, value in results.params.items() if isinstance(value, str)}
    settings = {f"requirement {key}": str(value) for key, value in results.requirements.items()}
    settings |= {key: str(value) for key, value in results.env_vars.items()}
    return make_environment(
        options,
        cuda=False,
        cpu=params.get("cpu") or params.get("machine"),
        host=params.get("machine"),
        os=params.get("os"),
        python=results.python,
        settings=settings,
    )


def _is_time(name: str, known: dict[str, Known] | None) -> bool:
    facts = (known or {}).get(name)
    if facts is not None and facts.type is not None:
        return facts.type == "time" and facts.unit in (None, "seconds")
    return name.rsplit(".", 1)[-1].startswith(("time_", "timeraw_"))
