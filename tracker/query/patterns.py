"""Shell wildcards * and ?, in SQL and in Python. Everything else is literal, including brackets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from sqlalchemy import ColumnElement, func, or_
from sqlalchemy.orm import Session


def matches(session: Session, column: Any, pattern: str) -> ColumnElement[bool]:
    """Return an SQL condition: the column matches a pattern, or equals it. Case-sensitive."""
    if session.get_bind().dialect.name == "sqlite":  # whose LIKE ignores case
        fits = column.op("GLOB")(pattern.replace("[", "[[]"))
    else:
        escaped = pattern.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        fits = column.like(escaped.replace("*", "%").replace("?", "_"), escape="\\")
    return or_(column == pattern, fits)


def starts(column: Any, text: str) -> ColumnElement[bool]:
    """Return an SQL condition: the column starts with a text. Case-sensitive; wildcards are literal."""
    return func.substr(column, 1, len(text)) == text


def any_pattern(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Return a function to match a text against any pattern."""
    exact = set(patterns)
    wild = [_Wildcards(pattern) for pattern in exact if "*" in pattern or "?" in pattern]
    return lambda text: text in exact or any(each.fit(text) for each in wild)


class _Wildcards:
    """A pattern with shell wildcards, matched without backtracking.

    For each part between two stars, the first match suffices, because later ones leave less text for the rest. A
    regular expression would try all combinations, in time exponential in the number of stars.
    """

    def __init__(self, pattern: str) -> None:
        parts = ["".join("." if c == "?" else re.escape(c) for c in part) for part in pattern.split("*")]
        self._first, *self._rest = (re.compile(part, re.DOTALL) for part in parts)
        self._last_length = len(pattern.rpartition("*")[2])

    def fit(self, text: str) -> bool:
        """Return whether the pattern matches a whole text."""
        if not self._rest:
            return self._first.fullmatch(text) is not None
        start = self._first.match(text)
        if start is None:
            return False
        at = start.end()
        for part in self._rest[:-1]:
            part_match = part.search(text, at)
            if part_match is None:
                return False
            at = part_match.end()
        end = len(text) - self._last_length
        return end >= at and self._rest[-1].match(text, end) is not None
