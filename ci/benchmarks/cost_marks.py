"""Measure how the gate judges costs: its false alarms on 40 quiet nights, then one planted change of each cost.

    python ci/benchmarks/cost_marks.py [--series 12 100] [--seed N ...]

Each night is another commit. Every series has every judged cost, with the scatter in `SCATTER` between nights. Prints
the false alarms of the quiet nights by metric, and the verdict on each planted change on its first night.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.record import Record
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.ingest import ingest

Floats = NDArray[np.float64]

NIGHTS = 40

SCATTER = {  # relative scatter between nights; t3 for metrics that other work on the CPU disturbs
    "latency": (0.005, "gauss"),
    "enqueue_ms": (0.06, "t3"),
    "compile_ms": (0.08, "t3"),
    "tune_ms": (0.08, "t3"),
    "first_result_ms": (0.08, "t3"),
    "energy_j": (0.01, "gauss"),
}
LEVELS = {  # lowest and highest level of a series
    "latency": (0.02, 2.0),
    "enqueue_ms": (0.01, 0.08),
    "compile_ms": (400, 6000),
    "tune_ms": (2000, 60000),
    "first_result_ms": (3000, 12000),
    "energy_j": (0.02, 1.0),
}
EXACT = {"spills": 0.0, "stages": 4.0, "occupancy": 0.25, "kernels": 1.0, "workspace_mib": 16.0, "kept_mib": 8.0}

PLANTS: dict[str, tuple[str, Any]] = {  # title: (metric, its value after the change)
    "compile time x 3": ("compile_ms", lambda value: 3 * value),
    "launch + 30 us": ("enqueue_ms", lambda value: value + 0.03),
    "workspace + 64 MiB": ("workspace_mib", lambda value: value + 64),
    "energy + 5 %": ("energy_j", lambda value: 1.05 * value),
    "one spill": ("spills", lambda value: value + 4),
    "one stage fewer": ("stages", lambda value: value - 1),
}


def nights(rng: np.random.Generator, series: int) -> dict[str, Floats]:
    """Return the values of each metric, [series, nights + 1]; the last night has the planted changes."""
    values = {}
    for name, (sigma, kind) in SCATTER.items():
        low, high = LEVELS[name]
        level = np.exp(rng.uniform(np.log(low), np.log(high), (series, 1)))
        shape = (series, NIGHTS + 1)
        scatter = rng.normal(0, 1, shape) if kind == "gauss" else rng.standard_t(3, shape) / np.sqrt(3)
        values[name] = level * np.exp(sigma * scatter)
    values |= {name: np.full((series, NIGHTS + 1), value) for name, value in EXACT.items()}
    for row, (name, grown) in enumerate(PLANTS.values()):
        values[name][row, -1] = grown(values[name][row, -1])
    return values


def records(values: dict[str, Floats], night: int, rng: np.random.Generator) -> Iterator[Record]:
    started = datetime(2026, 1, 1, 3, tzinfo=UTC) + timedelta(days=night)
    run = {"id": f"night-{night:02d}", "started": started, "trigger": "nightly", "plan": "nightly",
           "commit": {"hash": f"{night + 1:040x}"}}  # fmt: skip
    where = {"device": "cuda", "gpu": "GPU", "gpu_uuid": "1", "driver": "1", "torch": "2.13.0", "triton": "3.7.1"}
    for row in range(len(values["latency"])):
        value = {name: float(each[row, night]) for name, each in values.items()}
        ms = value.pop("latency")
        bursts = (ms * (1 + rng.normal(0, 0.0005, (5, 7)))).tolist()
        cell = {"operator": "op", "backend": f"b{row}", "shape": "M=1", "dtype": "bf16"}
        body = {
            "latency": {"timing": "gpu", "bursts_ms": bursts, "enqueue_ms": value.pop("enqueue_ms")},
            "accuracy": {"rms": 2e-3},
            "metrics": value,
        }
        yield msgspec.convert(
            {"schema": 1, "run": run, "environment": where, "cell": cell, "status": "ok", **body}, Record
        )


def simulate(series: int, seed: int) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    values = nights(rng, series)
    quiet: Counter[str] = Counter()
    loud_nights = 0
    rows: list[Judged] = []
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "t.db", create=True) as store:
        for night in range(NIGHTS + 1):
            ingest(store, enumerate(records(values, night, rng), 1), f"night {night}")
            with store.read() as session:
                rows = [row for row in judge_run(session, find_run(session, None)).rows if row.verdict.changed]
            if night < NIGHTS:
                quiet.update(f"{row.metric.name} {row.verdict}" for row in rows)
                loud_nights += bool(rows)
    alarms = ", ".join(f"{count} {row}" for row, count in sorted(quiet.items())) or "none"
    yield f"{series} series, {NIGHTS} quiet nights: {loud_nights} nights with false alarms; {alarms}"
    for number, (title, (metric, _)) in enumerate(PLANTS.items()):
        changed = [row for row in rows if row.series.backend == f"b{number}" and row.metric.name == metric]
        yield f"  {title}: " + ("; ".join(f"{row.verdict}, {row.note}" for row in changed) or "not found")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, nargs="+", default=[12, 100], help="numbers of series in a night")
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    for series in options.series:
        for seed in options.seed:
            for line in simulate(series, seed):
                print(line, flush=True)


if __name__ == "__main__":
    main()
