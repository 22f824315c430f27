"""Which changes are one incident: one cause is one, two causes are two, whatever the order, noise and number."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.judge.incidents import Change, fits, group
from groupbench.tracker.judge.owners import owner_in
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.rows import RunRow

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
    unlike = ({"effect": 0.5}, {"backend": "helion"}, {"first": 7.0}, {"commit": "a"}, {"exact": True})
    for other in (second_step_of_series, *(at(7, **{"first": 6.0} | each) for each in unlike)):
        assert [len(each) for each in group([*cause, other])] == [6, 1], other


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


def test_an_effect_inherits_between_two_measured_ones() -> None:
    assert fits(0.1, [0.05, 0.12]) and not fits(0.2, [0.05, 0.12]) and not fits(0.1, [0.1]) and not fits(None, [0, 1])


def run(number: int) -> RunRow:
    at = datetime(2026, 1, number, tzinfo=UTC)
    return RunRow(number, f"r{number}", f"{number:040d}", False, None, None, at, "", None)


@pytest.mark.parametrize(
    ("number", "files", "owner"),
    [
        (1, {"kernels/a.py"}, "Ada"),
        (3, {"kernels/a.py"}, "@kernels"),
        (3, {"kernels/moe/a.py", "kernels/moe/b.py"}, "@moe"),
        (3, {"kernels/a.py", "kernels/moe/a.py"}, "@plan"),
        (None, {"setup.cfg"}, "@plan"),
        (3, {"docs/x.md"}, "@plan"),
    ],
)
def test_the_owner_is_the_author_or_the_code_owner_or_the_plans(
    tmp_path: Path, number: int | None, files: set[str], owner: str
) -> None:
    text = "# who\n/kernels/ @kernels @others\nkernels/moe/** @moe\ndocs/\n"
    (tmp_path / "CODEOWNERS").write_text(text)
    assert owner_in(tmp_path, "@plan")([Span(run(1), run(2), "Ada", number)], files) == owner
    if number == 1:
        late = Span(run(2), run(3), "Bob", 1)
        assert owner_in(tmp_path, "@plan")([late, *[Span(run(1), run(2), "Ada", 1)] * 2], files) == "Ada"
