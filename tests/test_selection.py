"""Check `cover_pairs`: the tests that run by default have every pair of parameter values."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

Rows = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def cover_pairs(pytestconfig: pytest.Config) -> Callable[[Rows], set[int]]:
    here = str(Path(__file__).with_name("conftest.py"))
    (conftest,) = [p for p in pytestconfig.pluginmanager.get_plugins() if getattr(p, "__file__", "") == here]
    return conftest.cover_pairs


def pairs(rows: Rows) -> set[object]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_every_pair_and_every_value_is_kept(cover_pairs: Callable[[Rows], set[int]], sizes: list[int], data) -> None:
    rows = list(product(*map(range, sizes)))
    rows = data.draw(st.permutations(rows))[: data.draw(st.integers(1, len(rows)))]
    kept = cover_pairs(rows)
    few = [rows[number] for number in sorted(kept)]
    assert pairs(few) == pairs(rows)
    assert {(column, value) for row in few for column, value in enumerate(row)} == {
        (column, value) for row in rows for column, value in enumerate(row)
    }
    assert kept == cover_pairs(rows)


@pytest.mark.parametrize(
    ("sizes", "least", "most"),
    [((2, 2), 4, 4), ((2, 2, 2), 4, 5), ((27, 6, 2), 162, 170), ((2, 2, 2, 2, 2), 6, 8), ((5,), 5, 5)],
    ids=str,
)
def test_few_are_kept(cover_pairs: Callable[[Rows], set[int]], sizes: tuple[int, ...], least: int, most: int) -> None:
    assert least <= len(cover_pairs(list(product(*map(range, sizes))))) <= most
