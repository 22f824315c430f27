"""Results as FlashInfer-Bench traces, one JSON line each, as read by FlashInfer-Bench's datasets and leaderboards.

The latency is the median as measured here, and the speed-up is over the definition's reference. Cells that did not run
have no trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from groupbench.operators import table
from groupbench.operators.errors import UsageError
from groupbench.operators.problems.definition import Shape
from groupbench.operators.registry import get_operator
from groupbench.tracker.facts.record import MEASURED, Record
from groupbench.tracker.text.files import whole_file

RUNTIME_ERROR = "RUNTIME_ERROR"
STATUSES = {"wrong": "INCORRECT_NUMERICAL", "timeout": "TIMEOUT", "oom": RUNTIME_ERROR, "error": RUNTIME_ERROR}
"""FlashInfer-Bench's names of a record's status. `ok` is PASSED; records of any other status were not run."""

LIBRARIES = ("torch", "triton", "helion", "cuda", "groupbench")


def write(path: Path, records: Sequence[Record], plugins: Sequence[str]) -> int:
    """Write the traces of these records to a file and return their number. Raises UsageError."""
    lines = traces(records, plugins)
    with whole_file(path, UsageError) as file:
        file.writelines(msgspec.json.encode(trace) + b"\n" for trace in lines)
    return len(lines)


def traces(records: Sequence[Record], plugins: Sequence[str]) -> list[dict[str, Any]]:
    """Return a trace for each executed record on a definition's operator, but none if the speed is unknown."""
    references = table.baselines(records)
    lines = []
    for record in records:
        shape = get_operator(record.cell.operator, plugins).parse_shape(record.cell.shape)
        if isinstance(shape, Shape):
            baseline = next(iter(table.baselines([_as_baseline(record)])), None)
            evaluation = _evaluation(record, references.get(baseline) if baseline else None)
            if evaluation is not None:
                lines.append(
                    {
                        "definition": record.cell.operator,
                        "workload": msgspec.to_builtins(shape.workload),
                        "solution": record.cell.backend,
                        "evaluation": evaluation,
                    }
                )
    return lines


def _as_baseline(record: Record) -> Record:
    """Return the record marked as a baseline, with the problem's baseline as the key."""
    return msgspec.structs.replace(record, baseline=True)


def _evaluation(record: Record, reference: Record | None) -> dict[str, Any] | None:
    environment, accuracy = record.environment, record.accuracy
    libraries = {name: getattr(environment, name) for name in LIBRARIES if getattr(environment, name)}
    evaluation: dict[str, Any] = {
        "status": _status(record),
        "environment": {
            "hardware": (environment.gpu or environment.cpu or environment.device).replace(" ", "_"),
            "libs": libraries,
        },
        "timestamp": record.run.started.isoformat(),
        "log": record.message or "",
    }
    if evaluation["status"] is None:
        return None
    if record.status in MEASURED and accuracy is not None:
        evaluation["correctness"] = {
            "max_relative_error": "NaN",  # not meaningful for single elements near 0
            "max_absolute_error": "Infinity" if accuracy.max_abs is None else accuracy.max_abs,
            "extra": {"relative_rms_error": accuracy.rms, "mismatch": accuracy.mismatch},
        }
    if record.status == "ok":
        latency, base = _latency(record), _latency(reference)
        if latency is None:
            return None  # interpreted: it passed, but its speed is unknown
        performance = {"latency_ms": latency, "reference_latency_ms": base or 0.0}
        evaluation["performance"] = performance | {"speedup_factor": base / latency if base else 0.0}
    return evaluation


def _status(record: Record) -> str | None:
    if record.status == "ok":
        return "PASSED"
    message = record.message or ""
    if record.status == "error" and "the backend returned shape" in message:
        return "INCORRECT_SHAPE"
    if record.status == "error" and "the backend returned" in message and "expected torch." in message:
        return "INCORRECT_DTYPE"
    if record.status == "wrong" and record.accuracy is None:
        return RUNTIME_ERROR
    return STATUSES.get(record.status)


def _latency(record: Record | None) -> float | None:
    if record is None or record.latency is None or record.latency.timing == "interpreted":
        return None
    ms = table.median_ms(record.latency)
    return ms if math.isfinite(ms) else None
