"""Kill `ab` and `backfill` with SIGKILL at random moments: nothing is lost, doubled or left behind.

    python ci/benchmarks/kill_marks.py --kills 300 --seed 1

The commands are real, and so are git, their databases and their files. What measures is played (PLAYED_SIDE,
PLAYED_TRITONBENCH), so that a kill costs a second and no torch is needed. After every tenth kill the command runs to
its end; then no process, checkout or temporary folder of it may be left, every line of `ab --records` must be whole,
and `backfill` must have stored every cell of every commit exactly once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

COMMITS, CELLS = 6, 3
KILLS_BETWEEN_CHECKS = 10
MARK = "KILL_MARKS"
"""Environment variable by which the processes of one round are found."""

PLAYED_TRITONBENCH = """
import sys, time
from datetime import UTC, datetime
from pathlib import Path
import msgspec
from groupbench.tracker.record import Record, decode, encode

def option(name):
    return sys.argv[sys.argv.index(name) + 1]

path, commit = Path(option("--records")), option("--commit")
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
prepared = {"timing": "cpu", "accuracy": {"rms": 0.0}, "problem": None, "kernels": [], "flops": 0, "min_bytes": 0}
cells = [{"operator": "o", "backend": b, "shape": "N=1", "dtype": "fp32", "mode": "fwd", "unavailable": None}
         for b in ("a", "b")]
answers = {"hello": {"device": "cpu", "capability": None, "environment": {}}, "cells": cells, "prepare": prepared,
           "burst": [1.0, 1.0]}
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
from groupbench.tracker.cli import main
main()
"""


class Lab:
    """A repository, and a groupbench whose measuring is played."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.repository, self.temporary = folder, folder / "repository", folder / "temporary"
        self.temporary.mkdir()
        (folder / "played_tritonbench.py").write_text(PLAYED_TRITONBENCH)
        (folder / "played_side.py").write_text(PLAYED_SIDE)
        (folder / "driver.py").write_text(DRIVER.format(folder=folder))
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("GROUPBENCH_")}
        self.environment |= {
            "GROUPBENCH_ALONE": str(folder / "lock"),
            "TMPDIR": str(self.temporary),
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
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
        return subprocess.Popen(
            command, cwd=self.repository, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def run(self, words: list[str]) -> tuple[float, int]:
        """Run a command to its end: (seconds it took, exit code)."""
        begun = time.monotonic()
        code = self.start(words).wait()
        return time.monotonic() - begun, code

    def left(self) -> Iterator[str]:
        """Yield what the commands have left: processes, temporary folders, checkouts."""
        for _ in range(200):  # a process that is ending may take a moment
            processes = self._processes()
            if not processes:
                break
            time.sleep(0.05)
        yield from (f"process {pid}: {command}" for pid, command in processes.items())
        for pid in processes:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        yield from (f"temporary {path.name}" for path in self.temporary.iterdir())
        trees = self.git("worktree", "list").splitlines()[1:]
        yield from (f"checkout {tree}" for tree in trees)

    def _processes(self) -> dict[int, str]:
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.folder}".encode() in (process / "environ").read_bytes():
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def wrong_records(self) -> Iterator[str]:
        """Yield what is wrong with what `ab` has written."""
        for number, line in enumerate((self.folder / "ab.jsonl").read_text().splitlines(), 1):
            try:
                json.loads(line)
            except ValueError as error:
                yield f"ab.jsonl, line {number}: {error}"

    def wrong_points(self) -> Iterator[str]:
        """Yield the cells that `backfill` has lost or stored twice."""
        query = (
            'SELECT "commit".hash, series.shape FROM point JOIN run ON run.id = point.run_id '
            'JOIN "commit" ON "commit".id = run.commit_id JOIN series ON series.id = point.series_id'
        )
        with closing(sqlite3.connect(self.repository / "groupbench.db")) as connection:
            stored = Counter(connection.execute(query).fetchall())
        commits = self.git("rev-list", "HEAD", f"^HEAD~{COMMITS}").split()
        expected = Counter((commit, f"N={cell}") for commit in commits for cell in range(CELLS))
        yield from (f"lost: {cell}" for cell in expected - stored)
        yield from (f"doubled: {cell}" for cell in stored - expected)


def problems(command: str, kills: int, rng: random.Random, folder: Path) -> Iterator[str]:
    """Kill a command that many times, run it to its end, and yield what is wrong then."""
    lab = Lab(folder)
    words = {
        "ab": ["ab", "HEAD~1", "HEAD", "--operator", "o", "--device", "cpu", "--budget", "60s"],
        "backfill": ["backfill", f"HEAD~{COMMITS}..", "--device", "cpu"],
    }[command]
    words += ["--records", str(folder / "ab.jsonl")] if command == "ab" else []
    span, killed = 3.0, 0
    while killed < kills:
        process = lab.start(words)
        try:
            process.wait(rng.uniform(0, span))
            span = max(0.9 * span, 0.5)  # it had ended: later kills come sooner
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    seconds, code = lab.run(words)
    if code:
        yield f"{command} ended with {code} after {seconds:.1f} s"
    yield from lab.left()
    yield from lab.wrong_records() if command == "ab" else lab.wrong_points()


def marks() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=300, metavar="N", help="Number of kills in all.")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="Seed of the moments.")
    given = parser.parse_args()
    rng, total, wrong = random.Random(given.seed), 0, 0
    while total < given.kills:
        kills = min(KILLS_BETWEEN_CHECKS, given.kills - total)
        command = ("ab", "backfill")[total // KILLS_BETWEEN_CHECKS % 2]
        with tempfile.TemporaryDirectory() as folder:
            for problem in problems(command, kills, rng, Path(folder)):
                print(f"{command}, kills {total + 1} to {total + kills}: {problem}", flush=True)
                wrong += 1
        total += kills
    print(f"{total} kills: {wrong} problems")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(marks())
