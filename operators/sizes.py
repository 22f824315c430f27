"""Parse the sizes in a shape's text, and format counts."""

from __future__ import annotations

DIGITS = 30
"""More than any size has; int() refuses thousands of them with advice for programmers."""


def whole(name: str, text: str) -> int:
    """The number, of any sign. Raises ValueError, naming it."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(f"{name}={text[:DIGITS]} is not an integer")
    if len(digits) > DIGITS:
        raise ValueError(f"{name}={text[:DIGITS]}... has {len(digits)} digits")
    return int(text)


def size(name: str, text: str, most: int, least: int = 1) -> int:
    """The number, if it is one from `least` to `most`. Raises ValueError, naming it and them."""
    return within(name, whole(name, text), most, least)


def within(name: str, value: int, most: int, least: int = 1) -> int:
    """The number again. Raises ValueError, naming it and the limits."""
    if not least <= value <= most:
        raise ValueError(f"{name}={value}: {least} to {most}")
    return value


def counted(number: float, what: str) -> str:
    """`1 cell`, `2 cells`."""
    shown = f"{number:g}" if isinstance(number, float) else str(number)
    return f"{shown} {what}{'' if number == 1 else 's'}"
