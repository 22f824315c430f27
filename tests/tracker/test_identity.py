"""The fields of a series' identity: one list, and stored hashes never change."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from groupbench.tracker.facts.identity import EXACT, IDENTITY, OF_CELL, PROBLEM, SHOWN, series_fields, series_identity
from groupbench.tracker.facts.record import Cell, Record
from groupbench.tracker.query.rows import SeriesRow
from groupbench.tracker.store.schema import Series


def test_a_stored_identity_does_not_change(make: Callable[..., Record]) -> None:
    assert series_identity(make()) == "a2134aff72ec04e45e52363df0d493ae"


@pytest.mark.parametrize(
    ("names", "left_out"),
    [
        pytest.param(SHOWN, set(), id="shown"),
        pytest.param(PROBLEM, {"backend"}, id="problem"),
        pytest.param(EXACT, {"shape", "hardware", "seed"}, id="exact"),
        pytest.param(OF_CELL, {"hardware"}, id="cell"),
    ],
)
def test_other_orders_hold_the_same_fields(names: tuple[str, ...], left_out: set[str]) -> None:
    assert sorted(names) == sorted(set(IDENTITY) - left_out)


@pytest.mark.parametrize(
    "kind", [SeriesRow.__dataclass_fields__, Series.__table__.columns.keys()], ids=["row", "table"]
)
def test_a_series_holds_each_field(kind: object) -> None:
    assert set(IDENTITY) <= set(kind)  # type: ignore[call-overload]


def test_each_field_but_the_hardware_is_one_of_the_cell() -> None:
    assert set(OF_CELL) <= set(Cell.__struct_fields__)


@pytest.mark.parametrize("name", OF_CELL)
def test_another_value_is_another_series(name: str, make: Callable[..., Record]) -> None:
    other = make(cell={name: 7 if name == "seed" else "other"})
    assert series_fields(other.cell, other.environment)[name] in (7, "other")
    assert series_identity(other) != series_identity(make())
