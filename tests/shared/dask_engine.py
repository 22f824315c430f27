"""A Dask scheduler and two workers on this machine, started by their commands, which tests kill and start again.

As a program, a client of that scheduler: the same as `tritonbench --scheduler ADDRESS --records RECORDS --resume`, on
cells that cost nothing.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from groupbench.tracker.facts.record import Accuracy, Environment, Latency, Record

COMMIT = "f1ee7f1ee7"
PAUSE_S = 0.02


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
            wait(lambda: _answers(self.port), "the scheduler")
        if self.host is None or self.host.poll() is not None:
            self.host = self._begin(
                "groupbench.operators.fleet.worker", self.address, "--device", "cpu", "--gpus", "0,1"
            )
        wait(lambda: len(self.workers()) == 2, "two workers")

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


def wait(ready: Callable[[], object], name: str, seconds: float = 600) -> None:
    until = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > until:
            raise TimeoutError(f"{name}: not ready within {seconds:g} s")
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


def whole_lines(records: Path) -> set[bytes]:
    """Return the complete lines, without skipped cells, which a resumed run removes and measures."""
    if not records.exists():
        return set()
    lines = [line for line in records.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return {line for line in lines if b'"status":"skipped"' not in line}


def client(fleet: Engine, records: Path, number: int, patience_s: float = 3) -> subprocess.Popen[str]:
    """Start this file as a program."""
    arguments = [fleet.address, str(records), str(number), str(patience_s)]
    return subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True)


def look(device: str, dask_worker: Any = None) -> Card:
    """Return the worker's card without importing torch, which empty cells do not need."""
    return Card(str(dask_worker.name), Machine(Environment(device="cpu", cpu=cpu_model()), None), batches.code())


def little(batch: Batch) -> list[Record]:
    """Return a record for every cell after a pause, without measuring."""
    time.sleep(PAUSE_S)
    return [_record(job, batch.run) for job in batch.jobs]


def _record(job: Job, run: Any) -> Record:
    record = executor.unmeasured(job, Machine(Environment(device="cpu", cpu="any"), None), run, "unavailable", "why")
    latency = Latency(timing="cpu", bursts_ms=((1.0, 1.1),) * 4)
    return msgspec.structs.replace(record, status="ok", message=None, latency=latency, accuracy=Accuracy(rms=1e-4))


def main() -> int:
    from groupbench.operators.fleet.dask import DaskFleet

    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("address", str), ("records", Path), ("cells", int), ("patience_s", float)):
        parser.add_argument(name, type=kind)
    options = parser.parse_args()
    session = Session(records_path=options.records, commit=COMMIT, resume=True, quiet=True, shows_table=False)
    fleet = DaskFleet(options.address, "cpu", measure=little, look=look, patience_s=options.patience_s)
    session.open("a client", fleet.cards[0].machine.environment, fleet=True)
    shapes = [f"G=1,M_g={n + 1},N=8,K=8" for n in range(options.cells)]
    jobs = [Job("grouped_gemm", "torch_loop", shape, "fp16", "cpu") for shape in shapes]
    todo = resume.not_done(jobs, session.records)
    print("begun", flush=True)
    return session.collect(
        lambda run, progress: drive.records(fleet, batches.batches(todo, run, 60, batches.code()), progress), len(todo)
    )


if __name__ == "__main__":
    sys.exit(main())
