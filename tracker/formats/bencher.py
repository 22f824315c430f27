"""Read Bencher Metric Format (BMF): an object with an object of measures for each benchmark.

The measure `latency` is in ns. Any other measure is a series, with the measure as its shape, and the unit at
the end of its name (`latency_p99_us`). The file has neither commit, date nor machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Read, Reader, read_runs
from groupbench.tracker.formats.values import FormatError, convert, load_json, read_bytes, unit_in

TITLE = "Bencher Metric Format"

_UNITS = {"latency": "ns", "throughput": "operations/s", "build-time": "s", "file-size": "bytes"}
"""Units of Bencher's own measures."""

_START = re.compile(rb'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*\{\s*"[a-z0-9_-]+"\s*:\s*\{\s*"(value|lower_value|upper_value)"')


class BencherMetric(msgspec.Struct):
    value: float
    lower_value: float | None = None
    upper_value: float | None = None


def recognise(head: bytes, path: Path) -> bool:
    return _START.match(head) is not None


def read(path: Path, options: Options) -> Iterator[Read]:
    return read_runs([_BencherReader(read_bytes(path), options)])


class _BencherReader(Reader):
    name = "bencher"
    timing = "cpu"

    def __init__(self, data: bytes, options: Options) -> None:
        super().__init__(data, options)
        self.benchmarks = convert(load_json(data), dict[str, dict[str, BencherMetric]])

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        for name, measures in self.benchmarks.items():
            if not name.strip():
                raise FormatError("a benchmark has no name")
            for measure, metric in measures.items():
                unit = _UNITS.get(measure) or unit_in(measure)
                yield self.measured(name, self.name, "-" if measure == "latency" else measure, metric.value, unit)
