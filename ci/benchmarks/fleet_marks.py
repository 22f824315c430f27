"""Measure the overhead, the losses and the speed-up of a fleet.

    python ci/benchmarks/fleet_marks.py --overhead 10000 --kills 50 --database

    --overhead N        send N empty cells through a Dask scheduler to two workers on this machine; prints ms per cell
    --kills N           kill a worker, host, scheduler or client at random, N times; prints lost and doubled records
    --database [URL]    time `groupbench ingest` into SQLite, or into the database of URL; prints points per second
    --gpus all|0,1,...  run a night on one GPU and on these; prints the speed-up, statuses that differ, and the
                        influence of neighbouring cards on a cell

The benchmark needs no network, and no git with `--commit`. Only `--gpus` needs GPUs; `--device cpu --gpus 0,1` is a
trial without GPUs, whose figures mean nothing. The exit code is 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import psutil

from groupbench.operators import executor, resume
from groupbench.operators.executor import Machine
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet import drive
from groupbench.operators.fleet.batch import Batch, Card
from groupbench.operators.measure.environment import cpu_model
from groupbench.operators.measure.wire import Job
from groupbench.operators.session import Session
from groupbench.tracker.facts.record import Accuracy, Commit, Environment, Latency, Record, Run, encode, read

COMMIT = "f1ee7f1ee7"
KILLED_BATCHES = 120
PAUSE_S = 0.02
SHAPES = [f"{g},{m},{n},{k}" for g in (4, 16) for m in (512, 1024) for n, k in ((2048, 4096), (4096, 2048))] + [
    f"{g},{m},{n},{n}" for g in (8, 32) for m in (256, 768) for n in (1024, 3072)
]
BACKENDS = "torch_grouped_mm,triton_pointer,triton_contiguous"


# --- empty cells ------------------------------------------------------------------------------------------------------


def look(device: str, dask_worker: Any = None) -> Card:
    """Return the worker's card without importing torch, which empty cells do not need."""
    return Card(str(dask_worker.name), Machine(Environment(device="cpu", cpu=cpu_model()), None), batches.code())


def nothing(batch: Batch) -> list[Record]:
    """Return a record for every cell, without measuring."""
    return [_record(job, batch.run) for job in batch.jobs]


def little(batch: Batch) -> list[Record]:
    time.sleep(PAUSE_S)
    return nothing(batch)


def _record(job: Job, run: Run) -> Record:
    record = executor.unmeasured(job, Machine(Environment(device="cpu", cpu="any"), None), run, "unavailable", "why")
    latency = Latency(timing="cpu", bursts_ms=((1.0, 1.1),) * 4)
    return msgspec.structs.replace(record, status="ok", message=None, latency=latency, accuracy=Accuracy(rms=1e-4))


def jobs(number: int) -> list[Job]:
    """Return jobs of one cell per batch, so that the time is per cell."""
    return [Job("grouped_gemm", "torch_loop", f"G=1,M_g={n + 1},N=8,K=8", "fp16", "cpu") for n in range(number)]


# --- a fleet on this machine ------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """A scheduler and a host process with two workers, which can be killed and started again."""

    folder: Path
    port: int
    scheduler: subprocess.Popen[bytes] | None = None
    host: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the processes that are not running."""
        if self.scheduler is None or self.scheduler.poll() is not None:
            if self.host is not None:
                _end(self.host)
            self.scheduler = self._begin("distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port",
                                         str(self.port), "--no-dashboard")  # fmt: skip
            _wait(lambda: _answers(self.port), "the scheduler")
        if self.host is None or self.host.poll() is not None:
            self.host = self._begin(
                "groupbench.operators.fleet.worker", self.address, "--device", "cpu", "--gpus", "0,1"
            )
        _wait(lambda: len(self.workers()) == 2, "two workers")

    def _begin(self, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.folder / "engine.log").open("ab") as log:
            return subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=log, stderr=log)

    def workers(self) -> list[str]:
        """Return the names of the workers that are registered at the scheduler."""
        from distributed import Client

        try:
            with Client(self.address, timeout="5s", set_as_default=False) as client:
                return list(client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.aliases)))
        except (OSError, TimeoutError):
            return []

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the workers."""
        assert self.host is not None
        return [
            child for child in psutil.Process(self.host.pid).children() if "spawn_main" in " ".join(child.cmdline())
        ]

    def stop(self) -> None:
        for process in (self.host, self.scheduler):
            if process is not None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for child in children:
        if child.is_running():
            child.kill()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait(ready: Any, name: str, seconds: float = 180) -> None:
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            sys.exit(f"{name}: not ready within {seconds:g} s")
        time.sleep(0.1)


@contextmanager
def engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        fleet = Engine(Path(folder), port)
        try:
            fleet.start()
            yield fleet
        finally:
            fleet.stop()


def client(address: str, records: Path, number: int, pause: bool, patience_s: float) -> int:
    """Do the same as `tritonbench --scheduler ADDRESS --records RECORDS --resume`, on empty cells."""
    from groupbench.operators.fleet.dask import DaskFleet

    session = Session(records_path=records, commit=COMMIT, resume=True, quiet=True, shows_table=False)
    fleet = DaskFleet(address, "cpu", measure=little if pause else nothing, look=look, patience_s=patience_s)
    session.open("fleet marks", fleet.cards[0].machine.environment, fleet=True)
    todo = resume.not_done(jobs(number), session.records)
    print("begun", flush=True)
    start = time.perf_counter()
    code = session.collect(
        lambda run, progress: drive.records(fleet, batches.batches(todo, run, 60, batches.code()), progress), len(todo)
    )
    print(f"seconds {time.perf_counter() - start}", flush=True)
    return code


def _client(fleet: Engine, records: Path, number: int, pause: bool, patience_s: float = 3) -> subprocess.Popen[str]:
    arguments = ["--step", fleet.address, "--records", str(records), "--cells", str(number), *(["--pause"] * pause)]
    arguments += ["--patience", str(patience_s)]
    return subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)


# --- the marks --------------------------------------------------------------------------------------------------------


def overhead(number: int) -> bool:
    with engine() as fleet:
        records = fleet.folder / "records.jsonl"
        done = _client(fleet, records, number, pause=False)
        out, _ = done.communicate()
        seconds = float(out.split("seconds ")[1].split()[0])
        count = len(records.read_bytes().splitlines())
    each = 1e3 * seconds / number
    print(f"{number:,} cells, one per batch, two workers: {seconds:.1f} s, {each:.1f} ms each (target 20)")
    print(f"{count:,} records")
    return each < 20 and count == number


def kills(number: int, seed: int) -> bool:
    """Kill a process in each of `number` runs, and restart the client until the run has all cells.

    Records that were stored before the kill must be unchanged at the end. Each cell must be stored once, in the file
    and in the tracker's database.
    """
    draw = random.Random(seed)
    lost = doubled = missing = 0
    killed: Counter[str] = Counter()
    clients = 0
    with engine() as fleet:
        for turn in range(number):
            victim = ("worker", "client", "scheduler", "host")[turn % 4]
            records = fleet.folder / f"{turn}.jsonl"
            running = _client(fleet, records, KILLED_BATCHES, pause=True)
            clients += 1
            assert running.stdout is not None
            while "begun" not in running.stdout.readline():
                if running.poll() is not None:
                    sys.exit("the client did not begin")
            time.sleep(draw.uniform(0, 1.3))
            _kill(victim, fleet, running, draw)
            killed[victim] += 1
            stored = _whole(records)
            _wait(lambda: running.poll() is not None, "the client's end", 200)  # noqa: B023 - called at once
            for _ in range(5):
                if len(_whole(records)) == KILLED_BATCHES:
                    break
                fleet.start()
                again = _client(fleet, records, KILLED_BATCHES, pause=True)
                clients += 1
                again.communicate(timeout=200)
            fleet.start()
            lines = records.read_bytes().splitlines(keepends=True)
            cells = Counter(resume.key_of_cell(record.cell) for _, record in read(lines))
            lost += len(stored - set(lines))
            doubled += sum(cells.values()) - len(cells)
            missing += KILLED_BATCHES - len(cells)
            missing += KILLED_BATCHES - _ingested(fleet.folder / f"{turn}.db", records)
            records.unlink()
    victims = ", ".join(f"{victim} {count}" for victim, count in killed.items())
    print(
        f"killed {number} times ({victims}), {clients} clients: "
        f"{lost} records lost, {doubled} doubled, {missing} missing"
    )
    return lost == doubled == missing == 0


def _kill(victim: str, fleet: Engine, running: subprocess.Popen[str], draw: random.Random) -> None:
    assert fleet.scheduler is not None and fleet.host is not None
    if victim == "worker":
        alive = fleet.processes()
        if alive:
            draw.choice(alive).kill()
    elif victim == "client":
        running.send_signal(signal.SIGKILL)
    else:
        process = fleet.scheduler if victim == "scheduler" else fleet.host
        process.send_signal(signal.SIGKILL)
        process.wait()


def _whole(records: Path) -> set[bytes]:
    """Return the complete lines, without skipped cells, which a resumed run removes and measures."""
    if not records.exists():
        return set()
    lines = [line for line in records.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return {line for line in lines if b'"status":"skipped"' not in line}


def _ingested(database: Path, records: Path) -> int:
    """Return the number of points in a new database after ingesting the file twice."""
    import sqlite3

    for _ in range(2):
        subprocess.run(
            [sys.executable, "-m", "groupbench.tracker", "--db", str(database), "ingest", str(records)],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    with sqlite3.connect(database) as connection:
        return int(connection.execute("select count(*) from point").fetchone()[0])


def database(url: str | None, number: int = 20_000) -> bool:
    """Ingest two nights of `number` series: new series in the first night, existing ones in the second."""
    with tempfile.TemporaryDirectory() as folder:
        target = url or str(Path(folder) / "marks.db")
        for night in range(2):
            commit = Commit(hash=COMMIT[:-1] + str(night))
            run = Run(id=f"fleet-marks-{time.time_ns()}", started=datetime.now(UTC), commit=commit)
            path = Path(folder) / f"{night}.jsonl"
            path.write_bytes(b"".join(encode(_record(job, run)) for job in jobs(number)))
            start = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "groupbench.tracker", "--db", target, "ingest", str(path)],
                check=True,
                stdout=subprocess.DEVNULL,
            )
            seconds = time.perf_counter() - start
            kind = "PostgreSQL" if url else "SQLite"
            age = "new series" if night == 0 else "known series"
            print(f"{kind}: {number:,} points of {age} in {seconds:.1f} s, {number / seconds:,.0f} a second")
    return True


# --- GPUs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Night:
    seconds: float
    records: dict[Any, Record]


def gpus(options: argparse.Namespace) -> bool:
    from groupbench.operators.fleet import local

    slots = local.slots(options.gpus, options.device)
    numbers = list(range(len(slots))) if options.gpus == "all" else [int(text) for text in options.gpus.split(",")]
    every = ",".join(map(str, numbers))
    with tempfile.TemporaryDirectory() as name:
        folder = options.out or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        # pip compiles what it installs. Where that is missing, importing torch takes 3 s more in every night.
        os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(Path(name) / "bytecode")}
        shapes = options.shapes or SHAPES
        _night(options, folder, "warm", every, shapes)  # compiles, and fills the caches
        one = _night(options, folder, "one", str(numbers[0]), shapes)
        all_ = _night(options, folder, "all", every, shapes, previous="one")
        speedup = one.seconds / all_.seconds
        target = 0.95 * len(numbers)
        seconds = f"{one.seconds:.1f} s on one, {all_.seconds:.1f} s on {len(numbers)}"
        print(f"{seconds}: {speedup:.2f} times (target {target:.1f})")
        busy = Counter(record.environment.gpu_uuid for record in all_.records.values())
        print(f"cells by GPU: {', '.join(f'{uuid} {count}' for uuid, count in busy.items())}")
        differ = [key for key, record in one.records.items() if all_.records[key].status != record.status]
        print(f"statuses that differ: {len(differ)} of {len(one.records)}")
        for key in differ:
            print(f"  {key}: {one.records[key].status} on one, {all_.records[key].status} on all")
        _neighbours(options, folder, numbers, all_)
    return speedup >= 0.95 * len(numbers) and not differ


def _neighbours(options: argparse.Namespace, folder: Path, numbers: list[int], together: Night) -> None:
    """Measure the cells of a card twice more while the other cards are idle, and compare the changes.

    The two idle runs differ by chance; the first run differs also by the neighbours' influence.
    """
    chance: list[float] = []
    influence: list[float] = []
    by_card: dict[Any, list[Any]] = {}
    for key, record in together.records.items():
        by_card.setdefault(record.environment.gpu_uuid, []).append(key)
    for number in numbers[: options.neighbours]:
        probe = _night(options, folder, f"probe{number}", str(number), (options.shapes or SHAPES)[:1])
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
        _telemetry(f"GPU {number} alone", [first.records[key] for key in by_card[uuid] if key in first.records])
        _telemetry(f"GPU {number} together", [together.records[key] for key in by_card[uuid]])
    if len(influence) < 2:
        print("neighbours: too few cells")
        return
    # `influence` compares one run with the mean of two, so by chance it has 3/4 of the variance of `chance`.
    noise = statistics.median(map(abs, chance))
    shift, error = statistics.median(influence), 1.25 * statistics.stdev(influence) / math.sqrt(len(influence))
    busy = statistics.median(map(abs, influence))
    print(f"neighbours: {100 * shift:+.2f} % (standard error {100 * error:.2f} %, {len(influence)} cells)")
    print(f"a cell from night to night, median: {100 * noise:.2f} % alone, {100 * busy:.2f} % with neighbours")
    amount = "less than" if abs(shift) < noise else "MORE THAN"
    print(f"neighbours change a cell's latency by {amount} its own noise")


def _telemetry(title: str, records: list[Record]) -> None:
    seen = [t for record in records if record.latency for t in record.latency.telemetry]
    power = [t.power_w for t in seen if t.power_w is not None]
    clock = [t.sm_clock_mhz for t in seen if t.sm_clock_mhz is not None]
    warm = [t.temperature_c for t in seen if t.temperature_c is not None]
    reasons = Counter(reason for t in seen for reason in t.throttle)
    if power and clock and warm:
        throttled = ", ".join(f"{reason} {count}" for reason, count in reasons.items()) or "none"
        print(f"{title}: {statistics.mean(power):.0f} W, {statistics.mean(clock):.0f} MHz, "
              f"{statistics.mean(warm):.0f} °C; throttled in {len(seen)} bursts: {throttled}")  # fmt: skip


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
               "--commit", options.commit or COMMIT, "--shapes", *shapes]  # fmt: skip
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", type=int, metavar="CELLS")
    parser.add_argument("--kills", type=int, metavar="TIMES")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments to kill at")
    parser.add_argument("--database", nargs="?", const="", metavar="URL")
    parser.add_argument("--points", type=int, default=20_000, help="number of points for --database")
    parser.add_argument("--gpus", metavar="all|0,1,...")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--commit", help="commit hash, if git is not available")
    parser.add_argument("--backends", default=BACKENDS, help="backends for --gpus")
    parser.add_argument("--shapes", nargs="+", help="shapes for --gpus, as for `tritonbench --shapes`")
    parser.add_argument("--neighbours", type=int, default=2, help="number of cards to measure alone too")
    parser.add_argument("--out", type=Path, help="folder for the records of --gpus")
    for name in ("--step", "--records"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--cells", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--pause", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--patience", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        sys.exit(client(options.step, Path(options.records), options.cells, options.pause, options.patience))
    os.environ.setdefault("GROUPBENCH_LOCKS", tempfile.gettempdir())
    met = True
    if options.overhead:
        met &= overhead(options.overhead)
    if options.kills:
        met &= kills(options.kills, options.seed)
    if options.database is not None:
        met &= database(options.database or None, options.points)
    if options.gpus:
        met &= gpus(options)
    sys.exit(not met)


if __name__ == "__main__":
    main()
