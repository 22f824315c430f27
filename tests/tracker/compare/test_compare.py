"""`groupbench compare`: pairs, verdicts and words for commits."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from click.testing import Result

Cli = Callable[..., Result]
Stored = Callable[..., Any]


def verdicts(cli: Cli, *args: str) -> dict[str, str]:
    result = cli("compare", *args, "--format=json")
    return {row["backend"]: row["verdict"] for row in json.loads(result.stdout)["series"]}


def test_each_verdict(cli: Cli, stored: Stored, make: Any) -> None:
    unlike = {"backend": "unlike"}
    interpreted = {"backend": "interpreted", "timing": "interpreted"}
    stored(
        [
            *[make(n, backend=b) for n in (0,) for b in ("same", "slow", "fast", "wrong", "gone", "oom")],
            *[make(1, backend=b, ms=ms) for b, ms in (("same", 1.0), ("slow", 1.1), ("fast", 0.9), ("new", 1.0))],
            make(1, backend="wrong", status="wrong"),
            make(1, backend="oom", status="oom"),
            make(0, **unlike),
            make(1, **unlike, environment={"driver": "2"}),
            make(0, **interpreted),
            make(1, ms=9.0, **interpreted),
            make(0, backend="coarse", rms=1e-3),
            make(1, backend="coarse", rms=1e-2),
        ]
    )
    assert verdicts(cli, "previous", "latest") == {
        "same": "ok",
        "slow": "regressed",
        "fast": "improved",
        "wrong": "wrong",
        "gone": "missing",
        "oom": "missing",
        "new": "new",
        "unlike": "incomparable",
        "interpreted": "ok",
        "coarse": "regressed",
    }
    text = cli("compare", "previous", "latest")
    assert text.exit_code == 0
    lines = text.stdout.rstrip("\n").split("\n")
    assert lines[0].startswith("A 000ccccccc  B 001ccccccc: 1 wrong, 2 regressed, 2 missing, 1 incomparable")
    assert lines[-1].startswith("geometric mean of B/A over 4 series: 0.99")
    assert "driver 570.1 → 2" in text.stdout


def test_the_reason_of_a_lost_accuracy_shows_the_error_that_decided(cli: Cli, stored: Stored, make: Any) -> None:
    """The median of A decides, whatever its newest run shows."""
    errors = [1e-3, 1e-3, 1e-3, 2e-3, 1.8e-3]
    stored([make(n, commit=("b" if n == 4 else "a") * 40, rms=rms) for n, rms in enumerate(errors)])
    (row,) = json.loads(cli("compare", "aaaa", "bbbb", "--format=json").stdout)["series"]
    assert (row["verdict"], row["note"]) == ("regressed", "accuracy: rms 0.001 → 0.0018")


def test_force_compares_different_environments_with_a_note(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0), make(1, ms=1.1, environment={"driver": "2"})])
    refused = cli("compare", "000", "001")
    assert refused.exit_code == 4
    assert "no latency could be compared" in refused.stdout
    forced = cli("compare", "000", "001", "--force")
    assert forced.exit_code == 0
    assert "forced: driver 570.1 → 2" in forced.stdout


def test_runs_of_a_commit_are_pooled_within_like_environments(cli: Cli, stored: Stored, make: Any) -> None:
    a, b = {"commit": "a" * 40}, {"commit": "b" * 40}
    stored([make(n, ms=ms, **a) for n, ms in enumerate((1.0, 1.002, 5.0))])
    stored([make(n, **b) for n in (3, 4)])
    stored([make(5, ms=9.0, **b, environment={"driver": "2"}), make(6, ms=7.0, **a, environment={"driver": "3"})])
    (row,) = json.loads(cli("compare", "aaa", "bbb", "--format=json").stdout)["series"]
    assert row["runs"] == [3, 2]
    assert row["a_ms"] == pytest.approx(1.002, rel=1e-3)
    assert row["ratio"] == pytest.approx(1 / 1.002, rel=1e-3)


def test_toolchains_of_a_plan_are_not_pooled_though_they_report_the_same_versions(
    cli: Cli, stored: Stored, make: Any
) -> None:
    def night(toolchain: str, number: int, ms: float) -> Any:
        return make(number, ms=ms, run=f"{toolchain}-{number}", plan=f"nightly@{toolchain}")

    stored([night("stable", 0, 1.0), night("nightly", 0, 2.0), night("stable", 1, 1.0), night("nightly", 1, 2.0)])
    (row,) = json.loads(cli("compare", "000", "001", "--format=json").stdout)["series"]
    assert row["runs"] == [1, 1]
    assert row["ratio"] == pytest.approx(1.0, rel=1e-3)
    refused = cli("compare", "run:stable-0", "run:nightly-1")
    assert refused.exit_code == 4
    assert "toolchain stable → toolchain nightly" in refused.stderr
    forced = cli("compare", "run:stable-0", "run:nightly-1", "--force")
    assert "forced: toolchain stable → toolchain nightly" in forced.stdout
    stored([make(2, ms=2.0, plan=None)])
    (row,) = json.loads(cli("compare", "run:nightly-1", "002", "--format=json").stdout)["series"]
    assert (row["verdict"], row["runs"]) == ("ok", [1, 1])


def test_one_burst_of_one_run_has_no_verdict(cli: Cli, stored: Stored, make: Any) -> None:
    def bare(night: int, ms: float) -> Any:
        record = make(night)
        return msgspec.structs.replace(record, latency=msgspec.structs.replace(record.latency, bursts_ms=((ms, ms),)))

    stored([bare(0, 1.0), bare(1, 2.0)])
    assert verdicts(cli, "000", "001") == {"triton": "~"}


def test_nothing_comparable_is_4(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0, backend="a"), make(1, backend="b")])
    assert cli("compare", "previous", "latest").exit_code == 4


def test_words_for_commits(cli: Cli, stored: Stored, make: Any) -> None:
    stored(
        [
            make(0, commit="abc1" + "0" * 36, commit_facts={"branch": "main"}),
            make(1, commit="abc2" + "0" * 36, commit_facts={"branch": "topic"}),
            make(2, commit="abc2" + "0" * 36, commit_facts={"dirty": True}),
        ]
    )

    def sides(a: str, b: str) -> tuple[str, str]:
        printed = json.loads(cli("compare", a, b, "--format=json").stdout)
        return printed["a"], printed["b"]

    one, two = "abc1000000", "abc2000000"
    assert sides("abc1", "abc2") == (one, two)
    assert sides("abc2", "abc2+") == (two, two + "+")
    assert sides("previous", "latest") == (two, two + "+")
    assert sides("main", "topic") == (one, two)
    for bad, message in {
        ("abc", "abc1"): "ambiguous: abc100000000, abc200000000",
        ("abc1", "abc1"): "the same commit",
        ("x", "abc1"): "no commit or branch 'x'",
        ("abc1+", "abc2"): "no run with uncommitted changes",
        ("+", "abc2"): "no commit",
    }.items():
        result = cli("compare", *bad)
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_previous_needs_two(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(), make(1, commit="000" + "c" * 37)])
    errors = cli("compare", "previous", "latest").stderr
    assert "no previous commit" in errors
    assert "`run:ID` names a single run" in errors
    assert cli("compare", "latest").exit_code == 2


def test_rows_come_by_severity_and_a_regression_can_set_the_exit_code(cli: Cli, stored: Any, make: Any) -> None:
    now = {"same": 1.0, "slower": 1.2, "slowest": 1.5, "faster": 0.5}
    nights = [make(0, 1.0, backend=name) for name in now]
    stored([*nights, *(make(1, ms, backend=name) for name, ms in now.items())])
    listed = json.loads(cli("compare", "000", "001", "--format=json").stdout)["series"]
    assert [row["backend"] for row in listed] == ["slowest", "slower", "faster", "same"]
    failed = cli("compare", "000", "001", "--only-changed", "--fail-on", "regressed", "--format=json")
    assert failed.exit_code == 1
    assert [row["backend"] for row in json.loads(failed.stdout)["series"]] == ["slowest", "slower", "faster"]
    assert cli("compare", "001", "000", "--fail-on", "regressed", "--backend", "slower").exit_code == 0


def test_rows_and_geometric_means_have_intervals(cli: Cli, stored: Stored, make: Any) -> None:
    now = {("slow", "a"): 1.2, ("slow", "b"): 1.25, ("same", "a"): 1.0, ("same", "b"): 1.0, ("lone", "a"): 1.1}
    cells = [{"backend": backend, "operator": operator} for backend, operator in now]
    stored([make(0, 1.0, **cell) for cell in cells])
    stored([make(1, ms, **cell) for cell, ms in zip(cells, now.values(), strict=True)])
    output = json.loads(cli("compare", "000", "001", "--format=json").stdout)
    for row in output["series"]:
        assert row["low"] < now[row["backend"], row["operator"]] < row["high"] < 1.03 * row["low"]
        assert (row["p"] < 0.05) == (row["verdict"] == "regressed")
    means = {row.pop("backend"): row for row in output["geometric_means"]}
    assert list(means) == ["lone", "same", "slow"]
    assert means["slow"]["ratio"] == pytest.approx((1.2 * 1.25) ** 0.5, rel=1e-3)
    assert means["slow"]["low"] < means["slow"]["ratio"] < means["slow"]["high"]
    low, high = output["geometric_mean_interval"]
    assert low < output["geometric_mean"] < high
    assert (means["lone"]["series"], means["lone"]["low"], means["lone"]["high"]) == (1, None, None)
    lines = cli("compare", "000", "001").stdout.rstrip("\n").split("\n")
    assert "95 %" in lines[2] and "<0.001" in lines[3] and " .. " in lines[3]
    assert lines[-4].startswith("geometric mean of lone over 1 series: 1.100")
    assert lines[-2].startswith("geometric mean of slow over 2 series: 1.22") and ", 95 % " in lines[-2]
    assert lines[-1].startswith("geometric mean of B/A over 5 series: 1.10") and ", 95 % " in lines[-1]
    stored([make(2, ms, **cell) for cell, ms in zip(cells, (1, 1, 1, 1, 100), strict=True)])
    assert "not resolved, since their ratios differ too much" in cli("compare", "000", "002").stdout.split("\n")[-2]
    listed = cli("compare", "000", "001", "--format=csv")
    assert ",ratio,low,high,p,noise," in listed.stdout.partition("\n")[0]
    assert "geometric mean of slow" in listed.stderr


def test_without_noise_estimates_there_is_no_interval(cli: Cli, stored: Stored, make: Any) -> None:
    def bare(night: int, ms: float) -> Any:
        record = make(night)
        return msgspec.structs.replace(record, latency=msgspec.structs.replace(record.latency, bursts_ms=((ms, ms),)))

    stored([bare(0, 1.0), bare(1, 2.0)])
    (row,) = json.loads(cli("compare", "000", "001", "--format=json").stdout)["series"]
    assert (row["ratio"], row["low"], row["high"], row["p"]) == (2.0, None, None, None)
    assert "2.000" in cli("compare", "000", "001").stdout


def test_noise_that_hides_a_factor_of_two_cannot_be_judged(cli: Cli, stored: Stored, make: Any) -> None:
    """Such a series is not `ok`, and its ratio does not count for the geometric mean."""
    a, b = {"commit": "a" * 40}, {"commit": "b" * 40}
    stored([make(n, ms=ms, **a) for n, ms in enumerate((1.0, 3.0, 0.4))])
    stored([make(n, ms=ms, **b) for n, ms in enumerate((0.8, 2.5, 0.3), 3)])
    stored([make(n, backend="calm", **side) for n, side in ((0, a), (3, b))])
    assert verdicts(cli, "aaa", "bbb") == {"triton": "~", "calm": "ok"}
    text = cli("compare", "aaa", "bbb").stdout
    assert "too noisy to judge: only a change of more than" in text
    assert "geometric mean of B/A over 1 series" in text
