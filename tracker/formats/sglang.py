"""Read the JSON lines of SGLang's benchmarks: `bench_serving`, `bench_one_batch` and its server variant.

Each line is a load with the median of each time of a request, or the times of a batch in seconds. The file has no date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from groupbench.tracker.formats.common import ImportedResult, LeftOut, Options, Read, distinct, read_runs
from groupbench.tracker.formats.serving import ServingReader
from groupbench.tracker.formats.values import FormatError, json_lines, read_bytes

TITLE = "SGLang benchmark JSON lines"


def recognise(head: bytes, path: Path) -> bool:
    serving = b'"median_e2e_latency_ms"' in head or b'"sharegpt_output_len"' in head
    batch = b'"prefill_latency"' in head and b'"total_latency"' in head
    return head.lstrip().startswith(b"{") and (serving or batch or b'"median_decode_latency"' in head)


def read(path: Path, options: Options) -> Iterator[Read]:
    data = read_bytes(path)
    loads = []
    for number, content in json_lines(data):
        if not isinstance(content, dict):
            raise FormatError(f"line {number}: is not a JSON object")
        loads.append(content)
    if not loads:
        raise FormatError("is empty")
    return read_runs([_SglangReader(data, options, loads)])


class _SglangReader(ServingReader):
    name = "sglang"
    times: ClassVar[dict[str, float]] = dict.fromkeys(
        ("prefill_latency", "median_decode_latency", "total_latency", "latency"), 1e3
    )

    def __init__(self, data: bytes, options: Options, loads: list[dict[str, Any]]) -> None:
        super().__init__(data, options, loads[0])
        self.loads = loads

    def cells(self) -> Iterator[ImportedResult | LeftOut]:
        return distinct(one for self.content in self.loads for one in super(_SglangReader, self).cells())
