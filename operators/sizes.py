"""Parse the sizes in a shape's text."""

from __future__ import annotations

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
