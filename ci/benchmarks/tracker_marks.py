"""Measure the time, memory and disk space of the tracker, and print the table of docs/explanation/storage.md.

    python ci/benchmarks/tracker_marks.py [--nights 500] [--keep DIR] [--only NAME]

Makes its data (see nights.py), and measures each target in a separate process. The big database takes about 20 minutes
and 2.2 GB of disk; a trial with `--nights 50` takes two minutes. *Cold* means that the operating system's file cache
was dropped before, which needs root; the table has a note if that was not possible.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asv_history
import nights

ASV_SERIES, ASV_NIGHTS = 2000, 100
SMALL_SERIES, SMALL_NIGHTS = 20, 30


def groupbench(*args: str) -> list[str]:
    return [shutil.which("groupbench", path=Path(sys.executable).parent) or "groupbench", *args]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=20_000)
    parser.add_argument("--nights", type=int, default=500)
    parser.add_argument("--keep", type=Path, help="folder for the data; existing data is reused")
    parser.add_argument("--only", choices=[name for name, _ in MARKS], action="append")
    parser.add_argument("--step", help=argparse.SUPPRESS)  # for the separate processes
    options = parser.parse_args()
    if options.step:
        print(json.dumps(STEPS[options.step](options)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        options.keep = options.keep or Path(scratch)
        options.keep.mkdir(parents=True, exist_ok=True)
        print(f"{_machine()}; {options.series:,} series, {options.nights} nights\n")
        print("| measurement | target | measured |\n|---|---|---|", flush=True)
        for name, measure in MARKS:
            if not options.only or name in options.only:
                for row in measure(options):
                    print("| " + " | ".join(row) + " |", flush=True)


Rows = Iterator[tuple[str, str, str]]


def ingest_mark(options: argparse.Namespace) -> Rows:
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
        began = time.perf_counter()
        process = subprocess.Popen(groupbench("--db", str(place), "ingest", str(file)), stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        took = time.perf_counter() - began
        assert status == 0
        memory = usage.ru_maxrss / 1024
        yield (
            f"store a night of {options.series:,} cells, 40 samples each, from a file: {into}",
            "≤ 5 s, ≤ 300 MB",
            f"{took:.1f} s, {memory:.0f} MB",
        )


def size_mark(options: argparse.Namespace) -> Rows:
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


def history_mark(options: argparse.Namespace) -> Rows:
    cold, dropped = [], True
    warm: list[float] = []
    for _ in range(5):
        dropped = _drop_caches() and dropped
        took = _step(options, "history")
        cold.append(took["cold"])
        warm += took["warm"]
    how = "" if dropped else " (the file cache could not be dropped)"
    yield "`history` of one series there, cold, in Python", "≤ 200 ms", f"{1e3 * max(cold):.0f} ms, worst of 5{how}"
    warm.sort()
    measured = f"{1e3 * warm[len(warm) // 2]:.1f} ms, worst of {len(warm)} {1e3 * warm[-1]:.1f} ms"
    yield "`history` of one series there, warm, in Python", "≤ 20 ms", measured


def recent_mark(options: argparse.Namespace) -> Rows:
    for number, points in ((1, "newest point"), (61, "newest point and last 60")):
        took = _step(options, f"recent-{number}")
        yield (
            f"{points} of all {options.series:,} series, as arrays",
            "≤ 5 s",
            f"{took['seconds']:.1f} s, {took['points']:,} points, {took['memory']:.0f} MB",
        )


def gate_mark(options: argparse.Namespace) -> Rows:
    """Judge the newest night with the command. At most 100 earlier nights count; 99 of them share its environment."""
    took = []
    for _ in range(3):
        began = time.perf_counter()
        process = subprocess.Popen(groupbench("--db", str(_big(options)), "gate"), stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        assert os.waitstatus_to_exitcode(status) in (0, 1, 3)
        cpu = usage.ru_utime + usage.ru_stime
        took.append((time.perf_counter() - began, cpu, usage.ru_maxrss / 1024))
    wall, cpu, memory = max(took)
    yield (
        f"`groupbench gate` on a night of {options.series:,} series, {min(options.nights, 101)} points of each",
        "≤ 10 s",
        f"{wall:.1f} s, worst of 3, {cpu:.1f} s of CPU, {memory:.0f} MB",
    )


def report_mark(options: argparse.Namespace) -> Rows:
    """Write the report of the newest night with the command."""
    page = options.keep / "report.html"
    store = _big(options)
    began = time.perf_counter()
    process = subprocess.Popen(groupbench("--db", str(store), "report", "-o", str(page)))
    _, status, usage = os.wait4(process.pid, 0)
    took = time.perf_counter() - began
    assert status == 0
    yield (
        f"`groupbench report` on a night of {options.series:,} series, {options.nights} points of each",
        "≤ 15 MB, ≤ 300 MB of memory",
        f"{_size(page) / 1e6:.1f} MB, {usage.ru_maxrss / 1024:.0f} MB of memory, {took:.1f} s",
    )


def shell_mark(options: argparse.Namespace) -> Rows:
    small = options.keep / "shell.db"
    if not small.exists():
        nights.fill(small, SMALL_SERIES, SMALL_NIGHTS)
    command = groupbench("--db", str(small), "history", "--operator", "grouped_gemm", "--backend", "triton")
    took = []
    for _ in range(10):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        took.append(time.perf_counter() - began)
    took.sort()
    measured = f"{took[5]:.2f} s, worst of 10 {took[-1]:.2f} s"
    yield f"`groupbench history …` from shell to output, {SMALL_SERIES * SMALL_NIGHTS} points", "≤ 0.4 s", measured


def asv_mark(options: argparse.Namespace) -> Rows:
    """Read the history of one benchmark from asv's JSON files and from a database with the same results."""
    results = options.keep / "asv"
    store = options.keep / "asv.db"
    if not store.exists():
        nights.fill(store, ASV_SERIES, ASV_NIGHTS)
    if not results.exists():
        asv_history.write(store, results)
    size = sum(file.stat().st_size for file in results.rglob("*.json"))
    title = f"history of one of {ASV_SERIES:,} series × {ASV_NIGHTS} nights"
    ours = _step(options, "asv-ours")
    yield (
        f"{title}: groupbench, opening included",
        "",
        f"{1e3 * ours['seconds']:.0f} ms, from a file of {_size(store) / 1e6:.0f} MB",
    )
    python = os.environ.get("ASV_PYTHON", sys.executable)
    script = str(Path(asv_history.__file__))
    done = subprocess.run([python, script, str(results)], capture_output=True, text=True)
    if done.returncode:
        yield f"{title}: asv", "", "not measured: " + (done.stderr.strip().splitlines() or ["?"])[-1]
        return
    result = json.loads(done.stdout)
    measured = f"{1e3 * result['seconds']:.0f} ms, from files of {size / 1e6:.0f} MB"
    yield f"{title}: asv {result['version']}, its own reader of its JSON files", "", measured


def history_step(options: argparse.Namespace) -> dict[str, Any]:
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


def recent_step(number: int) -> Callable[[argparse.Namespace], dict[str, Any]]:
    def step(options: argparse.Namespace) -> dict[str, Any]:
        from groupbench.tracker.judge.recent import recent_points
        from groupbench.tracker.store.engine import open_store

        with open_store(_big(options), create=False) as store, store.read() as session:
            began = time.perf_counter()
            recent = recent_points(session, number)
            seconds = time.perf_counter() - began
        assert len(recent.series) == options.series
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return {"seconds": seconds, "points": len(recent.run), "memory": memory}

    return step


def asv_ours_step(options: argparse.Namespace) -> dict[str, Any]:
    from groupbench.tracker.query.filters import Filter
    from groupbench.tracker.query.history import history
    from groupbench.tracker.store.engine import open_store

    cell = nights.cell(asv_history.ONE)
    where = Filter(**{name: (cell[name],) for name in ("operator", "backend", "shape", "dtype")})
    began = time.perf_counter()
    with open_store(options.keep / "asv.db", create=False) as store, store.read() as session:
        assert len(history(session, where).rows) == ASV_NIGHTS
    return {"seconds": time.perf_counter() - began}


MARKS: tuple[tuple[str, Callable[[argparse.Namespace], Rows]], ...] = (
    ("ingest", ingest_mark),
    ("size", size_mark),
    ("history", history_mark),
    ("recent", recent_mark),
    ("gate", gate_mark),
    ("report", report_mark),
    ("shell", shell_mark),
    ("asv", asv_mark),
)
STEPS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "history": history_step,
    "recent-1": recent_step(1),
    "recent-61": recent_step(61),
    "asv-ours": asv_ours_step,
}


def _step(options: argparse.Namespace, name: str) -> Any:
    """Run a step in a new process, so that its memory has nothing of other measurements."""
    sizes = ["--series", str(options.series), "--nights", str(options.nights), "--keep", str(options.keep)]
    done = subprocess.run([sys.executable, __file__, *sizes, "--step", name], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def _big(options: argparse.Namespace) -> Path:
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


if __name__ == "__main__":
    main()
