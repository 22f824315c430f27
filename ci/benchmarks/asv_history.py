"""The same nights as asv's result files; and, run as a script by a Python that has asv, the history of one of them.

`write` makes what asv makes: a folder for the machine, a JSON file for each commit with every benchmark's value and
its confidence interval, and benchmarks.json. asv keeps no samples unless told so, and neither do these files. The
script reads them as `asv show` and `asv publish` do, by `iter_results_for_machine`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ONE = 777
"""The series whose history is asked for."""
MACHINE = "gpu-01"


def write(store: Path, folder: Path) -> None:
    from sqlalchemy import select

    from groupbench.tracker.store.engine import open_store
    from groupbench.tracker.store.schema import Commit, Point, Run

    half = folder.with_name(folder.name + ".half")
    machine = half / MACHINE
    machine.mkdir(parents=True)
    (machine / "machine.json").write_text(json.dumps({"machine": MACHINE, "version": 1}))
    columns = ["result", "params", "version", "started_at", "duration", "stats_ci_99_a", "stats_ci_99_b"]
    names: set[str] = set()
    with open_store(store, create=False) as opened, opened.read() as session:
        for run, started, commit in session.execute(select(Run.id, Run.started, Commit.hash).join(Commit)):
            results = {}
            query = select(Point.series_id, Point.median_ms, Point.low_ms, Point.high_ms).where(Point.run_id == run)
            for series, median, low, high in session.execute(query):
                name = f"grouped_gemm.time_{series - 1}"
                names.add(name)
                when = int(started.timestamp() * 1000)
                results[name] = [[median / 1e3], [], "v1", when, 1.5, [low / 1e3], [high / 1e3]]
            content = {
                "commit_hash": commit,
                "env_name": "virtualenv-py3.11",
                "date": int(started.timestamp() * 1000),
                "params": {"machine": MACHINE, "python": "3.11"},
                "python": "3.11",
                "requirements": {},
                "env_vars": {},
                "result_columns": columns,
                "results": results,
                "durations": {},
                "version": 2,
            }
            (machine / f"{commit[-8:]}-virtualenv-py3.11.json").write_text(json.dumps(content))
    half.rename(folder)


def main() -> None:
    import asv
    from asv.results import iter_results_for_machine

    began = time.perf_counter()
    found = []
    for result in iter_results_for_machine(sys.argv[1], MACHINE):
        found.append((result.date, result.get_result_value(f"grouped_gemm.time_{ONE}", [])))
    seconds = time.perf_counter() - began
    found.sort()
    assert len(found) > 1
    assert all(value for _, value in found)
    print(json.dumps({"seconds": seconds, "version": asv.__version__, "points": len(found)}))


if __name__ == "__main__":
    main()
