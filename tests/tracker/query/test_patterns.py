"""Wildcards match the same in Python as in SQL, and never hang."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from groupbench.tracker.query.patterns import any_pattern

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
