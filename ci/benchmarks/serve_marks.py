"""Measure the dashboard on a million points, alone and with hostile clients.

    python ci/benchmarks/serve_marks.py [--database postgresql] [--keep DIR] [--rounds 40] [--one-address]

Makes two databases of a million points (see nights.py), one with many series and one with long ones, which takes about
ten minutes. `groupbench serve --write` runs on each, and every page is requested over HTTP, one after the other, each
time for another series, run or part of a list. The second table is measured while three hostile clients do their worst
(see HOSTILE), each from an address of its own. A page misses its target if its first answer or its 95th percentile
takes more than 300 ms; a hostile request misses if its answer takes more than 5 s. The exit code is then 1, as after a
traceback of the server.

CPU is that of the server per request, and with PostgreSQL that of its processes; unlike the times it depends little on
other work on the machine, whose load is printed above each table.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import math
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import nights

MARK_MS = 300
MARK_HOSTILE_S = 5.0
SHAPES = {"20,000 series × 50 nights": (20_000, 50), "2,000 series × 500 nights": (2_000, 500)}
TOKEN = "played-token-of-the-marks"  # noqa: S105 # of a server for one round
SLOW_CONNECTIONS = 100
_TICKS = os.sysconf("SC_CLK_TCK")

Pages = dict[str, Callable[[], str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="sqlite", help="Default: sqlite.")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="Keep the data here, and reuse it.")
    parser.add_argument("--db", action="append", help="Measure this database instead; may be repeated.")
    parser.add_argument("--rounds", type=int, default=40, metavar="N", help="Requests of each page.")
    parser.add_argument("--one-address", action="store_true", help="The hostile clients have the address of the other.")
    parser.add_argument("--hostile", help=argparse.SUPPRESS)  # a process of its own is such a client
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hostile:
        HOSTILE[options.hostile](
            Attack(options.port, "127.0.0.1" if options.one_address else _address(options.hostile))
        )
        return 0
    missed: list[str] = []
    with ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        cluster = None
        if options.database == "postgresql" and not options.db:
            cluster = stack.enter_context(postgresql(folder / "postgresql"))
        for title, database in _databases(folder, options.db, cluster):
            missed += [f"{title}: {each}" for each in _measure(title, database, options, cluster)]
    print(f"\nmissed: {'; '.join(missed) or 'nothing'}")
    return 1 if missed else 0


# ---- databases


@dataclass(frozen=True)
class Cluster:
    """A PostgreSQL server of our own."""

    folder: Path
    pid: int

    def url(self, name: str) -> str:
        return f"postgresql+psycopg://groupbench@/{name}?host={self.folder}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(host=str(self.folder), user="groupbench", dbname=database, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


@contextmanager
def postgresql(folder: Path) -> Iterator[Cluster]:
    """A cluster in a folder, with PostgreSQL's own settings and without TCP."""
    initdb = shutil.which("initdb") or max(map(str, Path("/usr/lib/postgresql").glob("*/bin/initdb")), default=None)
    if initdb is None:
        raise SystemExit("PostgreSQL is not installed")
    programs = Path(initdb).parent
    user = "postgres" if os.geteuid() == 0 else None  # initdb refuses root
    folder = folder.resolve()
    data = folder / "data"

    def run(program: str, *args: str) -> None:
        subprocess.run([programs / program, *args], check=True, user=user, cwd=folder, stdout=subprocess.DEVNULL)

    if not data.exists():
        folder.mkdir(exist_ok=True)
        if user:
            shutil.chown(folder, user)
        run("initdb", "-D", str(data), "-U", "groupbench", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8")
    run("pg_ctl", "-D", str(data), "-w", "-l", str(folder / "log"), "-o", f"-k {folder} -h ''", "start")
    try:
        yield Cluster(folder, int((data / "postmaster.pid").read_text().split()[0]))
    finally:
        run("pg_ctl", "-D", str(data), "-m", "fast", "stop")


def _databases(folder: Path, own: list[str] | None, cluster: Cluster | None) -> Iterator[tuple[str, str]]:
    if own:
        yield from ((each, each) for each in own)
        return
    for title, (series, number) in SHAPES.items():
        if cluster is None:
            place = folder / f"serve-{series}-{number}.db"
            if not place.exists():
                half = place.with_suffix(".half")
                for leftover in folder.glob(f"{half.name}*"):
                    leftover.unlink()
                nights.fill(half, series, number)
                half.rename(place)
            yield title, str(place)
        else:
            name, half_name = f"serve_{series}_{number}", f"half_{series}_{number}"
            exists = f"SELECT 1 FROM pg_database WHERE datname = '{name}'"  # noqa: S608 # a name made of numbers
            if not cluster.execute(exists):
                cluster.execute(f"DROP DATABASE IF EXISTS {half_name}")
                cluster.execute(f"CREATE DATABASE {half_name}")
                nights.fill(cluster.url(half_name), series, number)
                cluster.execute("VACUUM ANALYZE", half_name)  # its own would do it within a minute or two
                cluster.execute(f"ALTER DATABASE {half_name} RENAME TO {name}")
            yield f"{title}, PostgreSQL", cluster.url(name)


# ---- measuring


class Client:
    """A connection that is kept, and how long its answers take."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(self, path: str) -> tuple[float, bytes]:
        """Return (milliseconds, body) of a page."""
        start = time.perf_counter()
        self._connection.request("GET", path)
        response = self._connection.getresponse()
        body = response.read()
        if response.status not in (200, 202):
            raise SystemExit(f"{path}: {response.status} {body[:300]!r}")
        return 1000 * (time.perf_counter() - start), body

    def json(self, path: str) -> Any:
        return json.loads(self.ask(path)[1])


def _measure(title: str, database: str, options: argparse.Namespace, cluster: Cluster | None) -> list[str]:
    """Print both tables of a database; return the pages and requests that miss their target."""
    rounds = options.rounds
    with _server(database) as (server, port, errors):
        client = Client(port)
        began = time.perf_counter()
        overview_ms, _ = client.ask("/")
        while client.json("/overview.json")["verdict"]["state"] != "known":
            time.sleep(0.1)
        judged_s = time.perf_counter() - began
        cpu = lambda: (_cpu_s(server), 0.0 if cluster is None else _cpu_of_cluster_s(cluster))  # noqa: E731
        pages = _pages(client)
        missed = _table(f"{title}, alone", client, pages, rounds, cpu, {"overview": overview_ms})
        print(f"\nthe newest run is judged {judged_s:.1f} s after the first request", flush=True)
        with _hostile(port, options.one_address) as reports:
            time.sleep(2)  # they are at work
            hostile_missed = _table(f"{title}, with hostile clients", client, pages, rounds, cpu, {})
        missed += [f"{each} with hostile clients" for each in hostile_missed]
        print("\n| hostile request | answers | median s | longest s | statuses |\n|---|---|---|---|---|")
        for report in reports:
            for name, (seconds, statuses) in report.items():
                longest = max(seconds, default=0.0)
                median = sorted(seconds)[len(seconds) // 2] if seconds else 0.0
                answered = ", ".join(f"{number} × {status}" for status, number in statuses.items())
                print(f"| {name} | {len(seconds)} | {median:.2f} | {longest:.2f} | {answered} |")
                if longest > MARK_HOSTILE_S and not name.startswith("slow"):
                    missed.append(f"{name} took {longest:.1f} s")
    text = errors.read_text()
    errors.unlink()
    if text.count("\n") > 1:
        print(f"\nthe server printed: {text}")
    return missed + (["a traceback"] if "Traceback" in text else [])


def _table(
    title: str,
    client: Client,
    pages: Pages,
    rounds: int,
    cpu: Callable[[], tuple[float, float]],
    first: dict[str, float],
) -> list[str]:
    load = " ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"\n{title}; load average {load}\n")
    print(
        "| page | first | p50 | p95 | max | CPU | database's CPU | KiB |\n|---|---|---|---|---|---|---|---|", flush=True
    )
    missed = []
    for name, path in pages.items():
        opening = first[name] if name in first else client.ask(path())[0]
        before = cpu()
        answers = [client.ask(path()) for _ in range(rounds)]
        used = [1000 * (now - then) / rounds for now, then in zip(cpu(), before, strict=True)]
        times = sorted(ms for ms, _ in answers)
        p50, p95 = times[len(times) // 2], times[min(len(times) - 1, math.ceil(0.95 * len(times)) - 1)]
        size = max(len(body) for _, body in answers) / 1024
        figures = (opening, p50, p95, times[-1], *used, size)
        print(f"| {name} | {' | '.join(f'{each:.0f}' for each in figures)} |", flush=True)
        if max(opening, p95) > MARK_MS:
            missed.append(name)
    print(f"\nload average {' '.join(f'{each:.1f}' for each in os.getloadavg())}", flush=True)
    return missed


def _cpu_s(pid: int) -> float:
    """Seconds that a process has used, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _cpu_of_cluster_s(cluster: Cluster) -> float:
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(cluster.pid)], capture_output=True, text=True).stdout
    total = 0.0
    for pid in (cluster.pid, *map(int, children.split())):
        with contextlib.suppress(OSError):
            total += _cpu_s(pid)
    return total


def _pages(client: Client) -> Pages:
    """Address of each page, another one at every call."""
    rng = random.Random(1)
    series = client.json("/series.json")
    number = series["paging"]["total"]
    runs = [run["run"] for run in client.json("/runs.json?per_page=50")["runs"]]
    operator = series["series"][0]["operator"]
    problems = client.json(f"/operators/{operator}.json")["paging"]["pages"]
    words = ("triton bf16", "torch", "helion fp16 N=512", "G=4", "K=1024 persistent", "fp8", "cutlass uniform")
    newest = client.json(f"/series/{series['series'][0]['series']}.json")["points"][0]["id"]
    run = newest.partition(".")[2]
    key = lambda: rng.randint(1, number)  # noqa: E731
    return {
        "overview": lambda: "/",
        "runs": lambda: f"/runs?page={rng.randint(1, max(1, len(runs) // 50))}",
        "run": lambda: f"/runs/{rng.choice(runs)}",
        "run, filtered": lambda: f"/runs/{rng.choice(runs)}?q={rng.choice(words).replace(' ', '+')}&status=ok",
        "series": lambda: f"/series?page={rng.randint(1, max(1, number // 50))}",
        "series, by words": lambda: f"/series?q={rng.choice(words).replace(' ', '+')}+{rng.choice('123456789')}",
        "series, by size": lambda: f"/series?where=M>=64,N={512 * rng.randint(1, 16)}&backend=triton",
        "one series": lambda: f"/series/{key()}",
        "point": lambda: f"/points/{key()}.{run}",
        "operators": lambda: "/operators",
        "operator": lambda: f"/operators/{operator}?page={rng.randint(1, problems)}",
        "operator, older run": lambda: f"/operators/{operator}?page=1&run={rng.choice(runs)}",
        "compare, the form": lambda: "/compare",
        "compare": lambda: f"/compare?a=previous&b=latest&page={rng.randint(1, max(1, number // 50))}",
        "alerts": lambda: "/alerts?state=all",
        "series, JSON": lambda: f"/series.json?page={rng.randint(1, max(1, number // 50))}",
        "one series, JSON": lambda: f"/series/{key()}.json",
    }


@contextmanager
def _server(database: str) -> Iterator[tuple[int, int, Path]]:
    """Yield (process, port, file of its stderr) of a dashboard that may write."""
    command = [sys.executable, "-m", "groupbench.tracker", "--db", database, "serve", "--write", "--port", "0"]
    handle, name = tempfile.mkstemp()
    errors = Path(name)
    with os.fdopen(handle, "w") as file:
        process = subprocess.Popen(command, stderr=file, env=os.environ | {"GROUPBENCH_TOKEN": TOKEN})
    try:
        while (port := re.search(r":(\d+)[ ,]", errors.read_text())) is None:
            if process.poll() is not None:
                raise SystemExit(errors.read_text())
            time.sleep(0.05)
        yield process.pid, int(port[1]), errors
    finally:
        process.terminate()
        process.wait(30)


# ---- hostile clients

Report = dict[str, tuple[list[float], dict[str, int]]]
"""By kind of request: the seconds that its answers took, and how many answers had each status."""


@contextmanager
def _hostile(port: int, one_address: bool) -> Iterator[list[Report]]:
    """Run the hostile clients, each a process, until the end of the context; their reports are then in the list."""
    reports: list[Report] = []
    command = [sys.executable, __file__, "--port", str(port), *(["--one-address"] if one_address else []), "--hostile"]
    processes = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for name in HOSTILE
    ]
    try:
        yield reports
    finally:
        for process in processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in processes:
            assert process.stdout is not None
            reports.append(json.loads(process.stdout.read()))
            process.wait()


def _address(name: str) -> str:
    """Return the address of a hostile client. The whole network of 127.0.0.1 belongs to this machine, on Linux."""
    return f"127.0.0.{2 + list(HOSTILE).index(name)}"


class Attack:
    """Threads that send requests from an address until standard input ends, and their report."""

    def __init__(self, port: int, address: str) -> None:
        self.port, self.source, self.report = port, (address, 0), Report()
        self._lock, self._ended = threading.Lock(), threading.Event()

    def run(self, *work: Callable[[], Iterator[None]]) -> None:
        threads = [threading.Thread(target=self._repeat, args=(each,)) for each in work]
        for thread in threads:
            thread.start()
        sys.stdin.read()
        self._ended.set()
        for thread in threads:
            thread.join()
        print(json.dumps(self.report))

    def _repeat(self, work: Callable[[], Iterator[None]]) -> None:
        for _ in work():
            if self._ended.is_set():
                return

    def send(self, kind: str, method: str, path: str, body: Any = None, **headers: str) -> None:
        start, status = time.perf_counter(), "no answer"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60, source_address=self.source)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            response = connection.getresponse()
            response.read()
            status = str(response.status)
        with self._lock:
            seconds, statuses = self.report.setdefault(kind, ([], {}))
            seconds.append(time.perf_counter() - start)
            statuses[status] = statuses.get(status, 0) + 1


def ask_hard_questions(attack: Attack) -> None:
    """Ask for patterns that backtrack and for searches whose every word is in every name, four at a time."""

    def compare() -> Iterator[None]:
        for number in itertools.count():
            shape = quote("*?" * 16 + f"{number}Z*")
            attack.send("compare by a pattern", "GET", f"/compare.json?a=previous&b=latest&shape={shape}")
            yield

    def search() -> Iterator[None]:
        for number in itertools.count():
            words = "+".join([*"groupedmf,=1", f"={number % 9}", "_"])
            attack.send("search by 14 words", "GET", f"/series.json?q={words}&per_page=500")
            yield
            attack.send("series by 40 patterns", "GET", "/series?" + "&".join(f"shape=*%3F*{n}*Z*" for n in range(40)))
            yield

    attack.run(compare, compare, search, search)


def ask_for_much(attack: Attack) -> None:
    """Ask for the longest lists and histories, four at a time."""
    rng = random.Random(2)

    def lists() -> Iterator[None]:
        while True:
            for kind, path in (
                ("500 series", f"/series?per_page=500&page={rng.randint(1, 4)}"),
                ("80 problems", f"/operators/grouped_gemm?per_page=80&run=night-{rng.randint(10, 49):05d}"),
                ("5,000 points", f"/series/{rng.randint(1, 2_000)}?last=5000&per_page=500"),
                ("an older verdict", f"/runs/night-{rng.randint(10, 49):05d}.json?verdict=1&per_page=500"),
            ):
                attack.send(kind, "GET", path)
                yield

    attack.run(lists, lists, lists, lists)


def send_much(attack: Attack) -> None:
    """Send wrong tokens, large forms, and forms that arrive a byte a second on a hundred connections."""
    form = "application/x-www-form-urlencoded"

    def tokens() -> Iterator[None]:
        while True:
            attack.send("slow: wrong token", "POST", "/alerts/change", "{}", Authorization="Bearer wrong")
            yield

    def uploads() -> Iterator[None]:
        for body in itertools.cycle((b"a" * 10_000_000, b"&".join([b"alert=1"] * 8_000))):
            bearer = f"Bearer {TOKEN}" if len(body) < 100_000 else "Bearer wrong"
            kind = "8,000 fields" if len(body) < 100_000 else "slow: upload of 10 MB"
            attack.send(kind, "POST", "/alerts/change", body, Authorization=bearer, Content_Type=form)
            attack.send("login with 10 MB", "POST", "/login", b"a" * 10_000_000, Content_Type=form)
            yield

    def dribble() -> Iterator[None]:
        head = f"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: {form}\r\nContent-Length: 60000\r\n\r\n"
        connections: list[socket.socket] = []
        while True:
            while len(connections) < SLOW_CONNECTIONS:
                connections.append(socket.create_connection(("127.0.0.1", attack.port), source_address=attack.source))
                connections[-1].sendall(head.encode())
            for connection in list(connections):
                try:
                    connection.sendall(b"a")
                except OSError:
                    connections.remove(connection)
            time.sleep(1)
            yield

    attack.run(tokens, tokens, uploads, dribble)


HOSTILE = {"questions": ask_hard_questions, "lists": ask_for_much, "uploads": send_much}


if __name__ == "__main__":
    sys.exit(main())
