"""Series with a step that an A/B measured: it must not hide a later one, and a reverted one must not stay."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
from cases import rarely
from nights import Stored, measured

from groupbench.tracker.facts.loaded import loaded_of
from groupbench.tracker.judge import incident_moves, members
from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.engine import open_store

pytestmark = pytest.mark.sqlite

Night = tuple[list[Judged], set[int]]  # rows of the night, and the nights whose regressions have an open alert


def play(
    make: Any,
    stored: Callable[..., Any],
    levels: Sequence[float],
    noise: float,
    timing: str,
    outliers: Mapping[int, float] = MappingProxyType({}),
    codes: str = "",
    unasked: int = 0,
) -> list[Night]:
    """Store and judge nights one by one, as the nightly job does: A/Bs of all suspects, then an update of the alerts.

    levels    true latency of each night's commit, which each A/B measures exactly
    outliers  latency that a night measures instead
    codes     the code that each night's process loaded, by letter; unknown without it
    unasked   night whose A/Bs the budget does not reach
    """
    rng = np.random.default_rng(len(levels))
    truth: dict[str | None, float] = {}
    nights: list[Night] = []
    for number, level in enumerate(levels, 1):
        record = make(number, outliers.get(number, level) * math.exp(abs(rng.normal(0, noise))), timing=timing)
        if codes:
            loaded = loaded_of({"kernel.py": codes[number - 1]}, {})
            record = msgspec.structs.replace(record, loaded=loaded)
        truth[record.run.commit.hash] = level
        with open_store(stored([record]), create=False) as store, store.write() as session:
            run = find_run(session, None)
            gate = judge_run(session, run)
            suspects = () if number == unasked else gate.suspects
            for row in suspects:
                base, head = row.ab_base, row.span.head if row.span else run
                assert base is not None
                effect = math.log(truth[head.commit] / truth[base.commit])
                verdict = "different" if effect else "same"
                comparisons.store(session, row.series.pk, measured(base.commit, head.commit, verdict, effect, 0.002))
            if suspects:
                gate = judge_run(session, run)
            incident_moves.update(session, gate)
            stored_alerts = members.find(session, series={row.series.pk for row in gate.rows})
            nights.append((list(gate.rows), {night(one.run) for one in stored_alerts if one.state in members.OPEN}))
    return nights


def night(run: Any) -> int:
    return int(run.commit[:3], 16)


def changes(nights: list[Night], verdict: str = "regressed") -> list[dict[int, float]]:
    """Return for each night the changes of rows with a verdict, by the night whose commit they name."""
    return [
        {night(row.span.head): row.change or 0.0 for row in rows if row.span and row.verdict == verdict}
        for rows, _ in nights
    ]


QUIET, BUSY, CPU = (0.002, "gpu"), (0.02, "cpu"), (0.004, "cpu")


LAST = 99
HISTORIES: dict[str, tuple[list[float], tuple[float, str], dict[int, int]]] = {
    "reverted, on a CPU": ([1, 1, 2.5, 1, 1, 1.5, 1.5], BUSY, {3: 4, 6: LAST}),
    "reverted": ([1, 1, 1.1, 1, 1, 1.05], QUIET, {3: 4, 6: LAST}),
    "reverted at once": ([1, 1.1, 1, 1.05], QUIET, {2: 3, 4: LAST}),
    "reverted later": ([1, 1, 1, 1, 1.1, 1.1, 1, 1, 1, 1, 1, 1.04], QUIET, {5: 7, 12: LAST}),
    "reverted before ten results": ([1, 1, 1.1, *[1] * 8, 1.05], QUIET, {3: 4, 12: LAST}),
    "reverted in a long history": ([*[1] * 12, 1.1, 1, 1, 1.05], QUIET, {13: 14, 16: LAST}),
    "open, on a CPU": ([1, 1, *[2.5] * 4, 3.7, 3.7], BUSY, {3: LAST, 7: LAST}),
    "open for ten results": ([1, 1, *[1.5] * 8, 1.6], QUIET, {3: LAST, 11: LAST}),
    "open at once": ([1, 1.5, 1.6], QUIET, {2: LAST, 3: LAST}),
    "reverted in parts": ([0.3, 0.3, 0.5, 3.0, 0.36, 0.3, 0.3, 0.5, 0.5, 0.5], CPU, {3: 6, 4: 5, 8: LAST}),
    "night after night": ([*[0.3] * 4, 0.4, 0.5, 0.6, 0.4, 0.3, 0.4, 0.4], CPU, {5: 9, 6: 8, 7: 8, 10: LAST}),
    "an improvement that is lost": ([1, 1, 0.7, 1, 1], QUIET, {4: LAST}),  # only slowdowns that are over leave history
}


@pytest.mark.parametrize(("levels", "noise", "slowdowns"), HISTORIES.values(), ids=HISTORIES)
def test_no_slowdown_hides_the_next(
    levels: list[float], noise: tuple[float, str], slowdowns: dict[int, int], make: Any, stored: Any
) -> None:
    """`slowdowns` maps the night of each to the one that ends it. It is measured from the night before."""
    nights = play(make, stored, levels, *noise)
    for number, (reported, (_, opened)) in enumerate(zip(changes(nights), nights, strict=True), 1):
        assert set(reported) == opened == {one for one, end in slowdowns.items() if one <= number < end}, number
        if number in slowdowns:
            assert reported[number] == pytest.approx(levels[number - 1] / levels[number - 2] - 1, rel=0.2)


@pytest.mark.parametrize("seed", [2, *rarely(5, *range(100, 120))])
@pytest.mark.parametrize(("menu", "noise"), [([1, 1.35, 1.8, 2.5], (0.005, "cpu")), ([1, 1.05, 1.12, 1.2], QUIET)])
def test_nights_that_come_and_go_name_each_slowdown(
    menu: list[float], noise: tuple[float, str], seed: int, make: Any, stored: Any
) -> None:
    """No commit is named that did not slow the kernel down; most slowdowns are named on their first night.

    The others return to the level of an earlier slowdown that was taken back in part, whose alert is still open.
    """
    rng = np.random.default_rng(seed)
    levels, level = [1.0] * 4, 0
    for move in rng.random(10):
        level = level if move < 0.45 else int(rng.integers(0, 4)) if move < 0.75 else 0
        levels.append(menu[level])
    nights = play(make, stored, levels, *noise)
    for number, named in enumerate(changes(nights), 1):
        assert all(levels[one - 1] > levels[one - 2] for one in named), (number, levels)
        if number > 1 and levels[number - 1] > levels[number - 2]:
            assert number in named or nights[number - 2][1], (number, levels)


def test_a_row_of_an_open_alert_shows_the_newest_result(make: Any, stored: Any) -> None:
    """Half of a slowdown was taken back: the row shows the rest, without an interval of the whole slowdown."""
    nights = play(make, stored, [1, 1, 2.5, *[1.2] * 14], *BUSY)
    for rows, opened in nights[3:]:
        (row,) = [row for row in rows if row.verdict == "regressed"]
        assert opened == {3} and row.point is not None
        assert row.shown.now == pytest.approx(row.point.median_ms)
        assert row.change == pytest.approx(0.2, abs=0.05)


def test_a_fast_outlier_does_not_end_a_slowdown(make: Any, stored: Any) -> None:
    """The A/B of the outlier's commit and the next finds no difference, so the slowdown was never over."""
    nights = play(make, stored, [1, 1, *[2.5] * 4], *BUSY, outliers={4: 1.0})
    assert [set(one) for one in changes(nights)][4:] == [{3}, {3}]
    assert [opened for _, opened in nights][4:] == [{3}, {3}]


@pytest.mark.parametrize("tonight", [1.24, 1.5, 1.9])
@pytest.mark.parametrize(("codes", "over"), [("aaaaba", True), ("aaaabc", False), ("", False)])
def test_a_slowdown_is_over_as_soon_as_its_code_is(
    codes: str, over: bool, tonight: float, make: Any, stored: Any
) -> None:
    """The latency of the revert's night alone does not tell, and it has no A/B."""
    nights = play(make, stored, [1, 1, 1, 1, 1.5, 1], *BUSY, outliers={6: tonight}, codes=codes, unasked=6)
    assert [set(one) for one in changes(nights)][4:] == [{5}, set() if over else {5}]
    assert nights[-1][1] == (set() if over else {5})


@pytest.mark.parametrize("seed", [1, *rarely(5, *range(100, 120))])
def test_no_commit_is_blamed_once_its_code_has_gone(seed: int, make: Any, stored: Any) -> None:
    """Loaded nights, and nights without A/Bs, may hide a slowdown, but they blame no commit."""
    rng = np.random.default_rng(seed)
    codes = "aaaaa" + "".join(rng.choice(list("aab"), 10))
    levels = [1.0 if code == "a" else 1.5 for code in codes]
    loaded = {night: level * rng.choice([1.3, 2.0]) for night, level in enumerate(levels, 1) if rng.random() < 0.3}
    nights = play(make, stored, levels, *BUSY, outliers=loaded, codes=codes, unasked=int(rng.integers(5, 15)))
    for number, named in enumerate(changes(nights), 1):
        assert not (codes[number - 1] == "a" and (named or nights[number - 1][1])), (number, codes, loaded)


def test_an_ab_of_two_commits_after_a_hidden_step_does_not_clear_it(make: Any, stored: Any) -> None:
    """Both commits are slow, so they do not differ; the next A/B is with a commit that is on the level for certain."""
    hidden = {2: 1.2, 3: 0.9, 4: 0.9, 5: 1.25, 6: 0.8, 7: 1.1, 8: 0.85, 9: 1.15, 10: 1.7, 11: 1.7}
    nights = play(make, stored, [*[1] * 8, *[1.45] * 3], *BUSY, outliers=hidden)
    (row,) = nights[9][0]
    assert row.verdict != "regressed" and "does not tell" in (row.note or "")
    (row,) = nights[10][0]
    assert row.verdict == "regressed" and row.span is not None and row.span.base is not None
    assert night(row.span.base) < 9 <= night(row.span.head)


@pytest.mark.parametrize("level", [0.1, 0.125, 0.16])
@pytest.mark.parametrize("faster", [0.55, 0.8])
def test_faster_than_before_the_slowdown_is_no_slowdown(make: Any, stored: Any, level: float, faster: float) -> None:
    """The revert's night is too noisy to end the slowdown, and the next commit is faster than the one before it."""
    nightly = dict(enumerate([0.151, 0.110, 0.168, 0.224, 0.173, 0.100, 0.407], 1))
    levels = [level] * 3 + [1.8 * level, level, faster * level, 4 * faster * level]
    nights = play(make, stored, levels, 0.0, "cpu", nightly)
    assert [set(reported) for reported in changes(nights)[5:]] == [set(), {7}]
    assert [opened for _, opened in nights[5:]] == [set(), {7}]


@pytest.mark.parametrize("verdict", ["same", "different"])
@pytest.mark.parametrize("further", [False, True])
def test_an_ab_decides_about_a_step_that_history_alone_found(
    make: Any, stored: Callable[..., Any], further: bool, verdict: str
) -> None:
    """The A/B ends before a further change, which it would measure too."""
    rng = np.random.default_rng(2)
    levels = [1.0] * 6 + [1.05] * 4 + [1.3] * further
    records = [make(at, level * math.exp(rng.normal(0, 1e-3))) for at, level in enumerate(levels, 1)]
    hashes = [record.run.commit.hash for record in records]
    with open_store(stored(records), create=False) as store, store.write() as session:
        run = find_run(session, None)
        first = judge_run(session, run).suspects[0]
        assert first.rule == "three nights" and first.ab_base is not None and first.ab_head is not None
        assert (first.ab_base.commit, first.ab_head.commit) == (hashes[5], hashes[9])
        effect = math.log(1.05) if verdict == "different" else 0.0
        compared = measured(hashes[5], hashes[9], verdict, effect, 0.002, at=datetime(2026, 1, 20, tzinfo=UTC))
        comparisons.store(session, first.series.pk, compared)
        gate = judge_run(session, run)
    rules = [row.rule for row in gate.rows if row.span and row.span.head.commit == hashes[6]]
    assert rules == (["A/B worse"] if verdict == "different" else [])
    assert not any(row.ab_base and row.ab_base.commit == hashes[5] for row in gate.suspects)


def test_an_ab_across_other_commits_does_not_blame_one_that_changed_no_file(make: Any, stored: Stored) -> None:
    """Noise hid the slow commit for two nights; the A/B began before it, and the files are the same since."""
    old, new = (loaded_of({"kern.py": name}, {}) for name in ("one", "two"))
    levels = [1.0, 1.01, 0.99, 1.0, 1.01, 1.0, 1.02, 1.9]
    records = [make(at, level, loaded=old if at < 6 else new) for at, level in enumerate(levels, 1)]
    hashes = [record.run.commit.hash for record in records]
    with open_store(stored(records), create=False) as store, store.write() as session:
        run = find_run(session, None)
        (row,) = judge_run(session, run).suspects
        compared = measured(
            hashes[4], hashes[7], "different", math.log(1.9), 0.01, at=datetime(2026, 1, 20, tzinfo=UTC)
        )
        comparisons.store(session, row.series.pk, compared)
        (row,) = [row for row in judge_run(session, run).rows if row.compared is not None]
    assert row.cause == "code" and row.span is not None and row.span.base is not None
    assert (row.span.base.commit, row.span.head.commit) == (hashes[4], hashes[7])


NOISY_CPU = (0.06, "cpu")


def test_a_step_that_noise_hid_is_found_after_a_commit_that_changed_no_file(make: Any, stored: Any) -> None:
    """The A/B has a base of other code, and the row names the commit that changed it, not the newest."""
    nights = play(make, stored, [1] * 8 + [1.5] * 3, *NOISY_CPU, outliers={9: 1.14}, codes="aaaabbbbccc", unasked=9)
    assert changes(nights)[8:] == [{}, {9: pytest.approx(0.5, abs=0.2)}, {9: pytest.approx(0.5, abs=0.2)}]


@pytest.mark.parametrize("level", [1.0, 1.8])
def test_a_slow_night_of_the_same_files_is_not_blamed_on_its_commit(level: float, make: Any, stored: Any) -> None:
    """Nothing that ran has changed: an A/B with older code finds that, and history alone names the surroundings."""
    nights = play(make, stored, [1] * 6 + [level] * 4, *BUSY, outliers={10: 1.8}, codes="aaaabbbbbb", unasked=10)
    (row,) = nights[9][0]
    if level > 1:
        assert row.verdict == "regressed"
    else:
        assert (row.rule, row.cause, row.verdict.exit) == ("outside", "infrastructure", 3)
        assert row.ab_base is not None and row.ab_base.commit != row.span.base.commit


@pytest.mark.parametrize(("n", "rule"), [(3, "too early"), (12, "too wide")])
def test_an_undecided_row_says_why(n: int, rule: str, make: Any, stored: Any) -> None:
    noise, value = (0.02, 1.3) if rule == "too early" else (0.9, 1.0)
    rows, _ = play(make, stored, [1] * n + [value], noise, "cpu", unasked=n + 1)[-1]
    assert [(row.verdict, row.rule) for row in rows] == [("undecided", rule)]
    assert rows[0].note is not None and ("too few" if rule == "too early" else "vary too much") in rows[0].note


@pytest.mark.parametrize(("before", "known"), [([1.0, 1.002], True), ([1.5, 1.5], False)], ids=["reverted", "faster"])
def test_an_improvement_to_an_earlier_level_takes_a_slowdown_back(
    before: list[float], known: bool, make: Any, stored: Stored
) -> None:
    """A backfill measured too few commits before the slowdown for a level of their own."""
    records = [make(at, level) for at, level in enumerate([*before, 1.5, 1.502, 1.5, 1.501, 1.0], 1)]
    base, head = (record.run.commit.hash for record in records[-2:])
    with open_store(stored(records), create=False) as store, store.write() as session:
        run = find_run(session, None)
        (row,) = judge_run(session, run).rows
        comparisons.store(session, row.series.pk, measured(base, head, "different", math.log(1 / 1.5), 0.002))
        (row,) = judge_run(session, run).rows
    assert row.verdict == "improved"
    assert (f"back on the level until 2026-01-03, before {'003' + 'c' * 7}" in (row.note or "")) is known
