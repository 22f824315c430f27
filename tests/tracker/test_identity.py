"""Identities of series and environments, and the limits of a record's texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from groupbench.tracker.facts.environment import environment_differences, environment_identity, hardware_class
from groupbench.tracker.facts.identity import EXACT, IDENTITY, OF_CELL, PROBLEM, SHOWN, series_fields, series_identity
from groupbench.tracker.facts.record import (
    LONGEST_NAME,
    LONGEST_TEXT,
    Cell,
    Environment,
    Record,
    RecordError,
    cut,
    decode,
)
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


BASE = Environment(
    device="cuda", gpu="H100", driver="570.1", python="3.11.9", cpu="EPYC", host="a", settings={"X": "1"}
)


def changed(**fields: object) -> Environment:
    return msgspec.structs.replace(BASE, **fields)


@pytest.mark.parametrize(
    "field",
    [
        *({"host": "b"}, {"cpu": "Xeon"}, {"cpu_threads": 4}, {"python": "3.11.10"}, {"memory_mib": 5}, {"os": "x"}),
        {"groupbench": "9"},
    ],
    ids=str,
)
def test_metadata_leaves_environments_alike(field: dict[str, object]) -> None:
    assert environment_identity(changed(**field)) == environment_identity(BASE)
    assert environment_differences(BASE, changed(**field)) == []


@pytest.mark.parametrize(
    ("field", "difference"),
    [
        ({"driver": "580.2"}, "driver 570.1 → 580.2"),
        ({"python": "3.12.1"}, "python 3.11 → 3.12"),
        ({"power_limit_w": 350.0}, "power_limit_w unknown → 350"),
        ({"gpu_uuid": "GPU-2"}, "gpu_uuid unknown → GPU-2"),
        ({"settings": {"X": "2"}}, "setting X 1 → 2"),
        ({"settings": {}}, "setting X 1 → unknown"),
    ],
    ids=str,
)
def test_a_declared_field_makes_environments_unlike(field: dict[str, object], difference: str) -> None:
    assert environment_identity(changed(**field)) != environment_identity(BASE)
    assert environment_differences(BASE, changed(**field)) == [difference]


def test_the_processor_counts_where_it_is_the_device() -> None:
    here, there = Environment(device="cpu", cpu="EPYC"), Environment(device="cpu", cpu="Xeon")
    assert environment_identity(here) != environment_identity(there)
    assert (hardware_class(here), hardware_class(BASE)) == ("EPYC", "H100")
    assert hardware_class(Environment(device="cpu")) == "unknown cpu"


def test_threads_differ_and_a_record_without_them_keeps_its_identity() -> None:
    old = Environment(device="cpu", cpu="EPYC")
    one, two = (msgspec.structs.replace(old, cpu_threads=count) for count in (1, 2))
    assert len({environment_identity(environment) for environment in (old, one, two)}) == 3
    assert environment_differences(one, two) == ["cpu_threads 1 → 2"]
    assert environment_differences(old, two) == ["cpu_threads unknown → 2"]
    assert environment_identity(old) == "0299630d34a62428e4bd6ce4a2d30b0f"


def test_identity_does_not_depend_on_order() -> None:
    one, two = changed(settings={"A": "1", "B": "2"}), changed(settings={"B": "2", "A": "1"})
    assert environment_identity(one) == environment_identity(two)


LONG = "x" * (LONGEST_TEXT + 1)


@pytest.mark.parametrize(
    ("path", "longest"),
    [
        (("run", "commit", "subject"), LONGEST_TEXT),
        (("run", "commit", "author"), LONGEST_TEXT),
        (("run", "plan"), LONGEST_TEXT),
        (("run", "command"), LONGEST_TEXT),
        (("environment", "gpu"), LONGEST_TEXT),
        (("cell", "shape"), LONGEST_TEXT),
        (("cell", "backend"), LONGEST_NAME),
        (("run", "id"), LONGEST_NAME),
        (("run", "commit", "hash"), LONGEST_NAME),
        (("message",), LONGEST_TEXT),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_text_has_a_limit(make: Any, path: tuple[str, ...], longest: int) -> None:
    body = msgspec.to_builtins(make(0))
    place = body
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = "x" * longest
    decode(json.dumps(body))
    place[path[-1]] += "x"
    with pytest.raises(RecordError, match=rf"length <= {longest} - at `\$\.{'.'.join(path)}`$"):
        decode(json.dumps(body))


def test_what_is_cut_says_so() -> None:
    assert cut("x" * LONGEST_TEXT) == "x" * LONGEST_TEXT
    short = cut(LONG)
    assert len(short) <= LONGEST_TEXT and short.endswith("x ... (51 more characters)")
    assert short.count("x") == len(LONG) - 51
