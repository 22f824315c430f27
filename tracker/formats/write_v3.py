"""Write points as entries of PyTorch's benchmark database, table `oss_ci_benchmark_v3`: one JSON line per metric.

The fields follow the published definition (pytorch/test-infra, clickhouse_db_schema/oss_ci_benchmark_v3/schema.sql).
Fields known only to PyTorch's workflows (workflow_id, job_id, run_attempt) are left to the uploader.

A latency is written only if it measures speed. A failed point has `pass` 0 with the status and message, never a latency
of 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import msgspec
from sqlalchemy.orm import Session

from groupbench.tracker.facts.metrics import METRICS, TFLOPS, rate
from groupbench.tracker.facts.record import Environment, Record
from groupbench.tracker.store.records import numbered_records
from groupbench.tracker.text.cells import json_for

BENCHMARK = "groupbench"
MODEL_TYPE = "tritonbench-oss"

_REPOSITORIES = {
    "torch": ("pytorch", "pytorch/pytorch"),
    "triton": ("triton", "triton-lang/triton"),
    "helion": ("helion", "pytorch/helion"),
    "tritonbench": ("tritonbench", "meta-pytorch/tritonbench"),
}
_encoder = msgspec.json.Encoder()


def write_v3(session: Session, file: IO[bytes]) -> int:
    """Write the metrics of every point except skipped and unavailable ones; return the number of points."""
    count = 0
    for row, record in numbered_records(session):
        if record.status in ("skipped", "unavailable"):
            continue
        count += 1
        for entry in entries(record, row.median_ms):
            file.write(json_for(file, _encoder.encode(entry)) + b"\n")
    return count


def entries(record: Record, median_ms: float | None) -> Iterator[dict[str, Any]]:
    """Yield an entry for each metric of a record."""
    run, cell = record.run, record.cell
    common = {
        "timestamp": int(run.started.timestamp()),
        "schema_version": "v3",
        "name": BENCHMARK,
        "head_branch": run.commit.branch or "",
        "head_sha": run.commit.hash,
        "runners": [_runner(record.environment)],
        "benchmark": {
            "name": run.plan or run.trigger,
            "mode": cell.mode,
            "dtype": cell.dtype,
            "extra_info": {"run": run.id, "host": cell.host, "protocol": cell.protocol, "seed": str(cell.seed)},
        },
        "model": {"name": cell.operator, "type": MODEL_TYPE, "backend": cell.backend, "origins": [], "extra_info": {}},
        "dependencies": _dependencies(record.environment),
    }
    for name, values, details in _metrics(record, median_ms):
        extra = {"input_shape": cell.shape, **details}
        yield {**common, "metric": {"name": name, "benchmark_values": values, "extra_info": extra}}


def _metrics(record: Record, median_ms: float | None) -> Iterator[tuple[str, list[float], dict[str, str]]]:
    """Yield (name, values, extra_info) of each metric of a record."""
    details: dict[str, str] = {"status": record.status}
    if record.message:
        details["message"] = record.message
    yield "pass", [float(record.status == "ok")], details
    if record.status == "ok" and record.latency is not None and median_ms and record.latency.timing != "interpreted":
        yield "latency", [median_ms], {"aggregation": "p50", "unit": "ms"}
        tflops = rate(record.cell.flops, median_ms, TFLOPS)
        if tflops is not None:
            yield "tflops", [tflops], {}
    if record.accuracy is not None:
        yield "accuracy", [float(record.status != "wrong")], {}
        if record.accuracy.rms is not None:
            yield "rms", [record.accuracy.rms], {}
    for name, value in record.metrics.items():
        unit = METRICS[name].unit if name in METRICS else ""
        yield name, [value], {"unit": unit} if unit else {}


def _runner(environment: Environment) -> dict[str, Any]:
    extra = {"cuda_version": environment.cuda, "driver": environment.driver, "gpu_uuid": environment.gpu_uuid}
    return {
        "name": environment.host or "",
        "type": environment.device,
        "cpu_info": environment.cpu or "",
        "cpu_count": _natural(environment.cpu_count),
        "avail_mem_in_gb": _natural(environment.memory_mib) // 1024,
        "gpu_info": environment.gpu or "",
        "gpu_count": int(environment.device == "cuda"),
        "avail_gpu_mem_in_gb": _natural(environment.gpu_memory_mib) // 1024,
        "extra_info": {name: value for name, value in extra.items() if value is not None},
    }


def _natural(value: int | None) -> int:
    return max(value or 0, 0)


def _dependencies(environment: Environment) -> dict[str, dict[str, Any]]:
    dependencies = {}
    for field, (name, repository) in _REPOSITORIES.items():
        version = getattr(environment, field)
        if version is not None:
            key = "sha" if field == "tritonbench" else "version"
            dependencies[name] = {"repo": repository, key: version, "extra_info": {}}
    return dependencies
