"""Test which A/Bs of a search are stored, and that the gate judges by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from nights import Cli, Stored, commit, rows

from groupbench.tracker.ab.kept import ComparisonKeeper, keep
from groupbench.tracker.ab.result import AbCell, AbResult
from groupbench.tracker.ab.side import AbSide
from groupbench.tracker.store.engine import open_store

H100 = {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "python": "3.11.9", "torch": "2.13.0", "triton": "3.7.1"}


def result(verdict: Any = "different", effect: float | None = 0.05, **facts: Any) -> AbResult:
    cell = {"operator": "grouped_gemm", "backend": "triton", "shape": "G=4,N=1024,K=1024", "dtype": "bf16"}
    cell |= {name: facts.pop(name) for name in list(facts) if name in ("shape", "seed", "idle_s", "dtype")}
    interval = {} if effect is None else {"low": effect - 0.01, "high": effect + 0.01, "base_ms": 1.0}
    values = {"timing": "gpu", "min_effect": 0.003, "base_environment": H100, "head_environment": H100}
    return AbResult(AbCell(**cell), AbSide("a"), AbSide("b"), verdict, effect, **{**interval, **values, **facts})


def of_three(make: Any) -> list[Any]:
    return [make(0), make(1, ms=1.4), make(2, ms=1.4)]


@pytest.mark.usefixtures("two_nights_are_certain")
def test_the_gate_judges_by_it(cli: Cli, stored: Stored, make: Any, db: Any) -> None:
    stored(of_three(make))
    assert cli("gate").exit_code == 3
    with open_store(db, create=False) as store:
        assert keep(store, result(effect=0.34), commit(0), commit(1)) == 1
    judged = cli("gate")
    assert (judged.exit_code, judged.stdout.startswith("GATE regression: 1 series regressed")) == (1, True)
    assert "measured by an A/B of 000ccccccc..001ccccccc: +40.5%" in judged.stdout


@pytest.mark.usefixtures("two_nights_are_certain")
@pytest.mark.parametrize(("effect", "labelled"), [(0.27, True), (0.336, False)])
def test_its_size_is_kept_apart_from_that_of_the_history(
    cli: Cli, stored: Stored, make: Any, db: Any, effect: float, labelled: bool
) -> None:
    stored([*(make(night) for night in range(5)), *(make(night, ms=1.4) for night in range(5, 8))])
    with open_store(db, create=False) as store:
        assert keep(store, result(effect=effect), commit(4), commit(5)) == 1
    (row,) = rows(cli)
    assert row["change"] == pytest.approx(0.4, abs=0.01)
    assert ("estimated from the history: +40.0%" in row["note"]) == labelled


@pytest.mark.sqlite
@pytest.mark.parametrize(
    ("ab", "number"),
    [
        (result(shape="4,1024,1024"), 1),  # as `tritonbench --shapes` takes it
        (result("same", 0.001), 1),
        (result("same", 0.001, min_effect=0.5), 0),  # too coarse for the gate
        (result("same", None, base_ms=1.0), 0),  # not timed: the kernels are equal
        (result("unknown"), 0),
        (result("failed", None), 0),
        (result(shape="G=8,N=1024,K=1024"), 0),
        (result(shape="G=*"), 0),  # matches two series
        (result(dtype="fp16"), 0),
        (result(seed=1), 0),
        (result(idle_s=0.5), 0),  # of another protocol
        (result(head_environment={**H100, "gpu": "NVIDIA H200"}), 0),
        (result(base_environment={}), 0),  # the side's versions are unknown
    ],
)
def test_which_comparisons_are_stored(stored: Stored, make: Any, db: Any, ab: AbResult, number: int) -> None:
    stored([*of_three(make), make(2, shape="G=2,N=1024,K=1024")])
    with open_store(db, create=False) as store:
        assert keep(store, ab, commit(0), commit(1)) == number


@pytest.mark.sqlite
def test_an_unwritable_database_does_not_end_the_search(tmp_path: Path) -> None:
    lines: list[str] = []
    missing = ComparisonKeeper(str(tmp_path / "none.db"), lines.append)
    missing(result(), commit(0), commit(1))
    assert not lines and not missing.stored
    (tmp_path / "other.db").write_text("not a database")
    other = ComparisonKeeper(str(tmp_path / "other.db"), lines.append)
    for _ in range(2):
        other(result(), commit(0), commit(1))
    assert len(lines) == 1 and lines[0].startswith("not every comparison is stored: ")
