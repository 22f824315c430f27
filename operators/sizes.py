"""Parse the sizes in a shape's text."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

S = TypeVar("S")

MOST_DIGITS = 30
"""Maximum number of digits, more than any size has. Without it, int() refuses thousands of digits less clearly."""


def whole(name: str, text: str) -> int:
    """Parse a signed integer. Raises ValueError with the name and the text."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(f"{name}={text[:MOST_DIGITS]} is not an integer")
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"{name}={text[:MOST_DIGITS]}... is too large: it has {len(digits)} digits")
    return int(text)


def size(name: str, text: str, most: int, least: int = 1) -> int:
    """Parse an integer from `least` to `most`. Raises ValueError with the name, the value and the limits."""
    return within(name, whole(name, text), most, least)


def within(name: str, value: int, most: int, least: int = 1) -> int:
    """Return the value if it is from `least` to `most`. Raises ValueError with the name, the value and the limits."""
    if not least <= value <= most:
        raise ValueError(f"{name}={value} is out of range: {least} to {most}")
    return value


def shape_parser(form: str) -> Callable[[Callable[[str], S]], Callable[[str], S]]:
    """Return a decorator for shape parsers, which adds the text and the right form to their ValueErrors."""

    def decorate(parse: Callable[[str], S]) -> Callable[[str], S]:
        @wraps(parse)
        def parser(text: str) -> S:
            try:
                return parse(text.strip())
            except (ValueError, OverflowError) as error:
                raise ValueError(f"shape {text[:200]!r}: {error}. A shape is {form}") from error

        return parser

    return decorate


def fields_of(text: str, required: str, optional: str = "", by_position: bool = False) -> dict[str, str]:
    """Return the fields of a shape such as `M=8,N=100` by name.

    Args:
        required, optional: Names, separated by blanks.
        by_position: Also accept the values of the required fields alone, as in `8,100`.

    Raises ValueError for an unknown, repeated or missing field.
    """
    needed, fields = required.split(), dict[str, str]()
    parts = split(text)
    if by_position and "=" not in text and len(parts) == len(needed):
        return dict(zip(needed, parts, strict=True))
    for part in parts:
        name, _, value = part.partition("=")
        if name in fields or name not in (*needed, *optional.split()):
            raise ValueError(f"field {name!r} is unknown or given twice")
        fields[name] = value
    if missing := [name for name in needed if name not in fields]:
        raise ValueError(f"missing {' and '.join(missing)}")
    return fields


def split(text: str) -> list[str]:
    """Split a text at the commas outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts
