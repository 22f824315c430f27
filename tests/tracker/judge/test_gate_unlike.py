"""`groupbench gate`: wrong, failed and missing results, and results that cannot be compared."""

from __future__ import annotations

from typing import Any

import pytest
from nights import Cli, Stored, quiet, rows

from groupbench.tracker.facts.record import Record

from ..conftest import build

TORCH = {"backend": "torch"}
WRONG = "GATE regression: 1 result is wrong. 1 wrong\n"
MISSING = "GATE incomplete: 1 series missing. 1 missing, 1 new\n"
OUTCOMES: dict[str, tuple[list[Record], int, list[str]]] = {
    "wrong": (
        [build(status="wrong", message="12 % outside")], 1, [WRONG, "12 % outside"],
    ),
    **{
        status: ([build(), build(backend="b", status=status, message="because")], 3, [MISSING, status, "because"])
        for status in ("error", "oom", "timeout", "skipped")
    },
    **{
        f"{status} alone": ([build(status=status)], 3, ["nothing was measured"])
        for status in ("unavailable", "skipped", "error")
    },
    "unavailable": ([build(), build(backend="b", status="unavailable")], 0, ["1 new, 1 unavailable\n"]),
    "gone": ([build(0), build(0, **TORCH), build(1)], 3, ["1 missing, 1 ok\n", "absent", "torch"]),
    "no longer available": (
        [build(0), build(0, **TORCH), build(1), build(1, status="unavailable", message="no module", **TORCH)],
        3, ["no module"],
    ),
    "without a latency": ([build(0), build(1, ms=None)], 3, ["the previous run has a latency, but this run does not"]),
    "other plan": ([build(0, **TORCH, plan="weekly"), build(1)], 0, ["1 new"]),
    "no plan": ([build(0, **TORCH, plan=None), build(1, plan=None)], 0, ["1 new"]),
    "other hardware": ([build(0, **TORCH, environment={"gpu": "NVIDIA B200"}), build(1, plan=None)], 0, ["1 new"]),
    "other environment": (
        [*quiet(build, 5), build(5, ms=2.0, environment={"power_limit_w": 350.0})], 4,
        ["1 incomparable\n", "power_limit_w 700 → 350, and the code changed: 1 series moved by +100.0%; 1 slower"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("records", "code", "says"), OUTCOMES.values(), ids=OUTCOMES)
def test_a_run_ends_with_a_code_and_says_why(
    cli: Cli, stored: Stored, records: list[Record], code: int, says: list[str]
) -> None:
    stored(records)
    result = cli("gate")
    assert result.exit_code == code
    assert all(text in result.stdout for text in says), result.stdout


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
    (row,) = rows(cli)
    assert row["commits"] == "..".join(end and f"{end}ccccccc" for end in commits.split(".."))
    assert (row["verdict"], row["metric"], row["n"]) == ("wrong", "result", n)
    has_base = not commits.startswith(".")
    assert (row["cause"], row["before_rms"]) == (("code", 2e-3) if has_base else (None, None))
    assert row["before_ms"] == (pytest.approx(1.0, rel=0.01) if has_base else None)
    (again,) = rows(cli, "--window", "3")
    assert again["commits"] == row["commits"]  # however long ago


def test_a_result_that_became_wrong_in_another_environment_is_noted(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0), make(1, status="wrong", environment={"driver": "580.1"}, message="12 % outside")])
    (row,) = rows(cli)
    assert (row["cause"], row["note"]) == ("code and toolchain", "12 % outside; driver 570.1 → 580.1")


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


def test_the_gravest_decides(cli: Cli, stored: Stored, make: Any) -> None:
    unlike = make(1, ms=2.0, backend="unlike", environment={"gpu_uuid": "2"})
    stored([make(0, backend="unlike"), unlike, make(1, backend="b", status="oom")])
    assert cli("gate").exit_code == 3
    stored([make(2, backend="unlike", environment={"gpu_uuid": "3"}), make(2, status="wrong", plan="nightly")])
    assert cli("gate").exit_code == 1
