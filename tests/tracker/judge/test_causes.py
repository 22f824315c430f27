"""The cause of a change of latency or result, from the facts of two points."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from groupbench.tracker.facts.record import Environment, Kernel
from groupbench.tracker.judge.causes import Cause, Facts, find_cause
from groupbench.tracker.query.rows import State

HERE = Environment(device="cuda", gpu="H100", driver="570.1", triton="3.7.1", gpu_uuid="GPU-1")
OLD, NEW = State("a" * 40, False), State("b" * 40, False)


def kernel(name: str = "gemm", **config: Any) -> tuple[Kernel, ...]:
    return (Kernel(name=name, hash="h", config=config),)


def facts(state: State = NEW, hash_: str | None = "new", **fields: Any) -> Facts:
    environment = msgspec.structs.replace(HERE, **fields.pop("environment", {}))
    return Facts(state, environment, hash_, fields.pop("kernels", ()))


BEFORE = facts(OLD, "old", kernels=kernel(BLOCK_M=64, num_warps=4))
TUNED = kernel(BLOCK_M=128, num_warps=4)


@pytest.mark.parametrize(
    ("after", "moved", "confirmed", "word", "note"),
    [
        (facts(hash_="old", environment={"driver": "580"}, kernels=TUNED), True, False, "machine", "canary"),
        (facts(environment={"gpu_uuid": "2", "driver": "580"}), False, False, "environment", "GPU-1 → 2; driver 570"),
        (facts(OLD, "old", environment={"driver": "580"}), False, False, "toolchain", "580; compiled kernel unchanged"),
        (facts(OLD, environment={"triton": "3.8"}), False, False, "toolchain", "triton 3.7.1 → 3.8"),
        (facts(environment={"triton": "3.8"}), False, False, "code and toolchain", "triton 3.7.1 → 3.8"),
        (facts(OLD, "new", kernels=TUNED), False, False, "infrastructure", "same commit"),
        (facts(hash_="old", kernels=TUNED), False, False, "infrastructure", "compiled kernel unchanged"),
        (facts(OLD, "new"), True, False, "machine", "canary"),
        (facts(kernels=TUNED), False, False, "tuning", "BLOCK_M 64 → 128"),
        (facts(kernels=kernel("other", BLOCK_M=128)), False, False, "code", "compiled kernel changed"),
        (facts(kernels=BEFORE.kernels), False, False, "code", "compiled kernel changed"),
        (facts(hash_=None), False, False, "code", None),
        (facts(kernels=TUNED), True, True, "tuning", "BLOCK_M 64 → 128"),
        (facts(hash_="old"), True, True, "code", "compiled kernel unchanged"),
        (facts(environment={"driver": "580"}), False, True, "code", "compiled kernel changed"),
    ],
    ids=str,
)
def test_the_first_that_holds(after: Facts, moved: bool, confirmed: bool, word: str, note: str | None) -> None:
    cause = find_cause(BEFORE, after, canaries_moved=moved, confirmed=confirmed)
    assert cause.word == word
    assert (cause.note is None) if note is None else note in str(cause.note)


@pytest.mark.parametrize(
    ("after", "word", "note"),
    [
        (facts(hash_="old", environment={"driver": "580"}), "code and toolchain", "driver 570.1 → 580"),
        (facts(OLD, "old"), "infrastructure", "same commit"),
        (facts(hash_="old", kernels=TUNED), "tuning", "BLOCK_M 64 → 128"),
        (facts(hash_="old"), "code", "compiled kernel unchanged"),
        (facts(), "code", "compiled kernel changed"),
    ],
    ids=str,
)
def test_of_a_result_the_same_compiled_kernel_does_not_clear_the_code(after: Facts, word: str, note: str) -> None:
    cause = find_cause(BEFORE, after, result=True)
    assert cause.word == word and note in str(cause.note)


def test_a_dirty_tree_does_not_prove_the_same_code() -> None:
    dirty = State("a" * 40, True)
    assert find_cause(facts(dirty, "old"), facts(dirty, "new")).word == "code"


def test_without_a_past_it_is_the_code() -> None:
    assert find_cause(None, facts()).word == "code"
    assert find_cause(None, facts(), canaries_moved=True).word == "machine"


def test_many_differences_are_counted() -> None:
    assert "5 more" in str(find_cause(BEFORE, facts(kernels=kernel(**{f"c{i}": 1 for i in range(7)}))).note)


def test_the_change_of_the_compiled_kernel_is_named() -> None:
    before = facts(OLD, "old", kernels=(Kernel(name="gemm", hash="a", spills=0, registers=168),))
    after = facts(hash_="new", kernels=(Kernel(name="gemm", hash="b", spills=24, registers=255),))
    assert find_cause(before, after).note == "compiled kernel changed: 96 B spilled; 168 registers → 255"
    assert find_cause(before, after, metric="spills").note == "compiled kernel changed: 168 registers → 255"


@pytest.mark.parametrize(
    ("metric", "change"),
    [
        ("stages", {"config": {"num_stages": 3}}),
        ("spills", {"spills": 24}),
        ("occupancy", {"occupancy": 0.25}),
    ],
)
def test_the_metric_of_the_row_is_not_repeated(metric: str, change: dict[str, Any]) -> None:
    old = Kernel(name="gemm", hash="a", spills=0, occupancy=0.5, config={"num_stages": 4})
    new = msgspec.structs.replace(old, hash="b", **change)
    before, after = facts(OLD, "old", kernels=(old,)), facts(hash_="new", kernels=(new,))
    assert find_cause(before, after).note not in (None, "", "compiled kernel changed")
    assert find_cause(before, after, metric=metric).note in (None, "", "compiled kernel changed")


@pytest.mark.parametrize(
    ("state", "hash_", "driver", "word", "note"),
    [
        (OLD, None, "570.1", "toolchain", "numpy 2.2.6 → 2.4.0"),
        (NEW, None, "570.1", "code and toolchain", "numpy 2.2.6 → 2.4.0"),
        (NEW, None, "580", "code and toolchain", "driver 570.1 → 580; numpy 2.2.6 → 2.4.0"),
        (NEW, "old", "570.1", "infrastructure", "compiled kernel unchanged; numpy 2.2.6 → 2.4.0"),
    ],
    ids=["alone", "with the code", "with the driver", "the same kernels"],
)
def test_a_package_that_the_process_imported_is_named(
    state: State, hash_: str | None, driver: str, word: str, note: str
) -> None:
    before = replace(facts(OLD, hash_), packages={"numpy": "2.2.6", "click": "8.1"})
    after = replace(facts(state, hash_, environment={"driver": driver}), packages={"numpy": "2.4.0", "rich": "14"})
    assert find_cause(before, after) == Cause(word, note)  # type: ignore[arg-type]
    assert find_cause(before, after, confirmed=True).word == "code"
