"""Read request times by name, for vLLM's and SGLang's benchmark files.

Each time is a series of its own: the median time to the first token, the median time per token, and so on. Rates, such
as tokens per second, are left out and counted, as are means and percentiles where the median exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from groupbench.tracker.facts.record import Cell, Environment, Run
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Reader
from groupbench.tracker.formats.values import number_of

_TIME = re.compile(r"(median|mean)_(ttft|tpot|itl|e2el|e2e_latency)_ms")
_RATE = re.compile(r".*(throughput|per_second|goodput)s?")

LOAD = (
    *("batch_size", "input_len", "output_len", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
    *("dataset_name", "random_input_len", "random_output_len", "random_range_ratio", "sharegpt_output_len"),
    *("tensor_parallel_size", "tp_size"),
)
"""Keys describing the load, which is the shape."""


class ServingReader(Reader):
    """Reads one object of a benchmark of a server or an engine."""

    times: ClassVar[Mapping[str, float]] = {}
    """Further keys with a time, and their unit in ms."""

    def __init__(self, data: bytes, options: Options, content: dict[str, Any]) -> None:
        super().__init__(data, options, {name: value for name, value in content.items() if name != "date"})
        self.content = content

    def run(self) -> Run:
        date = self.content.get("date")
        match = re.fullmatch(r"(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)", date) if isinstance(date, str) else None
        text = "{}-{}-{}T{}:{}:{}".format(*match.groups()) if match else date
        return self.make_run(date=self.own_date(text if isinstance(text, str) else None, "date"))

    def environment(self) -> Environment:
        return self.make_environment(device=None)

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        content = self.content
        for name in content:
            match = _TIME.fullmatch(name)
            if match and (match[1] == "median" or f"median_{match[2]}_ms" not in content):
                yield self._result(match[2].removesuffix("_latency"), [number_of(content[name])], 1.0)
            elif name in self.times:
                samples = content.get("latencies") if name == "avg_latency" else None
                values = samples if isinstance(samples, list) and samples else [content[name]]
                yield self._result(name, [number_of(value) for value in values], self.times[name])
            elif match is None and _RATE.fullmatch(name) and number_of(content[name]) is not None:
                yield LeftOut("of a rate", name)

    def _result(self, measure: str, values: list[float | None], scale: float) -> ImportedResult:
        cell = self._cell(measure)
        if any(value is None for value in values):
            return ImportedResult(cell, status="error", message=f"{measure} is not a number")
        failed = number_of(self.content.get("failed")) or 0
        samples = [(value or 0.0) * scale for value in values]
        if failed:
            return ImportedResult(cell, [samples], "wrong", f"{failed:.0f} requests failed")
        return ImportedResult(cell, [samples])

    def _cell(self, measure: str) -> Cell:
        content = self.content
        names = (content.get(key) for key in ("model_id", "model", "model_path"))
        model = next((name for name in names if isinstance(name, str)), "-")
        load = {key: content[key] for key in LOAD if isinstance(content.get(key), str | int | float)}
        shape = ",".join(f"{key}={value}" for key, value in load.items() if value != "")
        return self.cell(f"{model} {measure}" if model != "-" else measure, self.name, shape)
