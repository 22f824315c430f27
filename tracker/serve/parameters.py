"""Parse request parameters strictly: an invalid, unknown or repeated parameter is an error."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TypeVar
from urllib.parse import parse_qsl, urlencode

from groupbench.tracker.facts.errors import QueryError, TrackerError
from groupbench.tracker.query import filters
from groupbench.tracker.serve.limits import LIMITS

LONGEST_QUERY = 8_192
"""Maximum length of a query string in characters, ten times the length that a form sends."""

LARGEST_KEY = 2**62

T = TypeVar("T")


class BadRequest(TrackerError):
    """A parameter is invalid. The response has status 400."""


class NotFound(TrackerError):
    """A page or a row does not exist. The response has status 404."""


class Parameters:
    """A request's parameters. A view reads each by name and type, and then calls `done`, which refuses the others.

    An empty value counts as missing, since a form sends all fields. Every reading method raises BadRequest for an
    invalid value.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        self._known: list[str] = []
        for name, value in pairs:
            if value.strip():
                self._values.setdefault(name, []).append(value)

    @classmethod
    def of_query(cls, query: str) -> Parameters:
        """Return a query string's parameters. Raises BadRequest."""
        if len(query) > LONGEST_QUERY:
            raise BadRequest(f"the query has {len(query)} characters; at most {LONGEST_QUERY} are allowed")
        return cls(parse_qsl(query, keep_blank_values=True))

    def texts(self, name: str) -> tuple[str, ...]:
        """Return the distinct values for a repeatable parameter."""
        self._known.append(name)
        return tuple(dict.fromkeys(checked(name, value) for value in self._values.get(name, ())))

    def text(self, name: str) -> str | None:
        values = self.texts(name)
        if len(values) > 1:
            raise BadRequest(f"{name} is given {len(values)} times; once is enough")
        return values[0] if values else None

    def number(self, name: str, default: int, low: int = 1, high: int = LARGEST_KEY) -> int:
        text = self.text(name)
        if text is None:
            return default
        if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or not low <= int(text) <= high:
            upper = f" to {high}" if high < LARGEST_KEY else ""
            raise BadRequest(f"{name}={text[:40]!r} is not a whole number from {low}{upper}")
        return int(text)

    def choice(self, name: str, choices: Sequence[str], default: str) -> str:
        text = self.text(name)
        if text is None:
            return default
        if text not in choices:
            raise BadRequest(f"{name}={text[:80]!r} is not one of {', '.join(choices)}")
        return text

    def flag(self, name: str) -> bool:
        return self.choice(name, ("1", "0"), "0") == "1"

    def date(self, name: str, *, end: bool = False) -> datetime | None:
        """Return the time meant by a date, a date and time, or an age (`filters.instant`); None if missing."""
        text = self.text(name)
        return None if text is None else resolve_parameter(name, lambda: filters.instant(text, end=end))

    def keys(self, name: str) -> list[int]:
        """Return the row keys for a repeatable parameter."""
        return [key_of(name, text) for text in self.texts(name)]

    def done(self) -> None:
        """Raise BadRequest for a parameter unread by the view."""
        unknown = sorted(set(self._values) - set(self._known))
        if unknown:
            names = ", ".join(sorted(set(self._known))) or "none"
            raise BadRequest(f"no parameter {unknown[0][:80]!r} here; known: {names}")

    def url(self, path: str, **changed: object) -> str:
        """Return the path with this request's parameters and `changed`; None or "" removes a parameter."""
        values = {**self._values, **{name: [str(v)] if v not in (None, "") else [] for name, v in changed.items()}}
        query = urlencode([(name, value) for name in values for value in values[name]])
        return f"{path}?{query}" if query else path


def checked(name: str, value: str) -> str:
    """Return the value without surrounding blanks. Raises BadRequest if it is too long or has a control character."""
    if len(value) > LIMITS.value:
        raise BadRequest(f"{name} has {len(value)} characters; at most {LIMITS.value} are allowed")
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in value):
        raise BadRequest(f"{name} holds a control character")
    return value.strip()


def key_of(name: str, text: str) -> int:
    """Return the row key in a text. Raises BadRequest if it is not a whole number."""
    if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise BadRequest(f"{name} {text[:40]!r} is not a key; keys are whole numbers")
    return int(text)


def resolve_parameter(name: str, ask: Callable[[], T]) -> T:
    """Return the result from `ask`; a QueryError becomes a BadRequest with the parameter's name."""
    try:
        return ask()
    except QueryError as error:
        raise BadRequest(f"{name}: {error.message}") from error
