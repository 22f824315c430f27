"""Check that commands killed with SIGKILL at random moments lose, double and leave behind nothing.

    python ci/benchmarks/kill_marks.py --kills 500 --seed 1 [--command serve --command night]

The commands, git, their databases and their files are real. Only measuring is simulated (PLAYED_SIDE,
PLAYED_TRITONBENCH), so that a kill takes a second and needs no torch. After every tenth kill the command runs to its
end. Then no process, checkout, lock or temporary folder may be left, no command may have printed a traceback, and:

- `ab`: every line of `--records` is whole.
- `backfill`: every cell of every commit is stored exactly once.
- `bisect`: its log has the comparisons of a search that was not killed, each once.
- `confirm`: every suspect has exactly one comparison, and it is decided.
- `serve`: every change that the server confirmed is stored exactly once and whole, although three clients and
  `groupbench ingest` were at work when it was killed. `ingest` is not killed and must succeed.
- `ingest`: every night is stored exactly once. The first kills hit the creation of the database.
- `gate`: after each kill of `gate --update`, either all alerts are there, each with one event, or none.
- `night`: every cell of the interrupted night is stored exactly once, and the verdict and the report are written.
- `repair`: after each kill, the new database is whole or does not exist.
- `migrate`: after each kill of a migration from revision 0001, the database is that of before or that of after, with
  the same results, and there is at most one backup.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import http.client
import json
import os
import random
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

COMMITS, CELLS = 6, 3
SLOW_FROM = 4
"""Number of the commit from which on the played kernel takes twice as long."""

SERIES, NIGHTS = 6, 24
"""Series and nightly runs in the database of `confirm` and `serve`."""

KILLS_BETWEEN_CHECKS = 10
START_S = 300.0
"""How long a start, or the end of a process, may take on a busy machine."""
TOKEN = "played-token-of-the-marks"  # noqa: S105 # of a server for one round
MARK = "KILL_MARKS"
"""Environment variable by which the processes of one round are found."""

PLAYED_TRITONBENCH = """
import sys, time
from datetime import UTC, datetime
from pathlib import Path
import msgspec
from groupbench.tracker.facts.record import Record, decode, encode

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

path = Path(option("--records"))
commit = option("--commit") if "--commit" in sys.argv else "c" * 40  # a nightly run measures the checkout
lines = path.read_bytes().split(b"\\n") if path.exists() else [b""]
path.write_bytes(b"".join(line + b"\\n" for line in lines[:-1]))
done = [decode(line) for line in lines[:-1]]
name = done[0].run.id if done else f"{commit[:8]}-{time.monotonic_ns()}"
run = {"id": name, "started": datetime(2026, 1, 1, tzinfo=UTC), "trigger": "backfill", "commit": {"hash": commit}}
with path.open("ab", buffering=0) as file:
    for number in range(3):
        cell = {"operator": "canary", "backend": "torch", "shape": f"N={number}", "dtype": "fp32"}
        if any(record.cell.shape == cell["shape"] for record in done):
            continue
        time.sleep(0.02)
        line = encode(msgspec.convert({
            "schema": 1, "run": run, "environment": {"device": "cpu", "cpu": "X"}, "cell": cell, "status": "ok",
            "latency": {"timing": "cpu", "bursts_ms": [[1.0]]}, "accuracy": {"rms": 0.0}}, Record))
        file.write(line[:20])
        file.write(line[20:])
"""

PLAYED_SIDE = """
import json, sys, time
latency = 1.0 + (int(open("kernel.py").read().strip("# \\n")) >= {slow_from})
prepared = {"timing": "cpu", "accuracy": {"rms": 0.0}, "problem": None, "kernels": [], "flops": 0, "min_bytes": 0}
cells = [{"operator": "o", "backend": b, "shape": "N=1", "dtype": "fp32", "mode": "fwd", "unavailable": None}
         for b in ("a", "b")]
answers = {"hello": {"device": "cpu", "capability": None, "environment": {"device": "cpu", "cpu": "X"}},
           "cells": cells, "prepare": prepared, "burst": [latency, latency]}
for line in sys.stdin:
    verb = json.loads(line)["verb"]
    time.sleep(0.01)
    print(json.dumps({"value": answers.get(verb)}), flush=True)
"""

DRIVER = """
import sys
from groupbench.tracker.ab import side
from groupbench.tracker.night import measuring
measuring.PROGRAM = (sys.executable, "{folder}/played_tritonbench.py")
side.MODULE = "played_side"
if __name__ == "__main__":  # the dashboard's workers import this file too
    from groupbench.tracker.cli import main
    main()
"""


OLD_DATABASE = Path(__file__).parents[2] / "tests/tracker/data/revision_0001.db.gz"

FILES = {".git", ".gitignore", "groupbench.toml", "kernel.py", "records"}
FILES |= {f"groupbench.db{ending}" for ending in ("", "-wal", "-shm")}


class Lab:
    """A repository, and a groupbench whose measuring is played."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.repository, self.temporary = folder, folder / "repository", folder / "temporary"
        self.errors = folder / "errors"
        self.temporary.mkdir()
        (folder / "played_tritonbench.py").write_text(PLAYED_TRITONBENCH)
        (folder / "played_side.py").write_text(PLAYED_SIDE.replace("{slow_from}", str(SLOW_FROM)))
        (folder / "driver.py").write_text(DRIVER.format(folder=folder))
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("GROUPBENCH_")}
        self.environment |= {
            "GROUPBENCH_ALONE": str(folder / "lock"),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
            "GROUPBENCH_TOKEN": TOKEN,
            MARK: str(folder),
        }
        self.repository.mkdir()
        self.git("init", "-q", "-b", "main")
        (self.repository / ".gitignore").write_text("groupbench.db*\nrecords/\n")
        (self.repository / "groupbench.toml").write_text('[[measure]]\noperator = "canary"\n')
        for number in range(COMMITS + 1):
            (self.repository / "kernel.py").write_text(f"# {number}\n")
            self.git("add", "-A")
            self.git("commit", "-qm", f"Commit {number}")

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(self.repository), *identity, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def start(self, words: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(self.folder / "driver.py"), *words]
        with self.errors.open("ab") as errors:
            return subprocess.Popen(
                command, cwd=self.repository, env=self.environment, stdout=subprocess.DEVNULL, stderr=errors
            )

    def run(self, words: list[str]) -> tuple[float, int]:
        """Run a command to its end: (seconds it took, exit code)."""
        begun = time.monotonic()
        code = self.start(words).wait()
        return time.monotonic() - begun, code

    def left(self, files: Container[str] = FILES) -> Iterator[str]:
        """Yield the leftovers of the commands: processes, temporary folders, checkouts, other files, tracebacks.

        files  names of files that may be in the repository
        """
        end = time.monotonic() + START_S
        while (processes := self._processes()) and time.monotonic() < end:  # one that is ending may take a moment
            time.sleep(0.05)
        yield from (f"process {pid}: {command}" for pid, command in processes.items())
        for pid in processes:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        yield from (f"temporary {path.name}" for path in self.temporary.iterdir())
        trees = self.git("worktree", "list").splitlines()[1:]
        yield from (f"checkout {tree}" for tree in trees)
        yield from (f"lock {path.name}" for path in (self.repository / ".git").rglob("*.lock"))
        names = (path.name for path in self.repository.iterdir())
        yield from (f"file {name}" for name in names if name not in files)
        text = self.errors.read_text(errors="replace") if self.errors.exists() else ""
        if "Traceback" in text:
            yield f"traceback: {text[text.index('Traceback') :]}"

    def _processes(self) -> dict[int, str]:
        commands = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.folder}".encode() in (process / "environ").read_bytes():
                    commands[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return commands

    @property
    def database(self) -> Path:
        return self.repository / "groupbench.db"

    def replace_database(self, content: Path | None) -> None:
        """Put a copy of a file in the place of the database, or nothing."""
        for path in self.repository.glob(f"{self.database.name}*"):
            path.unlink()
        if content is not None:
            shutil.copyfile(content, self.database)

    def query(self, statement: str) -> list[Any]:
        with closing(sqlite3.connect(self.database)) as connection:
            return connection.execute(statement).fetchall()

    def cells(self) -> Counter[Any]:
        """Count the stored points by (run, shape)."""
        runs = "SELECT run.uuid, series.shape FROM point JOIN run ON run.id = run_id"
        return Counter(self.query(f"{runs} JOIN series ON series.id = series_id"))

    def write_night(self, number: int, hash_: str, ms: float) -> Path:
        """Write the records of a nightly run of `SERIES` series to a file."""
        started = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=number)
        run = {"id": f"night-{number:05d}", "started": started.isoformat(), "trigger": "nightly"}
        run |= {"commit": {"hash": hash_, "branch": "main", "time": started.isoformat()}}
        rng, lines = random.Random(number), []
        for size in range(SERIES):
            lines.append({
                "schema": 1, "run": run, "environment": {"device": "cpu", "cpu": "X"},
                "cell": {"operator": "o", "backend": "a", "shape": f"N={size}", "dtype": "fp32"}, "status": "ok",
                "latency": {"timing": "cpu", "bursts_ms": [[ms * rng.gauss(1, 0.001)] * 2 for _ in range(4)]},
                "accuracy": {"rms": 0.0},
            })  # fmt: skip
        path = self.folder / f"{run['id']}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def store_nights(self, slow: int) -> None:
        """Store nightly runs, the last of which measure a slower commit, and open alerts."""
        before, after = self.git("rev-parse", f"HEAD~{COMMITS - SLOW_FROM + 1}", "HEAD").split()
        nights = [(number, number >= NIGHTS - slow) for number in range(NIGHTS)]
        files = [self.write_night(number, after if late else before, 1.0 + late) for number, late in nights]
        if self.run(["ingest", *map(str, files)])[1]:
            raise SystemExit(f"the nights cannot be stored: {self.errors.read_text()}")
        self.run(["gate", "--update"])


class Killed(ABC):
    """A command that is killed and started again until it runs to its end. `wrong` then yields its problems."""

    span_s = 3.0
    files = FILES
    """Names of files that the command may leave in the repository."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    @abstractmethod
    def words(self) -> list[str]:
        """Return the arguments of the command."""

    @abstractmethod
    def wrong(self) -> Iterator[str]:
        """Yield the problems that the command has left."""

    def kill(self, after_s: float) -> bool:
        """Start the command and kill it after a while. Returns False if it had ended."""
        process = self.lab.start(self.words())
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return True
        return False

    def finish(self) -> Iterator[str]:
        """Run the command to its end, and yield the problems of that run."""
        seconds, code = self.lab.run(self.words())
        if code:
            yield f"ended with {code} after {seconds:.1f} s"


class Ab(Killed):
    def words(self) -> list[str]:
        records = ["--records", str(self.lab.folder / "ab.jsonl")]
        return ["ab", "HEAD~1", "HEAD", "--operator", "o", "--device", "cpu", "--budget", "60s", *records]

    def wrong(self) -> Iterator[str]:
        for number, line in enumerate((self.lab.folder / "ab.jsonl").read_text().splitlines(), 1):
            try:
                json.loads(line)
            except ValueError as error:
                yield f"ab.jsonl, line {number}: {error}"


class Backfill(Killed):
    def words(self) -> list[str]:
        return ["backfill", f"HEAD~{COMMITS}..", "--device", "cpu"]

    def wrong(self) -> Iterator[str]:
        stored = Counter(
            self.lab.query(
                'SELECT "commit".hash, series.shape FROM point JOIN run ON run.id = point.run_id '
                'JOIN "commit" ON "commit".id = run.commit_id JOIN series ON series.id = point.series_id'
            )
        )
        commits = self.lab.git("rev-list", "HEAD", f"^HEAD~{COMMITS}").split()
        expected = Counter((commit, f"N={cell}") for commit in commits for cell in range(CELLS))
        yield from (f"lost: {cell}" for cell in expected - stored)
        yield from (f"doubled: {cell}" for cell in stored - expected)


class Bisect(Killed):
    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.log, self.whole = lab.folder / "killed.jsonl", lab.folder / "whole.jsonl"
        _, self.code = lab.run([*self._search(), "--log", str(self.whole)])

    def _search(self) -> list[str]:
        cell = ("--operator", "o", "--backend", "a", "--shape", "N=1", "--dtype", "fp32", "--device", "cpu")
        return ["bisect", f"HEAD~{COMMITS}", "HEAD", *cell]

    def words(self) -> list[str]:
        resume = ["--resume"] if self.log.exists() else []
        return [*self._search(), "--log", str(self.log), *resume]

    def finish(self) -> Iterator[str]:
        if self.code != 1:
            yield f"the search that was not killed ended with {self.code}"
        _, code = self.lab.run(self.words())
        if code != self.code:
            yield f"ended with {code}, not {self.code}"

    def wrong(self) -> Iterator[str]:
        expected, logged = _findings(self.whole), _findings(self.log)
        if len(expected) < 3:
            yield f"the search that was not killed asked {len(expected)} questions"
        if logged != expected:
            yield f"the log has {logged}, not {expected}"


def _findings(log: Path) -> list[tuple[str, ...]]:
    entries = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    return [(entry["base"][:10], entry["head"][:10], entry["why"], entry["finding"]["verdict"]) for entry in entries]


class Confirm(Killed):
    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        lab.store_nights(slow=1)

    def words(self) -> list[str]:
        return ["confirm", "--budget", "5m"]

    def wrong(self) -> Iterator[str]:
        statement = "SELECT shape, verdict FROM comparison JOIN series ON series.id = comparison.series_id"
        stored = Counter(self.lab.query(statement))
        expected = Counter((f"N={size}", "different") for size in range(SERIES))
        yield from (f"lost: {cell}" for cell in expected - stored)
        yield from (f"doubled: {cell}" for cell in stored - expected)


class Serve(Killed):
    """The dashboard, while clients change alerts and ask for comparisons, and another process stores a night."""

    span_s = 6.0

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        lab.store_nights(slow=8)
        self.alerts = [key for (key,) in lab.query("SELECT id FROM alert")]
        self.nights = NIGHTS
        self.port = 0
        self.asked = 0
        self.confirmed: list[str] = []
        self._lock = threading.Lock()

    def words(self) -> list[str]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        return ["serve", "--write", "--port", str(self.port)]

    def kill(self, after_s: float) -> bool:
        ended = threading.Event()
        words = self.words()
        clients = [
            threading.Thread(target=client, args=(ended,)) for client in (self._change, self._change, self._read)
        ]
        server = self.lab.start(words)
        for client in clients:
            client.start()
        head = self.lab.git("rev-parse", "HEAD")
        night = self.lab.write_night(self.nights, head, 2.0)
        self.nights += 1
        time.sleep(after_s / 2)
        ingest = self.lab.start(["ingest", str(night)])
        time.sleep(after_s / 2)
        server.kill()
        killed = server.wait() == -signal.SIGKILL
        ended.set()
        for client in clients:
            client.join()
        if ingest.wait():
            raise SystemExit(f"`ingest` failed: {self.lab.errors.read_text()}")
        return killed

    def _change(self, ended: threading.Event) -> None:
        while not ended.is_set():
            with self._lock:
                self.asked += 1
                reason = f"change {self.asked}"
            form = {"alert": self.alerts, "action": "acknowledge", "who": "marks", "reason": reason}
            with contextlib.suppress(OSError, http.client.HTTPException):
                if self._ask("POST", "/alerts/change.json", json.dumps(form)) == 200:
                    with self._lock:
                        self.confirmed.append(reason)
                    continue
            time.sleep(0.02)

    def _read(self, ended: threading.Event) -> None:
        while not ended.is_set():
            for path in ("/", "/compare.json?a=previous&b=latest"):
                with contextlib.suppress(OSError, http.client.HTTPException):
                    self._ask("GET", path)
            time.sleep(0.02)

    def _ask(self, method: str, path: str, body: str | None = None) -> int:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"} if body else {}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            response.read()
            return response.status

    def finish(self) -> Iterator[str]:
        """Start it once more: it must take a change, and end when it is asked to."""
        server = self.lab.start(self.words())
        confirmed, ended = len(self.confirmed), threading.Event()
        client = threading.Thread(target=self._change, args=(ended,))
        client.start()
        end = time.monotonic() + START_S
        while len(self.confirmed) == confirmed and time.monotonic() < end:
            time.sleep(0.05)
        ended.set()
        client.join()
        server.terminate()
        if code := server.wait(START_S):
            yield f"ended with {code}"
        if len(self.confirmed) == confirmed:
            yield f"took no change within {START_S:g} s"
        if self.lab.run(["verify"])[1]:
            yield "`verify` finds damage"

    def wrong(self) -> Iterator[str]:
        if len(self.alerts) != SERIES:
            yield f"{len(self.alerts)} alerts, not {SERIES}"
        events = Counter(self.lab.query("SELECT reason, alert_id FROM alert_event WHERE who = 'marks'"))
        yield from (f"doubled: {event}" for event, number in events.items() if number > 1)
        by_reason = Counter(reason for reason, _ in events)
        yield from (f"half stored: {reason}" for reason, number in by_reason.items() if number != len(self.alerts))
        yield from (f"lost: {reason}" for reason in self.confirmed if not by_reason[reason])
        runs = dict(self.lab.query("SELECT run.uuid, count(*) FROM run JOIN point ON point.run_id = run.id GROUP BY 1"))
        for number in range(self.nights):
            if runs.get(f"night-{number:05d}") != SERIES:
                yield f"night {number} has {runs.get(f'night-{number:05d}')} points"


class Ingest(Killed):
    span_s = 1.5

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.written: list[Path] = []

    def words(self) -> list[str]:
        number = len(self.written)
        hashes = self.lab.git("rev-list", "HEAD").split()
        for night in (number, number + 1):
            self.written.append(self.lab.write_night(night, hashes[night % len(hashes)], 1.0))
        return ["ingest", *map(str, self.written)]

    def wrong(self) -> Iterator[str]:
        cells = self.lab.cells()
        expected = Counter((path.stem, f"N={size}") for path in self.written for size in range(SERIES))
        yield from (f"lost: {cell}" for cell in expected - cells)
        yield from (f"doubled: {cell}" for cell in cells - expected)
        if self.lab.run(["verify"])[1]:
            yield "`verify` finds damage"


class Checked(Killed):
    """A command that changes one file at once: each kill leaves the state of before or that of after."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.problems: list[str] = []

    def kill(self, after_s: float) -> bool:
        self.reset()
        killed = super().kill(after_s)
        self.problems += self.after_kill()
        return killed

    def finish(self) -> Iterator[str]:
        self.reset()
        yield from super().finish()

    def wrong(self) -> Iterator[str]:
        yield from self.problems
        yield from self.after_kill()
        if not self.done():
            yield "lost: the command ended and changed nothing"

    @abstractmethod
    def reset(self) -> None:
        """Undo the command, if a killed one had come to its end."""

    @abstractmethod
    def after_kill(self) -> Iterator[str]:
        """Yield the differences to the state of before, if it is not that of after."""

    @abstractmethod
    def done(self) -> bool:
        """Return whether the command has made its change."""


class Gate(Checked):
    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        before, after = lab.git("rev-parse", f"HEAD~{COMMITS - SLOW_FROM + 1}", "HEAD").split()
        nights = [(number, number >= NIGHTS - 8) for number in range(NIGHTS)]
        files = [lab.write_night(number, after if late else before, 1.0 + late) for number, late in nights]
        lab.run(["ingest", *map(str, files)])
        self.unjudged = lab.folder / "unjudged.db"
        with closing(sqlite3.connect(lab.database)) as connection:
            connection.execute("VACUUM INTO ?", (str(self.unjudged),))

    def words(self) -> list[str]:
        return ["gate", "--update"]

    def finish(self) -> Iterator[str]:
        self.reset()
        seconds, code = self.lab.run(self.words())
        if code != 1:
            yield f"ended with {code}, not 1, after {seconds:.1f} s"

    def reset(self) -> None:
        if self.done():
            self.lab.replace_database(self.unjudged)

    def after_kill(self) -> Iterator[str]:
        stored = Counter(self.lab.query("SELECT series_id FROM alert JOIN alert_event ON alert.id = alert_id"))
        if len(stored) not in (0, SERIES):
            yield f"half stored: alerts of {len(stored)} series"
        yield from (f"doubled: {series}" for series, number in stored.items() if number > 1)

    def done(self) -> bool:
        return bool(self.lab.query("SELECT 1 FROM alert"))


class Night(Killed):
    files = FILES | {"artifacts", "report.html"}

    def words(self) -> list[str]:
        return ["night", "--device", "cpu", "--confirm", "0"]

    def kill(self, after_s: float) -> bool:
        killed = super().kill(after_s)
        if not killed:
            self._start_over()
        return killed

    def _start_over(self) -> None:
        self.lab.replace_database(None)
        for name in ("records", "artifacts"):
            shutil.rmtree(self.lab.repository / name, ignore_errors=True)

    def wrong(self) -> Iterator[str]:
        cells = self.lab.cells()
        runs = {run for run, _ in cells}
        expected = Counter((run, f"N={cell}") for run in runs for cell in range(CELLS))
        yield from (f"lost: {cell}" for cell in expected - cells)
        yield from (f"doubled: {cell}" for cell in cells - expected)
        files = list((self.lab.repository / "records").glob("*.jsonl"))
        if not len(files) == len(runs) > 0:
            yield f"{len(files)} files of records, {len(runs)} runs"
        for name in ("artifacts/verdict.json", "report.html"):
            if not (self.lab.repository / name).exists():
                yield f"lost: {name}"


class Repair(Checked):
    files = FILES | {"new.db"}

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        lab.store_nights(slow=1)
        with closing(sqlite3.connect(lab.database)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")
        content = bytearray(lab.database.read_bytes())
        content[:100] = bytes(100)
        lab.database.write_bytes(content)
        self.new = lab.repository / "new.db"

    def words(self) -> list[str]:
        return ["repair", "groupbench.db", "new.db"]

    def reset(self) -> None:
        self.new.unlink(missing_ok=True)

    def after_kill(self) -> Iterator[str]:
        if self.done():
            with closing(sqlite3.connect(self.new)) as connection:
                (points,) = connection.execute("SELECT count(*) FROM point").fetchone()
            if points != NIGHTS * SERIES:
                yield f"half stored: {points} points"

    def done(self) -> bool:
        return self.new.exists()


class Migrate(Checked):
    files = FILES | {"groupbench.db.backup-0001"}

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.old = lab.folder / "old.db"
        self.old.write_bytes(gzip.decompress(OLD_DATABASE.read_bytes()))
        lab.replace_database(self.old)
        self.points = self._points()

    def _points(self) -> list[Any]:
        return self.lab.query("SELECT series_id, run_id, status, round(median_ms, 4) FROM point ORDER BY 1, 2")

    def words(self) -> list[str]:
        return ["verify"]

    def reset(self) -> None:
        if self.done():
            self.lab.replace_database(self.old)

    def after_kill(self) -> Iterator[str]:
        if (points := self._points()) != self.points:
            yield f"{len(points)} points, not the {len(self.points)} of before"

    def done(self) -> bool:
        return self.lab.query("SELECT version_num FROM alembic_version") != [("0001",)]


COMMANDS: dict[str, Callable[[Lab], Killed]] = {
    "ab": Ab, "backfill": Backfill, "bisect": Bisect, "confirm": Confirm, "serve": Serve, "ingest": Ingest,
    "gate": Gate, "night": Night, "repair": Repair, "migrate": Migrate,
}  # fmt: skip


def problems(command: str, kills: int, rng: random.Random, folder: Path) -> Iterator[str]:
    """Kill a command `kills` times, run it to its end, and yield the problems."""
    lab = Lab(folder)
    victim = COMMANDS[command](lab)
    span, killed = victim.span_s, 0
    while killed < kills:
        if victim.kill(rng.uniform(0, span)):
            killed += 1
        else:
            span = max(0.9 * span, 0.5)  # it had ended: later kills come sooner
    yield from victim.finish()
    yield from lab.left(victim.files)
    yield from victim.wrong()


def marks() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=500, metavar="N", help="Number of kills in all.")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="Seed of the moments.")
    parser.add_argument("--command", choices=COMMANDS, action="append", help="Kill only this; may be repeated.")
    options = parser.parse_args()
    commands = options.command or list(COMMANDS)
    rng, wrong = random.Random(options.seed), 0
    killed = dict.fromkeys(commands, 0)
    while (total := sum(killed.values())) < options.kills:
        kills = min(KILLS_BETWEEN_CHECKS, options.kills - total)
        command = commands[total // KILLS_BETWEEN_CHECKS % len(commands)]
        with tempfile.TemporaryDirectory() as folder:
            for problem in problems(command, kills, rng, Path(folder)):
                print(f"{command}, kills {killed[command] + 1} to {killed[command] + kills}: {problem}", flush=True)
                wrong += 1
        killed[command] += kills
    print(f"{', '.join(f'{kills} of {command}' for command, kills in killed.items())} killed: {wrong} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(marks())
