"""Read the entries of PyTorch's benchmark database that are not a table of TritonBench: models, operators, servers.

Each metric is a series, with the metric and its settings as the shape. The unit is in the entry (`unit`),
or at the end of the metric's name, `peak_mem(mb)`. A plain `latency` is in seconds, as PyTorch's dashboard shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from groupbench.tracker.facts.metrics import Better
from groupbench.tracker.facts.record import Environment
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, distinct
from groupbench.tracker.formats.serving import LOAD
from groupbench.tracker.formats.v3 import EntriesReader, V3Dependency, V3Entry, V3Runner
from groupbench.tracker.formats.values import milliseconds_of, number_of, unit_in

_HIGHER = re.compile(r".*(speedup|utilization|throughput|goodput|accuracy|pass_rate|sqnr).*", re.IGNORECASE)
_LOWER = re.compile(r".*(instruction_count|latency|mem_us\w*age|perplexity).*", re.IGNORECASE)
_SETTINGS = (
    "is_dynamic",
    "arch",
    "input_config",
    "method",
    "use_compile",
    "quant_type",
    "batch_size",
    "sub_workload",
    *LOAD,
)
"""Keys of free facts by which two results of one metric differ."""


class HudReader(EntriesReader):
    """Reads the entries of one run on one runner."""

    name = "hud"

    def __init__(self, data: bytes, options: Options, entries: Sequence[V3Entry]) -> None:
        super().__init__(data, options, entries)
        self.entries, runner = entries, self._runner
        self.part = "|".join(filter(None, (self._device, runner.name, runner.gpu_info, runner.cpu_info)))

    def environment(self) -> Environment:
        runner, device = self._runner, self._device
        on_gpu = device.startswith(("cuda", "rocm")) or bool(runner.gpu_info and not device.startswith("cpu"))
        torch = self.first.dependencies.get("pytorch", V3Dependency())
        on_cpu = bool(device or runner.name or runner.cpu_info)
        return self.make_environment(
            device="cuda" if on_gpu else "cpu" if on_cpu else None,
            gpu=runner.gpu_info if on_gpu else None,
            cpu=runner.cpu_info or (None if on_gpu else runner.name),
            torch=torch.sha or torch.version,
        )

    @property
    def _runner(self) -> V3Runner:
        return self.first.runners[0] if self.first.runners else V3Runner()

    @property
    def _device(self) -> str:
        device = self.first.benchmark.extra_info.get("device") or self._runner.type
        return device if isinstance(device, str) else ""

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        return distinct(map(self._result, self.entries))

    def _result(self, entry: V3Entry) -> ImportedResult | LeftOut:
        metric, model = entry.metric, entry.model
        values = [value for value in map(number_of, metric.benchmark_values) if value is not None]
        unit = metric.unit or metric.extra_info.get("unit") or unit_in(metric.name)
        unit = str(unit or ("s" if metric.name == "latency" else ""))
        better: Better = (
            "higher" if _HIGHER.fullmatch(metric.name) else "lower" if _LOWER.fullmatch(metric.name) else "neither"
        )
        shape = ",".join([metric.name, *(f"{key}={value}" for key, value in self._settings(entry))])
        backend = model.backend or entry.benchmark.name
        result = self.measured(model.name, backend, shape, median(values) if values else None, unit, better)
        if isinstance(result, LeftOut):
            return result
        facts = entry.benchmark
        cell = self.cell(result.cell.operator, backend, result.cell.shape, mode=facts.mode, dtype=facts.dtype)
        samples = [ms for value in values if (ms := milliseconds_of(value, unit)) is not None]
        return replace(result, cell=cell, bursts_ms=[samples] if samples else [])

    def _settings(self, entry: V3Entry) -> Iterator[tuple[str, Any]]:
        extra = entry.benchmark.extra_info
        arguments = extra.get("args")
        facts = {**(arguments if isinstance(arguments, dict) else {}), **extra, **entry.metric.extra_info}
        for key in _SETTINGS:
            if isinstance(facts.get(key), str | int | float) and facts[key] not in ("", False):
                yield key, facts[key]
