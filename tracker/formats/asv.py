"""Read airspeed velocity's results, version 2: the results folder, or one file.

The folder has `benchmarks.json`, a folder for each machine, and in it a file for each commit and environment. A
benchmark becomes an operator, the parameters the shape, and the environment's name the backend, since asv runs one
commit in several environments. Values that are not times (`peakmem_…`, most of `track_…`) become metrics. Results of
another version of a benchmark than the one in `benchmarks.json` are left out and counted. null is a failure, NaN a
skipped benchmark.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from groupbench.tracker.facts.record import Environment, Run, Status
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Read, Reader, with_unit
from groupbench.tracker.formats.values import (
    FormatError,
    convert,
    from_timestamp,
    load_json,
    milliseconds_of,
    number_of,
    read_bytes,
)

TITLE = "asv results"

MOST_COMBINATIONS = 1_000_000

_UNMEASURED: tuple[tuple[Status, str], ...] = ("error", "failed"), ("skipped", "was skipped")
_UNITS = {"mem": "bytes", "peakmem": "bytes"}
"""Units by the prefix of a benchmark's name, for results without `benchmarks.json`."""


class AsvResults(msgspec.Struct):
    commit_hash: str
    env_name: str
    date: float  # the commit's, in ms
    params: dict[str, Any]
    result_columns: list[str]
    results: dict[str, list[Any] | None]
    python: str | None = None
    requirements: dict[str, Any] = {}
    env_vars: dict[str, Any] = {}


class AsvBenchmark(msgspec.Struct):
    """The entry of a benchmark in benchmarks.json."""

    param_names: list[str] = []
    type: str | None = None
    unit: str | None = None
    version: str | None = None


class AsvColumns(msgspec.Struct):
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
    old = b'"commit_hash"' in head and b'"machine"' in head  # named as such, not as an unknown format
    return head.lstrip().startswith(b"{") and (b'"result_columns"' in head or old)


def read(path: Path, options: Options) -> Iterator[Read]:
    if not path.is_dir():
        folder = path.parent.parent if (path.parent.parent / "benchmarks.json").is_file() else None
        yield from _AsvReader(read_bytes(path), options, _benchmarks(folder)).records()
        return
    benchmarks = _benchmarks(path)
    files = [file for file in sorted(path.glob("*/*.json")) if file.name != "machine.json"]
    if not files:
        raise FormatError("contains no MACHINE/COMMIT-ENVIRONMENT.json")
    for file in files:
        try:
            yield from _AsvReader(read_bytes(file), options, benchmarks).records()
        except FormatError as error:
            raise FormatError(f"{file.relative_to(path)}: {error.message}") from error


def _benchmarks(folder: Path | None) -> dict[str, AsvBenchmark] | None:
    if folder is None:
        return None
    status = (folder / "benchmarks.json").stat() if (folder / "benchmarks.json").is_file() else None
    return _read_benchmarks(folder, status and (status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=2)  # thousands of files share one, which takes longer to read than a file
def _read_benchmarks(folder: Path, _: object) -> dict[str, AsvBenchmark]:
    try:
        content = convert(load_json((folder / "benchmarks.json").read_bytes()), dict[str, Any])
        return {name: convert(value, AsvBenchmark, name) for name, value in content.items() if name != "version"}
    except FormatError as error:
        raise FormatError(f"benchmarks.json: {error.message}") from error
    except OSError as error:
        raise FormatError(f"benchmarks.json: {error.strerror}") from error


class _AsvReader(Reader):
    name = "asv"
    timing = "cpu"

    def __init__(self, data: bytes, options: Options, benchmarks: dict[str, AsvBenchmark] | None) -> None:
        super().__init__(data, options)
        content = load_json(data)
        version = content.get("version") if isinstance(content, dict) else None
        if isinstance(version, int) and version != 2:
            raise FormatError(f"has version {version} of asv's results, not 2; `asv update` converts it")
        self.results = results = convert(content, AsvResults)
        if "result" not in results.result_columns:
            raise FormatError("result_columns does not name a column `result`")
        self.benchmarks = benchmarks
        self.columns = {
            name: convert(dict(zip(results.result_columns, row, strict=False)), AsvColumns, f"results.{name}")
            for name, row in results.results.items()
            if row is not None
        }

    def run(self) -> Run:
        timed = [table for name, table in self.columns.items() if self._other_unit(name) is None]
        starts = [table.started_at for table in timed if table.started_at is not None]
        return self.make_run(
            commit=self.results.commit_hash,
            date=from_timestamp(min(starts, default=self.results.date) / 1e3),
            committed=from_timestamp(self.results.date / 1e3),
        )

    def environment(self) -> Environment:
        results = self.results
        params = {key: value for key, value in results.params.items() if isinstance(value, str)}
        settings = {f"requirement {key}": str(value) for key, value in results.requirements.items()}
        settings |= {key: str(value) for key, value in results.env_vars.items()}
        return self.make_environment(
            device="cpu",
            cpu=params.get("cpu") or params.get("machine"),
            host=params.get("machine"),
            os=params.get("os"),
            python=results.python,
            settings=settings,
        )

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        for name, table in self.columns.items():
            unit, facts = self._other_unit(name), (self.benchmarks or {}).get(name) or AsvBenchmark()
            outdated = table.version is not None and facts.version not in (None, table.version)
            if outdated:
                left_out = LeftOut("of another version of the benchmark", name)
                yield from itertools.repeat(left_out, len(table.result or [None]))
            else:
                yield from self._combinations(name, table, facts, unit)

    def _other_unit(self, name: str) -> str | None:
        """Return the unit of a benchmark, or None if it measures seconds."""
        facts = (self.benchmarks or {}).get(name)
        if facts is not None and facts.type is not None:
            if facts.type == "time" and facts.unit in (None, "seconds"):
                return None
            is_time = facts.type == "track" and milliseconds_of(1.0, facts.unit or "") is not None
            return None if is_time else facts.unit or facts.type
        prefix, _, rest = name.rsplit(".", 1)[-1].partition("_")
        return None if rest and prefix in ("time", "timeraw") else _UNITS.get(prefix, "unknown")

    def _combinations(
        self, name: str, table: AsvColumns, facts: AsvBenchmark, unit: str | None
    ) -> Iterator[ImportedResult | LeftOut]:
        """Yield the result of each combination of a benchmark's parameters."""
        number = math.prod(len(values) for values in table.params)
        if number > MOST_COMBINATIONS:
            raise FormatError(f"results.{name}: {number} combinations of parameters")
        values = table.result if table.result is not None else [None] * number
        if len(values) != number:
            raise FormatError(f"results.{name}: {len(values)} results for {number} combinations of parameters")
        for place, shape in enumerate(_shapes(tuple(facts.param_names), json.dumps(table.params))):
            seconds = number_of(values[place])
            if unit is not None and seconds is not None and not math.isnan(seconds):
                yield self.measured(name, self.results.env_name, shape, seconds, unit)
                continue
            cell = self.cell(name, self.results.env_name, shape if unit is None else with_unit(shape, unit))
            if unit is None and seconds is not None and facts.type == "track":
                seconds = (milliseconds_of(seconds, facts.unit or "") or 0.0) / 1e3
            if seconds is None or math.isnan(seconds):
                status, what = _UNMEASURED[seconds is not None]
                yield ImportedResult(cell, (), status, f"asv: the benchmark {what}", duration_s=table.duration)
            else:
                yield ImportedResult(cell, [_burst(name, table, place, seconds)], duration_s=table.duration)


@lru_cache(maxsize=1 << 12)  # files have the same benchmarks
def _shapes(param_names: tuple[str, ...], params: str) -> list[str]:
    """Return the shape of each combination of parameters."""
    lists = json.loads(params)
    names = [*param_names, *(f"param{i + 1}" for i in range(len(param_names), len(lists)))]
    return [
        ",".join(f"{key}={text}" for key, text in zip(names, combination, strict=False))
        for combination in itertools.product(*lists)
    ]


def _burst(name: str, table: AsvColumns, place: int, seconds: float) -> list[float]:
    """Return one result's samples in ms, or only the median if asv kept no samples."""
    samples = table.samples[place] if table.samples and place < len(table.samples) else None
    burst = []
    for sample in samples if isinstance(samples, list) else ():
        number = number_of(sample)
        if number is None:
            raise FormatError(f"results.{name}: a sample is not a number")
        burst.append(number * 1e3)
    return burst or [seconds * 1e3]
