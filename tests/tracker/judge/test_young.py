"""Series with too few results for history to judge: an A/B with the commit before decides."""

from __future__ import annotations

import math
from typing import Any

import pytest
from nights import Stored, commit, keep, measured, rows

from groupbench.tracker.facts.record import UNKNOWN_COMMIT, Record
from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.judge.verdicts import Gate, Judged
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.store.engine import open_store

pytestmark = pytest.mark.sqlite


AB = tuple[int, int, str, float]
"""Numbers of two nights, and the verdict and effect of an A/B of their commits."""


def judge(stored: Stored, records: list[Record], ab: AB | None = None) -> Gate:
    """Judge the newest of some nights, of which the first has number 1."""
    database = stored(records)
    if ab is not None:
        keep(database, measured(*(records[night - 1].run.commit.hash for night in ab[:2]), *ab[2:]))
    with open_store(database, create=False) as store, store.read() as session:
        return judge_run(session, find_run(session, None))


def of_history(make: Any, stored: Stored, levels: list[float], ab: AB | None = None, **fields: Any) -> Gate:
    return judge(stored, [make(night, ms, **fields) for night, ms in enumerate(levels, 1)], ab)


def after_one(make: Any, stored: Stored, ms: float = 1.5, *ab: Any) -> Judged:
    """Return the row of a second commit, perhaps after an A/B of both."""
    (row,) = of_history(make, stored, [1, ms], (1, 2, *ab) if ab else None).rows
    return row


@pytest.mark.parametrize(
    ("effect", "verdict", "expected"),
    [(math.log(1.5), "different", "regressed"), (-0.4, "different", "improved"), (0.0, "same", "ok")],
)
def test_the_comparison_is_the_verdict(effect: float, verdict: str, expected: str, make: Any, stored: Any) -> None:
    row = after_one(make, stored, 1.5 if effect >= 0 else 0.7, verdict, effect)
    assert (row.verdict, row.ab_base) == (expected, None)
    if expected == "regressed":
        assert row.change == pytest.approx(0.5, abs=2e-3) and row.cause == "code"
        assert row.span is not None and row.span.head.commit == commit(2)


@pytest.mark.parametrize("verdict", ["unknown", "failed"])
def test_a_comparison_that_did_not_decide_leaves_it_open(verdict: str, make: Any, stored: Any) -> None:
    row = after_one(make, stored, 1.5, verdict, 0.2)
    assert row.verdict == "unresolved" and row.ab_base is not None
    assert row.note is not None and row.note.startswith(f"A/B {verdict}")
    assert row.change == pytest.approx(0.5, abs=2e-3)


def test_the_numbers_of_a_row_are_of_its_points(make: Any, stored: Any) -> None:
    """The A/B of an earlier night is in the note, with its commits, and not mixed with the newest point."""
    row = after_one(make, stored, 1.5, "different", math.log(1.8))
    assert row.point is not None and row.verdict == "regressed"
    assert row.shown.before == pytest.approx(1.0, rel=2e-3)
    assert row.shown.now == pytest.approx(row.point.median_ms)
    assert row.note is not None and f"A/B of {commit(1)[:10]}..{commit(2)[:10]}: +80.0%" in row.note


def test_an_accepted_change_stays_accepted_although_an_ab_found_it(make: Any, stored: Any, cli: Any) -> None:
    keep(stored([make(1), make(2, 1.6)]), measured(commit(1), commit(2), "different", math.log(1.5)))
    assert cli("gate", "--update").exit_code == 1
    cli("incidents", "expect", "1", "--reason", "bounds are checked now")
    (row,) = rows(cli)
    assert (cli("gate").exit_code, row["verdict"], row["incident"]) == (0, "ok", 1)


QUIET = {
    "the level is unchanged": [(1, {}), (2, {"ms": 1.001})],
    "the same commit again": [(1, {}), (2, {"ms": 1.5, "commit": commit(1)})],
    "a canary": [(1, {"operator": "canary"}), (2, {"ms": 1.5, "operator": "canary"})],
    "a first result": [(1, {})],
}


@pytest.mark.parametrize("nights", QUIET.values(), ids=QUIET)
def test_some_series_are_not_compared(nights: list[tuple[int, dict[str, Any]]], make: Any, stored: Any) -> None:
    assert judge(stored, [make(night, **fields) for night, fields in nights]).rows[0].ab_base is None


@pytest.mark.parametrize(
    "fields", [{"commit": UNKNOWN_COMMIT}, {"commit_facts": {"dirty": True}}], ids=["unknown", "dirty"]
)
def test_a_large_move_without_a_commit_to_compare_is_shown(fields: dict[str, Any], make: Any, stored: Any) -> None:
    (row,) = judge(stored, [make(1), make(2, 1.5, **fields)]).rows
    assert row.verdict == "unconfirmed" and row.ab_base is None
    assert row.change == pytest.approx(0.5, abs=2e-3)
    assert row.note is not None and "cannot be measured again" in row.note


def test_a_commit_in_between_that_was_measured_twice_is_not_a_base(make: Any, stored: Any) -> None:
    """The same commit measured again does not hide the commit before."""
    (row,) = judge(stored, [make(1), make(2, 1.5), make(3, 1.5, commit=commit(2))]).rows
    assert row.ab_base is not None and row.ab_base.commit == commit(1)


STEPS = {
    "the second result": ([1, 1.5], 2, 1),
    "the third result": ([1, 1.001, 2], 3, 1),
    "after one result": ([1, 2, 2.02], 2, 2),
    "four results ago": ([1, 1.001, 2, 1.95, 1.98, 2.02], 3, 4),
}


@pytest.mark.parametrize(("levels", "head", "since"), STEPS.values(), ids=STEPS)
def test_a_large_step_inside_a_short_history_is_a_suspect(
    levels: list[float], head: int, since: int, make: Any, stored: Any
) -> None:
    judged = of_history(make, stored, levels)
    (row,) = judged.rows
    assert judged.exit_code == 3 and row.verdict == ("unconfirmed" if since == 1 else "suspect")
    assert row.change == pytest.approx(levels[-1] - 1, abs=0.05) and row.since == since
    assert row.span is not None and row.span.head.commit == commit(head)
    assert row.ab_base is not None and row.ab_base.commit == commit(head - 1)


CALM = {
    "back on the level before": [1, 1.001, 2, 2.02, 1],
    "one outlier": [1, 1.001, 2, 1.001, 1],
}


@pytest.mark.parametrize("levels", CALM.values(), ids=CALM)
def test_a_short_history_without_a_clear_step_has_no_suspect(levels: list[float], make: Any, stored: Any) -> None:
    assert not of_history(make, stored, levels).suspects


LOST = {
    "noise of a CPU": ([0.61, 0.78, 0.7, 0.17, 0.21, 0.16, 0.66], "cpu"),
    "a GPU": ([1, 1.001, 1.002, 0.9, 0.901, 0.9, 1.001], "gpu"),
    "two nights": ([1, 1.001, 0.9, 0.901, 1.001], "gpu"),
}


@pytest.mark.parametrize(("levels", "timing"), LOST.values(), ids=LOST)
def test_a_suspected_improvement_that_is_lost_is_never_ok(
    levels: list[float], timing: str, make: Any, stored: Any
) -> None:
    """An A/B with the newest of the faster commits decides; history alone cannot."""
    judged = of_history(make, stored, levels, timing=timing)
    (row,) = judged.rows
    assert (row.verdict, judged.word, judged.exit_code) == ("undecided", "undecided", 0)
    assert row.change == pytest.approx(levels[-1] / levels[-2] - 1, rel=0.3)
    assert row.ab_base is not None and row.ab_base.commit == commit(len(levels) - 1)
    ab = len(levels) - 1, len(levels), "different", math.log(levels[-1] / levels[-2])
    decided = of_history(make, stored, levels, ab, timing=timing)
    assert (decided.rows[0].verdict, decided.exit_code) == ("regressed", 1)


@pytest.mark.parametrize(("ms", "verdicts"), [(0.8, ["improved"]), (1, ["undecided"])])
def test_an_improvement_is_quoted_as_long_as_tonight_shows_it(
    ms: float, verdicts: list[str], make: Any, stored: Any
) -> None:
    """The last commit may have undone it, whatever an earlier A/B found."""
    levels, ab = [1, 1.05, 0.95, 0.75, 0.78, 0.9, ms], (3, 4, "different", -0.25)
    rows = of_history(make, stored, levels, ab, timing="cpu").rows
    assert [row.verdict for row in rows] == verdicts
    assert all((row.compared is not None) == (row.verdict == "improved") for row in rows)


def test_a_series_that_could_hide_twice_the_latency_is_not_ok(make: Any, stored: Any) -> None:
    levels = [1, 3.1, 0.9, 2.8, 1.1, 3, 1.4]
    judged = of_history(make, stored, levels, timing="cpu")
    assert (judged.rows[0].rule, judged.word) == ("too wide", "undecided")
    assert "history cannot tell whether 1 series got slower (twice the latency could hide)" in judged.summary
    same = of_history(make, stored, levels, (3, 7, "same", 0.0), timing="cpu")
    assert (same.rows[0].verdict, same.word) == ("ok", "ok")


@pytest.mark.parametrize(
    ("levels", "ab", "verdict"),
    [
        ([1, 1.01, 1.06, 1.05, 1.05, 1.06], (2, 3, "different", 0.05), "regressed"),
        ([1.06, 1.05, 1, 1.01, 1, 1.01], (2, 3, "different", -0.05), "improved"),
        ([1, 1.01, 1.06, 1.05, 1, 1, 1.01], (2, 3, "different", 0.05), "ok"),
        ([1, 1.01, 2, 2.01, 2, 2.02], (2, 5, "same", 0.0), "ok"),
        ([1, 1, *[1.06] * 21], (2, 3, "different", 0.05), "ok"),
    ],
    ids=["slower", "faster", "back on the level before", "the same", "20 results ago"],
)
def test_a_stored_comparison_decides_later_runs(
    levels: list[float], ab: tuple[int, int, str, float], verdict: str, make: Any, stored: Any
) -> None:
    judged = of_history(make, stored, levels, ab)
    (row,) = judged.rows
    assert row.verdict == verdict
    if row.verdict.changed:
        assert row.span is not None and row.span.head.commit == commit(3)
        assert row.since == 4 and row.note is not None and "A/B of" in row.note


@pytest.mark.parametrize(
    ("levels", "head", "since"),
    [([1, 1.3, 2.6], 3, 1), ([1, 1.3, 1.31, 2.6], 4, 1), ([1, 1.01, 1.3, 2.6, 2.62, 2.59], 4, 3)],
    ids=["at once", "soon", "three results ago"],
)
def test_a_step_after_one_that_an_ab_found_is_a_suspect_of_its_own(
    levels: list[float], head: int, since: int, make: Any, stored: Any
) -> None:
    first = 3 if levels[1] == 1.01 else 2
    newest, left = of_history(make, stored, levels, (first - 1, first, "different", math.log(1.3))).rows
    if newest.verdict == "regressed":
        newest, left = left, newest
    assert newest.verdict == ("unconfirmed" if since == 1 else "suspect") and newest.since == since
    assert newest.change == pytest.approx(1.0, abs=0.05)
    assert newest.ab_base is not None and newest.ab_base.commit == commit(head - 1)
    assert left.verdict == "regressed" and left.change == pytest.approx(0.3, abs=0.02)
    assert left.span is not None and left.span.head.commit == commit(first)


def test_an_acknowledged_step_does_not_hide_a_later_one(make: Any, stored: Any, cli: Any) -> None:
    keep(stored([make(1), make(2, 1.3)]), measured(commit(1), commit(2), "different", math.log(1.3)))
    assert cli("gate", "--update").exit_code == 1
    cli("incidents", "ack", "1", "--reason", "known")
    stored([make(3, 2.6)])
    assert (cli("gate").exit_code, sorted(row["verdict"] for row in rows(cli))) == (3, ["regressed", "unconfirmed"])
    cli("incidents", "expect", "1", "--reason", "accepted")
    assert (cli("gate").exit_code, [row["verdict"] for row in rows(cli)]) == (3, ["unconfirmed"])


def test_a_row_says_when_its_earlier_level_was_not_measured(make: Any, stored: Any) -> None:
    """The results and the A/B point in opposite directions, so the row shows the A/B's effect."""
    row = after_one(make, stored, 0.5, "different", math.log(1.3))
    assert row.verdict == "regressed" and row.change == pytest.approx(0.3)
    assert row.note is not None and "before is computed from the A/B; the results show -50.0%" in row.note


def test_an_old_step_does_not_hide_a_much_larger_one(make: Any, stored: Any) -> None:
    (row,) = of_history(make, stored, [8.4, 25.8, 31.5, 25.5, 215.7]).rows
    assert row.verdict in ("suspect", "unconfirmed") and row.ab_base is not None
