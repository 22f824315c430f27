"""Test `groupbench confirm`: the commits that it measures for each series, and the gate's verdicts afterwards."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from nights import Cli, Stored, commit, first_line, members, quiet, rows, suspect, wobble
from planned_ab import FakeBench

from groupbench.tracker.ab.confirm import LEFT_OUT, Measuring, confirm
from groupbench.tracker.ab.result import AbCell
from groupbench.tracker.ab.suspects import MOST_AB
from groupbench.tracker.facts.loaded import loaded_of
from groupbench.tracker.store.engine import open_store

pytestmark = [pytest.mark.usefixtures("two_nights_are_certain", "once"), pytest.mark.sqlite]


@pytest.fixture
def slow(bench: FakeBench, stored: Stored, make: Any) -> FakeBench:
    """A series that is 5 % slower on its newest night."""
    stored(suspect(make))
    return bench


def test_different_is_a_regression_with_its_interval(cli: Cli, slow: FakeBench) -> None:
    assert cli("gate").exit_code == 3
    slow.plan("different", 0.04)
    done = cli("confirm")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "CONFIRM 1 different")
    assert "different +4.1% (+3.9% .. +4.3%) 005ccccccc..006ccccccc grouped_gemm triton" in done.stdout
    assert "A/B of 005ccccccc and 006ccccccc: 1 series, at most 60 s\n" in done.stderr
    cell = AbCell("grouped_gemm", "triton", "G=4,N=1024,K=1024", "bf16", "fwd", 0, "cuda")
    assert [compared[:3] for compared in slow.compared] == [(commit(5), commit(6), cell)]
    result = cli("gate", "--update")
    assert (result.exit_code, first_line(result)) == (1, "GATE regression: 1 series regressed. 1 regressed")
    assert "A/B of 005ccccccc..006ccccccc: +4.1% (+3.9% to +4.3%) in 12 blocks" in result.stdout
    (row,) = rows(cli)
    assert (row["ab"], row["change"]) == ("different", pytest.approx(0.05, abs=2e-3))
    assert row["now"] == pytest.approx(row["before"] * (1 + row["change"]), rel=1e-3)
    (member,) = members(cli)
    assert (member["ab"], member["change"]) == ("different", pytest.approx(math.expm1(0.04)))
    title = "1 confirmed: latency +4.1% in grouped_gemm triton"
    assert cli("incidents").stdout.startswith(title), "not the night's +5 %"
    assert "nothing to confirm" in cli("confirm").stdout


@pytest.mark.parametrize(("verdict", "effect"), [("different", 0.04), ("same", 0.001), ("unknown", 0.02)])
def test_what_an_ab_could_not_check_stays_with_it(cli: Cli, slow: FakeBench, verdict: str, effect: float) -> None:
    busy = "times, because other work kept the CPU busy"
    slow.plan(verdict, effect, unchecked={"head": [busy]})
    (line,) = (line for line in cli("confirm").stdout.splitlines() if line.startswith(verdict))
    assert line.endswith(f": not checked in head: {busy}")
    assert f"A/B not checked in head: {busy}" in cli("gate", "--update").stdout
    assert rows(cli)[0]["note"].count(busy) == 1


@pytest.mark.parametrize(
    ("verdict", "effect", "code", "text"),
    [
        ("same", 0.001, 0, "A/B: no difference"),
        ("unknown", 0.02, 3, "A/B unknown: too noisy"),
        ("failed", None, 3, "A/B failed: too noisy"),
        ("different", -0.04, 3, "history and A/B contradict each other"),
    ],
)
def test_what_the_gate_makes_of_it(
    cli: Cli, slow: FakeBench, stored: Stored, make: Any, verdict: str, effect: float | None, code: int, text: str
) -> None:
    slow.plan(verdict, effect, message="too noisy" if verdict != "different" else None)
    assert cli("confirm").exit_code == (0 if verdict in ("same", "different") else 3)
    result = cli("gate", "--update")
    assert (result.exit_code, text in result.stdout) == (code, True)
    assert "unresolved" in result.stdout or code == 0
    assert members(cli) == []
    if verdict in ("unknown", "failed"):  # it hides no certain change
        stored([make(night, ms=1.05) for night in (7, 8)])
        result = cli("gate", "--window", "6")
        assert (result.exit_code, first_line(result)) == (1, "GATE regression: 1 series regressed. 1 regressed")
        assert text in result.stdout


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [("different", "unknown", 1), ("unknown", "different", 1), ("different", "same", 0), ("different", "failed", 1)],
)
def test_a_repeated_answer_counts_if_it_is_one(cli: Cli, slow: FakeBench, first: str, second: str, kept: int) -> None:
    """A false difference would stay red for weeks."""
    slow.plan(first, 0.04)
    slow.then = lambda: slow.plan(second, 0.04)
    code = cli("confirm").exit_code
    assert (len(slow.compared), cli("gate").exit_code, code) == (2, kept, 3 * (second == "failed"))


def test_what_the_preparation_left_no_time_for_is_left_out(cli: Cli, slow: FakeBench) -> None:
    slow.plan("unknown", ran_out="budget")
    assert "CONFIRM 1 left out because the budget is spent" in cli("confirm").stdout
    slow.plan("different", 0.04)
    assert cli("confirm").exit_code == 0


def test_what_was_tried_is_not_tried_again_unless_asked(cli: Cli, slow: FakeBench, stored: Stored, make: Any) -> None:
    slow.plan("unknown", 0.02)
    assert cli("confirm").exit_code == 3
    again = cli("confirm")
    assert (again.exit_code, len(slow.compared)) == (3, 1)
    assert again.stdout == "CONFIRM 1 left undecided by an earlier comparison; repeat them with --again\n"
    slow.plan("different", 0.05)
    assert cli("confirm", "--again").exit_code == 0
    assert cli("gate").exit_code == 1
    stored([make(7, ms=1.001)])
    assert cli("gate").exit_code == 0


def test_as_json(cli: Cli, slow: FakeBench) -> None:
    slow.plan("different", 0.05)
    answer = json.loads(cli("confirm", "--format", "json").stdout)
    [one] = answer["compared"]
    facts = (one["operator"], one["metric"], one["verdict"], one["base"], one["head"])
    assert facts == ("grouped_gemm", "latency", "different", commit(5), commit(6))
    assert one["change_low"] < one["change"] < one["change_high"]
    assert (answer["decided"], answer["searches"]) == (True, [])
    assert answer["summary"].startswith("CONFIRM ")


NOT_MEASURABLE = {
    "another driver": ({"environment": {"gpu_uuid": "GPU-2", "driver": "580"}}, ""),
    "a dirty tree": ({"ms": 1.05, "commit_facts": {"dirty": True}}, "is a dirty tree, which cannot be measured again"),
}


@pytest.mark.parametrize(("fields", "why"), NOT_MEASURABLE.values(), ids=NOT_MEASURABLE)
def test_some_suspects_are_not_measured(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench, fields: dict[str, Any], why: str
) -> None:
    stored([*map(make, range(6)), make(6, **fields)])
    assert why in cli("gate").stdout
    assert "nothing to confirm" in cli("confirm").stdout and not bench.compared


def test_a_commit_that_git_lacks_is_unresolved_with_the_reason(cli: Cli, slow: FakeBench) -> None:
    slow.unknown = {commit(5)}
    done = cli("confirm")
    assert (done.exit_code, "git knows no commit" in done.stdout) == (3, True)
    result = cli("gate")
    assert (result.exit_code, "1 unresolved" in first_line(result)) == (3, True)
    assert "git knows no commit" in result.stdout


def test_a_full_disk_is_not_the_commits_failure(cli: Cli, slow: FakeBench) -> None:
    slow.not_checked_out = {commit(5)}
    done = cli("confirm")
    assert (done.exit_code, "No space left" in done.output) == (3, True)
    slow.not_checked_out = set()
    slow.plan("same", 0.001)
    assert cli("confirm").exit_code == 0


@pytest.mark.parametrize(
    ("side", "status", "advice"), [("both", "usage", True), ("both", "oom", False), ("head", "error", False)]
)
def test_only_what_fails_on_both_sides_is_tried_again(
    cli: Cli, slow: FakeBench, side: str, status: str, advice: bool
) -> None:
    message = "grouped_gemm has no backend 'triton'"
    slow.plan("failed", message=message, failed_side=side, failed_status=status)
    failed = cli("confirm")
    assert (failed.exit_code, failed.stdout.splitlines()[-1]) == (3, "CONFIRM 1 failed")
    assert message in failed.stdout and ("--plugin" in failed.stdout) is advice
    assert ("1 unconfirmed" if side == "both" else "1 unresolved") in first_line(cli("gate"))
    slow.plan("different", 0.04)
    again = cli("confirm", "--plugin", "my.kernels").stdout.splitlines()[-1]
    assert (again == "CONFIRM 1 different") == (side == "both")


@pytest.mark.parametrize("wrong", ["device", "model"])
def test_another_machine_says_so_and_stores_nothing(cli: Cli, slow: FakeBench, wrong: str) -> None:
    here = {"device": "cuda", "gpu": "NVIDIA B200"}
    slow.plan(*(("raise",) if wrong == "device" else ("same", 0.0)), head_environment=here)
    done = cli("confirm")
    assert (done.exit_code, "1 cannot be measured on this machine" in done.stdout) == (3, True)
    assert "no such device" in done.stderr or "NVIDIA B200" in done.stderr
    assert "1 unconfirmed" in first_line(cli("gate"))


@pytest.mark.parametrize(
    ("protocol", "timing"),
    [("cooled", (None, False)), ("cooled+idle=0.2s", (0.2, False)), ("sustained+cudagraph", (None, True))],
)
def test_the_ab_times_as_the_series_is_timed(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench, protocol: str, timing: tuple[float | None, bool]
) -> None:
    stored(replace(record, cell=replace(record.cell, protocol=protocol)) for record in suspect(make))
    bench.plan("same", 0.0)
    cli("confirm")
    assert [(cell.idle_s, cell.cudagraph) for _, _, cell, _ in bench.compared] == [timing]


def test_another_card_is_compared_on_one(cli: Cli, stored: Stored, make: Any, bench: FakeBench) -> None:
    other = {"environment": {"gpu_uuid": "GPU-2"}}
    stored([*[make(n) for n in range(6)], make(6, ms=1.2, **other)])
    assert cli("gate").exit_code == 4
    bench.plan("same", 0.0)
    assert cli("confirm").exit_code == 0
    assert bench.compared[0][:2] == (commit(5), commit(6))
    result = cli("gate")
    assert (result.exit_code, "A/B on one GPU: no difference" in result.stdout) == (0, True)
    stored([make(7, ms=1.4, environment={"gpu_uuid": "GPU-3"})])
    bench.plan("different", 0.2)
    assert cli("confirm").exit_code == 0
    assert cli("gate").exit_code == 1


def test_commits_are_checked_out_once_and_the_gravest_come_first(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench
) -> None:
    for number, ms in enumerate((1.05, 0.8, 1.2, 1.1)):
        stored(suspect(make, ms=ms, backend=f"b{number}"))
        bench.plan("same", 0.0, backend=f"b{number}")
    assert cli("confirm").exit_code == 0
    assert [cell.backend for _, _, cell, _ in bench.compared] == ["b2", "b3", "b0", "b1"]
    assert len(bench.trees) == 2


def test_a_spent_budget_is_reported(stored: Stored, make: Any, bench: FakeBench, db: Any) -> None:
    for number in range(4):
        stored(suspect(make, ms=1.2 - number / 50, backend=f"b{number}"))
        bench.plan("same", 0.0, backend=f"b{number}")
    with open_store(db, create=False) as store:
        done = confirm(store, Measuring(Path()), budget_s=120, clock=lambda: bench.now)
        assert [one.row.series.backend for one in done.outcomes.values() if one.word == LEFT_OUT] == ["b3"]
        last = "CONFIRM 3 same, 1 left out because the budget is spent; run `groupbench confirm` to continue"
        assert done.text == last and not done.decided
        assert [round(budget) for *_, budget in bench.compared] == [60, 60, 20]
        assert confirm(store, Measuring(Path()), budget_s=120, clock=lambda: bench.now).decided


def test_usage(cli: Cli, stored: Stored, make: Any) -> None:
    stored([make()])
    assert "nothing to confirm" in cli("confirm").stdout
    for bad in (["nope"], ["--budget", "0"], ["--budget", "x"]):
        assert cli("confirm", *bad).exit_code == 2


def test_a_few_suspects_of_a_cause_are_measured_and_the_others_inherit(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench
) -> None:
    """Two causes in one night: each has few A/Bs and one incident, confirmed in the same night."""
    facts = {"author": "Ada", "parents": [commit(5)]}
    stored([make(6, shape="M=1,N=2", backend="quiet", commit_facts=facts)])
    for number in range(8):
        shape = f"G=4,N={64 * (number + 1)},K=64"
        stored(suspect(make, ms=1.2 + 0.001 * number, shape=shape))
        stored(suspect(make, ms=1.05 + 0.0005 * number, shape=shape, backend="other"))
    bench.plan("different", 0.18)
    bench.plan("different", 0.05, backend="other")
    done = cli("confirm")
    assert done.stdout.splitlines()[-1] == "CONFIRM 16 different"
    of_backend = [cell.backend for _, _, cell, _ in bench.compared]
    assert max(of_backend.count(name) for name in ("triton", "other")) <= 5
    assert done.stdout.count("not measured: fits the A/B of series") == 16 - len(of_backend)
    assert "incidents: 2 opened (1, 2)" in cli("gate", "--update").stderr
    lines = cli("incidents").stdout.splitlines()
    assert sorted(line.split(":")[0] for line in lines[::3]) == ["1 confirmed", "2 confirmed"]
    assert "+19.5% to +20.0%" in lines[0], "the most expensive one first"
    assert "A/B of 3 series, 5 more fit" in lines[1] and all("owner Ada" in line for line in lines[1::3])


def test_suspects_beyond_the_comparisons_of_a_cause_are_not_called_beyond_the_budget(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench
) -> None:
    """One A/B finds a difference, and the others none: no suspect is between two measured changes."""
    for number in range(8):
        stored(suspect(make, ms=1.2 + 0.001 * number, shape=f"G=4,N={64 + number},K=64"))
    stored([make(night, shape="M=1,N=2", backend="quiet") for night in range(7)])
    bench.plan("different", 0.18)
    bench.then = lambda: bench.plan("same", 0.0)
    done = cli("confirm")
    left = "left out because 4 A/Bs of a cause are enough; run `groupbench confirm` to continue"
    assert done.stdout.splitlines()[-1].endswith(left)
    assert "budget" not in done.stdout and done.exit_code == 3


def test_suspects_of_a_cause_at_two_pairs_of_commits_share_the_comparisons(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench
) -> None:
    """Half of the series were not measured the night before."""
    for number in range(12):
        shape = f"G=4,N={64 + number},K=64"
        nights = [night for night in range(6) if night < 5 or number % 2]
        quiet = [make(night, ms=wobble(night), shape=shape) for night in nights]
        stored([*quiet, make(6, ms=1.2 + 0.001 * number, shape=shape)])
        stored([make(night, shape=shape, backend="quiet") for night in range(7)])
    bench.plan("different", 0.18)
    done = cli("confirm").stdout
    assert done.splitlines()[-1] == "CONFIRM 12 different"
    assert len(bench.compared) <= MOST_AB
    inherited = [line for line in done.splitlines() if "not measured: fits the A/B of series" in line]
    assert {line.split()[5] for line in inherited} == {f"{commit(n)[:10]}..{commit(6)[:10]}" for n in (4, 5)}
    assert cli("gate").exit_code == 1


def test_a_lone_difference_is_repeated_whatever_pair_or_code_the_others_have(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench
) -> None:
    same = {"loaded": loaded_of({"kernel.py": "1"}, {})}
    stored([*[make(night, ms=wobble(night)) for night in range(5)], make(6, ms=1.21)])
    stored(suspect(make, ms=1.2, shape="M=1,N=2"))
    stored(suspect(make, ms=1.2, shape="M=1,N=3", **same))
    bench.plan("different", 0.18)
    bench.then = lambda: bench.plan("same", 0.0)
    last = cli("confirm").stdout.splitlines()[-1]
    assert last == "CONFIRM 2 same"  # the same files ran in all nights of the third series
    first, second, third = (compared[:3] for compared in bench.compared)
    assert first == third and {first[0], second[0]} == {commit(4), commit(5)}


@pytest.mark.parametrize(
    ("second", "last", "code"),
    [
        ("same", "2 same", 0),
        ("different", "1 different, 1 same", 0),
        ("unknown", "1 different, 1 same", 0),
        ("failed", "1 different, but failed when repeated, 1 same", 3),
    ],
)
def test_each_suspect_counts_once_however_often_it_is_measured(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench, second: str, last: str, code: int
) -> None:
    for number in range(2):
        stored(suspect(make, ms=1.2, shape=f"M=1,N={number + 1}"))
    bench.plan("different", 0.18)

    def then() -> None:  # the second suspect, and after it the repeated first one
        bench.plan(second if len(bench.compared) > 1 else "same", 0.18)
        bench.then = then

    bench.then = then
    done = cli("confirm")
    assert len(bench.compared) == 3
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (code, f"CONFIRM {last}")
    assert cli("gate").exit_code == (0 if second == "same" else 1)


def test_one_ab_shows_that_the_machine_did_not_move_all_cells(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench
) -> None:
    for number in range(12):
        stored(suspect(make, ms=1.2 + 0.001 * number, shape=f"G=4,N={64 + number},K=64"))
    bench.plan("different", 0.18)
    assert cli("confirm").stdout.splitlines()[-1] == "CONFIRM 12 different"
    assert len(bench.compared) <= 1 + MOST_AB


def test_a_slower_machine_takes_one_ab_and_adds_nothing_to_an_incident(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench
) -> None:
    for number in range(8):
        stored(suspect(make, ms=1.04 + 0.001 * number, shape=f"G=4,N={64 + number},K=64"))
    for number in range(4):
        stored(suspect(make, ms=1.04 * 1.2 + 0.001 * number, shape=f"G=4,N={64 + number},K=64", backend="slow"))
    bench.plan("same", 0.0)
    bench.plan("different", math.log(1.2), backend="slow")
    cli("confirm")
    assert [cell.backend for _, _, cell, _ in bench.compared].count("triton") == 1
    cli("gate", "--update")
    (ok,) = {
        row["cause"] for row in json.loads(cli("gate", "--format=json").stdout)["series"] if row["verdict"] == "ok"
    }
    assert ok == "infrastructure"
    changes = [row["change"] for row in json.loads(cli("incidents", "--each", "--format=json").stdout)]
    assert len(changes) == 4 and changes == pytest.approx([0.2] * 4, abs=0.003)


def test_late_suspects_of_a_known_cause_get_only_what_is_left_of_its_abs(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench
) -> None:
    """Unlike shapes, so that not all inherit, make no night measure more for a cause."""
    shapes = [f"G=4,N={64 + number},K=64" for number in range(8)]
    late = [f"G=8,N={64 + number},K=64" for number in range(8)]
    quiet = [make(night, shape=shape, backend="quiet") for night in range(8) for shape in (*shapes, *late)]
    for number, shape in enumerate(shapes):
        stored(suspect(make, ms=1.2 + 0.002 * number, shape=shape))
    stored([one for one in quiet if one.run.id != "run-007"])
    bench.plan("different", math.log(1.2))
    cli("confirm")
    cli("gate", "--update")
    first = len(bench.compared)
    assert 2 <= first <= MOST_AB
    for number, shape in enumerate(shapes):
        stored([make(7, ms=1.2 + 0.002 * number, shape=shape)])
    for number, shape in enumerate(late):
        stored([*suspect(make, ms=1.2, nights=6, shape=shape)[:-1], make(7, ms=1.203 + 0.001 * number, shape=shape)])
    stored([one for one in quiet if one.run.id == "run-007"])
    assert cli("confirm").stdout.splitlines()[-1] == "CONFIRM 8 different"
    assert len(bench.compared) <= MOST_AB
    cli("gate", "--update")
    (incident,) = json.loads(cli("incidents", "--format=json").stdout)
    assert incident["series"] == 16


def test_a_change_after_the_commit_of_a_cause_inherits_nothing(
    cli: Cli, stored: Stored, make: Any, bench: FakeBench
) -> None:
    """An A/B of earlier commits is no evidence about the next one, however equal the sizes are."""
    shapes, late = ([f"G={groups},N={64 + number},K=64" for number in range(8)] for groups in (4, 8))
    stored([make(night, shape=shape, backend="quiet") for night in range(7) for shape in (*shapes, *late)])
    for number in range(8):
        stored(suspect(make, ms=1.2 + 0.002 * number, shape=shapes[number]))
        stored(quiet(make, 7, shape=late[number]))
    bench.plan("different", math.log(1.2))
    assert "fits the A/B" in cli("confirm").stdout
    cli("gate", "--update")
    for number in range(8):
        stored([make(7, ms=1.2 + 0.002 * number, shape=shape) for shape in (shapes[number], late[number])])
        stored([make(7, shape=shape, backend="quiet") for shape in (shapes[number], late[number])])
    bench.plan("same", 0.0)
    assert "fits the A/B" not in cli("confirm").stdout
