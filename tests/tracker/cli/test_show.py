"""`groupbench show`: a point, a run."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from cases import Cli

Stored = Callable[..., Any]

FULL: dict[str, Any] = {
    "run": {
        "id": "night-1",
        "started": "2026-01-01T03:00:00Z",
        "commit": {"hash": "a" * 40, "parents": ["b" * 40], "branch": "main", "author": "Ann", "subject": "Faster"},
        "command": "tritonbench --op grouped_gemm",
    },
    "environment": {"device": "cuda", "gpu": "H100", "driver": "570.1", "settings": {"A": "1"}},
    "cell": {"operator": "op", "backend": "b", "shape": "G=2,M=8", "dtype": "bf16", "dims": {"G": 2, "M": 8}},
    "status": "ok",
    "latency": {
        "timing": "gpu",
        "bursts_ms": [[1.0, 1.0, 1.5], [2.0, 2.0, 2.0]],
        "telemetry": [
            {"sm_clock_mhz": 1755, "temperature_c": 60, "power_w": 500.5, "throttle": ["SwPowerCap"]},
            {"sm_clock_mhz": 1700},
        ],
        "prepare_ms": 12.5,
    },
    "accuracy": {"rms": 0.002, "repeatable": True},
    "kernels": [{"name": "gemm_kernel", "hash": "abc", "registers": 168, "spills": 0, "config": {"BLOCK_M": 128}}],
}


@pytest.fixture
def point(stored: Stored, cli: Cli) -> str:
    import msgspec

    from groupbench.tracker.facts.record import Record

    stored([msgspec.convert({"schema": 1, **FULL}, Record)])
    return json.loads(cli("history", "--format=json").stdout)[0]["id"]


def test_everything_of_a_point(cli: Cli, point: str) -> None:
    text = cli("show", point).stdout
    for expected in (
        *("op", "G=2,M=8", "night-1", "a" * 40, "b" * 10, "Ann", "Faster", "tritonbench --op grouped_gemm"),
        *("H100", "570.1", "setting A", "gemm_kernel", "168", "BLOCK_M=128", "1755", "500.5", "SwPowerCap", "12.5"),
    ):
        assert expected in text, expected


def test_a_point_for_programs(cli: Cli, point: str) -> None:
    shown = json.loads(cli("show", point, "--format=json").stdout)
    assert shown["bursts_ms"] == FULL["latency"]["bursts_ms"]
    assert shown["kernels"] == FULL["kernels"]
    assert shown["telemetry"][0] == FULL["latency"]["telemetry"][0]
    assert shown["environment_facts"]["settings"] == {"A": "1"}
    assert shown["dims"] == {"G": 2, "M": 8}
    table = dict(list(csv.reader(io.StringIO(cli("show", point, "--format=csv").stdout)))[1:])
    assert table["run"] == "night-1"
    assert table["burst 2 ms"] == "2.0; 2.0; 2.0"
    markdown = cli("show", point, "--format=md").stdout
    assert "| operator | op |" in markdown


def test_a_point_without_a_latency(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(status="oom", message="CUDA out of memory")])
    (row,) = json.loads(cli("history", "--format=json").stdout)
    text = cli("show", row["id"]).stdout
    assert "CUDA out of memory" in text
    assert "samples" not in text
    assert json.loads(cli("show", row["id"], "--format=json").stdout)["bursts_ms"] == []


def test_a_run(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0), make(1), make(1, backend="b", status="oom")])
    text = cli("show", "run:run-001").stdout
    assert "1 ok, 1 oom" in text
    assert "driver 570.1" in text
    assert "run-000" not in text
    assert "run-001" in cli("show", "run:").stdout, "the newest"
    shown = json.loads(cli("show", "run:run-001", "--format=json").stdout)
    assert shown["run"]["id"] == "run-001"
    assert {row["backend"] for row in shown["points"]} == {"triton", "b"}
    assert shown["environments"][0]["driver"] == "570.1"
    assert len(cli("show", "run:run-001", "--format=csv").stdout.strip().split("\n")) == 3
    assert cli("show", "run:run-001", "--format=md").stdout.count("| --- |") >= 1


def test_an_interpreted_time_of_a_run_is_not_a_latency(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0, ms=7.77, timing="interpreted")])
    table = cli("show", "run:run-000").stdout
    assert ("interpreted" in table, "7.7" in table) == (True, False)
    (point,) = json.loads(cli("show", "run:run-000", "--format=json").stdout)["points"]
    assert point["latency_ms"] == pytest.approx(7.77, 0.01)


@pytest.mark.parametrize(
    "what", ["1", "1.2.3", "x", "", "-1.2", "1.99", "9" * 30 + ".1", "run:nope", "run:run-", "1.x"]
)
def test_what_is_not_there(cli: Cli, stored: Stored, make: Any, what: str) -> None:
    stored([make(0), make(1)])
    result = cli("show", "--", what)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "groupbench history --ids" in result.stderr or "run" in result.stderr
