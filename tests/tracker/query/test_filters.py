"""Sizes, dates and ranges as people write them; wildcards match as in SQL, and never hang."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.query.filters import (
    Size,
    all_hold,
    commit_range,
    instant,
    is_expression,
    looks_like_date,
    sizes,
    unnamed_sizes,
    without_letters,
)
from groupbench.tracker.query.patterns import any_pattern


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ("M>=4096", [4096, 5000], [4095]),
        ("M>4096", [4097], [4096]),
        ("M<=4096", [4096, 0], [4097]),
        ("M<4096", [4095], [4096]),
        ("M=4096", [4096], [4095, 4097]),
        ("M==4_096", [4096], [4095]),
        ("M!=4096", [1, 4097], [4096]),
        ("M=8..64", [8, 64, 20], [7, 65]),
        ("M!=8..64", [7, 65], [8, 64]),
        ("M=8..", [8, 10**12], [7]),
        ("M=..64", [64, -3], [65]),
        (" M >= 8 , M < 10 ", [8, 9], [7, 10]),
    ],
)
def test_sizes(text: str, yes: list[int], no: list[int]) -> None:
    conditions = sizes(text)
    assert all(all_hold(conditions, {"M": value}) for value in yes)
    assert not any(all_hold(conditions, {"M": value}) for value in no)
    assert not all_hold(conditions, {"N": yes[0]}), "a series without that size never matches"


NO_SIZES = (
    *("", "M", "M>", ">=4", "M>=x", "M=1.5", "M=>4", "M>=8..64", "M=..", "M=64..8", "M=4,", "M=4,,N=5", "M=1;N=2"),
    "M=٣",
)


@pytest.mark.parametrize("text", NO_SIZES)
def test_an_invalid_size_is_named(text: str) -> None:
    with pytest.raises(QueryError, match=r"'"):
        sizes(text)


@pytest.mark.parametrize("text", ["K>=", "K>", "K=", "K!= ", "M=4,K<="])
def test_a_condition_without_a_number_is_named(text: str) -> None:
    with pytest.raises(QueryError, match=r"'K[=!<>]+' has no number; give one, as in K[=!<>]+4096$"):
        sizes(text)


@given(st.text())
def test_any_text_is_an_expression_or_refused(text: str) -> None:
    try:
        conditions = sizes(text)
    except QueryError as error:
        assert "\n" not in error.message
        assert not is_expression(text)
    else:
        assert all(isinstance(size, Size) for size in conditions)


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("M>=4", True),
        ("G=8..64", True),
        ("N=4096", True),
        ("G=4,M>=8", True),
        ("G=4,M=8", False),  # how a shape is named
        ("G=4,M_g=0|1,N=3,K=4,W=nk", False),
        ("*G=4*", False),
        ("copy,N=2048", False),
        ("x..y", False),
    ],
)
def test_a_shape_or_an_expression(text: str, expression: bool) -> None:
    assert is_expression(text) == expression


def test_instants() -> None:
    now = datetime(2026, 3, 10, 12, tzinfo=UTC)
    assert instant("2026-01-31") == datetime(2026, 1, 31, tzinfo=UTC)
    assert instant("2026-01-31", end=True) == datetime(2026, 2, 1, tzinfo=UTC)
    assert instant("2026-01-31T12:00", end=True) == datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert instant("2026-01-31T12:00+02:00") == datetime(2026, 1, 31, 10, tzinfo=UTC)
    assert instant("7d", now=now) == datetime(2026, 3, 3, 12, tzinfo=UTC)
    assert instant("1y", now=now) == datetime(2025, 3, 10, 12, tzinfo=UTC)
    for bad in ("", "yesterday", "2026-13-01", "7 parsecs"):
        with pytest.raises(QueryError, match="is not a date"):
            instant(bad)


@pytest.mark.parametrize(
    ("shape", "bare"),
    [
        ("G=4,M_g=128,N=128,K=128", "4,128,128,128"),
        ("N=512", "512"),
        ("G=4,M_g=64,N=64,K=64,B=shared", "4,64,64,64,B=shared"),
        ("G=3,M_g=0|1|9,N=8,K=4", "3,M_g=0|1|9,8,4"),
        ("copy,N=8", "copy,8"),
    ],
)
def test_a_shape_by_its_sizes_alone(shape: str, bare: str) -> None:
    assert without_letters(shape) == bare
    assert unnamed_sizes(bare) == (bare if bare.replace(",", "").isdecimal() else None)


def test_blanks_between_sizes() -> None:
    assert unnamed_sizes(" 4, 128 ,8 ") == "4,128,8"
    assert [unnamed_sizes(text) for text in ("", "4,", "-4,8", "4 8", "4,٣", "4,*")] == [None] * 6


def test_texts_that_look_like_dates() -> None:
    texts = ("2026-01-31", "7d", "abc1", "main", "2026")
    assert [looks_like_date(text) for text in texts] == [True, True, False, False, False]


def test_ranges_of_commits() -> None:
    assert commit_range("a..b") == ("a", "b")
    assert commit_range("a..") == ("a", None)
    assert commit_range("..b") == (None, "b")
    assert commit_range("v1.0..v1.1") == ("v1.0", "v1.1")
    for bad in ("", "..", "a", "a...b", "a..b..c"):
        with pytest.raises(QueryError, match="not a range"):
            commit_range(bad)


TEXTS = st.text(alphabet="ab[\n.", max_size=12)
PATTERNS = st.text(alphabet="ab[\n.*?", max_size=8)


@given(text=TEXTS, pattern=PATTERNS)
def test_a_pattern_matches_like_a_regular_expression(text: str, pattern: str) -> None:
    expression = "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in pattern)
    assert any_pattern([pattern])(text) == (re.fullmatch(expression, text, re.DOTALL) is not None)


CASES = {
    "all": ("*", "", True),
    "one letter": ("?", "", False),
    "both ends meet": ("ab*ba", "aba", False),
    "the last part comes twice": ("*ab", "abxab", True),
    "brackets are literal": ("[ab]*", "[ab]c", True),
    "a line break": ("a*b", "a\nb", True),
}


@pytest.mark.parametrize(("pattern", "text", "fits"), CASES.values(), ids=CASES)
def test_ends_and_literals(pattern: str, text: str, fits: bool) -> None:
    assert any_pattern([pattern])(text) is fits


def test_any_of_several_patterns_is_enough() -> None:
    fits = any_pattern(["x*", "exact"])
    assert (fits("xy"), fits("exact"), fits("exactly")) == (True, True, False)
    assert not any_pattern([])("")


def test_many_stars_end() -> None:
    """A regular expression of these takes longer than anyone waits."""
    assert not any_pattern(["*a" * 50 + "*b"])("a" * 20_000)
