"""How fast the dashboard answers on a million points: `python ci/benchmarks/serve_marks.py [--keep DIR] [--rounds 40]`.

Makes two databases of a million points (see nights.py), many series and long ones, in about four minutes; starts
`groupbench serve` on each, and asks for every page over HTTP, one request after the other, each for another series, run
or part of a list. Printed are the first answer of a fresh server, the median and the 95th percentile of the rounds, in
milliseconds; the mark is 300. `--db FILE` measures a database of your own. The first overview is asked for while the
newest run is being judged, by a process beside the server; how long that took is told below the table.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nights

MARK_MS = 300
SHAPES = {"20,000 series × 50 nights": (20_000, 50), "2,000 series × 500 nights": (2_000, 500)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder for the data; what is there already is used again")
    parser.add_argument("--db", action="append", help="measure this database instead; may be repeated")
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for title, database in _databases(folder, given.db):
            _measure(title, database, given.rounds)


def _databases(folder: Path, own: list[str] | None) -> Iterator[tuple[str, str]]:
    if own:
        yield from ((each, each) for each in own)
        return
    for title, (series, number) in SHAPES.items():
        place = folder / f"serve-{series}-{number}.db"
        if not place.exists():
            half = place.with_suffix(".half")
            for leftover in folder.glob(f"{half.name}*"):
                leftover.unlink()
            nights.fill(half, series, number)
            half.rename(place)
        yield title, str(place)


def _measure(title: str, database: str, rounds: int) -> None:
    print(f"\n{title}\n\n| page | first | p50 | p95 | KiB |\n|---|---|---|---|---|", flush=True)
    missed = []
    with _server(database) as (port, began):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

        def ask(path: str) -> tuple[float, int, bytes]:
            start = time.perf_counter()
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            if answer.status not in (200, 202):
                raise SystemExit(f"{path}: {answer.status} {body[:300]!r}")
            return 1000 * (time.perf_counter() - start), len(body), body

        first = ask("/")[0]
        judged = _judged(ask, began)
        for name, path in _pages(ask).items():
            opening = first if name == "overview" else ask(path())[0]
            found = [ask(path())[:2] for _ in range(rounds)]
            times = sorted(each[0] for each in found)
            p50, p95 = times[len(times) // 2], times[min(len(times) - 1, math.ceil(0.95 * len(times)) - 1)]
            size = max(each[1] for each in found) / 1024
            print(f"| {name} | {opening:.0f} | {p50:.0f} | {p95:.0f} | {size:.0f} |", flush=True)
            if max(opening, p95) > MARK_MS:
                missed.append(name)
        compared, began = None, time.perf_counter()
        while compared is None or compared["state"] == "comparing":
            compared = json.loads(ask("/compare.json?a=previous&b=latest")[2])
            time.sleep(0.05)
    print(f"\njudged {judged} after the server's start; two commits compared in {compared.get('seconds', '?')} s")
    print(f"over {MARK_MS} ms: {', '.join(missed) or 'none'}")


def _judged(ask: Callable[[str], Any], began: float) -> str:
    while json.loads(ask("/overview.json")[2])["verdict"]["state"] != "known":
        time.sleep(0.1)
    return f"{time.perf_counter() - began:.1f} s"


def _pages(ask: Callable[[str], Any]) -> dict[str, Callable[[], str]]:
    """Address of each page, another one at every call."""
    rng = random.Random(1)
    series = json.loads(ask("/series.json")[2])
    number = series["paging"]["total"]
    runs = [run["run"] for run in json.loads(ask("/runs.json?per_page=50")[2])["runs"]]
    operator = series["series"][0]["operator"]
    problems = json.loads(ask(f"/operators/{operator}.json")[2])["paging"]["pages"]
    words = ("triton bf16", "torch", "helion fp16 N=512", "G=4", "K=1024 persistent", "fp8", "cutlass uniform")
    newest = json.loads(ask(f"/series/{series['series'][0]['series']}.json")[2])["points"][0]["id"]
    run = newest.partition(".")[2]
    key = lambda: rng.randint(1, number)  # noqa: E731
    return {
        "overview": lambda: "/",
        "runs": lambda: f"/runs?page={rng.randint(1, max(1, len(runs) // 50))}",
        "run": lambda: f"/runs/{rng.choice(runs)}",
        "run, filtered": lambda: f"/runs/{rng.choice(runs)}?q={rng.choice(words).replace(' ', '+')}&status=ok",
        "series": lambda: f"/series?page={rng.randint(1, number // 50)}",
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
        "series, JSON": lambda: f"/series.json?page={rng.randint(1, number // 50)}",
        "one series, JSON": lambda: f"/series/{key()}.json",
    }


@contextmanager
def _server(database: str) -> Iterator[tuple[int, float]]:
    command = [sys.executable, "-m", "groupbench.tracker", "--db", database, "serve", "--port", "0"]
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.search(r":(\d+)[ ,]", line)
        if found is None:
            raise SystemExit(line)
        yield int(found[1]), began
    finally:
        process.terminate()
        process.wait(30)


if __name__ == "__main__":
    main()
