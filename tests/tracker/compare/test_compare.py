"""`groupbench compare`: pairs, verdicts and words for commits; runs, dates, tags, files, slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nights import Cli, Stored
from repositories import git

from groupbench.tracker.facts.loaded import loaded_of


def series(cli: Cli, *args: str) -> list[dict[str, Any]]:
    """Return the rows of a comparison as JSON has them."""
    listed: list[dict[str, Any]] = json.loads(cli("compare", *args, "--format=json").stdout)["series"]
    return listed


def verdicts(cli: Cli, *args: str) -> dict[str, str]:
    return {row["backend"]: row["verdict"] for row in series(cli, *args)}


def test_each_verdict(cli: Cli, stored: Stored, make: Any) -> None:
    before = {name: make(0, backend=name) for name in ("same", "slow", "fast", "wrong", "gone", "oom", "unlike")}
    after = {name: make(1, backend=name, ms=ms) for name, ms in (("same", 1), ("slow", 1.1), ("fast", 0.9), ("new", 1))}
    after |= {name: make(1, backend=name, status=name) for name in ("wrong", "oom")}
    after["unlike"] = make(1, backend="unlike", environment={"driver": "2"})
    coarse = [make(night, backend="coarse", rms=rms) for night, rms in enumerate((1e-3, 1e-2))]
    interpreted = [make(n, ms=ms, backend="interpreted", timing="interpreted") for n, ms in enumerate((1, 9))]
    stored([*before.values(), *after.values(), *coarse, *interpreted])
    assert verdicts(cli, "previous", "latest") == {
        "same": "ok",
        "slow": "regressed",
        "fast": "improved",
        "wrong": "wrong",
        "gone": "missing",
        "new": "new",
        "oom": "missing",
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
    (row,) = series(cli, "aaaa", "bbbb")
    assert (row["verdict"], row["note"]) == ("regressed", "accuracy: rms 0.001 → 0.0018")


def test_runs_of_a_commit_are_pooled_within_like_environments(cli: Cli, stored: Stored, make: Any) -> None:
    a, b = {"commit": "a" * 40}, {"commit": "b" * 40}
    stored([make(n, ms=ms, **a) for n, ms in enumerate((1.0, 1.002, 5.0))])
    stored([make(n, **b) for n in (3, 4)])
    stored([make(5, ms=9.0, **b, environment={"driver": "2"}), make(6, ms=7.0, **a, environment={"driver": "3"})])
    (row,) = series(cli, "aaa", "bbb")
    assert (row["runs"], row["a_ms"]) == ([3, 2], pytest.approx(1.002, rel=1e-3))
    assert row["ratio"] == pytest.approx(1 / 1.002, rel=1e-3)


def test_toolchains_of_a_plan_are_not_pooled_though_they_report_the_same_versions(
    cli: Cli, stored: Stored, make: Any
) -> None:
    def night(toolchain: str, number: int, ms: float) -> Any:
        return make(number, ms=ms, run=f"{toolchain}-{number}", plan=f"nightly@{toolchain}")

    stored([night("stable", 0, 1.0), night("nightly", 0, 2.0), night("stable", 1, 1.0), night("nightly", 1, 2.0)])
    (row,) = series(cli, "000", "001")
    assert (row["runs"], row["ratio"]) == ([1, 1], pytest.approx(1.0, rel=1e-3))
    refused = cli("compare", "run:stable-0", "run:nightly-1")
    assert (refused.exit_code, "toolchain stable → toolchain nightly" in refused.stderr) == (4, True)
    forced = cli("compare", "run:stable-0", "run:nightly-1", "--force")
    assert "forced: toolchain stable → toolchain nightly" in forced.stdout
    stored([make(2, ms=2.0, plan=None)])
    (row,) = series(cli, "run:nightly-1", "002")
    assert (row["verdict"], row["runs"]) == ("ok", [1, 1])


def test_nothing_comparable_is_4(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0, backend="a"), make(1, backend="b")])
    assert cli("compare", "previous", "latest").exit_code == 4


def test_words_for_commits(cli: Cli, stored: Stored, make: Any) -> None:
    facts = ("abc1", {"branch": "main"}), ("abc2", {"branch": "topic"}), ("abc2", {"dirty": True})
    stored([make(n, commit=name.ljust(40, "0"), commit_facts=each) for n, (name, each) in enumerate(facts)])

    def sides(a: str, b: str) -> tuple[str, str]:
        printed = json.loads(cli("compare", a, b, "--format=json").stdout)
        return printed["a"], printed["b"]

    one, two = "abc1000000", "abc2000000"
    assert sides("abc1", "abc2") == (one, two) and sides("abc2", "abc2+") == (two, two + "+")
    assert sides("previous", "latest") == (two, two + "+") and sides("main", "topic") == (one, two)
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
    assert "no previous commit" in errors and "`run:ID` names a single run" in errors
    assert cli("compare", "latest").exit_code == 2


def test_rows_come_by_severity_and_a_regression_can_set_the_exit_code(cli: Cli, stored: Any, make: Any) -> None:
    now = {"same": 1.0, "slower": 1.2, "slowest": 1.5, "faster": 0.5}
    nights = [make(0, 1.0, backend=name) for name in now]
    stored([*nights, *(make(1, ms, backend=name) for name, ms in now.items())])
    listed = series(cli, "000", "001")
    assert [row["backend"] for row in listed] == ["slowest", "slower", "faster", "same"]
    failed = cli("compare", "000", "001", "--only-changed", "--fail-on", "regressed", "--format=json")
    assert failed.exit_code == 1
    assert [row["backend"] for row in json.loads(failed.stdout)["series"]] == ["slowest", "slower", "faster"]
    assert cli("compare", "001", "000", "--fail-on", "regressed", "--backend", "slower").exit_code == 0


def test_p_knows_how_much_other_runs_of_the_series_differ(cli: Cli, stored: Stored, write: Any, make: Any) -> None:
    """One run each, whose bursts agree: the noise between runs is that of the others in the same environment."""

    def p_of(a: str, b: str) -> Any:
        (row,) = series(cli, a, b)
        return row["p"]

    luck = np.random.default_rng(4).normal(0, 0.05, 12)
    stored([make(0, 1.0), make(1, 1.04)])
    (row,) = series(cli, "000", "001")
    assert (row["p"], row["low"], row["high"]) == (None, None, None) and "one run each" in row["note"]
    stored([make(2 + n, float(np.exp(each)), environment={"driver": "2"}) for n, each in enumerate(luck)])
    assert p_of("000", "001") is None
    stored([make(20 + n, float(np.exp(each))) for n, each in enumerate(luck)])
    assert 0.3 < p_of("000", "001") < 1
    quiet = [make(40 + n, 1 + 0.001 * (n % 3)) for n in range(40)]
    stored(quiet)
    assert p_of("000", "001") < 1e-3
    a_file = write([make(1, 1.04)], "new.jsonl")
    assert p_of("000", str(a_file)) == pytest.approx(p_of("000", "001"), rel=0.01)
    for record in quiet:
        assert cli("db", "reject", record.run.id, "--reason", "disturbed").exit_code == 0
    assert 0.3 < p_of("000", "001") < 1


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (({"a.py": "1"}, {"numpy": "2.2"}), ({"a.py": "1"}, {"numpy": "2.2"}), "~"),
        (({"a.py": "1"}, {"numpy": "2.2"}), ({"a.py": "2"}, {"numpy": "2.2"}), "regressed"),
        (({"a.py": "1"}, {"numpy": "2.2"}), ({"a.py": "1"}, {"numpy": "2.4"}), "regressed"),
        ((None, {"numpy": "2.2"}), (None, {"numpy": "2.2"}), "regressed"),
    ],
    ids=["same files", "other files", "other packages", "unknown files"],
)
def test_equal_files_are_never_at_fault(
    before: Any, after: Any, verdict: str, cli: Cli, stored: Stored, make: Any
) -> None:
    stored([make(0, loaded=loaded_of(*before)), make(1, 2.0, loaded=loaded_of(*after))])
    (row,) = series(cli, "000", "001")
    assert row["verdict"] == verdict
    assert ("both ran the same files" in row["note"]) == (verdict == "~")


def test_a_rejected_run_is_compared_only_by_its_id(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0), make(1), make(1, 2.0, run="run-001-more"), make(2)])
    cli("db", "reject", "run-001-more", "--reason", "disturbed")
    assert [row["runs"] for row in series(cli, "000", "001")] == [[1, 1]]
    assert [row["b_ms"] for row in series(cli, "000", "run:run-001-more")] == [pytest.approx(2.0, rel=1e-3)]
    cli("db", "reject", "run-002", "--reason", "disturbed")
    failed = cli("compare", "000", "002")
    assert failed.exit_code == 2 and "every run at 002cccccc" in failed.stderr and "was rejected" in failed.stderr


def test_rows_and_geometric_means_have_intervals(cli: Cli, stored: Stored, make: Any) -> None:
    now = {("slow", "a"): 1.2, ("slow", "b"): 1.25, ("same", "a"): 1.0, ("same", "b"): 1.0, ("lone", "a"): 1.1}
    cells = [{"backend": backend, "operator": operator} for backend, operator in now]
    stored([make(night, 1 + 0.001 * (night % 2), **cell) for night in range(100, 130) for cell in cells])
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


def test_one_burst_of_one_run_has_neither_verdict_nor_interval(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(night, latency={"timing": "gpu", "bursts_ms": [[ms, ms]]}) for night, ms in enumerate((1.0, 2.0))])
    (row,) = series(cli, "000", "001")
    assert (row["ratio"], row["low"], row["high"], row["p"], row["verdict"]) == (2.0, None, None, None, "~")
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


def compared(cli: Cli, *args: Any, **settings: Any) -> dict[str, Any]:
    result = cli("compare", *args, "--format=json", **settings)
    assert result.exit_code in (0, 4), result.stderr
    return json.loads(result.stdout)


def test_files_need_no_database(cli: Cli, write: Any, make: Any, tmp_path: Path) -> None:
    a = write([make(0), make(0, backend="gone")], "a.jsonl")
    b = write([make(1, ms=1.1), make(1, backend="fresh")], "b.jsonl")
    none = tmp_path / "none.db"
    output = compared(cli, a, b, db=none)
    verdicts = {row["backend"]: row["verdict"] for row in output["series"]}
    assert verdicts == {"triton": "regressed", "gone": "missing", "fresh": "new"}
    assert (output["a"], output["geometric_mean"]) == (str(a), pytest.approx(1.1, rel=1e-2))
    assert not none.exists()


def test_a_file_against_the_store_is_the_file_against_itself(cli: Cli, stored: Stored, write: Any, make: Any) -> None:
    """The same numbers come out of a file as out of the database."""
    old = [make(0, backend=b, ms=ms) for b, ms in (("a", 1.0), ("b", 2.0))]
    new = [make(1, backend=b, ms=ms, rms=4e-3) for b, ms in (("a", 1.2), ("b", 2.0))]
    stored([*old, *new])
    a, b = write(old, "a.jsonl"), write(new, "b.jsonl")
    series = [compared(cli, *words)["series"] for words in ((a, b), (a, "001"), ("000", b), ("000", "001"))]
    for rows in series:
        for row, same in zip(rows, series[0], strict=True):
            numbers = {name: value for name, value in row.items() if isinstance(value, float)}
            assert row | {name: same[name] for name in numbers} == same
            assert numbers == pytest.approx({name: same[name] for name in numbers}, rel=1e-5)


def test_the_newest_run_before_a_date(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(n, ms=1.0 + n / 10) for n in range(4)])  # at 03:00 of 1 to 4 January
    output = compared(cli, "2026-01-02", "2026-01-04T02:59")
    assert "run-001" in output["a"] and "run-002" in output["b"]
    assert output["series"][0]["ratio"] == pytest.approx(1.2 / 1.1, rel=1e-3)
    assert "run-003" in compared(cli, "2026-01-01", "@1m")["b"]
    early = cli("compare", "2025-01-01", "latest")
    assert (early.exit_code, "no run at or before" in early.stderr) == (2, True)


def test_a_hash_goes_before_a_date(cli: Cli, stored: Stored, make: Any) -> None:
    """`7d` is also the start of a hash; `@` marks a date."""
    stored([make(0, commit="7d" + "0" * 38), make(1)])
    assert compared(cli, "7d", "001")["a"] == "7d00000000" and "run-001" in compared(cli, "7d", "@7d")["b"]


def test_one_run(cli: Cli, stored: Stored, make: Any) -> None:
    commit = {"commit": "a" * 40}
    stored([make(0, **commit), make(1, ms=1.5, **commit)])
    assert [row["verdict"] for row in compared(cli, "run:run-000", "run:run-001")["series"]] == ["regressed"]
    assert "no run 'x'" in cli("compare", "run:x", "latest").stderr


def test_a_tag_of_git(cli: Cli, stored: Stored, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()

    git(tree, "init", "-q")
    git(tree, "commit", "-q", "--allow-empty", "-m", "x")
    git(tree, "tag", "v1.0")
    stored([make(0, commit=git(tree, "rev-parse", "HEAD")), make(1)])
    monkeypatch.chdir(tree)
    assert compared(cli, "v1.0", "001")["a"] == git(tree, "rev-parse", "HEAD")[:10]
    assert "no commit or branch 'v2.0'" in cli("compare", "v2.0", "001").stderr


def test_slices(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(n, backend=b, cell={"dims": {"M": m}}) for n in (0, 1) for b, m in (("a", 8), ("b", 4096))])
    assert [r["backend"] for r in compared(cli, "000", "001", "--shape", "M>=4096")["series"]] == ["b"]
    assert [r["backend"] for r in compared(cli, "000", "001", "--backend", "a")["series"]] == ["a"]
    assert "no backend 'x'; known: a, b" in cli("compare", "000", "001", "--backend", "x").stderr
    assert "no size 'Z'; known: M" in cli("compare", "000", "001", "--shape", "Z>1").stderr
    assert len(compared(cli, "000", "001", "--shape", "4,1024,1024")["series"]) == 2
    assert "no shape '4,8,8'; known: G=4,N=1024,K=1024" in cli("compare", "000", "001", "--shape", "4,8,8").stderr


def test_unlike_environments_are_named_and_refused(cli: Cli, write: Any, make: Any) -> None:
    a = write([make(0)], "a.jsonl")
    b = write([make(1, environment={"driver": "580.2", "torch": "2.14.0"})], "b.jsonl")
    refused, forced = cli("compare", a, b), cli("compare", a, b, "--force")
    assert (refused.exit_code, forced.exit_code) == (4, 0)
    assert "environments differ: driver 570.1 → 580.2; torch 2.13.0 → 2.14.0; --force compares" in refused.stderr
    assert refused.stdout.rstrip().endswith("no latency could be compared")
    assert compared(cli, a, b)["differences"] == ["driver 570.1 → 580.2; torch 2.13.0 → 2.14.0"]
    assert "forced: driver 570.1 → 580.2" in forced.stdout
    assert forced.stdout.rstrip().split("\n")[-1].startswith("geometric mean")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((b"", "is empty"), (b"{}\n", "no known format")),
        *((b'{"schema":1,"run":1}\n', "line 1: "), (b'{"schema":99,"run":1}\n', "record schema 99")),
    ],
)
def test_a_file_that_cannot_be_read(cli: Cli, write: Any, make: Any, content: bytes, message: str) -> None:
    result = cli("compare", write([content], "a.jsonl"), write([make()], "b.jsonl"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr and "a.jsonl" in result.stderr


def test_a_file_that_does_not_hold_records_is_no_commit(
    cli: Cli, stored: Stored, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored([make()])
    monkeypatch.chdir(tmp_path)
    Path("kernel.py").write_text("")
    message = cli("compare", "kernel.py", "latest").stderr
    assert "kernel.py is not a file of records (.jsonl, .ndjson, .json, .csv), and no commit or branch" in message


def test_identical_sides_are_not_compared(cli: Cli, stored: Stored, write: Any, make: Any) -> None:
    a = write([make()], "a.jsonl")
    assert "are the same" in cli("compare", a, a).stderr
    stored([make()])
    assert "are the same commit" in cli("compare", "000", "latest").stderr
    assert cli("compare", "nope.jsonl", "000").exit_code == 2


@pytest.mark.both
def test_only_the_newest_run_without_a_commit_is_a_side(cli: Cli, stored: Stored, make: Any) -> None:
    """Runs outside git may be of different code: pooled, they would hide a change."""
    stored([make(n, commit="unknown", ms=1.0 + n) for n in (0, 1, 2)])
    newest = compared(cli, f"@{make(1).run.started:%Y-%m-%dT%H:%M}", "latest")
    assert newest["b"].startswith("run ") and newest["b"].endswith(" at unknown")
    assert [row["ratio"] for row in newest["series"]] == [pytest.approx(1.5, rel=0.1)]


def test_files_of_other_benchmarks(cli: Cli, tmp_path: Path) -> None:
    """Files need no commit or date, because their results are not stored."""
    before = Path(__file__).parents[1] / "data" / "tritonbench_grouped_gemm.json"
    after = tmp_path / "after.json"
    after.write_text(before.read_text().replace('"0.2518079876899719"', '"0.5036159753799438"'))
    output = compared(cli, before, after, db=tmp_path / "none.db")
    assert {row["verdict"] for row in output["series"]} == {"~"}, "one sample tells no noise"
    ratios = {(row["backend"], row["shape"]): round(row["ratio"], 3) for row in output["series"]}
    assert ratios.pop(("triton_grouped_gemm", "x_val=1024")) == 2 and set(ratios.values()) == {1}
    assert output["geometric_mean"] == pytest.approx(2**0.25)
