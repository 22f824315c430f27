"""Values that are the same whenever the code is."""

from __future__ import annotations

import pytest

from groupbench.tracker.stats.exact import walk_exact
from groupbench.tracker.stats.walk import Mark


@pytest.mark.parametrize(
    ("y", "stack"),
    [
        pytest.param([5, 5], [(0, 5)], id="unchanged"),
        pytest.param([5, 7, 7], [(0, 5), (1, 7)], id="worse"),
        pytest.param([5, 7, 9], [(0, 5), (1, 7), (2, 9)], id="worse twice"),
        pytest.param([5, 7, 9, 7], [(0, 5), (1, 7)], id="the second change is taken back"),
        pytest.param([5, 7, 9, 5], [(0, 5)], id="both are taken back at once"),
        pytest.param([5, 7, 9, 8], [(0, 5), (1, 7), (2, 8)], id="a part of the second"),
        pytest.param([5, 7, 9, 6], [(0, 5), (1, 6)], id="the second and a part of the first"),
        pytest.param([5, 7, 4], [(2, 4)], id="better than ever"),
        pytest.param([5, 5.4, 5.8, 6.2], [(0, 5), (3, 6.2)], id="small steps add up"),
        pytest.param([5, 7, 5, 7, 5, 7], [(0, 7)], id="alternating"),
        pytest.param([5, 7, 5, 7, 5, 9], [(0, 7), (5, 9)], id="worse than while alternating"),
    ],
)
def test_each_change_begins_or_ends_a_level(y: list[float], stack: list[tuple[int, float]]) -> None:
    walked = walk_exact(y, lambda a, b: b - a > 0.9, None, {}, 20)
    assert [(level.start, level.known) for level in walked.stack] == stack


def test_a_value_that_changes_without_the_code_is_no_change() -> None:
    def starts(y: list[float], codes: list[int]) -> list[int]:
        return [level.start for level in walk_exact(y, lambda a, b: b > a, codes, {}, 20).stack]

    assert starts([5, 5, 7], [0, 1, 1]) == [0]
    assert starts([5, 5, 7, 5, 7], [0, 1, 1, 2, 3]) == [3]  # the same code was as bad
    assert starts([5, 5, 7], [0, 1, 2]) == [0, 2]


def test_alternation_is_forgotten_once_the_value_settles() -> None:
    y = [5, 7, 5, 7, *[5] * 8]
    assert len(walk_exact(y, lambda a, b: b > a, None, {}, 5).stack) == 1
    assert [level.start for level in walk_exact([*y, 7], lambda a, b: b > a, None, {}, 5).stack] == [0, 12]


def test_accepted_levels_and_alerts_are_known_facts() -> None:
    def worse(a: float, b: float) -> bool:
        return b > a

    accepted = walk_exact([5, 7, 7, 9], worse, None, {1: [Mark("reference", tag=3)]}, 20)
    assert [(level.start, level.tag) for level in accepted.stack] == [(1, 3), (3, None)]
    alert = walk_exact([5, 7, 7], worse, None, {1: [Mark("slower", tag=4)]}, 20)
    assert [(level.start, level.tag) for level in alert.stack] == [(0, None), (1, 4)]
    older = walk_exact([7, 7], worse, None, {0: [Mark("slower", before=5.0, tag=4)]}, 20)
    assert [(level.start, level.known, level.tag) for level in older.stack] == [(-1, 5, None), (0, 7, 4)]


def test_a_new_reference_knows_the_one_that_it_replaced() -> None:
    (first, second) = walk_exact([7, 5, 7], lambda a, b: b > a, None, {}, 20).stack
    assert first.replaced is not None and (first.replaced.known, second.known) == (7, 7)
