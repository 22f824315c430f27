"""Measure the time, memory and disk space of the tracker on simulated nights; see nights.py.

Each part runs in a separate process. With `--scale 1` the big database has 20,000 series of 500 nights: it takes about
20 minutes and 2.2 GB of disk. `--nights 50` takes two minutes. *Cold* means that the operating system's file cache was
dropped before, which needs root; the table has a note if that was not possible.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import nights

SMALL_SERIES, SMALL_NIGHTS = 20, 30

Row = tuple[str, str, str]
Rows = Iterator[Row]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nights", type=int, default=500, help="nights in the big database [500]")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder for the data; existing data is reused")


def part(measure: Callable[[Sizes], Rows]) -> Callable[[argparse.Namespace], Rows]:
    """Return a part that measures in the folder of `--keep`, or in one that is removed at the end."""

    def rows(options: argparse.Namespace) -> Rows:
        yield f"measurement ({_machine()})", "target", "measured"
        folder = options.keep or Path(_scratch().name)
        folder.mkdir(parents=True, exist_ok=True)
        yield from measure(Sizes(folder, max(1, round(20_000 * options.scale)), options.nights))

    return rows


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@dataclass(frozen=True)
class Sizes:
    """The size of the simulated data, and its folder."""

    keep: Path
    series: int
    nights: int


def groupbench(*args: str) -> list[str]:
    return [shutil.which("groupbench", path=Path(sys.executable).parent) or "groupbench", *args]


def timed(*args: str, allowed: tuple[int, ...] = (0,)) -> tuple[float, float, float]:
    """Run a command of groupbench: (seconds, seconds of CPU time, MB of memory)."""
    began = time.perf_counter()
    process = subprocess.Popen(groupbench(*args), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in allowed:
        raise SystemExit(f"groupbench {' '.join(args)} ended with {process.returncode}")
    return took, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def ingest_mark(options: Sizes) -> Rows:
    """Ingest a night from a file into a new database with the command, then a second night."""
    files = []
    for night in (0, 1):
        files.append(options.keep / f"night-{night}-{options.series}.jsonl")
        if not files[-1].exists():
            nights.write_night(files[-1], night, options.series)
    place = options.keep / "night.db"
    for leftover in options.keep.glob("night.db*"):
        leftover.unlink()
    for file, into in zip(files, ("a new database", "the second night, its series known"), strict=True):
        took, _, memory = timed("--db", str(place), "ingest", str(file))
        yield (
            f"store a night of {options.series:,} cells, 40 samples each, from a file: {into}",
            "≤ 5 s, ≤ 300 MB",
            f"{took:.1f} s, {memory:.0f} MB",
        )


def size_mark(options: Sizes) -> Rows:
    count = options.series * options.nights
    size = _big(options).stat().st_size
    yield (
        f"a database of {count:,} points, indexes and all",
        f"≤ {250 * count / 1e9:.1f} GB, 250 bytes per point",
        f"{size / 1e9:.2f} GB, {size / count:.0f} bytes per point",
    )
    for ticks, kind in ((True, "latencies in steps of 32 ns, as above"), (False, "latencies of full precision")):
        small = options.keep / f"small-{ticks}.db"
        if not small.exists():
            nights.fill(small, 1000, 200, ticks=ticks)
        points = _size(small) / 200_000
        yield f"the same at 200,000 points: {kind}", "≤ 250 bytes per point", f"{points:.0f} bytes per point"


def history_mark(options: Sizes) -> Rows:
    cold, dropped = [], True
    warm: list[float] = []
    for _ in range(5):
        dropped = _drop_caches() and dropped
        took = _step(history_step, options)
        cold.append(took["cold"])
        warm += took["warm"]
    how = "" if dropped else " (the file cache could not be dropped)"
    yield "`history` of one series there, cold, in Python", "≤ 200 ms", f"{1e3 * max(cold):.0f} ms, worst of 5{how}"
    warm.sort()
    measured = f"{1e3 * warm[len(warm) // 2]:.1f} ms, worst of {len(warm)} {1e3 * warm[-1]:.1f} ms"
    yield "`history` of one series there, warm, in Python", "≤ 20 ms", measured


def recent_mark(options: Sizes) -> Rows:
    for number, points in ((1, "newest point"), (61, "newest point and last 60")):
        took = _step(recent_step, options, number)
        yield (
            f"{points} of all {options.series:,} series, as arrays",
            "≤ 5 s",
            f"{took['seconds']:.1f} s, {took['points']:,} points, {took['memory']:.0f} MB",
        )


def gate_mark(options: Sizes) -> Rows:
    """Judge the newest night with the command. At most 100 earlier nights count; 99 of them share its environment."""
    command = ("--db", str(_big(options)), "gate")
    wall, cpu, memory = max(timed(*command, allowed=(0, 1, 3)) for _ in range(3))
    yield (
        f"`groupbench gate` on a night of {options.series:,} series, {min(options.nights, 101)} points of each",
        "≤ 10 s",
        f"{wall:.1f} s, worst of 3, {cpu:.1f} s of CPU, {memory:.0f} MB",
    )


def report_mark(options: Sizes) -> Rows:
    """Write the report of the newest night with the command."""
    page = options.keep / "report.html"
    took, _, memory = timed("--db", str(_big(options)), "report", "-o", str(page))
    yield (
        f"`groupbench report` on a night of {options.series:,} series, {options.nights} points of each",
        "≤ 15 MB, ≤ 300 MB of memory",
        f"{_size(page) / 1e6:.1f} MB, {memory:.0f} MB of memory, {took:.1f} s",
    )


def shell_mark(options: Sizes) -> Rows:
    small = options.keep / "shell.db"
    if not small.exists():
        nights.fill(small, SMALL_SERIES, SMALL_NIGHTS)
    command = ("--db", str(small), "history", "--operator", "grouped_gemm", "--backend", "triton")
    took = sorted(timed(*command)[0] for _ in range(10))
    measured = f"{took[5]:.2f} s, worst of 10 {took[-1]:.2f} s"
    yield f"`groupbench history …` from shell to output, {SMALL_SERIES * SMALL_NIGHTS} points", "≤ 0.4 s", measured


def history_step(options: Sizes) -> dict[str, Any]:
    from groupbench.tracker.query.filters import Filter
    from groupbench.tracker.query.history import history
    from groupbench.tracker.store.engine import open_store

    def once(number: int) -> float:
        cell = nights.cell(number)
        where = Filter(**{name: (cell[name],) for name in ("operator", "backend", "shape", "dtype")})
        began = time.perf_counter()
        with open_store(_big(options), create=False) as store, store.read() as session:
            assert len(history(session, where).rows) == options.nights
        return time.perf_counter() - began

    cold = once(options.series // 3)
    return {"cold": cold, "warm": [once(options.series // 3) for _ in range(10)]}


def recent_step(options: Sizes, number: int) -> dict[str, Any]:
    from groupbench.tracker.judge.recent import recent_points
    from groupbench.tracker.store.engine import open_store

    with open_store(_big(options), create=False) as store, store.read() as session:
        began = time.perf_counter()
        recent = recent_points(session, number)
        seconds = time.perf_counter() - began
    assert len(recent.series) == options.series
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "points": len(recent.columns["run"]), "memory": memory}


PARTS = {
    name: part(measure)
    for name, measure in {
        "ingest": ingest_mark, "size": size_mark, "history": history_mark, "recent": recent_mark, "gate": gate_mark,
        "report": report_mark, "shell": shell_mark,
    }.items()
}  # fmt: skip


def _step(step: Callable[..., Any], *arguments: Any) -> Any:
    """Run a step in a new process, so that its memory has nothing of other measurements."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(step, *arguments).result()


def _big(options: Sizes) -> Path:
    place: Path = options.keep / f"big-{options.series}-{options.nights}.db"
    if not place.exists():
        half = place.with_suffix(".half")
        for leftover in options.keep.glob(f"{half.name}*"):
            leftover.unlink()
        began = time.perf_counter()
        nights.fill(half, options.series, options.nights)
        half.replace(place)
        print(f"made {place.name} in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return place


def _size(store: Path) -> int:
    return store.stat().st_size


def _drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def _machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"
