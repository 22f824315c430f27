"""Measure the overhead and the speed-up of a fleet.

The part `overhead` sends empty cells through a Dask scheduler to two workers on this machine, 10,000 with `--scale 1`.
The part `gpus` needs `--gpus all` or `--gpus 0,1,...`. It runs a night on one GPU and on these, and reports the
speed-up, the statuses that differ, and the influence of neighbouring GPUs on a cell. `--device cpu --gpus 0,1` is a
trial without GPUs, whose figures mean nothing. The benchmark needs no network, and no git with `--commit`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from groupbench.operators import executor, resume
from groupbench.operators.executor import Machine, Progress
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet import drive
from groupbench.operators.fleet.batch import Batch, Card
from groupbench.operators.measure.environment import cpu_model
from groupbench.operators.measure.wire import Job
from groupbench.tracker.facts.record import Accuracy, Commit, Environment, Latency, Record, Run, read

COMMIT = "f1ee7f1ee7"
SHAPES = [f"{g},{m},{n},{k}" for g in (4, 16) for m in (512, 1024) for n, k in ((2048, 4096), (4096, 2048))] + [
    f"{g},{m},{n},{n}" for g in (8, 32) for m in (256, 768) for n in (1024, 3072)
]
BACKENDS = "torch_grouped_mm,triton_pointer,triton_contiguous"


Rows = Iterator[tuple[object, ...]]
HEAD = ("measurement", "target", "measured")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", metavar="all|0,1,...")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--commit", default=COMMIT, help="commit hash, if git is not available")
    parser.add_argument("--backends", default=BACKENDS, help="backends for --gpus")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="shapes for --gpus, as for `tritonbench --shapes`")
    parser.add_argument("--neighbours", type=int, default=2, help="number of GPUs to measure alone too")
    parser.add_argument("--out", type=Path, help="folder for the records of --gpus")


# --- empty cells ------------------------------------------------------------------------------------------------------


def look(device: str, dask_worker: Any = None) -> Card:
    """Return the worker's card without importing torch, which empty cells do not need."""
    return Card(str(dask_worker.name), Machine(Environment(device="cpu", cpu=cpu_model()), None), batches.code())


def nothing(batch: Batch) -> list[Record]:
    """Return a record for every cell, without measuring."""
    return [_record(job, batch.run) for job in batch.jobs]


def _record(job: Job, run: Run) -> Record:
    record = executor.unmeasured(job, Machine(Environment(device="cpu", cpu="any"), None), run, "unavailable", "why")
    latency = Latency(timing="cpu", bursts_ms=((1.0, 1.1),) * 4)
    return msgspec.structs.replace(record, status="ok", message=None, latency=latency, accuracy=Accuracy(rms=1e-4))


@contextmanager
def scheduler() -> Iterator[str]:
    """Start a scheduler and two workers by their commands. Gives the scheduler's address."""
    from distributed import Client

    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "scheduler.json", (Path(folder) / "log").open("wb")
        words = ["distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        processes = [_start([*words, "--scheduler-file", str(file)], log)]
        try:
            while not file.exists() or not file.stat().st_size:
                time.sleep(0.1)
            address = json.loads(file.read_text())["address"]
            worker = ["groupbench.operators.fleet.worker", address, "--device", "cpu", "--gpus", "0,1"]
            processes.append(_start(worker, log))
            with Client(address, set_as_default=False) as client:
                client.wait_for_workers(2, timeout=180)
            yield address
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait()


def _start(words: list[str], log: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", *words], stdout=log, stderr=log)


def overhead(options: argparse.Namespace) -> Rows:
    """Measure with one cell in each batch, so that the time is per cell."""
    from groupbench.operators.fleet.dask import DaskFleet

    yield HEAD
    number = max(1, round(10_000 * options.scale))
    run = Run(id="fleet", started=datetime.now(UTC), commit=Commit(hash=COMMIT))
    jobs = [Job("grouped_gemm", "torch_loop", f"G=1,M_g={n + 1},N=8,K=8", "fp16", "cpu") for n in range(number)]
    with scheduler() as address:
        fleet = DaskFleet(address, "cpu", measure=nothing, look=look)
        began = time.perf_counter()
        records = sum(1 for _ in drive.records(fleet, batches.batches(jobs, run, 60, batches.code()), Progress()))
        seconds = time.perf_counter() - began
    yield (
        "one cell of two workers",
        "< 20 ms",
        f"{1e3 * seconds / number:.1f} ms; {records:,} records in {seconds:.1f} s",
    )


# --- GPUs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Night:
    seconds: float
    records: dict[Any, Record]


def gpus(options: argparse.Namespace) -> Rows:
    yield HEAD
    if options.gpus is None:
        return
    from groupbench.operators.fleet import local

    slots = local.slots(options.gpus, options.device)
    numbers = list(range(len(slots))) if options.gpus == "all" else [int(text) for text in options.gpus.split(",")]
    every = ",".join(map(str, numbers))
    with tempfile.TemporaryDirectory() as name:
        folder = options.out or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        # pip compiles what it installs. Where that is missing, importing torch takes 3 s more in every night.
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(name) / "bytecode")}
        _night(options, folder, "warm", every, options.shapes)  # compiles, and fills the caches
        one = _night(options, folder, "one", str(numbers[0]), options.shapes)
        all_ = _night(options, folder, "all", every, options.shapes, previous="one")
        measured = f"{one.seconds / all_.seconds:.2f} times: {one.seconds:.1f} s, {all_.seconds:.1f} s"
        yield f"speed-up of {len(numbers)} GPUs over one", f"≥ {0.95 * len(numbers):.1f} times", measured
        busy = Counter(record.environment.gpu_uuid for record in all_.records.values())
        yield "cells by GPU", "", ", ".join(f"{uuid} {count}" for uuid, count in busy.items())
        differ = [
            f"{key}: {record.status}, {all_.records[key].status}"
            for key, record in one.records.items()
            if all_.records[key].status != record.status
        ]
        yield "statuses that differ", "none", "; ".join(differ) or f"none of {len(one.records)}"
        yield from _neighbours(options, folder, numbers, all_)


def _neighbours(options: argparse.Namespace, folder: Path, numbers: list[int], together: Night) -> Rows:
    """Measure the cells of a card twice more while the other cards are idle, and compare the changes.

    The two idle runs differ by chance; the first run differs also by the neighbours' influence.
    """
    chance: list[float] = []
    influence: list[float] = []
    by_card: dict[Any, list[Any]] = {}
    for key, record in together.records.items():
        by_card.setdefault(record.environment.gpu_uuid, []).append(key)
    for number in numbers[: options.neighbours]:
        probe = _night(options, folder, f"probe{number}", str(number), options.shapes[:1])
        uuid = next(iter(probe.records.values())).environment.gpu_uuid
        shapes = list(dict.fromkeys(key[2] for key in by_card.get(uuid, [])))
        if not shapes:
            continue
        first, second = (_night(options, folder, f"alone{number}{turn}", str(number), shapes) for turn in "ab")
        for key in by_card[uuid]:
            times = [_median(night.records.get(key)) for night in (first, second, together)]
            if all(times):
                chance.append(math.log(times[1] / times[0]))
                influence.append(math.log(times[2] / math.sqrt(times[0] * times[1])))
        yield _telemetry(f"GPU {number} alone", [first.records[key] for key in by_card[uuid] if key in first.records])
        yield _telemetry(f"GPU {number} together", [together.records[key] for key in by_card[uuid]])
    if len(influence) < 2:
        yield "influence of neighbours", "", "too few cells"
        return
    # `influence` compares one run with the mean of two, so by chance it has 3/4 of the variance of `chance`.
    noise = statistics.median(map(abs, chance))
    shift, error = statistics.median(influence), 1.25 * statistics.stdev(influence) / math.sqrt(len(influence))
    measured = f"{100 * shift:+.2f} % (standard error {100 * error:.2f} %, {len(influence)} cells)"
    yield "influence of neighbours", f"< {100 * noise:.2f} %, the noise between nights", measured


def _telemetry(title: str, records: list[Record]) -> tuple[str, str, str]:
    seen = [t for record in records if record.latency for t in record.latency.telemetry]
    means = []
    for name, unit in (("power_w", "W"), ("sm_clock_mhz", "MHz"), ("temperature_c", "°C")):
        values = [value for t in seen if (value := getattr(t, name)) is not None]
        means.append(f"{statistics.mean(values):.0f} {unit}" if values else f"unknown {unit}")
    reasons = Counter(reason for t in seen for reason in t.throttle)
    throttled = ", ".join(f"{reason} {count}" for reason, count in reasons.items()) or "none"
    return title, "", f"{', '.join(means)}; throttled in {len(seen)} bursts: {throttled}"


def _median(record: Record | None) -> float:
    if record is None or record.latency is None:
        return 0.0
    return statistics.median(statistics.median(burst) for burst in record.latency.bursts_ms)


def _night(
    options: argparse.Namespace, folder: Path, name: str, on: str, shapes: list[str], previous: str | None = None
) -> Night:
    records = folder / f"{name}.jsonl"
    records.unlink(missing_ok=True)
    command = [sys.executable, "-m", "groupbench.operators", "--host", "builtin", "--device", options.device, "--quiet",
               "--op", "grouped_gemm", "--only", options.backends, "--gpus", on, "--records", str(records),
               "--commit", options.commit, "--shapes", *shapes]  # fmt: skip
    if previous:
        command += ["--previous", str(folder / f"{previous}.jsonl")]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode == 2 or not records.exists():
        sys.exit(f"{name}: {done.stderr or done.stdout}")
    measured = [record for _, record in read(records.read_bytes().splitlines(keepends=True))]
    print(f"{name} on {on}: {len(measured)} cells in {seconds:.1f} s", file=sys.stderr, flush=True)
    return Night(seconds, {resume.key_of_cell(record.cell): record for record in measured})


PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {"overhead": overhead, "gpus": gpus}
