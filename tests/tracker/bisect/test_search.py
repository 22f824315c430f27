"""The search, with simulated comparisons at the error rates of the A/B, on histories with merges and skips."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.bisect.hunt import BisectCommit, BisectResult, History, Settings, hunt
from groupbench.tracker.bisect.search import (
    AbFinding,
    Change,
    ComparisonRequest,
    GaveUp,
    Line,
    Posterior,
    Rates,
    Trace,
    pooled,
    search,
)
from groupbench.tracker.bisect.search import side as side_of

EXACT = Rates(1e-4, 1e-4)
Compare = Callable[[ComparisonRequest], AbFinding]


def finding(effect: float, verdict: str = "different", half: float = 0.002, **more: object) -> AbFinding:
    return AbFinding(verdict, effect, effect - half, effect + half, **more)  # type: ignore[arg-type]


def finish(generator, compare: Compare, most: int = 500):  # type: ignore[no-untyped-def]
    """Run a search. Returns (its result, the questions that it asked)."""
    questions: list[ComparisonRequest] = []
    try:
        question = next(generator)
        while True:
            questions.append(question)
            assert len(questions) <= most, "it does not end"
            question = generator.send(compare(question))
    except StopIteration as done:
        return done.value, questions


class World:
    """A history with the effect of each commit on the log of the time, and an A/B with error rates."""

    def __init__(
        self,
        parents: dict[str, tuple[str, ...]],  # oldest first; the first is GOOD, the last BAD
        planted: dict[str, float],
        rates: Rates = EXACT,
        seed: int = 0,
        broken: frozenset[str] = frozenset(),
        unknown: float = 0.0,
        keys: dict[str, str] | None = None,
        good: str | None = None,
        base: str | None = None,
    ) -> None:
        self.parents, self.planted, self.rates, self.broken, self.unknown = parents, planted, rates, broken, unknown
        self.random = random.Random(seed)
        names = list(parents)
        self.good, self.bad = good or names[0], names[-1]
        commits = {name: BisectCommit(name, before, (keys or {}).get(name, name)) for name, before in parents.items()}
        base = base or self.good
        inside = frozenset(self.ancestors(self.bad) - self.ancestors(base))
        self.history = History(commits, self.good, self.bad, base, inside)

    def ancestors(self, name: str) -> set[str]:
        reached: set[str] = set()
        left = [name]
        while left:
            each = left.pop()
            if each not in reached:
                reached.add(each)
                left.extend(self.parents[each])
        return reached

    def level(self, name: str) -> float:
        return sum(self.planted.get(each, 0.0) for each in self.ancestors(name))

    def compare(self, question: ComparisonRequest) -> AbFinding:
        for name, at in ((question.base, "base"), (question.head, "head")):
            if name in self.broken:
                return AbFinding("failed", at=at, message="does not build", seconds=1.0)
        effect = self.level(question.head) - self.level(question.base)
        if self.random.random() < self.unknown:
            return AbFinding("unknown", effect, None, None, seconds=1.0)
        differs = abs(effect) > 1e-9
        wrong = self.random.random() < (self.rates.missed if differs else self.rates.false_different)
        if wrong:
            effect = 0.0 if differs else self.random.choice((-0.02, 0.02))
        measured = effect + self.random.gauss(0, 0.0003)
        return finding(measured, "different" if differs != wrong else "same", seconds=1.0)

    def hunt(
        self, compare: Compare | None = None, **settings: object
    ) -> tuple[BisectResult, list[ComparisonRequest], Trace]:
        trace = Trace()
        chosen = replace(Settings(rates=self.rates), **settings)  # type: ignore[arg-type]
        result, questions = finish(hunt(self.history, chosen, trace), compare or self.compare)
        return result, questions, trace


def straight(n: int) -> dict[str, tuple[str, ...]]:
    return {f"c{i}": (f"c{i - 1}",) if i else () for i in range(n)}


@pytest.mark.parametrize("where", range(1, 32))
def test_each_place_of_a_history_of_32_is_named_in_5_steps(where: int) -> None:
    result, _, trace = World(straight(32), {f"c{where}": 0.02}).hunt()
    assert result.outcome == "found"
    (culprit,) = result.culprits
    assert (culprit.commits, culprit.parent) == ((f"c{where}",), f"c{where - 1}")
    assert (trace.comparisons["ends"], trace.comparisons["confirm"]) == (1, 1) and trace.comparisons["step"] <= 5
    assert culprit.finding.effect == pytest.approx(0.02, abs=0.002)
    assert result.unexplained is None


def test_the_pair_is_measured_apart_from_what_found_it() -> None:
    result, questions, _ = World(straight(2), {"c1": 0.02}).hunt()
    assert [(q.base, q.head, q.why) for q in questions] == [("c0", "c1", "ends"), ("c0", "c1", "confirm")]
    assert result.culprits[0].commits == ("c1",)


def test_no_regression_is_an_answer() -> None:
    result, questions, _ = World(straight(32), {}).hunt()
    assert (result.outcome, len(questions)) == ("none", 1) and "no regression" in result.message
    result, questions, _ = World(straight(4), {}, keys={f"c{i}": "k" for i in range(4)}).hunt()
    assert (result.outcome, questions) == ("none", []), "equal trees are not measured"


def test_an_improvement_is_found_too() -> None:
    result, _, _ = World(straight(16), {"c5": -0.03}).hunt()
    assert result.outcome == "found" and result.culprits[0].commits == ("c5",)


def test_an_improvement_on_the_way_is_not_blamed() -> None:
    result, _, _ = World(straight(16), {"c7": -0.02, "c11": 0.05}).hunt()
    assert [c.commits for c in result.culprits] == [("c11",)]


def test_commits_that_do_not_matter_share_a_measurement() -> None:
    keys = {f"c{i}": f"k{i // 8}" for i in range(32)}
    result, questions, trace = World(straight(32), {"c16": 0.02}, keys=keys).hunt()
    assert result.culprits[0].commits == ("c16",) and result.culprits[0].parent == "c15"
    assert trace.comparisons["step"] <= 2
    assert all(q.head in ("c31", "c8", "c16", "c24") for q in questions)


def test_a_tree_that_comes_back_is_known() -> None:
    keys = {f"c{i}": f"k{i}" for i in range(6)}
    keys["c2"] = keys["c0"]  # c2 takes c1 back
    result, questions, _ = World(straight(6), {"c3": 0.02}, keys=keys).hunt()
    assert result.culprits[0].commits == ("c3",)
    assert not any(q.head == "c2" for q in questions if q.why == "step")


@pytest.mark.parametrize("where", [1, 5, 6, 9, 15])
@pytest.mark.parametrize("broken", [{7}, {3, 4}, {6, 7, 8}])
def test_commits_that_do_not_build_are_gone_round(where: int, broken: set[int]) -> None:
    world = World(straight(16), {f"c{where}": 0.02}, broken=frozenset(f"c{i}" for i in broken))
    result, _, trace = world.hunt()
    (culprit,) = result.culprits
    assert f"c{where}" in culprit.commits
    if where in broken or where - 1 in broken:
        assert result.outcome == "narrowed"
        assert all(int(name[1:]) in broken or int(name[1:]) - 1 in broken for name in culprit.commits)
    else:
        assert result.outcome == "found"
    assert set(trace.skipped) <= {f"c{i}" for i in broken}


@pytest.mark.parametrize("at", ["base", "head", "both", ""])
@pytest.mark.parametrize("why", ["ends", "step"])
def test_a_commit_that_fails_once_is_not_skipped(why: str, at: str) -> None:
    world = World(straight(16), {"c6": 0.02})
    failed: list[ComparisonRequest] = []

    def compare(question: ComparisonRequest) -> AbFinding:
        if question.why == why and question not in failed:
            failed.append(question)
            return AbFinding("failed", at=at, message="out of memory")
        return world.compare(question)

    result, questions, trace = world.hunt(compare)
    assert (result.outcome, trace.skipped) == ("found", {}) and result.culprits[0].commits == ("c6",)
    assert all(questions.count(question) >= 2 for question in failed) and failed
    assert sum(trace.comparisons.values()) == len(questions)


def test_a_commit_that_fails_twice_is_skipped() -> None:
    world = World(straight(16), {"c6": 0.02}, broken=frozenset({"c8"}))
    result, questions, trace = world.hunt()
    assert result.culprits[0].commits == ("c6",)
    assert trace.skipped == {"c8": "does not build"}
    assert sum(question.head == "c8" for question in questions) == 2


def test_a_long_broken_stretch_costs_few_steps() -> None:
    broken = frozenset(f"c{i}" for i in range(20, 45))
    for where in ("c3", "c60"):
        result, _, trace = World(straight(64), {where: 0.02}, broken=broken).hunt()
        assert result.culprits[0].commits == (where,)
        assert len(trace.skipped) <= 6


def test_a_pair_that_differs_the_other_way_does_not_confirm() -> None:
    world = World(straight(2), {"c1": 0.02})
    result, _, _ = world.hunt(lambda question: finding(-0.02) if question.why == "confirm" else world.compare(question))
    assert result.outcome != "found" and not result.culprits


def test_the_smallest_change_of_the_comparisons_is_that_of_the_search() -> None:
    """A second change of 0.7 % counts, since each comparison shows changes from 0.3 % on."""
    world = World(straight(32), {"c5": 0.007, "c20": 0.009})
    result, _, _ = world.hunt(lambda question: replace(world.compare(question), least=math.log1p(0.003)))
    assert [culprit.commits for culprit in result.culprits] == [("c20",)]
    assert result.unexplained == pytest.approx(0.007, abs=0.001)


def test_a_good_end_that_fails_midway_ends_it() -> None:
    world = World(straight(16), {"c5": 0.02})
    failed = AbFinding("failed", at="base", message="out of memory")
    result, questions, _ = world.hunt(lambda question: failed if question.why == "step" else world.compare(question))
    assert (result.outcome, "out of memory" in result.message, len(questions)) == ("undecided", True, 3)


def test_many_small_changes_name_nobody() -> None:
    """Each change is too small for the A/B, but not all of them together, so no pair of commits shows it."""
    world = World(straight(17), {f"c{i}": 0.03 / 16 for i in range(1, 17)})

    def compare(question: ComparisonRequest) -> AbFinding:
        effect = world.level(question.head) - world.level(question.base)
        return finding(effect, "different" if abs(effect) > 0.004 else "same")

    result, _, _ = world.hunt(compare)
    assert (result.outcome, result.culprits, "small changes" in result.message) == ("undecided", (), True)


def test_ends_that_fail_are_named() -> None:
    for broken, word in (("c0", "GOOD"), ("c7", "BAD")):
        result, _, _ = World(straight(8), {"c3": 0.02}, broken=frozenset([broken])).hunt()
        assert result.outcome == "undecided"
        assert word in result.message and "does not build" in result.message


def test_ends_that_stay_unknown_are_said_to() -> None:
    result, questions, _ = World(straight(8), {"c3": 0.02}, unknown=1.0).hunt()
    assert result.outcome == "undecided"
    assert [q.budget for q in questions] == [1.0, 2.0]


def test_a_step_that_stays_unknown_is_skipped() -> None:
    world = World(straight(16), {"c5": 0.02})

    def compare(question: ComparisonRequest) -> AbFinding:
        if question.head == "c8" and question.why == "step":
            return AbFinding("unknown", 0.01, -0.02, 0.04)
        return world.compare(question)

    result, questions, trace = world.hunt(compare)
    assert result.culprits[0].commits == ("c5",)
    assert "c8" in trace.skipped
    assert [q.budget for q in questions if q.head == "c8" and q.why == "step"] == [1.0, 2.0]


def test_of_two_changes_the_larger_is_named_and_the_rest_told() -> None:
    world = World(straight(32), {"c6": 0.02, "c20": 0.04})
    result, _, _ = world.hunt()
    assert [c.commits for c in result.culprits] == [("c20",)]
    assert result.unexplained == pytest.approx(0.02, abs=0.004)
    result, _, _ = world.hunt(all=True)
    assert [c.commits for c in result.culprits] == [("c20",), ("c6",)] and result.unexplained is None


@pytest.mark.parametrize("planted", [{"c4": 0.04, "c12": 0.03, "c20": 0.03}, {"c4": 0.03, "c12": 0.03, "c20": 0.04}])
def test_the_largest_of_three_is_named_though_half_is_crossed_elsewhere(planted: dict[str, float]) -> None:
    result, _, _ = World(straight(32), planted).hunt()
    assert result.culprits[0].commits == (max(planted, key=planted.__getitem__),)
    result, _, _ = World(straight(32), planted).hunt(all=True)
    assert {c.commits[0] for c in result.culprits} == set(planted)


def test_a_change_that_was_undone_is_not_named_if_its_files_are_restored() -> None:
    """Every commit from c2 to c4 measures like BAD, so that the search confirms c2 first."""
    world = World(straight(9), {"c2": 0.04, "c6": -0.04, "c7": 0.04})
    world.history = replace(
        world.history, restoring=lambda parent, commit, later: "c6" if (parent, commit) == ("c1", "c2") else None
    )
    named = []
    for seed in range(20):
        world.random = random.Random(seed)
        result, _, trace = world.hunt()
        named += [culprit.commits for culprit in result.culprits]
        assert set(trace.undone) <= {"c2"} and all(by == "c6" for by, _ in trace.undone.values())
        assert result.unexplained is None
    assert set(named) == {("c7",)}


def test_the_search_begins_at_the_step_of_the_stored_results() -> None:
    """It does not measure the change that was undone long before."""
    world = World(straight(65), {"c2": 0.04, "c40": -0.04, "c42": 0.03})
    known = {name: world.level(name) for name in ("c0", "c5", "c38", "c41", "c43", "c64")}
    world.history = replace(world.history, stored=known)
    result, questions, _ = world.hunt()
    assert [culprit.commits for culprit in result.culprits] == [("c42",)]
    assert [question.head for question in questions] == ["c64", "c41", "c43", "c42", "c42"]


@pytest.mark.parametrize("where", range(1, 65, 7))
def test_stored_results_decide_nothing(where: int) -> None:
    world = World(straight(65), {f"c{where}": 0.04})
    world.history = replace(world.history, stored={"c0": 0.0, "c41": 0.0, "c43": 0.04, "c64": 0.04})
    result, _, trace = world.hunt()
    assert [culprit.commits for culprit in result.culprits] == [(f"c{where}",)]
    assert trace.comparisons["step"] <= 6 + 2


def merging() -> dict[str, tuple[str, ...]]:
    """main m0..m5; a branch b1..b6 from m1 merged in m3, into which s1..s3 from b2 was merged in b4."""
    text = "m0 m1:m0 m2:m1 b1:m1 b2:b1 b3:b2 s1:b2 s2:s1 s3:s2 b4:b3,s3 b5:b4 m3:m2,b5 m4:m3 m5:m4"
    commits = (each.partition(":") for each in text.split())
    return {name: tuple(filter(None, parents.split(","))) for name, _, parents in commits}


@pytest.mark.parametrize(
    ("where", "merges"),
    [
        *((where, ()) for where in ("m2", "m4")),
        *((where, ("m3",)) for where in ("b1", "b3", "b5")),
        *((where, ("m3", "b4")) for where in ("s1", "s3")),
    ],
)
def test_a_merge_is_descended_into(where: str, merges: tuple[str, ...]) -> None:
    result, questions, _ = World(merging(), {where: 0.02}).hunt()
    (culprit,) = result.culprits
    assert (culprit.commits, culprit.merges) == ((where,), merges)
    starts = {"m3": "m1", "b4": "b2"}  # where the branch that a merge brought in begins
    assert [q.base for q in questions if q.why == "branch"] == [starts[merge] for merge in merges]


@pytest.mark.parametrize("where", ["m3", "b4"])
def test_a_merge_that_is_slow_by_itself_is_named(where: str) -> None:
    result, _, _ = World(merging(), {where: 0.02}).hunt()
    (culprit,) = result.culprits
    assert culprit.commits == (where,) and "the merge itself" in culprit.note


def test_a_good_that_is_no_ancestor_is_replaced_by_the_merge_base() -> None:
    parents = {"r": (), "g1": ("r",), "a": ("r",), "b": ("a",), "c": ("b",)}
    world = World(parents, {"b": 0.02}, good="g1", base="r")
    result, questions, _ = world.hunt()
    assert result.culprits[0].commits == ("b",)
    assert [q.why for q in questions][:2] == ["ends", "merge base"]
    result, _, _ = World(parents, {"r": 0.02, "g1": -0.02}, good="g1", base="r").hunt()
    assert result.outcome == "undecided" and not result.culprits
    assert "merge base" in result.message and "undone on the way" in result.message


@pytest.mark.parametrize("lie", ["c16", "c8", "c24", "c12", "c4"])
@pytest.mark.parametrize("where", [3, 13, 29])
def test_one_wrong_answer_is_found_out(lie: str, where: int) -> None:
    world = World(straight(32), {f"c{where}": 0.02})
    tested: list[str] = []

    def compare(question: ComparisonRequest) -> AbFinding:
        correct = world.compare(question)
        if question.head == lie and question.why == "step" and not tested:
            tested.append(lie)
            return finding(0.0, "same") if correct.verdict == "different" else finding(0.02)
        return correct

    result, _, _ = world.hunt(compare, rates=Rates(0.01, 0.05))
    assert result.outcome == "found" and result.culprits[0].commits == (f"c{where}",)


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, tuple[str, ...]], random.Random]:
    """Histories with branches and merges, one root, one tip."""
    parents: dict[str, tuple[str, ...]] = {"n0": ()}
    tips = ["n0"]
    for i in range(1, draw(st.integers(2, 24))):
        name = f"n{i}"
        kind = draw(st.sampled_from(["on", "on", "on", "fork", "merge"]))
        if kind == "fork":
            parents[name] = (draw(st.sampled_from(sorted(parents))),)
            tips.append(name)
        elif kind == "merge" and len(tips) > 1:
            first, second = draw(st.permutations(tips))[:2]
            parents[name] = (first, second)
            tips = [tip for tip in tips if tip not in (first, second)] + [name]
        else:
            tip = draw(st.integers(0, len(tips) - 1))
            parents[name] = (tips[tip],)
            tips[tip] = name
    for k, tip in enumerate(tips[1:]):
        parents[f"end{k}"] = (f"end{k - 1}" if k else tips[0], tip)
    return parents, random.Random(draw(st.integers(0, 2**32)))


@given(histories())
def test_on_any_history_the_right_one_is_named(drawn: tuple[dict[str, tuple[str, ...]], random.Random]) -> None:
    parents, chance = drawn
    names = list(parents)
    bad = names[-1]
    inside = sorted(World(parents, {}).history.inside)
    where = chance.choice(inside)
    result, _, _ = World(parents, {where: 0.02}).hunt()
    assert result.outcome == "found", (bad, result)
    assert result.culprits[0].commits == (where,)


@given(histories(), st.floats(0, 0.3), st.floats(0, 0.3), st.integers(0, 3))
def test_it_always_ends_and_never_names_one_that_was_not_confirmed(
    drawn: tuple[dict[str, tuple[str, ...]], random.Random], share: float, unknown: float, changes: int
) -> None:
    parents, chance = drawn
    names = sorted(World(parents, {}).history.inside)
    planted = {chance.choice(names): chance.choice((-0.03, 0.02, 0.05)) for _ in range(changes)}
    broken = frozenset(name for name in names if chance.random() < share)
    rates = Rates(0.1, 0.2)
    world = World(parents, planted, rates, chance.randrange(2**32), broken, unknown)
    result, questions, _ = world.hunt(all=chance.random() < 0.5)
    for culprit in result.culprits:
        assert culprit.finding.verdict == "different"
        assert any(q.why == "confirm" for q in questions)
        assert set(culprit.commits) <= set(names)
    assert (result.outcome in ("found", "narrowed")) <= bool(result.culprits)


@pytest.mark.parametrize(("rates", "unknown"), [(Rates(0.01, 0.05), 0.05), (Rates(0.05, 0.1), 0.1)], ids=["ab", "poor"])
def test_the_confidence_that_is_stated_is_kept(rates: Rates, unknown: float) -> None:
    """1000 searches: named ones are right at least as often as they say, by calibration and on average."""
    stated, right, named = 0.0, 0, 0
    outcomes: Counter[str] = Counter()
    for seed in range(1000):
        chance = random.Random(seed)
        n = chance.randint(2, 48)
        where = f"c{chance.randint(1, n - 1)}"
        broken = frozenset(f"c{i}" for i in range(1, n - 1) if chance.random() < 0.05)
        world = World(straight(n), {where: 0.02}, rates, seed, broken, unknown)
        result, _, _ = world.hunt()
        outcomes[result.outcome] += 1
        if result.outcome in ("found", "narrowed"):
            named += 1
            assert result.culprits[0].confidence >= 0.95
            stated += result.culprits[0].confidence
            right += where in result.culprits[0].commits
    error = math.sqrt(max(named - stated, 1.0))
    assert right >= stated - 2 * error, (right, stated, named)
    assert named >= 1000 * (1 - 2.5 * rates.missed - unknown), outcomes


def test_innocents_are_not_named_where_nothing_changed() -> None:
    rates = Rates(0.01, 0.05)
    named = 0
    for seed in range(2000):
        chance = random.Random(seed)
        world = World(straight(chance.randint(2, 48)), {}, rates, seed)
        result, _, _ = world.hunt()
        named += result.outcome == "found"
    assert named <= 2  # the A/B alone would have named 20


def test_at_the_rates_of_the_ab_nobody_innocent_is_named() -> None:
    """The first comparison is forced to be wrong, and later ones must correct it."""
    rates = Rates()
    for seed in range(300):
        world = World(straight(2 + seed % 40), {}, rates, seed)

        def compare(question: ComparisonRequest, world: World = world) -> AbFinding:
            return finding(0.02) if question.why == "ends" else world.compare(question)

        result, _, _ = world.hunt(compare)
        assert result.outcome == "none" and "did not appear again" in result.message


def test_giving_up_reaches_the_caller_of_a_line() -> None:
    line = Line("g", tuple(Change(f"c{i}", f"c{i - 1}") for i in range(4)), "c3")
    with pytest.raises(GaveUp, match="lost"):
        finish(search(line, 0.02, Rates(), 0.95, Trace()), lambda q: AbFinding("failed", at="base", message="lost"))


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=30))
def test_probabilities_stay_probabilities(n: int, levels: list[tuple[int, bool]]) -> None:
    posterior = Posterior(n, Rates())
    for j, above in levels:
        posterior.level(min(j, n), above)
    sums = posterior.cumulative()
    assert len(sums) == n + 2 and sums[0] == 0
    assert sums[-1] == pytest.approx(1) and all(b >= a for a, b in pairwise(sums))


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        (finding(0.0, "same"), "below"),
        (finding(0.02), "above"),
        (finding(-0.02), "below"),
        (finding(0.004), "below"),
        (finding(0.016), "above"),
        (finding(0.011, half=0.005), "above"),
        (finding(0.009, half=0.005), "unclear"),
        (finding(0.009, "unknown", half=0.005), "unclear"),
        (finding(0.001, "unknown", half=0.005), "below"),
        (AbFinding("different", 0.02), "above"),
        (AbFinding("unknown"), "unclear"),
        (AbFinding("same"), "below"),
        (AbFinding("failed"), "failed"),
    ],
)
def test_half_of_the_difference_decides(comparison: AbFinding, expected: str) -> None:
    assert side_of(comparison, 0.02) == expected
    if comparison.effect is not None and comparison.low is not None and comparison.high is not None:
        mirrored = replace(comparison, effect=-comparison.effect, low=-comparison.high, high=-comparison.low)
        assert side_of(mirrored, -0.02) == expected


@given(st.floats(-0.1, 0.1), st.floats(-0.1, 0.1), st.floats(0, 0.05), st.floats(0, 0.05))
def test_pooling_lies_between_and_is_no_wider(a: float, b: float, wide: float, other: float) -> None:
    both = pooled(finding(a, half=wide), finding(b, half=other))
    assert both.effect is not None and both.low is not None and both.high is not None
    assert min(a, b) - 1e-9 <= both.effect <= max(a, b) + 1e-9
    assert both.high - both.low <= 2 * min(wide, other) + 1e-9


def test_rates_are_checked() -> None:
    for false, missed in ((0.0, 0.1), (0.1, 0.5), (-1, 0.1)):
        with pytest.raises(ValueError, match="rates"):
            Rates(false, missed)
