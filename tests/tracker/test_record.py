"""Environments: equality and differences. Other tests check the record format itself."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from groupbench.tracker.facts.environment import environment_differences, environment_identity, hardware_class
from groupbench.tracker.facts.record import LONGEST_NAME, LONGEST_TEXT, Environment, RecordError, cut, decode

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
