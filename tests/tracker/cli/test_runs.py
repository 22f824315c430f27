"""`groupbench list runs`."""

from __future__ import annotations

import json
from typing import Any

from cases import Cli


def test_newest_first_with_counts(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(0), make(1), make(1, backend="b", status="oom"), make(1, backend="c", status="unavailable")])
    lines = cli("list", "runs").stdout.split("\n")
    assert lines[1].startswith("run-001  ")
    assert "NVIDIA H100 80GB HBM3  1 ok, 1 oom, 1 unavailable" in lines[1]
    assert lines[2].startswith("run-000  ")
    (newest,) = json.loads(cli("list", "runs", "--limit", "1", "--format=json").stdout)
    assert newest["run"] == "run-001"
    assert "1 ok; 1 oom; 1 unavailable" in cli("list", "runs", "--format=csv").stdout


def test_a_limit_is_a_number_above_0(cli: Cli, stored: Any, make: Any) -> None:
    stored([make()])
    for bad in ("0", "-1", "x"):
        assert cli("list", "runs", "--limit", bad).exit_code == 2
