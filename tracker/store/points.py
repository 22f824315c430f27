"""Convert a record's result to a `point` row, and compute the content hash.

Everything follows from stored data; samples are rounded to float32 first. So exporting and re-importing a database, or
merging it into another, gives the same rows, and `verify` can recompute them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.facts.bursts import Bursts
from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.identity import series_identity
from groupbench.tracker.facts.record import Accuracy, Cell, Kernel, Latency, Record
from groupbench.tracker.stats.thresholds import burst_error
from groupbench.tracker.store.packing import flatten, pack_samples, pack_telemetry, unpack_samples

PPM = 1e6
_LARGEST_PPM = 2**62

LATENCY_COLUMNS = ("timing", "median_ms", "low_ppm", "high_ppm", "error_ppm", "prepare_ms", "enqueue_ms")
ACCURACY_FIELDS = Accuracy.__struct_fields__
AMOUNTS = ("dims", "flops", "min_bytes")
"""Fields with the size of the problem, outside a series' identity because a better formula changes them."""

_encoder = msgspec.json.Encoder(order="deterministic")
_NO_LATENCY: dict[str, Any] = dict.fromkeys(LATENCY_COLUMNS)
_NO_VALUES = Accuracy()
_NO_ACCURACY: dict[str, Any] = dict.fromkeys(ACCURACY_FIELDS)


def point_values(
    record: Record,
    environment: str,  # hash of all its facts
    series: str,  # its identity
) -> dict[str, Any]:
    """Return a point's columns without keys."""
    (packed,) = packed_values([record.latency])
    return plain_values(record, environment, series) | packed


def packed_values(latencies: Sequence[Latency | None]) -> list[dict[str, bytes | None]]:
    """Return points' packed columns. Many together take less time for each."""
    measured = [latency for latency in latencies if latency is not None]
    samples = iter(pack_samples([latency.bursts_ms for latency in measured]))
    telemetry = iter(pack_telemetry([latency.telemetry for latency in measured if latency.telemetry]))
    return [
        {
            "samples": None if latency is None else next(samples),
            "telemetry": None if latency is None or not latency.telemetry else next(telemetry),
        }
        for latency in latencies
    ]


def plain_values(
    record: Record,
    environment: str,  # hash of all its facts
    series: str,  # its identity
) -> dict[str, Any]:
    """Return a point's columns without keys and packed ones."""
    accuracy = record.accuracy
    flat = None if record.latency is None else flatten(record.latency.bursts_ms)
    return {
        "content": _content(record, environment, series, flat),
        "status": record.status,
        "message": record.message,
        "baseline": record.baseline,
        **(_NO_ACCURACY if accuracy is None else _accuracy_values(accuracy)),
        "duration_s": record.duration_s,
        "metrics": _metrics(record) if record.metrics else None,
        **(_NO_LATENCY if record.latency is None or flat is None else _latency_values(record.latency, flat)),
    }


def _accuracy_values(accuracy: Accuracy) -> dict[str, Any]:
    values = {name: getattr(accuracy, name) for name in ACCURACY_FIELDS}
    return values | {"first_bad": None if accuracy.first_bad is None else list(accuracy.first_bad)}


def amounts_of(cell: Cell) -> dict[str, Any]:
    return {"dims": cell.dims, "flops": cell.flops, "min_bytes": cell.min_bytes}


def earlier_content(record: Record, environment: str, series: str) -> int:
    """Return the content hash before revision 0007, without amounts."""
    bare = msgspec.structs.replace(
        record, cell=msgspec.structs.replace(record.cell, dims={}, flops=None, min_bytes=None)
    )
    flat = None if record.latency is None else flatten(record.latency.bursts_ms)
    return _content(bare, environment, series, flat)


def content_of(record: Record) -> int:
    """Return a 48-bit hash over a record's series, environment and result.

    It leaves out the run and commit, and facts added to commit and series by later records.
    """
    flat = None if record.latency is None else flatten(record.latency.bursts_ms)
    return _content(record, digest(record.environment), series_identity(record), flat)


def result_of(point: Mapping[str, Any], kernels: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """Return the record fields in a `point` row, as builtins: the inverse of `point_values`."""
    latency = None
    if point["samples"] is not None:
        latency = {
            "timing": point["timing"],
            "bursts_ms": unpack_samples(point["samples"]),
            "telemetry": point["telemetry"] or (),
            "prepare_ms": point["prepare_ms"],
            "enqueue_ms": point["enqueue_ms"],
        }
    accuracy = {name: point[name] for name in ACCURACY_FIELDS}
    return {
        "status": point["status"],
        "message": point["message"],
        "baseline": point["baseline"],
        "latency": latency,
        "accuracy": accuracy if any(value is not None for value in accuracy.values()) else None,
        "kernels": kernels or (),
        "duration_s": point["duration_s"],
        "metrics": point["metrics"] or {},
    }


def kernels_hash(kernels: Sequence[Kernel]) -> str | None:
    """Return one hash over all compiled kernels' code, without library kernels; None if any is unknown."""
    hashes = [kernel.hash for kernel in kernels if not kernel.external]
    if not hashes or None in hashes:
        return None
    return hashes[0] if len(hashes) == 1 else digest(hashes)


def _content(record: Record, environment: str, series: str, flat: NDArray[np.float32] | None) -> int:
    accuracy, latency = record.accuracy, record.latency
    covered: list[Any] = [
        environment,
        series,
        record.status,
        record.message,
        record.baseline,
        None if accuracy is None else [_signless(getattr(accuracy, name)) for name in ACCURACY_FIELDS],
        record.kernels,
        _signless(record.duration_s),
    ]
    if record.metrics:
        covered.append(_metrics(record))
    if record.loaded is not None:
        covered.append([record.loaded.code, record.loaded.packages])
    cell = record.cell
    if cell.dims or cell.flops is not None or cell.min_bytes is not None:
        covered.append([cell.dims, cell.flops, cell.min_bytes])
    if accuracy is not None and accuracy == _NO_VALUES:
        covered[5] = None
    hashed = hashlib.sha256()
    if latency is not None and flat is not None:
        times = (_signless(latency.prepare_ms), _signless(latency.enqueue_ms))
        covered += [latency.timing, latency.telemetry, *times, [len(burst) for burst in latency.bursts_ms]]
        hashed.update(flat.tobytes())
    hashed.update(_encoder.encode(covered))
    return int.from_bytes(hashed.digest()[:6], "big")


def _metrics(record: Record) -> dict[str, float]:
    return {name: _signless(value) for name, value in sorted(record.metrics.items())}


def _signless(value: Any) -> Any:
    """Return a value without a zero's sign, which databases do not keep."""
    return value + 0.0 if isinstance(value, float) else value


def _latency_values(latency: Latency, flat: NDArray[np.float32]) -> dict[str, Any]:
    if len(flat) == 1:  # a file of another benchmark, which keeps one number
        (single,) = flat.tolist()
        times = {"prepare_ms": latency.prepare_ms, "enqueue_ms": latency.enqueue_ms}
        median = float(f"{single:.7g}")
        low, high = _ppm(1 - single / median), _ppm(single / median - 1)
        return {
            "timing": latency.timing,
            "median_ms": median,
            "low_ppm": low,
            "high_ppm": high,
            "error_ppm": None,
        } | times
    values = iter(flat.tolist())
    bursts = Bursts.of_singles([list(islice(values, len(burst))) for burst in latency.bursts_ms])
    error = burst_error(bursts.medians)
    return {
        "timing": latency.timing,
        "median_ms": bursts.median,
        "low_ppm": _ppm(1 - bursts.low / bursts.median),
        "high_ppm": _ppm(bursts.high / bursts.median - 1),
        "error_ppm": None if math.isnan(error) else _ppm(error),
        "prepare_ms": latency.prepare_ms,
        "enqueue_ms": latency.enqueue_ms,
    }


def _ppm(share: float) -> int:
    return round(min(max(share, 0.0) * PPM, _LARGEST_PPM))
