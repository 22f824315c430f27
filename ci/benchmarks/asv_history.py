"""Write a database's nights as asv's result files, and time asv reading the history of one benchmark.

    python ci/benchmarks/asv_history.py FOLDER

`write` makes the same files as asv: a folder for the machine, and a JSON file for each commit with every benchmark's
value and its confidence interval. asv does not keep samples by default, and neither do these files. The command needs a
Python with asv. It reads the files by `iter_results_for_machine`, like `asv show` and `asv publish`, and prints the
seconds, asv's version and the number of points as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

ONE = 777
"""Series whose history is read."""
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
    points = []
    for result in iter_results_for_machine(sys.argv[1], MACHINE):
        points.append((result.date, result.get_result_value(f"grouped_gemm.time_{ONE}", [])))
    seconds = time.perf_counter() - began
    points.sort()
    assert len(points) > 1
    assert all(value for _, value in points)
    print(json.dumps({"seconds": seconds, "version": asv.__version__, "points": len(points)}))


if __name__ == "__main__":
    main()
