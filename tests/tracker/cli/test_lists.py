"""`groupbench show` and `groupbench list`."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from cases import Cli, rarely, refused

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
    for newest in ("latest", "run-001"):
        assert cli("show", newest).stdout == text
    assert cli("show", "run:").stdout == text  # the newest
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
    assert re.search("groupbench history --ids|run", refused(cli, "show", "--", what))


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


def test_newest_first_with_what_was_measured(cli: Cli, stored: Any, make: Any) -> None:
    of = {"parents": ["f" * 40], "branch": "main", "author": "Ann", "subject": "Faster"}
    stored(
        [
            make(0, commit_facts=of),
            make(1, commit="000" + "c" * 37, commit_facts={"dirty": True}),
            make(2, commit_facts={"time": "2026-01-03T00:00:00Z"}),
            make(2, backend="b"),
        ]
    )
    commits = json.loads(cli("list", "commits", "--format=json").stdout)
    assert [r["commit"][:3] for r in commits] == ["002", "000"]
    assert [(r["runs"], r["dirty_runs"], r["points"]) for r in commits] == [(1, 0, 2), (2, 1, 2)]
    assert commits[1]["parents"] == ["f" * 40]
    assert (commits[1]["author"], commits[1]["subject"], commits[1]["branch"]) == ("Ann", "Faster", "main")
    assert (commits[1]["first"][:10], commits[1]["last"][:10]) == ("2026-01-01", "2026-01-02")
    for option, value, commit in (("--limit", "1", "002"), ("--branch", "main", "000")):
        (row,) = json.loads(cli("list", "commits", option, value, "--format=json").stdout)
        assert row["commit"][:3] == commit
    assert "000ccccccc" in cli("list", "commits").stdout
    assert "no commits match" in cli("list", "commits", "--since", "2030-01-01").stderr


@pytest.fixture
def three(stored: Any, make: Any) -> None:
    newer = {"driver": "580.2"}
    stored(
        [
            make(0),
            make(1, environment={"host": "other"}),  # no declared field: the same environment
            make(2, environment=newer),
            make(3, environment={"gpu": "B200"}),
        ]
    )


def test_each_with_what_differs_from_the_one_before(cli: Cli, three: None) -> None:
    environments = json.loads(cli("list", "envs", "--format=json").stdout)
    assert [(r["hardware"], r["runs"], r["variants"]) for r in environments] == [
        ("B200", 1, 1),
        ("NVIDIA H100 80GB HBM3", 2, 2),
        ("NVIDIA H100 80GB HBM3", 1, 1),
    ]
    assert [r["differs"] for r in environments] == [[], [], ["driver 570.1 → 580.2"]]
    assert environments[1]["first"][:10] == "2026-01-01"
    assert environments[1]["last"][:10] == "2026-01-02"
    assert "driver 570.1 → 580.2" in cli("list", "envs").stdout
    assert len(json.loads(cli("list", "envs", "--hardware", "*H100*", "--format=json").stdout)) == 2
    assert "no environments match" in cli("list", "envs", "--hardware", "x*").stderr
    assert "no hardware 'x'; known: B200, NVIDIA H100 80GB HBM3" in cli("list", "envs", "--hardware", "x").stderr


@pytest.mark.both
def test_two_of_them(cli: Cli, three: None) -> None:
    _, a, b = (row["environment"] for row in json.loads(cli("list", "envs", "--format=json").stdout))
    assert json.loads(cli("list", "envs", a[:8], b[:8], "--format=json").stdout) == [
        {"fact": "driver", "a": "570.1", "b": "580.2"}
    ]
    assert "the environments are equal" in cli("list", "envs", a, a).stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["x"], "two environments"),
        (["x", "y"], "no environment 'x'"),
        (["", ""], "no environment"),
        (["%", "%"], "no "),
    ],
)
def test_mistakes(cli: Cli, three: None, args: list[str], message: str) -> None:
    assert message in refused(cli, "list", "envs", *args)


def rows(cli: Cli, *args: str) -> list[dict[str, Any]]:
    result = cli("list", "series", *args, "--format=json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_counts_and_dates(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(0), make(2), make(1, status="oom"), make(1, backend="a", cell={"dims": {"M": 8}})])
    listed = rows(cli)
    assert [(r["backend"], r["points"], r["ok"]) for r in listed] == [("a", 1, 1), ("triton", 3, 2)]
    assert (listed[1]["first"][:10], listed[1]["last"][:10]) == ("2026-01-01", "2026-01-03")
    assert listed[0]["dims"] == {"M": 8}
    text = cli("list", "series").stdout.split("\n")
    assert text[0].split()[:3] == ["series", "operator", "backend"]
    assert "2026-01-03 03:00" in text[2]


def test_slices(cli: Cli, stored: Any, make: Any) -> None:
    stored([make(n, backend=b, cell={"dims": {"M": n}}, shape=f"M={n}") for n, b in enumerate("abc")])
    assert [r["backend"] for r in rows(cli, "--shape", "M>=1")] == ["b", "c"]
    assert [r["backend"] for r in rows(cli, "--since", "2026-01-02", "--until", "2026-01-02")] == ["b"]
    assert [r["backend"] for r in rows(cli, "--commit", "latest")] == ["c"]
    assert [r["backend"] for r in rows(cli, "--backend", "a")] == ["a"]
    assert "no backend 'z'; known: a, b, c" in cli("list", "series", "--backend", "z").stderr
    nothing = cli("list", "series", "--until", "2025-01-01")
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "no series match" in nothing.stderr


COMMANDS: list[tuple[str, ...]] = [
    *[("list", "series"), ("history",), ("compare", "000", "001"), ("show", "latest")],
    *[("gate", "--update"), ("incidents", "--each")],
]
DIFFERENCES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("host", ("builtin", "tritonbench"), {"cell": {"host": "tritonbench"}}),
    ("protocol", ("cooled", "sustained"), {"cell": {"protocol": "sustained"}}),
    ("seed", ("0", "7"), {"cell": {"seed": 7}}),
    ("hardware", (" H100", " B200"), {"environment": {"gpu": "NVIDIA B200"}}),
]
ASKED = [(command, *difference) for command in COMMANDS for difference in DIFFERENCES]
# One function adds the columns of all commands. By default, one of them shows every difference, and the others one.
OFTEN = [case for case in ASKED if case[0] == ("history",) or case[1] == "hardware"]


@pytest.mark.parametrize(
    ("command", "field", "values", "expected"), [*OFTEN, *rarely(*(case for case in ASKED if case not in OFTEN))]
)
def test_series_that_differ_in_one_thing_are_told_apart(
    cli: Cli, stored: Any, make: Any, command: tuple[str, ...], field: str, values: tuple[str, ...], expected: Any
) -> None:
    def header() -> list[str]:
        lines = cli(*command).stdout.split("\n")
        return next(line for line in lines if "backend" in line).split()

    always = (command[0], field) in {("list", "hardware"), ("list", "protocol"), ("compare", "hardware")}
    stored([make(0), make(1, status="wrong")])
    cli("gate", "--update")
    assert (field in header()) is always
    stored([make(0, **expected), make(1, status="wrong", **expected)])
    cli("gate", "--update")
    assert field in header()
    table = cli(*command, "--format=md").stdout
    assert all(value in table for value in values)
