"""Read request times by name, for vLLM's and SGLang's benchmark files.

Each time is a series: the median time to the first token, the median time per token, and so on. So is each
rate, such as tokens per second. Means and percentiles are not read where the median exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from groupbench.tracker.facts.record import Run, Status
from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Reader
from groupbench.tracker.formats.values import number_of

_TIME = re.compile(r"(median|mean)_(ttft|tpot|itl|e2el|e2e_latency)_ms")
_RATE = re.compile(r"(?:(request|input|output|total|total_token)_(?:throughput|goodput))|(request|token)s_per_second")

LOAD = (
    *("batch_size", "input_len", "output_len", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
    *("dataset_name", "random_input_len", "random_output_len", "random_range_ratio", "sharegpt_output_len"),
    *("tensor_parallel_size", "tp_size", "max_num_seqs", "max_num_batched_tokens", "tag", "label"),
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
        return self.make_run(date=self.own_date(date if isinstance(date, str) else None, "date"))

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
            elif (
                (rate := _RATE.fullmatch(name)) and not self.failed and (value := number_of(content[name])) is not None
            ):
                unit = "requests/s" if "request" in rate.groups() else "tokens/s"
                yield self.measured(self._named(name), self.name, self._load(), value, unit)

    def _result(self, measure: str, values: list[float | None], scale: float) -> ImportedResult:
        cell = self.cell(self._named(measure), self.name, self._load())
        if any(value is None for value in values):
            return ImportedResult(cell, status="error", message=f"{measure} is not a number")
        samples = [(value or 0.0) * scale for value in values]
        if self.failed:
            status: Status = "wrong" if all(samples) else "error"
            return ImportedResult(cell, [samples], status, f"{self.failed:.0f} requests failed")
        return ImportedResult(cell, [samples])

    @property
    def failed(self) -> float:
        """The number of failed requests."""
        return number_of(self.content.get("failed")) or 0.0

    def _named(self, measure: str) -> str:
        content, server = self.content, self.content.get("server_info")
        names = [content.get(key) for key in ("model_id", "model", "model_path")]
        names.append(server.get("model_path") if isinstance(server, dict) else None)
        model = next((name for name in names if isinstance(name, str)), "-")
        return f"{model} {measure}" if model != "-" else measure

    def _load(self) -> str:
        load = {key: self.content[key] for key in LOAD if isinstance(self.content.get(key), str | int | float)}
        return ",".join(f"{key}={value}" for key, value in load.items() if value != "")
