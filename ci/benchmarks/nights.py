"""Simulate nights that look like measured ones, as records or as a database of millions of points.

A cell has 4 bursts of 10 latencies around a level between 10 us and 10 ms. The level is higher if the problem takes
longer at 100 TFLOP/s or 1 TB/s, because the tracker refuses latencies that no card can reach. The noise within bursts,
between bursts and between nights is 0.2 to 1 %. Latencies are multiples of 32 ns, the resolution of CUDA events on an
H100. Without `ticks` they have full precision, which compresses worst. Records also have the telemetry of every burst,
accuracy, the compiled kernel and other times, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from sqlalchemy import insert, select

from groupbench.tracker.facts.record import Record, encode
from groupbench.tracker.store import schema
from groupbench.tracker.store.columns import copy_newest
from groupbench.tracker.store.engine import Store, open_store
from groupbench.tracker.store.ingest import ingest
from groupbench.tracker.store.points import point_values, series_identity

BURSTS, SAMPLES = 4, 10
FIRST = datetime(2024, 1, 1, 3, tzinfo=UTC)
VARIANTS = 10
"""Number of different nights that a big database repeats."""

BACKENDS = ("torch", "triton", "triton_persistent", "helion", "cutlass")
DTYPES = ("bf16", "fp16", "fp8", "fp32")


def environment(night: int) -> dict[str, Any]:
    """Return the environment of a night. Every 100 nights there is a new driver."""
    return {
        "device": "cuda",
        "gpu": "NVIDIA H100 80GB HBM3",
        "gpu_uuid": "GPU-5f1c8f8e-6d0e-4b43-9d3a-0e6f7c1b2a39",
        "gpu_memory_mib": 81559,
        "sm_count": 132,
        "driver": f"570.{night // 100}",
        "cuda": "13.0",
        "power_limit_w": 700.0,
        "cpu": "Intel(R) Xeon(R) Platinum 8480C",
        "cpu_count": 16,
        "os": "Linux 6.8",
        "host": "gpu-01",
        "python": "3.11.9",
        "torch": "2.13.0",
        "triton": "3.7.1",
        "groupbench": "0.1.0",
    }


def cell(series: int) -> dict[str, Any]:
    backend, rest = BACKENDS[series % len(BACKENDS)], series // len(BACKENDS)
    dtype, rest = DTYPES[rest % len(DTYPES)], rest // len(DTYPES)
    g, n, k = 2 ** (1 + rest % 6), 512 * (1 + rest // 6 % 16), 512 * (1 + rest // 96)
    m = 4096
    return {
        "operator": "grouped_gemm",
        "backend": backend,
        "shape": f"G={g},M={m},N={n},K={k},uniform",
        "dtype": dtype,
        "dims": {"G": g, "M": m, "N": n, "K": k},
        "flops": 2 * m * n * k,
        "min_bytes": 2 * (m * k + g * n * k + m * n),
    }


def night_records(night: int, series: int, *, ticks: bool = True) -> Iterator[Record]:
    """Yield one night of the first `series` cells."""
    rng = np.random.default_rng([night, series])
    run = {
        "id": f"night-{night:05d}",
        "started": FIRST + timedelta(days=night),
        "trigger": "nightly",
        "plan": "nightly",
        "command": "--plan groupbench.toml --trigger nightly",
        "commit": {
            "hash": f"{night:040x}",
            "parents": [f"{night - 1:040x}"] if night else [],
            "branch": "main",
            "time": FIRST + timedelta(days=night, hours=-5),
            "author": "A. Author",
            "subject": f"Change {night}",
        },
    }
    where = environment(night)
    for number in range(series):
        yield _record(rng, run, where, number, night, ticks)


def _record(
    rng: np.random.Generator, run: dict[str, Any], where: dict[str, Any], series: int, night: int, ticks: bool
) -> Record:
    of_series = np.random.default_rng(series)
    level, noise = np.exp(of_series.uniform(np.log(0.01), np.log(10))), of_series.uniform(0.002, 0.01)
    problem = cell(series)
    level = max(level, problem["flops"] / 1e11, problem["min_bytes"] / 1e9)
    bursts = level * (1 + noise * rng.normal(0, 0.5)) * (1 + noise * rng.normal(0, 0.3, (BURSTS, 1)))
    samples = bursts * (1 + noise * np.abs(rng.normal(0, 1, (BURSTS, SAMPLES))))
    if ticks:
        samples = np.rint(samples * 1e6 / 32) * 32 / 1e6
    clocks, heat, power = (rng.integers(0, top, BURSTS).tolist() for top in (8, 4, 40_000))
    telemetry = [
        {"sm_clock_mhz": 1755 + 15 * c, "temperature_c": 45 + t, "power_w": (400_000 + p) / 1000}
        for c, t, p in zip(clocks, heat, power, strict=True)
    ]
    prepare, enqueue, rms, largest, worst, duration = rng.random(6).tolist()
    kernel = {
        "name": "grouped_gemm_kernel",
        "hash": f"{of_series.integers(2**60):032x}"[:32],
        "registers": 128,
        "spills": 0,
        "shared_bytes": 65536,
        "config": {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3},
    }
    return msgspec.convert(
        {
            "schema": 1,
            "run": run,
            "environment": where,
            "cell": problem,
            "status": "ok",
            "baseline": series % len(BACKENDS) == 0,
            "latency": {
                "timing": "gpu",
                "bursts_ms": samples.tolist(),
                "telemetry": telemetry,
                "prepare_ms": 1000 * prepare,
                "enqueue_ms": 0.01 + 0.01 * enqueue,
            },
            "accuracy": {
                "rms": 2e-3 * (1 + 0.01 * rms),
                "max_abs": float(np.float32(0.03 * (1 + largest))),
                "worst_block_rms": 2.2e-3 * (1 + 0.01 * worst),
                "mismatch": 0.0,
                "unwritten": 0.0,
                "repeatable": True,
            },
            "kernels": [kernel],
            "duration_s": round(1 + duration, 3),
        },
        Record,
    )


def write_night(path: Path, night: int, series: int) -> None:
    with path.open("wb") as file:
        file.writelines(encode(record) for record in night_records(night, series))


def fill(location: Path, series: int, nights: int, *, ticks: bool = True) -> None:
    """Make a database of `series` times `nights` points, with the same rows as if each night had been ingested.

    The first `VARIANTS` nights are ingested. Later ones repeat their results, with new runs, commits and environments.
    """
    _kept.clear()
    with open_store(location, create=True) as store:
        for night in range(min(VARIANTS, nights)):
            ingest(store, enumerate(night_records(night, series, ticks=ticks), 1), "generated")
        for night in range(VARIANTS, nights):
            _repeat_night(store, night, night % VARIANTS, series)
        with store.write() as session:
            copy_newest(session)


_kept: dict[tuple[str, int, int], list[dict[str, Any]]] = {}


def _repeat_night(store: Store, night: int, like: int, series: int) -> None:
    first = next(night_records(night, 1))
    with store.write() as session:
        before = session.scalars(select(schema.Run).where(schema.Run.uuid == f"night-{like:05d}")).one()
        newest = {"hash": first.run.commit.hash, "parents": list(first.run.commit.parents), "branch": "main"}
        commit = schema.Commit(**newest, time=first.run.commit.time, author="A. Author", subject=f"Change {night}")
        session.add(commit)
        session.flush()
        facts = {"trigger": "nightly", "plan": "nightly", "command": before.command}
        run = schema.Run(uuid=first.run.id, commit_id=commit.id, dirty=False, started=first.run.started, **facts)
        session.add(run)
        session.flush()
        points = schema.Point.__table__
        key = (store.name, like, night // 100)
        if key not in _kept:
            _kept[key] = _rows(store, session, before.id, like, night)
        session.execute(insert(points), [{**row, "run_id": run.id} for row in _kept[key]])


def _rows(store: Store, session: Any, run: int, like: int, night: int) -> list[dict[str, Any]]:
    """Return the points of an earlier run in the environment of `night`, which is part of their hash."""
    from groupbench.tracker.facts.environment import digest, environment_identity
    from groupbench.tracker.facts.record import Environment
    from groupbench.tracker.store.records import numbered_records

    facts = msgspec.convert(environment(night), Environment)
    content = digest(facts)
    environment_id = session.scalar(select(schema.Environment.id).where(schema.Environment.content == content))
    if environment_id is None:
        columns = {n: getattr(facts, n) for n in facts.__struct_fields__ if n in schema.Environment.__table__.columns}
        row = schema.Environment(
            content=content, identity=environment_identity(facts), facts=msgspec.to_builtins(facts), **columns
        )
        session.add(row)
        session.flush()
        environment_id = row.id
    for key in [key for key in _kept if key[0] == store.name and key[2] != night // 100]:
        del _kept[key]
    rows = []
    for point, record in numbered_records(session, schema.Point.run_id == run):
        keys = {"series_id": point.series_id, "kernels_id": point.kernels_id, "environment_id": environment_id}
        rows.append({**keys, **point_values(record, content, series_identity(record))})
    return rows
