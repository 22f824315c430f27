"""Read the JSON files of vLLM's benchmarks: `vllm bench serve`, `latency` and `throughput`.

The result of a serving benchmark has the median of each time of a request; that of `latency` has all samples, in
seconds. Results of `throughput` have the elapsed time. Facts that were passed as `--metadata commit=...` are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from groupbench.tracker.formats.common import Options, Read, read_runs
from groupbench.tracker.formats.serving import ServingReader
from groupbench.tracker.formats.values import FormatError, load_json, read_bytes

TITLE = "vLLM benchmark JSON"


def recognise(head: bytes, path: Path) -> bool:
    if not head.lstrip().startswith(b"{") or b'"e2e_latency_ms"' in head or b"_e2e_latency_ms" in head:
        return False
    serve = b'"median_ttft_ms"' in head or (b'"tokenizer_id"' in head and b'"request_rate"' in head)
    latency = b'"avg_latency"' in head and b'"latencies"' in head
    throughput = b'"elapsed_time"' in head and b'"tokens_per_second"' in head
    return serve or latency or throughput


def read(path: Path, options: Options) -> Iterator[Read]:
    data = read_bytes(path)
    content = load_json(data)
    if not isinstance(content, dict):
        raise FormatError("is not a JSON object")
    return read_runs([_VllmReader(data, options, content)])


class _VllmReader(ServingReader):
    name = "vllm"
    times: ClassVar[dict[str, float]] = {"avg_latency": 1e3, "elapsed_time": 1e3}
