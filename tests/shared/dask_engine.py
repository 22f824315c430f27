"""A Dask scheduler and two workers on this machine, started by their commands, which tests kill and start again."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil


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
