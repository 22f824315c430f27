"""Shell wildcards * and ?, in SQL and in Python. Everything else is literal, including brackets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fnmatch import translate
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
    """Return a test like `matches` for Python strings: whether a text is one of the patterns or fits one.

    No pattern backtracks: `fnmatch` makes each part between wildcards atomic.
    """
    exact = set(patterns)
    wild = [re.compile(translate(pattern.replace("[", "[[]"))) for pattern in exact if "*" in pattern or "?" in pattern]
    return lambda text: text in exact or any(each.match(text) for each in wild)
