"""Measure whether the gate names the release of Triton that made a kernel slower.

    python ci/benchmarks/transition_marks.py [--series 12 300] [--seed N]
    python ci/benchmarks/transition_marks.py --two-jobs [--seed N]

The gate judges 40 nights, each with another release of Triton and the same commit. One series is 20 % slower from night
30 on. Prints a line for each noise and number of series: the verdict on the slower series on night 30, how often its
release was named on later nights, and the verdicts on all other series.

With --two-jobs, two jobs measure one plan alternately for 40 nights, `stable` and `nightly`, each with its own
environment. Neither has `night --toolchain`. Upgrades change nothing, but the jobs differ by up to 30 %. Prints a line
for each pattern of upgrades: the verdicts on all series from night 10 on, all of which should be ok.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.facts.record import Record
from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.ingest import ingest

NIGHTS, SLOWER_FROM, FACTOR = 40, 30, 1.2
NOISES = ("gauss 0.1%", "gauss 1%", "gauss 2%", "t3 0.5%", "outliers 0.3%")


def noise(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    """Return the scatter of results between nights, as logarithms."""
    name, size = kind.split()
    sigma = float(size.rstrip("%")) / 100
    if name == "t3":
        return sigma * rng.standard_t(3, shape) / np.sqrt(3)
    scatter = rng.normal(0, sigma, shape)
    if name == "outliers":  # one in a hundred, 5 to 20 sigma slower
        scatter += (rng.random(shape) < 0.01) * sigma * rng.uniform(5, 20, shape)
    return scatter


def records(
    ms: NDArray[np.float64], night: int, rng: np.random.Generator, triton: str | None = None
) -> Iterator[Record]:
    """Yield the records of a night. `ms` has the latencies, [series]."""
    started = datetime(2026, 1, 1, 3, tzinfo=UTC) + timedelta(days=night)
    run = {"id": f"night-{night:02d}", "started": started, "trigger": "nightly", "plan": "nightly",
           "commit": {"hash": "c" * 40}}  # fmt: skip
    where = {
        "device": "cuda",
        "gpu": "GPU",
        "gpu_uuid": "1",
        "driver": "1",
        "torch": "2.13.0",
        "triton": triton or f"3.8.{night}",
    }
    for number, latency in enumerate(ms.tolist()):
        cell = {"operator": "op", "backend": f"b{number}", "shape": "M=1", "dtype": "bf16"}
        bursts = (latency * (1 + rng.normal(0, 0.0005, (5, 7)))).tolist()
        body = {"latency": {"timing": "gpu", "bursts_ms": bursts}, "accuracy": {"rms": 2e-3}}
        yield msgspec.convert(
            {"schema": 1, "run": run, "environment": where, "cell": cell, "status": "ok", **body}, Record
        )


def simulate(kind: str, series: int, seed: int) -> str:
    rng = np.random.default_rng(seed)
    level = np.exp(rng.uniform(np.log(0.1), np.log(2.0), series))
    ms = level[:, None] * np.exp(noise(kind, rng, (series, NIGHTS)))
    slow = series // 2
    ms[slow, SLOWER_FROM:] *= FACTOR
    others: Counter[str] = Counter()
    first, later = "", Counter[str]()
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "t.db", create=True) as store:
        for night in range(NIGHTS):
            ingest(store, enumerate(records(ms[:, night], night, rng), 1), f"night {night}")
            with store.read() as session:
                judged = judge_run(session, find_run(session, None))
            for row in judged.rows:
                if row.series.backend != f"b{slow}" or night < SLOWER_FROM:
                    others[row.verdict] += row.verdict.changed
                elif night == SLOWER_FROM:
                    first = f"{row.verdict}, {row.cause}, {row.note}"
                else:
                    named = (
                        row.transition is not None
                        and f"3.8.{SLOWER_FROM - 1} → 3.8.{SLOWER_FROM}:" in row.transition.text
                    )
                    later[f"{row.verdict}{', named' if named else ''}"] += 1
    rest = ", ".join(f"{number} {verdict}" for verdict, number in others.items() if number) or "none"
    after = ", ".join(f"{number} {verdict}" for verdict, number in later.items())
    return f"{series:4d} series, {kind:14s} night 30: {first}; then {after}; others of {series * NIGHTS - 10}: {rest}"


JOBS = ("stable", "nightly")
OF_NIGHTLY = np.array([0.9, 1.12, 0.97, 1.3, 1.0, 0.8])
"""The latency of `nightly` over that of `stable`, [series]."""

PATTERNS: dict[str, tuple[set[int], set[int]]] = {
    "stable once": ({25}, set()),
    "nightly once": (set(), {25}),
    "both in one night": ({25}, {25}),
    "stable four times": ({12, 18, 26, 33}, set()),
    "nightly every night": (set(), set(range(NIGHTS))),
    "stable four times, nightly only on Sundays": ({12, 18, 26, 33}, set()),
    "nightly every fourth night, one run in ten missing": (set(), set(range(0, NIGHTS, 4))),
}
"""The nights before which each job is upgraded."""


def simulate_jobs(pattern: str, seed: int) -> Counter[str]:
    """Return the number of each verdict."""
    rng = np.random.default_rng(seed)
    verdicts: Counter[str] = Counter()
    release = dict.fromkeys(JOBS, 0)
    number = 0
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "t.db", create=True) as store:
        for night in range(NIGHTS):
            for job, minor, upgrades in zip(JOBS, (7, 9), PATTERNS[pattern], strict=True):
                release[job] += night in upgrades
                if (job == "nightly" and "Sundays" in pattern and night % 7) or (
                    "missing" in pattern and rng.random() < 0.1
                ):
                    continue
                ms = 0.1 * 1.7 ** np.arange(len(OF_NIGHTLY)) * (OF_NIGHTLY if job == "nightly" else 1.0)
                ms = ms * np.exp(noise("gauss 0.4%", rng, (len(ms), 1))[:, 0])
                ingest(store, enumerate(records(ms, number, rng, f"3.{minor}.{release[job]}"), 1), f"run {number}")
                number += 1
                if night >= 10:
                    with store.read() as session:
                        verdicts.update(row.verdict for row in judge_run(session, find_run(session, None)).rows)
    return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, nargs="+", default=[12, 300], help="numbers of series in a night")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--two-jobs", action="store_true", help="simulate two jobs that measure one plan alternately")
    options = parser.parse_args()
    for pattern in PATTERNS if options.two_jobs else ():
        verdicts = simulate_jobs(pattern, options.seed)
        print(f"{pattern}: " + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()), flush=True)
    if options.two_jobs:
        return
    for series in options.series:
        for kind in NOISES:
            print(simulate(kind, series, options.seed), flush=True)


if __name__ == "__main__":
    main()
