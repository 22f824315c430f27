"""Loads of experts have the right sums, and the same text always gives the same rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.operators.catalog import routing

TEXTS = ("balanced", "uniform(0.7,1.3)", "uniform(0,2)", "zipf(1.2)", "zipf(0)", "zipf(20)", "multinomial")

# Constants: if they change, every series with this routing measures another problem from now on.
PINNED = {
    "balanced": (14, 14, 13, 13, 13, 13, 13, 13),
    "balanced+empty(0.25)": (18, 18, 18, 18, 17, 0, 0, 17),
    "uniform(0.7,1.3)": (16, 10, 12, 17, 13, 11, 14, 13),
    "zipf(1.2)": (2, 16, 39, 8, 10, 15, 8, 8),
    "zipf(1.2)+empty(0.5)": (9, 0, 0, 17, 0, 61, 19, 0),
    "multinomial": (15, 13, 12, 19, 9, 17, 9, 12),
    "interleaved(5)": (15, 15, 15, 15, 15, 11, 10, 10),
}


@pytest.mark.parametrize(("text", "expected"), PINNED.items(), ids=PINNED)
def test_rows_never_change(text: str, expected: tuple[int, ...]) -> None:
    assert routing.rows(text, 8, 106) == expected


@given(
    st.sampled_from(TEXTS),
    st.sampled_from(["", "+empty(0)", "+empty(0.1)", "+empty(.5)", "+empty(0.99)"]),
    st.integers(1, 300),
    st.integers(0, 10**6),
)
def test_rows_sum_and_count(name: str, empty: str, groups: int, total: int) -> None:
    rows = routing.rows(name + empty, groups, total)
    assert len(rows) == groups
    assert sum(rows) == total
    assert min(rows) >= 0
    assert rows == routing.rows(name + empty, groups, total)


@given(st.integers(1, 300), st.integers(0, 10**6))
def test_balanced_differs_by_one_row_at_most(groups: int, total: int) -> None:
    rows = routing.rows("balanced", groups, total)
    assert max(rows) - min(rows) <= 1
    assert list(rows) == sorted(rows, reverse=True)


@given(st.integers(2, 100), st.floats(0.01, 0.99))
def test_that_share_of_the_experts_is_empty(groups: int, share: float) -> None:
    text = f"balanced+empty({share:.2f})"
    rows = routing.rows(text, groups, 1000 * groups)
    assert rows.count(0) == min(groups - 1, round(groups * float(f"{share:.2f}")))


def test_uniform_stays_near_its_bounds() -> None:
    rows = routing.rows("uniform(0.7,1.3)", 64, 64_000)
    assert 0.5 * 1000 < min(rows) < 850
    assert 1150 < max(rows) < 1.9 * 1000


def test_zipf_is_skewed_as_its_exponent_says() -> None:
    rows = sorted(routing.rows("zipf(1)", 4, 100_000), reverse=True)
    harmonic = 1 + 1 / 2 + 1 / 3 + 1 / 4
    for rank, row in enumerate(rows, 1):
        assert row == pytest.approx(100_000 / rank / harmonic, rel=0.05)


def test_the_busiest_expert_is_not_always_the_first() -> None:
    busiest = {max(range(8), key=routing.rows("zipf(1.2)", 8, total).__getitem__) for total in range(1000, 1030)}
    assert len(busiest) > 3


BAD = {
    "nothing": "",
    "unknown": "magic",
    "balanced with an argument": "balanced(1)",
    "zipf without": "zipf",
    "zipf of two": "zipf(1,2)",
    "uniform of one": "uniform(1)",
    "uniform of three": "uniform(1,2,3)",
    "uniform backwards": "uniform(2,1)",
    "uniform of nothing": "uniform(0,0)",
    "negative": "zipf(-1)",
    "no number": "zipf(1.2.3)",
    "a lone point": "zipf(.)",
    "huge": f"uniform(0,{'9' * 400})",
    "all empty": "balanced+empty(1)",
    "more than all empty": "balanced+empty(1.5)",
    "something behind": "balanced;",
    "a space": "zipf (1)",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_bad_text_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        routing.check(text)
    assert str(caught.value)
