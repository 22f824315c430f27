"""`groupbench gate`: exit codes, the first line and the rows below it, independent of the statistics."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
from msgspec.structs import replace
from nights import Cli, Stored, first_line, members, quiet, rows
from repositories import git

from groupbench.tracker.cli import main
from groupbench.tracker.cli.gate import gate
from groupbench.tracker.cli.here import program_of
from groupbench.tracker.facts.record import UNKNOWN_COMMIT, Record

from ..conftest import build


def noisy(level: float) -> dict[str, Any]:
    """Bursts that scatter by more than 100 %, around a median that is the level."""
    return {"timing": "gpu", "bursts_ms": [[level * factor] * 3 for factor in (0.5, 1.0, 1.0, 3.0)]}


def since(night: int, ms: float = 1.05, **fields: Any) -> list[Record]:
    """Six quiet nights, and those of the numbers from 6 to `night` at another level."""
    return [*quiet(build, 6), *(build(number, ms=ms, **fields) for number in range(6, night + 1))]


CANARY = {"operator": "canary", "backend": "memcpy"}
CONFIRM = "; run `groupbench confirm` to measure both commits. 1 "
OUTCOMES: dict[str, tuple[list[Record], int, list[str]]] = {
    "first": ([build()], 0, ["GATE not judged: nothing to compare with yet. 1 new\n"]),
    "slower": (
        [*since(8, 1.03), build(8, backend="torch")], 1,
        ["GATE regression: 1 series regressed. 1 regressed, 1 new\n", "+3.0%"],
    ),
    "slower once": (since(6, 1.03), 3, [f"GATE incomplete: 1 series unconfirmed{CONFIRM}unconfirmed\n", "+3.0%"]),
    "slower twice": (since(7, 1.03), 3, [f"GATE incomplete: 1 series may have regressed{CONFIRM}suspect\n"]),
    "dirty trees of one commit": (since(8, commit="005" + "c" * 37, commit_facts={"dirty": True}), 1, ["regressed"]),
    "an unknown commit": (since(6, commit=UNKNOWN_COMMIT), 3, ["the commit is not known"]),
    "faster twice": (since(7, 0.9), 0, ["GATE ok: 1 series may have improved. 1 suspect\n"]),
    "faster": (since(8, 0.9), 0, ["GATE ok: 1 series improved. 1 improved\n", "-10.0%"]),
    "faster for four nights": (since(9, 0.9), 0, ["GATE ok: no change above 0.3 %. 1 improved\n"]),
    "a burst that the host stalled": (
        [build(latency={"timing": "gpu", "bursts_ms": [[1.0] * 3, [1.0] * 3, [1.01] * 3, [24.0] * 3]})], 0,
        ["GATE not judged: nothing to compare with yet. 1 new"],
    ),
    "noisy on its level": ([*quiet(build, 6), build(6, latency=noisy(1.0))], 0, ["GATE ok: no change above "]),
    "less accurate": (since(6, 1.0, rms=3.2e-3), 1, ["rms 0.002 → 0.0032", "accuracy"]),
    "wrong before": (
        [*(build(night, ms=0.1, status="wrong", rms=1.0) for night in range(5)), *map(build, range(5, 9))], 0,
        ["GATE ok: no change above "],
    ),
    "less accurate than before, but not than wrong results": (
        [*(build(n, status="wrong", rms=1.0) for n in range(5)), *map(build, range(5, 8)), build(8, rms=0.01)], 1,
        ["accuracy"],
    ),
    "slower as a canary is": (
        [*since(6), *quiet(build, 6, **CANARY), build(6, ms=1.05, **CANARY)], 3,
        ["1 unresolved, 1 suspect\n", "canary moved: the machine, not the code", "machine suspect"],
    ),
    "wrong, whatever the canary": (
        [*since(6, 1.0, status="wrong"), *quiet(build, 6, **CANARY), build(6, ms=1.05, **CANARY)], 1,
        ["GATE regression"],
    ),
    "an earlier run was stored later": ([build(5), build(0, status="wrong")], 0, ["1 new"]),
}  # fmt: skip


TORCH = {"backend": "torch"}
WRONG = "GATE regression: 1 result is wrong. 1 wrong\n"
MISSING = "GATE incomplete: 1 series missing. 1 missing, 1 new\n"
UNLIKE: dict[str, tuple[list[Record], int, list[str]]] = {
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
        3, ["no module", "torch"],
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


@pytest.mark.parametrize(("records", "code", "says"), (OUTCOMES | UNLIKE).values(), ids=OUTCOMES | UNLIKE)
def test_a_run_ends_with_a_code_and_says_why(
    cli: Cli, stored: Stored, records: list[Record], code: int, says: list[str]
) -> None:
    stored(records[:-1] or records)
    stored(records[-1:])
    result = cli("gate")
    assert result.exit_code == code
    assert all(text in result.stdout for text in says), result.stdout
    assert "torch" not in result.stdout or "torch" in says, "a new series is counted alone"
    assert "groupbench confirm" not in result.stdout or records[-1].run.commit.hash != UNKNOWN_COMMIT


def test_a_second_run_is_judged_and_the_change_that_it_excludes_is_large(cli: Cli, stored: Stored, make: Any) -> None:
    stored(quiet(make, 2))
    few = float(first_line(cli("gate")).split()[5])
    stored(quiet(make, 12)[2:])
    many = float(first_line(cli("gate")).split()[5])
    assert 0.5 < few < 2.0 and many < few / 1.5


def test_strict_asks_for_a_history(cli: Cli, stored: Stored, make: Any) -> None:
    stored(quiet(make, 1))
    assert cli("gate", "--strict").exit_code == 3
    stored([make(3)])
    assert cli("gate", "--strict").exit_code == 0


def test_a_row_names_the_commits_of_the_change(cli: Cli, stored: Stored, make: Any) -> None:
    facts = {"subject": "Tiles: other ones", "author": "A. N. Other"}
    stored([*quiet(make, 6), make(6, ms=1.05, commit_facts=facts), *[make(n, ms=1.05) for n in (7, 8)]])
    (row,) = rows(cli)
    assert (row["verdict"], row["metric"], row["cause"]) == ("regressed", "latency", "code")
    assert row["commits"] == "005ccccccc..006ccccccc"
    assert (row["subject"], row["author"]) == (facts["subject"], facts["author"])
    assert row["low"] < row["change"] < row["high"] and row["before_ms"] == pytest.approx(1.0, rel=0.01)
    assert "005ccccccc..006ccccccc" in cli("gate").stdout


@pytest.fixture
def commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hashes of five commits without a change, in a new repository that is the current folder."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)

    git(folder, "init", "-q")
    hashes = []
    for number in range(5):
        git(folder, "commit", "-q", "--allow-empty", "-m", str(number))
        hashes.append(git(folder, "rev-parse", "HEAD"))
    return hashes


SLOWER = {"ms": 1.05}
LESS_ACCURATE = {"rms": 9e-3}


@pytest.mark.parametrize(("worse", "option"), [(SLOWER, ""), (LESS_ACCURATE, " --metric accuracy")])
def test_a_range_of_commits_has_the_command_that_finds_the_commit(
    worse: dict[str, float], option: str, cli: Cli, stored: Stored, make: Any, commits: list[str], db: Any
) -> None:
    after = [make(night, commit=commits[4], **worse) for night in (6, 7, 8)]
    stored([*quiet(make, 6, commit=commits[0]), *after])
    (line,) = [line for line in cli("gate").stdout.splitlines() if line.startswith("one of ")]
    label, _, command = line.partition(": ")
    assert label == "one of 4 commits"
    assert command == (
        f"groupbench --db {shlex.quote(str(db))} bisect {commits[0]} {commits[4]} --series 1{option} --device cuda"
    )
    done = cli(*shlex.split(command)[3:])  # `cli` adds --db itself; the commits do not differ, so nothing is measured
    assert done.exit_code == 0 and done.stdout.startswith("no regression to find: GOOD and BAD have the same files")


def test_a_single_commit_or_an_unknown_one_needs_no_search(
    cli: Cli, stored: Stored, make: Any, commits: list[str]
) -> None:
    first = [make(night, ms=1.05, commit=commits[1]) for night in (6, 7, 8)]
    stored([*quiet(make, 6, commit=commits[0]), *first])
    assert "+5.0%" in cli("gate").stdout and "one of " not in cli("gate").stdout
    stored([make(night, ms=1.2) for night in (9, 10, 11)])
    assert "regressed" in cli("gate").stdout and "one of " not in cli("gate").stdout


def test_a_password_is_not_printed() -> None:
    plain = "postgresql://host/db"
    for url, words in (("postgresql://me:secret@host/db", []), (plain, ["--db", plain])):
        context = main.make_context("groupbench", ["--db", url, "runs"])
        context.obj = url
        assert program_of(click.Context(gate, parent=context, obj=url)) == ["groupbench", *words]


def test_a_change_within_one_commit_is_not_the_code(cli: Cli, stored: Stored, make: Any) -> None:
    same = [make(night, ms=1.05, commit="005" + "c" * 37) for night in (6, 7, 8)]
    stored([*quiet(make, 6), *same])
    result = cli("gate")
    assert result.exit_code == 3
    assert first_line(result).endswith("1 unresolved") and "groupbench confirm" not in first_line(result)
    assert "same commit before and after" in result.stdout
    stored([make(9, ms=1.05, commit="005" + "c" * 37)])
    result = cli("gate")
    assert result.exit_code == 0  # the fourth night
    assert "1 ok (1 changed with no code change)" in first_line(result)


UNKNOWN_CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "latency": ({}, {"ms": 3.0}),
    "accuracy": ({}, {"rms": 4e-3}),
    "another metric": ({"metrics": {"workspace_mib": 100.0}}, {"metrics": {"workspace_mib": 200.0}}),
}


@pytest.mark.parametrize(("before", "after"), UNKNOWN_CHANGES.values(), ids=UNKNOWN_CHANGES)
def test_runs_of_an_unknown_commit_are_not_the_same_code(
    cli: Cli, stored: Stored, make: Any, before: dict[str, Any], after: dict[str, Any]
) -> None:
    unknown = {"commit": UNKNOWN_COMMIT}
    nights = [(1.0 + 0.001 * (night % 3), before) for night in range(14)]
    nights += [(1.0 + 0.001 * (night % 3), after) for night in range(10)]
    stored([make(night, **({"ms": ms} | fields), **unknown) for night, (ms, fields) in enumerate(nights)])
    result = cli("gate")
    assert (result.exit_code, first_line(result)) == (1, "GATE regression: 1 series regressed. 1 regressed")
    assert "unknown..unknown" in result.stdout and "the commit is not known" in result.stdout
    assert "git switch" not in result.stdout and "groupbench ab" not in result.stdout


def test_the_same_compiled_kernel_is_a_regression_only_by_an_ab(cli: Cli, stored: Stored, make: Any) -> None:
    kernels = [{"name": "k", "hash": "one"}]
    slower = [make(night, ms=1.05, kernels=kernels) for night in (6, 7, 8)]
    stored([*quiet(make, 6, kernels=kernels), *slower])
    result = cli("gate")
    assert (result.exit_code, "1 suspect" in first_line(result)) == (3, True)
    assert "infrastructure" in result.stdout and "compiled kernel unchanged" in result.stdout
    stored([make(night, ms=0.9, kernels=kernels) for night in (9, 10, 11)])
    (row,) = rows(cli)
    assert (row["verdict"], row["cause"], row["ab"]) == ("improved", "infrastructure", None)  # not an alarm
    assert row["change"] < 0


@pytest.mark.parametrize(
    ("worse", "what"),
    [({"status": "wrong"}, "result"), ({"rms": 9e-3}, "accuracy"), ({"repeatable": False}, "repeatability")],
    ids=["wrong", "less accurate", "unrepeatable"],
)
def test_the_same_compiled_kernel_does_not_clear_the_code_of_a_result(
    cli: Cli, stored: Stored, make: Any, worse: dict[str, Any], what: str
) -> None:
    """The code around a kernel affects the result too; the same commit cannot change it."""
    kernels = [{"name": "k", "hash": "one"}]
    stored([*quiet(make, 6, kernels=kernels), make(6, kernels=kernels, **worse)])
    (row,) = rows(cli)
    assert (row["metric"], row["cause"]) == (what, "code")
    assert row["note"].endswith("; compiled kernel unchanged")
    again = {"kernels": kernels, "commit": "005" + "c" * 37, "backend": "again"}
    stored([*quiet(make, 6, kernels=kernels, backend="again"), make(7, **again, **worse)])
    row = next(row for row in rows(cli) if row["backend"] == "again")
    assert (row["metric"], row["cause"]) == (what, "infrastructure")
    assert row["note"].endswith("; same commit before and after")


def test_faster_but_less_accurate_is_one_row(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*quiet(make, 6), *[make(night, ms=0.8, rms=9e-3) for night in (6, 7, 8)]])
    result = cli("gate")
    assert (result.exit_code, first_line(result)) == (1, "GATE regression: 1 series regressed. 1 regressed")
    assert "rms 0.002 → 0.009, and 20.0% faster" in result.stdout
    (row,) = rows(cli)
    assert (row["metric"], row["before_rms"], row["rms"]) == ("accuracy", pytest.approx(2e-3), 9e-3)


def test_slower_at_one_commit_and_less_accurate_at_another_are_two_rows(cli: Cli, stored: Stored, make: Any) -> None:
    """Each with its own commits: the later one slowed nothing."""
    stored([*quiet(make, 6), make(6, ms=1.5), make(7, ms=1.5), make(8, ms=1.5, rms=9e-3), make(9, ms=1.5, rms=9e-3)])
    result = cli("gate", "--update")
    assert first_line(result) == "GATE regression: 1 series regressed. 1 regressed"
    assert "2 opened (1, 2)" in result.stderr
    slow, coarse = sorted(rows(cli), key=lambda row: row["metric"], reverse=True)
    assert (slow["metric"], slow["commits"]) == ("latency", "005ccccccc..006ccccccc")
    assert (coarse["metric"], coarse["commits"]) == ("accuracy", "007ccccccc..008ccccccc")
    assert slow["change"] == pytest.approx(0.5, abs=0.01)
    assert (coarse["change"], coarse["before_ms"]) == (None, None) and "slower" not in coarse["note"]


def test_a_row_has_the_chance_and_the_rule_that_decided(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*quiet(make, 30), make(30, rms=9e-3)])
    (row,) = rows(cli)
    assert (row["metric"], row["p"] < 1e-3, row["rule"]) == ("accuracy", True, "error changed")


def test_drift_is_listed_with_the_sum_since_the_reference(cli: Cli, stored: Stored, make: Any) -> None:
    """No single night shows it: +0.2 % a night, where 0.3 % count."""
    stored([make(night, ms=1.002 ** max(night - 14, 0) * (1 + 0.0003 * (night % 3 - 1))) for night in range(23)])
    row, *_ = rows(cli)
    assert (row["verdict"], row["cause"]) == ("regressed", "drift")
    assert row["change"] == pytest.approx(1.002**8 - 1, abs=1e-3)


def test_an_undone_improvement_names_the_date_until_which_the_level_was_accepted(
    cli: Cli, stored: Stored, make: Any
) -> None:
    stored([*quiet(make, 10), *(make(night, ms=0.8) for night in range(10, 16))])
    assert cli("gate").exit_code == 0
    stored([make(night) for night in range(16, 19)])
    (row,) = rows(cli)
    assert (row["verdict"], row["cause"]) == ("regressed", "undone")
    improved = json.loads(cli("gate", "--run", "run-010", "--format", "json").stdout)["commit"][:10]
    assert f" is back, which {improved} had improved" in row["note"]


def test_a_backfilled_change_has_the_date_of_its_commit(cli: Cli, stored: Stored, make: Any) -> None:
    records = [
        make(night, ms=1.5 if night > 8 else 1.0, commit_facts={"time": datetime(2025, 9, 1 + night, tzinfo=UTC)})
        for night in range(12)
    ]
    stored(replace(one, run=replace(one.run, trigger="backfill")) for one in records)
    assert "since 2025-09-10 (measured 2026-01-10), 3 results" in cli("gate").stdout


def test_a_shape_whose_middle_is_left_out_is_whole_below(cli: Cli, stored: Stored, make: Any) -> None:
    shape = "G=4,M_g=100|200|300|400,N=1024,K=4096"
    stored([make(0, shape=shape, status="wrong")])
    row, below = cli("gate").stdout.splitlines()[3:5]
    assert "…" in row and below == f"    shape {shape}"


def test_one_cause_is_one_incident_if_a_backfill_measured_it_last(cli: Cli, stored: Stored, make: Any) -> None:
    """The newest commit is measured second, and those before it later, the newest first."""
    for place, day in enumerate((1, 5, 4, 3, 2)):
        wrong = {"status": "wrong"} if day > 2 else {}
        for shape in ("G=4,M=64,N=8,K=8", "G=4,M=1024,N=8,K=8"):
            facts = {"time": datetime(2025, 9, day, tzinfo=UTC), "parents": [f"{day - 1:040}"]}
            record = make(day, run=f"run-{day}", shape=shape, commit=f"{day:040}", commit_facts=facts, **wrong)
            run = replace(record.run, started=datetime(2025, 10, 1 + place, tzinfo=UTC))
            stored([replace(record, run=run)])
    assert "incidents: 1 opened (1)" in cli("gate", "--update", "--run", "run-5").stderr
    assert "1 new: wrong result in 2 series of" in cli("incidents").stdout


def test_a_noisy_latency_is_not_judged(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(latency=noisy(1.0))])
    result, strict = cli("gate"), cli("gate", "--strict")
    not_judged = "GATE not judged: no latency was judged (1 too noisy). 1 noisy"
    assert (result.exit_code, first_line(result)) == (0, not_judged)
    required = "GATE incomplete: --strict requires a verdict on every series (1 too noisy). 1 noisy"
    assert (strict.exit_code, first_line(strict)) == (3, required)
    output = json.loads(cli("gate", "--format=json").stdout)
    assert (output["latencies"], output["counts"]) == ({"judged": 0, "measured": 1}, {"noisy": 1})
    assert "±" in output["series"][0]["note"]


def test_a_noisy_latency_off_its_level_is_not_called_ok(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*quiet(make, 6), make(6, latency=noisy(1.1))])
    assert first_line(cli("gate")) in (
        "GATE not judged: no latency was judged (1 too noisy). 1 noisy",
        "GATE incomplete: 1 series unconfirmed; run `groupbench confirm` to measure both commits. 1 unconfirmed",
    )


@pytest.mark.both
def test_usage_is_2(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make()])
    assert "no run 'x'" in cli("gate", "--run", "x").stderr
    for bad in (["--window", "0"], ["--min-effect", "x"], ["--min-effect", "-1"], ["--min-effect", "nan"], ["--nope"]):
        assert cli("gate", *bad).exit_code == 2


def test_an_older_run_is_judged_by_what_came_before(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*quiet(make, 6), *[make(night, ms=1.05) for night in range(6, 9)]])
    assert cli("gate", "--run", "run-008").exit_code == 1
    assert cli("gate", "--run", "run-006").exit_code == 3
    assert cli("gate", "--run", "run-005").exit_code == 0
    assert "ambiguous" in cli("gate", "--run", "run-").stderr


def test_min_effect_and_window(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*quiet(make, 6), *[make(night, ms=1.05) for night in range(6, 10)]])
    assert cli("gate").exit_code == 1
    assert cli("gate", "--min-effect", "6%").exit_code == 0
    assert cli("gate", "--window", "3").exit_code == 0


def test_interpreted_timings_are_never_judged(cli: Cli, stored: Stored, make: Any) -> None:
    on_cpu = {"environment": {"device": "cpu", "gpu": None, "cpu": "EPYC"}, "timing": "interpreted"}
    stored([*[make(night, **on_cpu) for night in range(5)], make(5, ms=50.0, **on_cpu)])
    result = cli("gate")
    assert (result.exit_code, first_line(result)) == (0, "GATE ok: no result changed; no latency was measured. 1 ok")
    stored([make(6, rms=0.1, **on_cpu)])
    assert cli("gate").exit_code == 1


def test_lost_repeatability_is_1(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*quiet(make, 5), make(5, repeatable=False)])
    result = cli("gate")
    assert (result.exit_code, "repeatability" in result.stdout) == (1, True)
    stored([make(night, repeatable=False) for night in range(6, 26)])
    assert cli("gate", "--run", "run-024").exit_code == 1
    assert first_line(cli("gate")).endswith("1 ok (1 changed long ago)")
    stored([make(26, repeatable=True), make(27, repeatable=False)])
    assert cli("gate", "--run", "run-026").exit_code == 0
    assert cli("gate").exit_code == 1


@pytest.mark.sqlite
@pytest.mark.parametrize("ms", [0.95, 1.05], ids=["improved", "regressed"])
def test_an_old_change_is_not_news(cli: Cli, stored: Stored, make: Any, ms: float) -> None:
    """The statistics find the newest change at any age, but after twenty results it is old."""
    stored([*quiet(make, 6), *[make(night, ms=ms) for night in range(6, 28)]])
    for night, code in ((8, 1), (25, 1), (26, 0), (27, 0)):
        run, old = ("--run", f"run-{night:03d}"), night >= 26
        (row,) = rows(cli, *run)
        assert cli("gate", *run).exit_code == (code if ms > 1 else 0), night
        assert row["verdict"] == ("ok" if old else "regressed" if ms > 1 else "improved"), night
        assert ("old change" in (row["note"] or "")) == old, night
    assert cli("gate").stdout == "GATE ok: no change above 0.3 %. 1 ok (1 changed long ago)\n"


@pytest.mark.sqlite
def test_an_alert_keeps_an_old_change_until_it_is_dealt_with(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*quiet(make, 6), *[make(night, ms=1.05) for night in range(6, 40)]])
    assert "nothing new" in cli("gate", "--update").stderr  # of long before anybody asked
    assert "1 opened (1)" in cli("gate", "--update", "--run", "run-010").stderr
    for night in (25, 26, 39):
        assert cli("gate", "--run", f"run-{night:03d}").exit_code == 1, night
    assert cli("incidents", "ack", "1", "--reason", "known").exit_code == 0
    assert (cli("gate").exit_code, cli("gate", "--strict").exit_code) == (0, 1)
    assert cli("incidents", "expect", "1", "--reason", "bounds are checked").exit_code == 0
    assert cli("gate", "--strict").exit_code == 0
    assert cli("incidents", "close", "1", "--as", "fixed", "--reason", "it is as slow as ever").exit_code == 0
    assert "1 reopened (1)" in cli("gate", "--update").stderr


@pytest.mark.sqlite
def test_a_canary_speaks_of_its_own_machine_and_time(cli: Cli, stored: Stored, make: Any) -> None:
    canary = {"operator": "canary", "backend": "copy"}
    other = {"gpu_uuid": "GPU-2"}
    stored([*quiet(make, 6), *quiet(make, 6, backend="b", environment=other), *quiet(make, 6, **canary)])
    for night in (6, 7, 8):
        cells: list[dict[str, Any]] = [{}, {"backend": "b", "environment": other}, canary]
        stored([make(night, ms=1.05, **cell) for cell in cells])
    of = {row["backend"]: row for row in rows(cli)}
    assert [(of[name]["verdict"], of[name]["cause"]) for name in ("triton", "b", "copy")] == [
        ("unresolved", "machine"),
        ("regressed", "code"),
        ("suspect", "machine"),
    ]
    slow = [make(night, ms=1.05, **canary) for night in range(9, 12)]
    stored([*slow, *[make(night, backend="late", ms=1.0 if night < 9 else 1.05) for night in range(12)]])
    of = {row["backend"]: row for row in rows(cli)}
    assert (of["copy"]["verdict"], of["late"]["verdict"], of["late"]["cause"]) == ("suspect", "regressed", "code")


VARIED = (1.0, 1.1, 0.95, 1.03, 0.97, 1.08) * 2


@pytest.mark.parametrize(
    ("quiet_ones", "share", "line"),
    [
        ("", 1.0, "no change found, but 1 latency varies too much to tell: a change below 29 % may hide in noisy"),
        (
            "abc", 1.0,
            "no change above 0.3 % (c), but 1 latency varies too much to tell: a change below 29 % may hide in noisy",
        ),
        ("abc", 0.3, "no change above 8 % (noisy; 3 of 4 below 0.3 %)"),
    ],
)  # fmt: skip
def test_the_first_line_names_the_latency_that_varies_most(
    cli: Cli, stored: Stored, make: Any, quiet_ones: str, share: float, line: str
) -> None:
    """No change is called excluded if one of more than a fifth could hide."""
    records = [make(night, backend=name) for night in range(12) for name in quiet_ones]
    noise = [1 + share * (ms - 1) for ms in VARIED]
    stored(records + [make(night, ms=ms, backend="noisy") for night, ms in enumerate(noise)])
    shown = first_line(cli("gate")).replace(" G=4,N=1024,K=1024", "")
    assert shown.startswith(f"GATE ok: {line}. {1 + len(quiet_ones)} ok")


def test_the_same_commit_again_is_noted(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0, commit="a" * 40), make(1, commit="a" * 40)])
    assert "same commit as the previous run" in first_line(cli("gate"))
    stored([make(2, commit="a" * 40, commit_facts={"dirty": True})])
    assert "same commit" not in first_line(cli("gate"))
    stored([make(night, commit=UNKNOWN_COMMIT) for night in (3, 4)])
    assert "same commit" not in first_line(cli("gate"))


def test_formats(cli: Cli, stored: Stored, make: Any) -> None:
    stored([*quiet(make, 6), make(6, ms=1.03, shape="a|b*c<d>")])
    stored([*[make(n, backend="x|y") for n in range(5)], *[make(n, ms=1.05, backend="x|y") for n in (5, 6, 7)]])
    output = json.loads(cli("gate", "--format=json").stdout)
    assert (output["exit_code"], output["verdict"], output["counts"]["regressed"]) == (1, "regression", 1)
    csv = cli("gate", "--format=csv")
    assert csv.stdout.startswith("verdict,metric,cause,operator") and csv.stderr.startswith("GATE regression")
    assert r"x\|y" in cli("gate", "--format=md").stdout


def test_a_long_message_does_not_fill_the_screen(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make(0, status="wrong", message="x" * 20_000)])
    assert len(cli("gate").stdout) < 2000
    (row,) = rows(cli)
    assert len(row["note"]) == 20_000


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_commands_that_reproduce_a_row_name_its_device(cli: Cli, stored: Stored, make: Any, device: str) -> None:
    fields = {"environment": {"device": device, "cpu": "a CPU"}}
    stored([make(night, ms=2.0 if night == 6 else 1.0 + 0.001 * (night % 3), **fields) for night in range(7)])
    stored([make(6, backend="other", status="wrong", **fields)])
    of = {row["backend"]: row["repro"] for row in rows(cli)}
    assert of["triton"].startswith("groupbench ab ") and of["other"].startswith("git switch ")
    assert "opened" in cli("gate", "--update").output
    commands = [*of.values(), *(alert["repro"] for alert in members(cli))]
    assert len(commands) > 2 and all(command.endswith(f"--device {device}") for command in commands)


@pytest.mark.parametrize(
    ("timing", "options", "number"), [("cpu", (), 1), ("cpu", ("--min-effect", "2"), 0), ("gpu", (), 0)]
)
def test_a_run_on_a_cpu_names_the_smallest_change_that_counts(
    cli: Cli, stored: Stored, make: Any, timing: str, options: tuple[str, ...], number: int
) -> None:
    stored([make(night, timing=timing) for night in range(5)])
    judged = cli("gate", *options)
    assert judged.stderr.count("on a CPU, changes of less than 10 % do not count") == number


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
