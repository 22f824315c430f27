"""Check that every command handles a damaged database: it prints one line, never a traceback.

    python ci/benchmarks/damage_marks.py --flips 200 --seed 1

A flip changes a random byte of the file, of the schema's text, or of a stored value; sometimes it overwrites a whole
page or only the header. `gate` and `compare` may end with 1 if a flipped value looks like a regression, and `verify`
ends with 1 if it finds the damage. The dashboard answers 503 for a page that it cannot read. `repair` also
runs on each file, and `verify` must find no damage in its output.
Prints each problem and the totals. The exit code is 1 if there is a problem.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from click.testing import CliRunner, Result
from sqlalchemy import select
from starlette.testclient import TestClient

from groupbench.tracker.cli import main
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.record import Record, encode
from groupbench.tracker.serve.app import create_app
from groupbench.tracker.serve.jobs import Jobs
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.schema import Series

NIGHTS, BACKENDS = 8, ("torch_loop", "triton", "helion")

READING = [
    *(["history"], ["history", "--json", "--baseline", "torch_loop"], ["history", "--plot", "--backend", "triton"]),
    *(["gate"], ["gate", *(f"--output={name}={{folder}}/{name}" for name in ("junit", "sarif", "summary", "atom"))]),
    *(["runs"], ["commits"], ["series"], ["envs"], ["show", "1.1"], ["show", "run:run-003", "--md"]),
    *(["alerts", "--all"], ["alerts", "--json"], ["pins"], ["league", "latest"], ["explain", "previous", "latest"]),
    *(["export", "-"], ["export", "-", "--format", "csv"], ["export", "-", "--format", "v3"]),
    *(["compare", "previous", "latest"], ["compare", "17cc", "{folder}/more.jsonl"]),
    ["sql", "SELECT * FROM point JOIN series ON series.id = series_id"],
    ["sql", "SELECT * FROM alert JOIN alert_event ON alert.id = alert_id JOIN comparison USING (series_id)"],
    *(["verify"], ["verify", "--quick"], ["report", "-o", "{folder}/report.html"]),
]
WRITING = [
    *(["ingest", "{folder}/more.jsonl"], ["import", "{folder}/more.jsonl"], ["merge", "{folder}/sound.db"]),
    *(["gate", "--update"], ["prune", "--all", "1", "--apply"], ["confirm"], ["backup", "{folder}/copy.db"]),
    *(["ack", "1", "--reason", "known"], ["expect", "1", "--until", "17cc", "--reason", "x"]),
    *(["close", "1", "--as", "fixed", "--reason", "x"], ["pin", "latest", "--max-slowdown", "2"], ["unpin", "old"]),
]
PAGES = [
    *("/", "/runs", "/runs/run-003", "/series", "/series/2", "/series.json?q=triton", "/points/1.1", "/operators"),
    *("/operators/grouped_gemm", "/compare?a=16cc&b=17cc", "/alerts?state=all", "/alerts/1", "/healthz"),
]
MAY_FAIL = ("gate", "compare", "verify")

COMPARED = comparisons.Compared(
    base="16" + "c" * 38,
    head="17" + "c" * 38,
    verdict=comparisons.DIFFERENT,
    measured=datetime(2026, 1, 9, tzinfo=UTC),
    effect=0.262,
    low=0.255,
    high=0.27,
    details={"toolchain": "old"},
)
"""The A/B by which the last night's slowdown of triton is certain."""


def record(night: int, backend: str, number: int) -> Record:
    """Return the record of a cell of a night. On the last night, triton is 30 % slower."""
    slower = 1.3 if (backend, night) == ("triton", NIGHTS - 1) else 1.0
    noise = random.Random(f"{night} {backend} {number}")
    bursts = [[slower * (1 + number) * noise.gauss(1, 0.002) for _ in range(8)] for _ in range(4)]
    telemetry = [{"sm_clock_mhz": 1980, "temperature_c": 50, "power_w": 412.5}] * 4
    return msgspec.convert(
        {
            "schema": 1,
            "run": {
                "id": f"run-{night:03d}",
                "started": f"2026-01-{night + 1:02d}T03:00:00Z",
                "commit": {"hash": f"{night + 16:02x}" + "c" * 38, "branch": "main", "subject": "Tune"},
                "trigger": "nightly",
                "plan": "nightly",
            },
            "environment": {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "driver": "580.1", "torch": "2.11.0"},
            "cell": {
                "operator": "grouped_gemm", "backend": backend, "shape": f"G=4,N=1024,K={number}", "dtype": "bf16",
                "dims": {"G": 4, "N": 1024, "K": number}, "flops": 10**10, "min_bytes": 10**7,
            },
            "status": "ok",
            "latency": {"timing": "gpu", "bursts_ms": bursts, "telemetry": telemetry},
            "accuracy": {"rms": 2e-3, "repeatable": True},
            "kernels": [{"name": "k", "hash": f"{night // 4:032x}", "registers": 168, "config": {"BLOCK": 128}}],
            "metrics": {"energy_mj": 3.5},
        },
        Record,
    )  # fmt: skip


def build(folder: Path) -> Path:
    """Make an undamaged database with data for every command. Returns its path."""
    path = folder / "sound.db"
    nights = [[record(n, backend, number) for backend in BACKENDS for number in range(3)] for n in range(NIGHTS + 1)]
    (folder / "all.jsonl").write_bytes(b"".join(encode(one) for night in nights[:-1] for one in night))
    (folder / "more.jsonl").write_bytes(b"".join(map(encode, nights[-1])))
    _run(path, "ingest", str(folder / "all.jsonl"))
    _run(path, "pin", "10ccc", "--max-slowdown", "3", "--name", "old")
    with open_store(path, create=False) as store, store.write() as session:
        for series in session.scalars(select(Series).where(Series.backend == "triton")):
            comparisons.store(session, series.id, COMPARED)
    _run(path, "gate", "--update")  # opens an alert for each series that the comparisons confirm
    _run(path, "ack", "2", "--reason", "known", "--who", "Ada")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    return path


def _run(path: Path, *command: str) -> None:
    result = CliRunner().invoke(main, ["--db", str(path), *command])
    if result.exit_code not in (ExitCode.OK, ExitCode.FAILED, ExitCode.INCOMPLETE):
        raise SystemExit(f"{command}: {result.stderr}")


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file in one place. Returns a description of the place."""
    content = bytearray(path.read_bytes())
    kind = rng.choice(["anywhere", "anywhere", "schema", "value", "value", "value", "page", "first page"])
    if kind == "page":
        place = 8192 * rng.randrange(1, len(content) // 8192)
        content[place : place + 8192] = rng.randbytes(8192)
    elif kind == "first page":
        place, length = 0, rng.choice([100, 8192])
        content[:length] = rng.randbytes(length)
    else:
        if kind == "schema":
            place = rng.randrange(0, 8192)
        elif kind == "value":
            place = _in_a_value(path, content, rng)
        else:
            place = rng.randrange(len(content))
        content[place] = rng.choice([0xA3, content[place] ^ 1 << rng.randrange(8), rng.randrange(256)])
    path.write_bytes(content)
    return f"{kind} at {place}"


def _in_a_value(path: Path, content: bytes, rng: random.Random) -> int:
    with closing(sqlite3.connect(path)) as connection:
        table = rng.choice(
            [
                "point",
                "series",
                "run",
                "commit",
                "environment",
                "kernel_set",
                "alert",
                "alert_event",
                "comparison",
                "pin",
            ]
        )
        (number,) = connection.execute(f'SELECT max(id) FROM "{table}"').fetchone()  # noqa: S608 # a table of the list above
        if number is None:
            return rng.randrange(len(content))
        query = f'SELECT * FROM "{table}" WHERE id = ?'  # noqa: S608
        row = connection.execute(query, (rng.randint(1, number),)).fetchone()
    texts = [value.encode() if isinstance(value, str) else value for value in row if isinstance(value, str | bytes)]
    value = rng.choice(texts)
    place = content.find(value)
    # Half of the flips change the row's header and numbers, which are around its texts.
    return max(place + rng.randrange(-40, len(value) + 40), 0) if place >= 0 else rng.randrange(len(content))


def check(command: list[str], path: Path, folder: Path) -> str | None:
    """Run a command. Returns a description of the problem if it did not end properly."""
    words = [word.format(folder=folder) for word in command]
    return wrong_end(command, CliRunner().invoke(main, ["--db", str(path), *words]))


def wrong_end(command: list[str], result: Result) -> str | None:
    """Return a description of the problem if a command did not end properly."""
    lines = result.stderr.splitlines()
    if result.exit_code == ExitCode.BUG or (result.exception and not isinstance(result.exception, SystemExit)):
        return f"traceback: {lines[-1] if lines else result.exception!r}"
    if result.exit_code == ExitCode.FAILED and command[0] not in MAY_FAIL:
        return f"exit code 1: {result.output[-200:]!r}"
    if result.exit_code == ExitCode.USAGE and (len(lines) != 1 or not lines[0].startswith("groupbench: ")):
        return f"{len(lines)} lines: {result.stderr[-300:]!r}"
    return None


def page_problems(path: Path, expected: Container[int] = (200, 202, 404, 503)) -> Iterator[str]:
    """Ask the dashboard of a database for every kind of page, and yield the responses of another status."""
    with ThreadPoolExecutor(1) as executor:
        try:
            app = create_app(str(path), jobs=Jobs(executor))
        except TrackerError:
            return
        with TestClient(app, raise_server_exceptions=False) as client:
            for page in PAGES:
                if (status := client.get(page).status_code) not in expected:
                    yield f"GET {page}: status {status}"


def problems(sound: Path, seed: int, folder: Path, repair: bool = True) -> Iterator[str]:
    """Damage a copy of a database, run every command on copies of that, and yield the problems."""
    rng = random.Random(seed)
    damaged = folder / "damaged.db"
    shutil.copyfile(sound, damaged)
    where = damage(damaged, rng)
    for command in [*READING, *WRITING]:
        copy = folder / "one.db"
        for ending in ("", "-wal", "-shm"):
            Path(f"{copy}{ending}").unlink(missing_ok=True)
        shutil.copyfile(damaged, copy)
        (folder / "copy.db").unlink(missing_ok=True)
        wrong = check(command, copy, folder)
        if wrong:
            yield f"seed {seed}, {where}: {' '.join(command)}: {wrong}"
    yield from (f"seed {seed}, {where}: {wrong}" for wrong in page_problems(damaged))
    if repair:
        new = folder / "new.db"
        new.unlink(missing_ok=True)
        wrong = check(["repair", str(damaged), str(new)], damaged, folder)
        result = CliRunner().invoke(main, ["--db", str(new), "verify"]) if new.exists() else None
        if result is not None and result.exit_code:
            wrong = f"the repaired database is damaged: {result.output}"
        if wrong or result is None:
            yield f"seed {seed}, {where}: repair: {wrong or 'nothing was saved'}"


def marks() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--flips", type=int, default=200, metavar="N", help="Number of damaged files.")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="Seed of the first file.")
    options = parser.parse_args()
    kinds: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sound = build(folder)
        for seed in range(options.seed, options.seed + options.flips):
            for problem in problems(sound, seed, folder):
                print(problem, flush=True)
                kinds["repair" if ": repair:" in problem else "command"] += 1
    total = options.flips * (len(READING) + len(WRITING))
    print(f"{options.flips} flips, {total} commands: {kinds['command']} problems; repair: {kinds['repair']} problems")
    return 1 if kinds else 0


if __name__ == "__main__":
    sys.exit(marks())
