"""Which changes are one incident: one cause is one, two causes are two, whatever the order, noise and number."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.judge.incident_rows import IncidentRow, MemberRow
from groupbench.tracker.judge.incidents import Change, fits, group
from groupbench.tracker.judge.owners import owner_in
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.rows import RunRow, SeriesRow
from groupbench.tracker.store.comparisons import NamedCommits

SEEDS = 50
BACKENDS = ("triton", "helion", "cutlass", "cuda", "cute", "gluon")
NOISES = (0.001, 0.003, 0.01)


def change(key: int, backend: str = "triton", effect: float = 0.12, **facts: object) -> Change:
    return Change(key, ("grouped_gemm", backend), effect, 1.0, 2.0, **facts)  # type: ignore[arg-type]


def changes_of(
    seed: random.Random, number: int, effect: float, noise: float, backends: tuple[str, ...], first: int = 0
) -> list[Change]:
    return [
        change(first + key, seed.choice(backends), effect + seed.gauss(0, noise), noise=noise) for key in range(number)
    ]


@pytest.mark.parametrize("number", [1, 10, 100, 2000])
@pytest.mark.parametrize("noise", NOISES)
def test_one_cause_is_one_incident(number: int, noise: float) -> None:
    parted = 0
    for seed in range(SEEDS if number < 2000 else 10):
        rng = random.Random(seed)
        backends = tuple(rng.sample(BACKENDS, rng.randint(1, 6)))
        parted += len(group(changes_of(rng, number, rng.choice((0.05, 0.12, 0.4)), noise, backends))) != 1
    assert parted <= 1


@pytest.mark.parametrize("number", [1, 10, 100])
@pytest.mark.parametrize("noise", NOISES)
def test_two_causes_of_different_size_are_two_incidents(number: int, noise: float) -> None:
    parted = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        backends = rng.sample(BACKENDS, 4)
        first = changes_of(rng, number, 0.12, noise, tuple(backends[:2]))
        second = changes_of(rng, number, 0.04, noise, tuple(backends[2:]), first=number)
        whole = [*first, *second]
        rng.shuffle(whole)
        groups = {frozenset(each.key for each in of_cause) for of_cause in group(whole)}
        parted += groups == {frozenset(each.key for each in side) for side in (first, second)}
    assert parted >= 0.9 * SEEDS or (number == 1 and noise == NOISES[-1])


@pytest.mark.parametrize("number", [1, 10, 100, 2000])
def test_a_changed_file_explains_changes_of_any_size(number: int) -> None:
    """A file that every series loaded explains less than one that only the slower ones loaded."""
    for seed in range(SEEDS if number < 2000 else 5):
        rng = random.Random(seed)
        both = frozenset({"common.py"})
        first = [change(n, "triton", rng.uniform(0.02, 0.5), files=both | {"triton.py"}) for n in range(number)]
        files = both | {"helion.py"}
        second = [change(number + n, "helion", rng.uniform(0.02, 0.5), files=files) for n in range(number)]
        quiet = [both] * (2 * number)
        groups = sorted(sorted(each.key for each in of_cause) for of_cause in group([*first, *second], quiet))
        assert groups == [list(range(number)), list(range(number, 2 * number))]
        shared = [change(n, rng.choice(BACKENDS), rng.uniform(0.02, 0.5), files=both) for n in range(number)]
        assert len(group(shared, quiet)) == 1


def test_hard_facts_part_changes() -> None:
    surroundings = "triton 3.6.0 → 3.7.0", "machine GPU-1", "machine GPU-2"
    facts = [{}, *({"surroundings": each} for each in surroundings), {"worse": False}, {"wrong": True}]
    assert len(group([change(key, **each) for key, each in enumerate(facts)])) == len(facts)  # type: ignore[arg-type]


def test_changes_at_different_times_are_two_incidents_and_a_long_range_joins_one() -> None:
    early, late = Change(1, ("o", "b"), 0.1, 1.0, 2.0), Change(2, ("o", "b"), 0.1, 2.0, 3.0)
    wide = Change(3, ("o", "b"), 0.1, None, 3.0)
    assert [[each.key for each in of_cause] for of_cause in group([early, late])] == [[1], [2]]
    assert len(group([early, late, wide])) == 2


def test_the_shapes_of_one_exact_change_are_one_incident() -> None:
    """The size depends on the shape, and each shape loads a tuned config of its own."""
    facts = {"metric": "registers", "exact": True}
    changes = [
        change(shape, effect=0.1 * 3**shape, files=frozenset({"kernel.py", f"{shape}.json"}), series=shape, **facts)
        for shape in range(4)
    ]
    assert len(group(changes)) == 1
    assert len(group([*changes, change(9, "helion", 3.0, series=9, files=frozenset({"helion.py"}), **facts)])) == 2
    assert len(group([change(1, "triton", 0.1, **facts), change(2, "helion", 3.0, **facts)])) == 2


def test_a_step_shown_one_run_off_joins_its_cause() -> None:
    """A change of another series in the run before or after is of the cause, if kernel and size agree."""

    def at(key: int, first: float, effect: float = 0.12, backend: str = "triton", **facts: object) -> Change:
        return Change(key, ("o", backend), effect, first, first + 1, series=key, **facts)  # type: ignore[arg-type]

    cause = [at(key, 5.0) for key in range(6)]
    assert [len(each) for each in group([*cause, at(7, 6.0), at(8, 4.0, 0.125)])] == [8]
    second_step_of_series = at(3, 6.0)
    assert sorted(len(each) for each in group([*cause, second_step_of_series, at(7, 6.0)])) == [1, 7]
    unlike = ({"effect": 0.5}, {"backend": "helion"}, {"first": 7.0}, {"commit": "a"}, {"exact": True})
    for other in (second_step_of_series, *(at(7, **{"first": 6.0} | each) for each in unlike)):
        assert [len(each) for each in group([*cause, other])] == [6, 1], other


@pytest.mark.parametrize("end", [3.0, 4.0])
def test_a_wide_range_joins_its_kernel_and_not_the_first_or_last_cause(end: float) -> None:
    causes = [("triton", 0.12, 1.0, 2.0), ("helion", 0.3, 2.0, 3.0), ("cute", 0.6, 3.0, 4.0)]
    changes = [
        Change((name, key), ("o", name), effect, first, last, series=hash((name, key)))
        for name, effect, first, last in causes
        for key in range(3)
    ]
    wide = Change("wide", ("o", "helion"), 0.31, 0.0, end, series=0)
    for order in ([wide, *changes], [*changes, wide]):
        (largest, *others) = group(order)
        assert {each.kernel[1] for each in largest} == {"helion"} and len(largest) == 4
        assert [len(each) for each in others] == [3, 3]


def test_named_commits_part_changes_and_take_their_kernels_along() -> None:
    changes = [
        change(1, "triton", commit="a"), change(2, "triton"), change(3, "helion", commit="b"), change(4, "helion"),
    ]  # fmt: skip
    assert sorted([each.key for each in of_cause] for of_cause in group(changes)) == [[1, 2], [3, 4]]


@given(st.lists(st.tuples(st.sampled_from(BACKENDS), st.floats(0.01, 1.0), st.sampled_from("abc")), max_size=12))
def test_groups_are_a_partition_that_no_order_changes(drawn: list[tuple[str, float, str]]) -> None:
    changes = [change(n, name, size, files=frozenset(file)) for n, (name, size, file) in enumerate(drawn)]
    groups = [{each.key for each in of_cause} for of_cause in group(changes)]
    assert sorted(key for keys in groups for key in keys) == list(range(len(changes)))
    again = [{each.key for each in of_cause} for of_cause in group(reversed(changes))]
    assert sorted(map(sorted, groups)) == sorted(map(sorted, again))


def test_a_change_inherits_if_its_interval_meets_two_measured_ones_and_excludes_0() -> None:
    measured = [0.05, 0.12]
    assert fits((0.1, 0.1), measured) and fits((0.11, 0.3), measured) and fits((0.01, 0.06), measured)
    assert not fits((0.13, 0.3), measured) and not fits((0.01, 0.04), measured) and not fits((0.1, 0.1), [0.1])
    assert not fits((-0.03, 0.1), measured), "it may be no change at all"
    assert fits((-0.2, -0.1), [-0.15, -0.1]) and not fits((-0.2, 0.01), [-0.15, -0.1])


def run(number: int) -> RunRow:
    at = datetime(2026, 1, number, tzinfo=UTC)
    author = f"author {number}"
    return RunRow(number, f"r{number}", f"{number:040d}", False, None, None, at, "", None, author=author)


@pytest.mark.parametrize(
    ("files", "owner"),
    [
        ({"kernels/a.py"}, "@kernels"),
        ({"kernels/moe/a.py", "kernels/moe/b.py"}, "@moe"),
        ({"kernels/a.py", "kernels/moe/a.py"}, "@plan"),
        ({"setup.cfg"}, "@plan"),
        ({"docs/x.md"}, "@plan"),
    ],
)
def test_files_have_a_code_owner_or_the_plans(tmp_path: Path, files: set[str], owner: str) -> None:
    text = "# who\n/kernels/ @kernels @others\nkernels/moe/** @moe\ndocs/\n"
    (tmp_path / "CODEOWNERS").write_text(text)
    assert owner_in(tmp_path, "@plan")(files) == owner


def span(base: int, head: int, *named: int) -> Span:
    """Return the range of two nights, each with a commit and an author, and commits that a search named."""
    facts = [{"hash": f"{name:040d}", "subject": "", "author": f"author {name}"} for name in named]
    found = (NamedCommits(tuple(facts), "", "latency", 0.99),) if named else ()
    return Span(run(base), run(head), head - base, found)


def member(history: Span, ab: Span | None = None, metric: str = "latency", cause: str = "code") -> MemberRow:
    """Return a member that history places, and perhaps an A/B too."""
    series = SeriesRow(1, "softmax", "triton", "fwd", "bf16", "M=1", "builtin", "cooled", "H200", 0, {}, None, None)
    levels = (1.0, 1.1, 0.1, 0.09, 0.11, run(3).started, None)
    return MemberRow(1, series, metric, OF_PLAN, cause, history, None, *levels, None, ab_span=ab)


OF_PLAN = IncidentRow(1, "1", "new", "@plan", run(3).started)


@pytest.mark.parametrize(
    ("members", "owner"),
    {
        "history alone may be late": ([member(span(1, 2))], "@plan"),
        "an A/B of a commit and its parent": ([member(span(2, 3), span(1, 2))], "author 2"),
        "an A/B of several commits": ([member(span(2, 3), span(1, 3))], "@plan"),
        "the narrowest of two A/Bs": ([member(span(2, 3), span(1, 3)), member(span(1, 2), span(1, 2))], "author 2"),
        "most by history": ([member(span(2, 3)), member(span(2, 3)), member(span(1, 2), span(1, 2))], "author 2"),
        "A/Bs that contradict": ([member(span(1, 2), span(1, 2)), member(span(2, 3), span(2, 3))], "@plan"),
        "an exact metric": ([member(span(1, 2), metric="registers")], "author 2"),
        "a wrong result": ([member(span(1, 2), metric="result")], "author 2"),
        "an exact metric in a range": ([member(span(1, 3), metric="registers")], "@plan"),
        "another toolchain": ([member(span(1, 2), metric="registers", cause="toolchain")], "@plan"),
        "a search": ([member(span(1, 4, 3))], "author 3"),
        "a search that left two": ([member(span(1, 4, 2, 3))], "@plan"),
    }.values(),
)
def test_the_author_is_the_owner_only_if_the_commit_is_certain(members: list[MemberRow], owner: str) -> None:
    incident = replace(OF_PLAN, members=tuple(members))
    assert (incident.owner, incident.is_certain) == (owner, owner != "@plan")
    assert ("bisect" in incident.next) == (
        owner == "@plan" and not members[0].span.named and members[0].metric == "latency"
    )
