"""Texts that came from elsewhere, an exception or a command line, as a record can hold them."""

from __future__ import annotations

from groupbench.tracker.record import cut

LONGEST = 1000
"""Characters of a message: what a compiler says may fill pages."""


def storable(text: str) -> str:
    """The text with what no file of records can hold spelled as Python does.

    That is lone surrogates, in which Python reads bytes that are not UTF-8 (a file's name, an argument), and NUL.
    """
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", r"\x00")


def one_line(text: str) -> str:
    """A message, storable, its lines with ` / ` between them."""
    return cut(storable(joined_lines(text)), LONGEST)


def joined_lines(text: str) -> str:
    """The lines that are not blank as one, without the spaces around each."""
    return " / ".join(line for line in (" ".join(line.split()) for line in text.splitlines()) if line)
