"""Measure how the gate judges costs: its false alarms on 40 quiet nights, then one planted change of each cost.

    python ci/benchmarks/cost_marks.py [--noise measured disturbed] [--series 12 100] [--seed N ...]

Each night is another commit. Every series has every judged cost, with a scatter between nights of `NOISES`: as measured
on an H200, or as on a host with other work. The launch time is simulated from its six measurements in a cell, each of
which may fall into a slow phase of the host. All series of a night share the machine's speed and the canaries' error;
in 3 % of nights, a canary is 5 % slow. Prints the false alarms of the quiet nights by metric, and the verdict on each
planted change on its first night; for a latency, all its rows.
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

from groupbench.tracker.facts.record import Record
from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.ingest import ingest

Floats = NDArray[np.float64]

NIGHTS = 40

Noise = dict[str, tuple[float, str]]

NOISES: dict[str, Noise] = {  # relative scatter between nights; t3 for metrics that other work on the CPU disturbs
    "measured": {
        "compile_ms": (0.03, "t3"),
        "tune_ms": (0.03, "t3"),
        "first_result_ms": (0.03, "t3"),
        "energy_j": (0.006, "gauss"),
        "enqueue_ms": (0.025, "launch"),
    },
    "disturbed": {
        "compile_ms": (0.08, "t3"),
        "tune_ms": (0.08, "t3"),
        "first_result_ms": (0.08, "t3"),
        "energy_j": (0.01, "gauss"),
        "enqueue_ms": (0.05, "launch"),
    },
}
LATENCY, MACHINE, CANARY = 0.004, 0.003, 0.005
"""Scatter of a series' latency, of the machine's speed, and of a canary's rate, each of a night."""
GLITCH, GLITCHES = 0.05, 0.03
"""Error of a disturbed canary, and the share of nights with one."""
SLOW, SLOWER = (0.25, 0.1, 0.1, 0.1, 0.1, 0.1), (1.5, 3.5)
"""Chance that each measurement of a launch in a cell falls into a slow phase, and how many times as long it then is.

Of the first ones in a process, one in four was in such a phase."""
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
    "latency + 5 %": ("latency", lambda value: 1.05 * value),
}


def nights(rng: np.random.Generator, series: int, noise: Noise) -> dict[str, Floats]:
    """Return the values of each metric, [series, nights + 1]; the last night has the planted changes."""
    shape = (series, NIGHTS + 1)
    level = {name: np.exp(rng.uniform(np.log(low), np.log(high), (series, 1))) for name, (low, high) in LEVELS.items()}
    machine = rng.normal(0, MACHINE, NIGHTS + 1)
    values = {"latency": level["latency"] * np.exp(machine + rng.normal(0, LATENCY, shape))}
    for name, (sigma, kind) in noise.items():
        values[name] = level[name] * np.exp(_scatter(rng, shape, sigma, kind))
    values |= {name: np.full(shape, value) for name, value in EXACT.items()}
    for row, (name, grown) in enumerate(PLANTS.values()):
        values[name][row, -1] = grown(values[name][row, -1])
    grew = values["latency"] / level["latency"]
    values["energy_j"] *= grew / grew[:, :1]  # energy is power times time
    glitch = np.where(rng.random((2, NIGHTS + 1)) < GLITCHES, GLITCH, 0.0)
    canaries = machine + rng.normal(0, CANARY, (2, NIGHTS + 1)) + glitch
    bound = np.arange(series) % 2  # by operations, by bandwidth
    gap = rng.uniform(1.1, 3.0, (series, 1))
    values["sol_gap"] = gap * grew / np.exp(canaries[bound])
    return values


def _scatter(rng: np.random.Generator, shape: tuple[int, int], sigma: float, kind: str) -> Floats:
    """Return logarithms of a night's deviations, [series, nights + 1]."""
    if kind == "t3":
        return sigma * rng.standard_t(3, shape) / np.sqrt(3)
    if kind == "launch":
        late = np.abs(rng.standard_t(3, (len(SLOW), *shape))) * sigma
        in_slow = rng.random(late.shape) < np.array(SLOW)[:, None, None]
        slow = np.where(in_slow, np.log(rng.uniform(*SLOWER, late.shape)), 0.0)
        return rng.normal(0, sigma, shape) + (late + slow).min(axis=0)
    return rng.normal(0, sigma, shape)


def records(values: dict[str, Floats], night: int, rng: np.random.Generator) -> Iterator[Record]:
    started = datetime(2026, 1, 1, 3, tzinfo=UTC) + timedelta(days=night)
    run = {"id": f"night-{night:02d}", "started": started, "trigger": "nightly", "plan": "nightly",
           "commit": {"hash": f"{night + 1:040x}"}}  # fmt: skip
    where = {"device": "cuda", "gpu": "GPU", "gpu_uuid": "1", "driver": "1", "torch": "2.13.0", "triton": "3.7.1"}
    for row in range(len(values["latency"])):
        value = {name: float(each[row, night]) for name, each in values.items()}
        ms = value.pop("latency")
        bursts = (ms * (1 + rng.normal(0, 0.0005, (5, 7)))).tolist()
        gap, amounts = value["sol_gap"], (1e12, 1e8) if row % 2 == 0 else (1e9, 1e9)
        scale = ms / gap / (1 if row % 2 == 0 else 2)  # both ceilings are the same in all series
        cell = {"operator": "op", "backend": f"b{row}", "shape": "M=1", "dtype": "bf16",
                "flops": int(amounts[0] * scale), "min_bytes": int(amounts[1] * scale)}  # fmt: skip
        body = {
            "latency": {"timing": "gpu", "bursts_ms": bursts, "enqueue_ms": value.pop("enqueue_ms")},
            "accuracy": {"rms": 2e-3},
            "metrics": value,
        }
        yield msgspec.convert(
            {"schema": 1, "run": run, "environment": where, "cell": cell, "status": "ok", **body}, Record
        )


def simulate(series: int, seed: int, noise: str, total: Counter[str]) -> Iterator[str]:
    rng = np.random.default_rng(seed)
    values = nights(rng, series, NOISES[noise])
    quiet: Counter[str] = Counter()
    loud_nights = 0
    rows: list[Judged] = []
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "t.db", create=True) as store:
        for night in range(NIGHTS + 1):
            ingest(store, enumerate(records(values, night, rng), 1), f"night {night}")
            with store.read() as session:
                rows = [row for row in judge_run(session, find_run(session, None)).rows if row.verdict.changed]
            if night < NIGHTS:
                quiet.update(f"{row.what} {row.verdict} {row.change:+.0%}" for row in rows)
                loud_nights += bool(rows)
    alarms = ", ".join(f"{count} {row}" for row, count in sorted(quiet.items())) or "none"
    total.update({"quiet nights": NIGHTS, "with a false alarm": loud_nights, "first nights": 1})
    yield f"{noise}, {series} series, {NIGHTS} quiet nights: {loud_nights} nights with false alarms; {alarms}"
    for number, (title, (metric, _)) in enumerate(PLANTS.items()):
        of_series = [row for row in rows if row.series.backend == f"b{number}"]
        changed = [row for row in of_series if metric == "latency" or row.what == metric]
        total[f"found: {title}"] += any(row.what == metric for row in changed)
        yield f"  {title}: " + ("; ".join(f"{row.verdict} {row.what}, {row.note}" for row in changed) or "not found")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, nargs="+", default=[12, 100], help="numbers of series in a night")
    parser.add_argument("--noise", choices=NOISES, nargs="+", default=list(NOISES))
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    for noise in options.noise:
        for series in options.series:
            total: Counter[str] = Counter()
            for seed in options.seed:
                for line in simulate(series, seed, noise, total):
                    print(line, flush=True)
            print(f"{noise}, {series} series, in all:", ", ".join(f"{n} {what}" for what, n in total.items()))


if __name__ == "__main__":
    main()
