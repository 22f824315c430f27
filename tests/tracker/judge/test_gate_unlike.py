"""`groupbench gate`: wrong, failed and missing results, and results that cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import Result
from nights import UNCHANGED, first_line, quiet

Cli = Callable[..., Result]
Stored = Callable[..., Any]


def test_a_wrong_result_is_1_without_history(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(status="wrong", message="12 % outside")])
    result = cli("gate")
    assert result.exit_code == 1
    assert first_line(result) == "GATE regression: 1 result is wrong. 1 wrong"
    assert "12 % outside" in result.stdout


@pytest.mark.parametrize(
    ("nights", "commits", "n"),
    [
        ("ok ok ok ok wrong", "003..004", 4),
        ("ok ok ok ok wrong wrong", "003..004", 4),
        ("ok ok unavailable error wrong skipped oom wrong", "001..004", 2),
        ("wrong wrong ok wrong ok wrong wrong", "004..005", 2),
        ("wrong wrong", "..000", 0),
        ("unavailable wrong", "..001", 0),
    ],
)
def test_a_wrong_result_is_of_the_first_commit_that_has_it(
    cli: Cli, stored: Stored, make: Any, nights: str, commits: str, n: int
) -> None:
    stored([make(night, status=status) for night, status in enumerate(nights.split())])
    (row,) = json.loads(cli("gate", "--format=json").stdout)["series"]
    assert row["commits"] == "..".join(end and f"{end}ccccccc" for end in commits.split(".."))
    assert (row["verdict"], row["metric"], row["n"]) == ("wrong", "result", n)
    has_base = not commits.startswith(".")
    assert (row["cause"], row["before_rms"]) == (("code", 2e-3) if has_base else (None, None))
    assert row["before_ms"] == (pytest.approx(1.0, rel=0.01) if has_base else None)
    (again,) = json.loads(cli("gate", "--format=json", "--window", "3").stdout)["series"]
    assert again["commits"] == row["commits"]  # however long ago


def test_a_result_that_became_wrong_in_another_environment_is_noted(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0), make(1, status="wrong", environment={"driver": "580.1"}, message="12 % outside")])
    (row,) = json.loads(cli("gate", "--format=json").stdout)["series"]
    assert (row["cause"], row["note"]) == ("code and toolchain", "12 % outside; driver 570.1 → 580.1")


@pytest.mark.parametrize("status", ["error", "oom", "timeout", "skipped"])
def test_a_cell_that_failed_is_3(cli: Cli, stored: Stored, make: Any, status: str) -> None:
    stored([make(), make(backend="b", status=status, message="because")])
    result = cli("gate")
    assert result.exit_code == 3
    assert first_line(result) == "GATE incomplete: 1 series missing. 1 missing, 1 new"
    assert status in result.stdout
    assert "because" in result.stdout


@pytest.mark.parametrize("status", ["unavailable", "skipped", "error"])
def test_nothing_measured_is_3(cli: Cli, stored: Stored, make: Any, status: str) -> None:
    stored([make(status=status)])
    result = cli("gate")
    assert result.exit_code == 3
    assert "nothing was measured" in first_line(result)


def test_unavailable_without_history_is_counted_only(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(), make(backend="b", status="unavailable")])
    result = cli("gate")
    assert (result.exit_code, result.stdout.count("\n")) == (0, 1)
    assert "1 new, 1 unavailable" in first_line(result)


def test_a_series_that_is_gone_is_3(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0), make(0, backend="torch"), make(1)])
    result = cli("gate")
    assert result.exit_code == 3
    assert "1 missing, 1 ok" in first_line(result)
    assert "absent" in result.stdout
    assert "torch" in result.stdout


def test_a_series_that_became_unavailable_is_3(cli: Cli, stored: Stored, make: Any) -> None:
    other = {"backend": "torch"}
    stored([make(0), make(0, **other), make(1), make(1, status="unavailable", message="no module", **other)])
    result = cli("gate")
    assert result.exit_code == 3
    assert "no module" in result.stdout


def test_a_latency_that_is_gone_is_3(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0), make(1, ms=None)])
    result = cli("gate")
    assert result.exit_code == 3
    assert "the previous run has a latency, but this run does not" in result.stdout


@pytest.mark.parametrize(
    "before",
    [
        {"plan": "weekly"},
        {"plan": None},
        {"environment": {"gpu": "NVIDIA B200"}},
    ],
    ids=str,
)
def test_other_plans_and_hardware_expect_nothing(cli: Cli, stored: Stored, make: Any, before: dict[str, Any]) -> None:
    stored([make(0, backend="torch", **before), make(1, plan=before.get("plan") and "nightly")])
    assert cli("gate").exit_code == 0


def test_a_changed_environment_is_4_and_named(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*quiet(make, 5), make(5, ms=2.0, environment={"power_limit_w": 350.0})])
    result = cli("gate")
    assert result.exit_code == 4
    assert "1 incomparable" in first_line(result)
    assert "power_limit_w 700 → 350, and the code changed: 1 series moved by +100.0%; 1 slower" in result.stdout


def test_one_reason_for_many_series_is_listed_once(cli: Cli, stored: Stored, make: Any) -> None:
    """The line names the next command if the new machine is only another card of the model."""
    nights = [make(night, backend=backend) for night in range(5) for backend in ("a", "b", "c")]
    other = {"gpu_uuid": "GPU-other"}
    now = [make(5, ms=1.1, backend=backend, environment=other) for backend in ("a", "b")]
    stored([*nights, *now, make(5, ms=1.1, backend="c", environment=other | {"driver": "580.2"})])
    result = cli("gate")
    (folded,) = [line for line in result.stdout.splitlines() if line.startswith("2 series incomparable: gpu_uuid ")]
    assert folded.endswith("run `groupbench confirm` to measure both commits on this GPU")
    assert "driver 570.1 → 580.2" in result.stdout


def test_only_like_machines_are_history(cli: Cli, stored: Stored, make: Any) -> None:
    new = {"environment": {"gpu_uuid": "GPU-other"}}
    stored([*quiet(make, 5), *[make(night, ms=2.0, **new) for night in range(5, 9)]])
    result = cli("gate")
    assert result.exit_code == 0 and UNCHANGED.match(first_line(result))


def test_the_gravest_decides(cli: Cli, stored: Stored, make: Any) -> None:
    unlike = make(1, ms=2.0, backend="unlike", environment={"gpu_uuid": "2"})
    stored([make(0, backend="unlike"), unlike, make(1, backend="b", status="oom")])
    assert cli("gate").exit_code == 3
    stored([make(2, backend="unlike", environment={"gpu_uuid": "3"}), make(2, status="wrong", plan="nightly")])
    assert cli("gate").exit_code == 1
