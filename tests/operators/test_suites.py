"""Suites are made when they are read, once, and their names are known before."""

from __future__ import annotations

import pytest

from groupbench.operators.catalog import moe, shapes
from groupbench.operators.suites import Suites


@pytest.fixture
def made() -> list[str]:
    return []


@pytest.fixture
def suites(made: list[str]) -> Suites[list[int]]:
    def one() -> list[int]:
        made.append("one")
        return [1]

    def two() -> list[int]:
        made.append("two")
        return [2, 2]

    return Suites({"one": one, "two": two})


def test_names_make_nothing(suites: Suites[list[int]], made: list[str]) -> None:
    assert [*suites] == ["one", "two"]
    assert len(suites.each(sum)) == 2
    assert "one" in suites
    assert "three" not in suites.without("one")
    assert [*suites.without("one")] == ["two"]
    assert made == []


def test_a_suite_is_made_once_for_all_that_stand_on_it(suites: Suites[list[int]], made: list[str]) -> None:
    sums = suites.each(sum)
    assert [sums["two"], sums["two"], suites.without("one")["two"]] == [4, 4, [2, 2]]
    assert made == ["two"]
    assert suites["two"] is suites["two"]


def test_a_name_there_is_not(suites: Suites[list[int]]) -> None:
    with pytest.raises(KeyError):
        suites.each(sum)["three"]
    with pytest.raises(KeyError):
        suites.without("one")["one"]


@pytest.mark.parametrize("suites", [shapes.SUITES, moe.LAYER_SUITES, moe.PERMUTE_SUITES])
def test_no_name_of_a_shape_reads_like_its_text(suites: Suites[dict[str, object]]) -> None:
    assert not [name for suite in suites.values() for name in suite if "=" in name]
