"""A name that changes with each run is reported when it begins new series although equal ones exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def night(tmp_path: Path, number: int, host: str, names: tuple[str, ...] = ("A", "B", "C")) -> Path:
    rows = [{"name": name, "real_time": 1.0 + number / 100, "time_unit": "us"} for name in names]
    context = {"date": f"2026-03-{number:02d}T03:00:00", "host_name": host, "commit": f"{number:040x}", "num_cpus": 4}
    path = tmp_path / f"n{number}.json"
    path.write_text(json.dumps({"context": context, "benchmarks": rows}))
    return path


def test_another_machine_is_named_with_both_texts(cli: Any, tmp_path: Path) -> None:
    first = cli("import", night(tmp_path, 1, "blue"))
    assert "series are new" not in first.stdout + first.stderr
    again = cli("import", night(tmp_path, 2, "blue"))
    assert "series are new" not in again.stdout + again.stderr
    other = cli("import", night(tmp_path, 3, "green"))
    text = other.stdout + other.stderr
    assert "all series are new, but equal earlier ones except for the hardware: 'green' here, 'blue' before" in text
    assert "--cpu" in text


def test_a_new_name_of_most_benchmarks_is_named(cli: Any, tmp_path: Path) -> None:
    cli("import", night(tmp_path, 1, "blue", ("read_aaa111", "read_aaa112", "write")))
    result = cli("import", night(tmp_path, 2, "blue", ("read_bbb111", "read_bbb112", "write")))
    assert "2 of 3 series are new, but equal earlier ones except for the operator" in result.stdout + result.stderr


def test_new_benchmarks_beside_the_old_ones_are_not(cli: Any, tmp_path: Path) -> None:
    cli("import", night(tmp_path, 1, "blue", ("read1",)))
    result = cli("import", night(tmp_path, 2, "blue", ("read1", "read2", "read3", "read4")))
    assert "series are new" not in result.stdout + result.stderr
