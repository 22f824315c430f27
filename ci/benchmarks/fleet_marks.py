"""What a fleet costs and loses: `python ci/benchmarks/fleet_marks.py --overhead 10000 --kills 50 --database`.

    --overhead N        N cells that cost nothing through a Dask scheduler and two workers of this host: time for each
    --kills N           worker, host, scheduler or client killed at a random moment, N times: records lost, doubled
    --database [URL]    points that `groupbench ingest` writes in a second: into SQLite, or what URL names
    --gpus all|0,1,...  a night on one GPU and on these: speed-up, verdicts, and what neighbours do to a cell

None of them needs git (`--commit`) or a network. The first three need no GPU. `--device cpu --gpus 0,1` tries the
fourth out; its figures mean nothing there.
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
from groupbench.operators.measure import environment
from groupbench.operators.measure.cell import Job
from groupbench.operators.session import Session
from groupbench.tracker.record import Accuracy, Commit, Environment, Latency, Record, Run, encode, read

COMMIT = "f1ee7f1ee7"
KILLED_BATCHES = 120
PAUSE_S = 0.02
SHAPES = [f"{g},{m},{n},{k}" for g in (4, 16) for m in (512, 1024) for n, k in ((2048, 4096), (4096, 2048))] + [
    f"{g},{m},{n},{n}" for g in (8, 32) for m in (256, 768) for n in (1024, 3072)
]
BACKENDS = "torch_grouped_mm,triton_pointer,triton_contiguous"


# --- cells that cost nothing ------------------------------------------------------------------------------------------


def look(device: str, dask_worker: Any = None) -> Card:
    """A worker's card without torch, which a cell that costs nothing need not wait for."""
    return Card(str(dask_worker.name), Machine(environment.detect("cpu"), None), batches.code())


def nothing(batch: Batch) -> list[Record]:
    """A record for every cell, at once."""
    return [_record(job, batch.run) for job in batch.jobs]


def little(batch: Batch) -> list[Record]:
    time.sleep(PAUSE_S)
    return nothing(batch)


def _record(job: Job, run: Run) -> Record:
    found = executor.unmeasured(job, Machine(Environment(device="cpu", cpu="any"), None), run, "unavailable", "why")
    latency = Latency(timing="cpu", bursts_ms=((1.0, 1.1),) * 4)
    return msgspec.structs.replace(found, status="ok", message=None, latency=latency, accuracy=Accuracy(rms=1e-4))


def jobs(number: int) -> list[Job]:
    """One cell a batch: what each costs is seen alone."""
    return [Job("grouped_gemm", "torch_loop", f"G=1,M_g={n + 1},N=8,K=8", "fp16", "cpu") for n in range(number)]


# --- a fleet on this host ---------------------------------------------------------------------------------------------


@dataclass
class Engine:
    """A scheduler and a process of two workers, each a process that can be killed and begun again."""

    folder: Path
    port: int
    scheduler: subprocess.Popen[bytes] | None = None
    host: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Whatever is not running."""
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
        """Names of those that the scheduler knows."""
        from distributed import Client

        try:
            with Client(self.address, timeout="5s", set_as_default=False) as client:
                return list(client.run_on_scheduler(lambda dask_scheduler: list(dask_scheduler.aliases)))
        except (OSError, TimeoutError):
            return []

    def processes(self) -> list[psutil.Process]:
        """Of the workers themselves."""
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


def _wait(ready: Any, what: str, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            sys.exit(f"{what} did not start within {seconds:g} s")
        time.sleep(0.1)


@contextmanager
def engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        found = Engine(Path(folder), port)
        try:
            found.start()
            yield found
        finally:
            found.stop()


def client(address: str, records: Path, number: int, pause: bool) -> int:
    """What `tritonbench --scheduler ADDRESS --records RECORDS --resume` does, on cells that cost nothing."""
    from groupbench.operators.fleet.dask import DaskFleet

    session = Session(records_path=records, commit=COMMIT, resume=True, quiet=True, shows_table=False)
    fleet = DaskFleet(address, "cpu", measure=little if pause else nothing, look=look, patience_s=3)
    session.open("fleet marks", fleet.cards[0].machine.environment, fleet=True)
    todo = resume.not_done(jobs(number), session.records)
    print("begun", flush=True)
    start = time.perf_counter()
    code = session.collect(
        lambda run, progress: drive.records(fleet, batches.batches(todo, run, 60, batches.code()), progress), len(todo)
    )
    print(f"seconds {time.perf_counter() - start}", flush=True)
    return code


def _client(found: Engine, records: Path, number: int, pause: bool) -> subprocess.Popen[str]:
    arguments = ["--step", found.address, "--records", str(records), "--cells", str(number), *(["--pause"] * pause)]
    return subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)


# --- the marks --------------------------------------------------------------------------------------------------------


def overhead(number: int) -> bool:
    with engine() as found:
        records = found.folder / "records.jsonl"
        done = _client(found, records, number, pause=False)
        out, _ = done.communicate()
        seconds = float(out.split("seconds ")[1].split()[0])
        count = len(records.read_bytes().splitlines())
    each = 1e3 * seconds / number
    print(
        f"{number:,} cells, one a batch, two workers: {seconds:.1f} s, {each:.1f} ms each (mark 20); {count:,} records"
    )
    return each < 20 and count == number


def kills(number: int, seed: int) -> bool:
    """Each time a new run, whose client is started until it has all cells; what was stored when something was killed
    must be there in the end as it was, and each cell once, in the file and in the tracker's database."""
    draw = random.Random(seed)
    lost = doubled = missing = 0
    killed: Counter[str] = Counter()
    clients = 0
    with engine() as found:
        for turn in range(number):
            victim = ("worker", "client", "scheduler", "host")[turn % 4]
            records = found.folder / f"{turn}.jsonl"
            running = _client(found, records, KILLED_BATCHES, pause=True)
            clients += 1
            assert running.stdout is not None
            while "begun" not in running.stdout.readline():
                if running.poll() is not None:
                    sys.exit("the client did not begin")
            time.sleep(draw.uniform(0, 1.3))
            _kill(victim, found, running, draw)
            killed[victim] += 1
            stored = _whole(records)
            _wait(lambda: running.poll() is not None, "the client's end", 200)  # noqa: B023 - asked at once
            for _ in range(5):
                if len(_whole(records)) == KILLED_BATCHES:
                    break
                found.start()
                again = _client(found, records, KILLED_BATCHES, pause=True)
                clients += 1
                again.communicate(timeout=200)
            found.start()
            lines = records.read_bytes().splitlines(keepends=True)
            cells = Counter(resume.key_of_cell(record.cell) for _, record in read(lines))
            lost += len(stored - set(lines))
            doubled += sum(cells.values()) - len(cells)
            missing += KILLED_BATCHES - len(cells)
            missing += KILLED_BATCHES - _ingested(found.folder / f"{turn}.db", records)
            records.unlink()
    told = ", ".join(f"{what} {count}" for what, count in killed.items())
    print(
        f"killed {number} times ({told}), {clients} clients: {lost} records lost, {doubled} doubled, {missing} missing"
    )
    return lost == doubled == missing == 0


def _kill(victim: str, found: Engine, running: subprocess.Popen[str], draw: random.Random) -> None:
    assert found.scheduler is not None and found.host is not None
    if victim == "worker":
        alive = found.processes()
        if alive:
            draw.choice(alive).kill()
    elif victim == "client":
        running.send_signal(signal.SIGKILL)
    else:
        process = found.scheduler if victim == "scheduler" else found.host
        process.send_signal(signal.SIGKILL)
        process.wait()


def _whole(records: Path) -> set[bytes]:
    """Whole lines but for what was skipped, which a resumed run takes out and measures."""
    if not records.exists():
        return set()
    lines = [line for line in records.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return {line for line in lines if b'"status":"skipped"' not in line}


def _ingested(database: Path, records: Path) -> int:
    """Points in a new database after the file was stored twice."""
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
    """The first night of as many series, and the next: a night writes points of series that are there."""
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
            what = "new series" if night == 0 else "known series"
            print(f"{kind}: {number:,} points of {what} in {seconds:.1f} s, {number / seconds:,.0f} a second")
    return True


# --- GPUs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Night:
    seconds: float
    records: dict[Any, Record]


def gpus(given: argparse.Namespace) -> bool:
    from groupbench.operators.fleet import local

    slots = local.slots(given.gpus, given.device)
    numbers = list(range(len(slots))) if given.gpus == "all" else [int(text) for text in given.gpus.split(",")]
    every = ",".join(map(str, numbers))
    with tempfile.TemporaryDirectory() as name:
        folder = given.out or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        shapes = given.shapes or SHAPES
        _night(given, folder, "warm", every, shapes)  # compiles, and fills the caches
        one = _night(given, folder, "one", str(numbers[0]), shapes)
        all_ = _night(given, folder, "all", every, shapes, previous="one")
        speedup = one.seconds / all_.seconds
        mark = 0.95 * len(numbers)
        print(
            f"{one.seconds:.1f} s on one, {all_.seconds:.1f} s on {len(numbers)}: {speedup:.2f} times (mark {mark:.1f})"
        )
        busy = Counter(record.environment.gpu_uuid for record in all_.records.values())
        print(f"cells by GPU: {', '.join(f'{uuid} {count}' for uuid, count in busy.items())}")
        differ = [key for key, record in one.records.items() if all_.records[key].status != record.status]
        print(f"statuses that differ: {len(differ)} of {len(one.records)}")
        for key in differ:
            print(f"  {key}: {one.records[key].status} on one, {all_.records[key].status} on all")
        _neighbours(given, folder, numbers, all_)
    return speedup >= 0.95 * len(numbers) and not differ


def _neighbours(given: argparse.Namespace, folder: Path, numbers: list[int], together: Night) -> None:
    """The cells of a card again while its neighbours rest, twice: what they do to it beside what chance does."""
    chance: list[float] = []
    influence: list[float] = []
    by_card: dict[Any, list[Any]] = {}
    for key, record in together.records.items():
        by_card.setdefault(record.environment.gpu_uuid, []).append(key)
    for number in numbers[: given.neighbours]:
        probe = _night(given, folder, f"probe{number}", str(number), (given.shapes or SHAPES)[:1])
        uuid = next(iter(probe.records.values())).environment.gpu_uuid
        shapes = list(dict.fromkeys(key[2] for key in by_card.get(uuid, [])))
        if not shapes:
            continue
        first, second = (_night(given, folder, f"alone{number}{turn}", str(number), shapes) for turn in "ab")
        for key in by_card[uuid]:
            times = [_median(night.records.get(key)) for night in (first, second, together)]
            if all(times):
                chance.append(math.log(times[1] / times[0]))
                influence.append(math.log(times[2] / math.sqrt(times[0] * times[1])))
        _telemetry(f"GPU {number} alone", [first.records[key] for key in by_card[uuid] if key in first.records])
        _telemetry(f"GPU {number} together", [together.records[key] for key in by_card[uuid]])
    if len(influence) < 2:
        print("neighbours: too few cells to tell")
        return
    # The mean of two has half the variance of a difference: influence holds 3/4 of what chance does.
    noise = statistics.median(map(abs, chance))
    shift, error = statistics.median(influence), 1.25 * statistics.stdev(influence) / math.sqrt(len(influence))
    beside = statistics.median(map(abs, influence))
    print(f"neighbours: {100 * shift:+.2f} % (standard error {100 * error:.2f} %, {len(influence)} cells)")
    print(f"a cell from night to night, median: {100 * noise:.2f} % alone, {100 * beside:.2f} % with neighbours")
    said = "less than" if abs(shift) < noise else "MORE THAN"
    print(f"neighbours change a cell's latency by {said} its own noise")


def _telemetry(what: str, records: list[Record]) -> None:
    seen = [t for record in records if record.latency for t in record.latency.telemetry]
    power = [t.power_w for t in seen if t.power_w is not None]
    clock = [t.sm_clock_mhz for t in seen if t.sm_clock_mhz is not None]
    warm = [t.temperature_c for t in seen if t.temperature_c is not None]
    reasons = Counter(reason for t in seen for reason in t.throttle)
    if power and clock and warm:
        told = ", ".join(f"{reason} {count}" for reason, count in reasons.items()) or "none"
        print(f"{what}: {statistics.mean(power):.0f} W, {statistics.mean(clock):.0f} MHz, "
              f"{statistics.mean(warm):.0f} °C; throttled in {len(seen)} bursts: {told}")  # fmt: skip


def _median(record: Record | None) -> float:
    if record is None or record.latency is None:
        return 0.0
    return statistics.median(statistics.median(burst) for burst in record.latency.bursts_ms)


def _night(
    given: argparse.Namespace, folder: Path, name: str, on: str, shapes: list[str], previous: str | None = None
) -> Night:
    records = folder / f"{name}.jsonl"
    records.unlink(missing_ok=True)
    command = [sys.executable, "-m", "groupbench.operators", "--host", "builtin", "--device", given.device, "--quiet",
               "--op", "grouped_gemm", "--only", given.backends, "--gpus", on, "--records", str(records),
               "--commit", given.commit or COMMIT, "--shapes", *shapes]  # fmt: skip
    if previous:
        command += ["--previous", str(folder / f"{previous}.jsonl")]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode == 2 or not records.exists():
        sys.exit(f"{name}: {done.stderr or done.stdout}")
    found = [record for _, record in read(records.read_bytes().splitlines(keepends=True))]
    print(f"{name} on {on}: {len(found)} cells in {seconds:.1f} s", file=sys.stderr, flush=True)
    return Night(seconds, {resume.key_of_cell(record.cell): record for record in found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overhead", type=int, metavar="CELLS")
    parser.add_argument("--kills", type=int, metavar="TIMES")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--database", nargs="?", const="", metavar="URL")
    parser.add_argument("--points", type=int, default=20_000, help="of --database")
    parser.add_argument("--gpus", metavar="all|0,1,...")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--commit", help="hash of the code, where there is no git")
    parser.add_argument("--backends", default=BACKENDS, help="of --gpus")
    parser.add_argument("--shapes", nargs="+", help="of --gpus, as `tritonbench --shapes` takes them")
    parser.add_argument("--neighbours", type=int, default=2, help="cards that are measured alone too")
    parser.add_argument("--out", type=Path, help="folder that keeps the records of --gpus")
    for name in ("--step", "--records"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--cells", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--pause", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step:
        sys.exit(client(given.step, Path(given.records), given.cells, given.pause))
    os.environ.setdefault("GROUPBENCH_LOCKS", tempfile.gettempdir())
    held = True
    if given.overhead:
        held &= overhead(given.overhead)
    if given.kills:
        held &= kills(given.kills, given.seed)
    if given.database is not None:
        held &= database(given.database or None, given.points)
    if given.gpus:
        held &= gpus(given)
    sys.exit(not held)


if __name__ == "__main__":
    main()
