"""Read NVBench's `--json` and `--jsonbin`: a benchmark is an operator, its axes the shape.

The samples of isolated launches are in a file next to the JSON (`--jsonbin`), as float32 seconds. Without it, the mean
is the only sample. A skipped state becomes a status. Results of several devices are several runs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from groupbench.tracker.facts.record import Environment
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Noted, Options, Read, Reader, numbered, read_runs
from groupbench.tracker.formats.values import convert, load_json, number_of, read_bytes, status_of

TITLE = "NVBench JSON"

_SAMPLES = "nv/json/bin:nv/cold/sample_times"
_TIMES = ("nv/cold/time/gpu/mean", "nv/batch/time/gpu/mean", "nv/cold/time/cpu/mean", "nv/cpu_only/time/cpu/mean")


class NvSummary(msgspec.Struct):
    tag: str
    data: list[dict[str, Any]] | None = None  # an empty list is null, here and below


class NvState(msgspec.Struct):
    name: str
    device: int | None = None
    axis_values: list[dict[str, Any]] | None = None
    summaries: list[NvSummary] | None = None
    is_skipped: bool = False
    skip_reason: str | None = None


class NvBenchmark(msgspec.Struct):
    name: str
    states: list[NvState] | None = None


class NvDevice(msgspec.Struct):
    id: int
    name: str
    number_of_sms: int | None = None


class NvDocument(msgspec.Struct):
    benchmarks: list[NvBenchmark]
    devices: list[NvDevice] | None = None
    meta: dict[str, Any] = {}


def recognise(head: bytes, path: Path) -> bool:
    return head.lstrip().startswith(b"{") and b'"benchmarks"' in head and (b'"nvbench"' in head or b'"nv/' in head)


def read(path: Path, options: Options) -> Iterator[Read]:
    data = read_bytes(path)
    document = convert(load_json(data), NvDocument)
    devices = list(dict.fromkeys(state.device for each in document.benchmarks for state in each.states or []))
    return read_runs(_NvReader(data, options, document, path.parent, device, len(devices)) for device in devices)


class _NvReader(Reader):
    name = "nvbench"

    def __init__(
        self, data: bytes, options: Options, document: NvDocument, folder: Path, device: int | None, devices: int
    ) -> None:
        super().__init__(data, options, {name: value for name, value in document.meta.items() if name != "version"})
        self.document, self.folder, self.device = document, folder, device
        self.part = f"device {device}" if devices > 1 else None

    def environment(self) -> Environment:
        gpu = next((one for one in self.document.devices or [] if one.id == self.device), None)
        return self.make_environment(
            device="cpu" if gpu is None else "cuda",
            gpu=gpu.name if gpu else None,
            sm_count=gpu.number_of_sms if gpu else None,
        )

    def cells(self) -> Iterator[ImportedResult | LeftOut | Noted]:
        missing = 0
        states = (
            (state, each.name, ",".join(_axis(axis) for axis in state.axis_values or []) or "-")
            for each in self.document.benchmarks
            for state in each.states or []
            if state.device == self.device
        )
        for state, name, shape in numbered(states):
            cell = self.cell(name, self.name, shape)
            if state.is_skipped:
                status, message = status_of(state.skip_reason or "skipped")
                yield ImportedResult(cell, status="skipped" if status == "error" else status, message=message)
                continue
            summaries = {one.tag: _values(one) for one in state.summaries or []}
            samples = _samples(self.folder, summaries.get(_SAMPLES))
            missing += samples == [] and _SAMPLES in summaries
            mean = next((number_of(summaries[tag].get("value")) for tag in _TIMES if tag in summaries), None)
            if samples or mean is not None:
                yield ImportedResult(cell, [[second * 1e3 for second in samples or [mean or 0.0]]])
            else:
                yield LeftOut("without a time", name)
        if missing:
            yield Noted(f"{missing} files of samples are missing next to the JSON, so the mean is the only sample")


def _values(summary: NvSummary) -> dict[Any, Any]:
    return {item.get("name"): item.get("value") for item in summary.data or []}


def _axis(axis: dict[str, Any]) -> str:
    return f"{str(axis.get('name', '')).partition('{')[0] or 'axis'}={axis.get('value')}"


def _samples(folder: Path, summary: dict[Any, Any] | None) -> list[float]:
    """Return the samples in seconds; none if their file is missing, cut off or outside the folder."""
    name = PurePosixPath(str((summary or {}).get("filename", "")).replace("\\", "/"))
    count = number_of((summary or {}).get("size")) or 0
    for place in (name, PurePosixPath(*name.parts[-2:])):
        if len(place.parts) == 2 and ".." not in place.parts and place.suffix == ".bin":
            file = folder / place
            if file.is_file() and file.stat().st_size == count * 4:
                return list(struct.unpack(f"<{int(count)}f", file.read_bytes()))
    return []
