"""Convert texts of exceptions and command lines to a form that a record can hold."""

from __future__ import annotations

from groupbench.tracker.facts.record import cut

LONGEST_LINE = 1000
"""Maximum length of a message in characters: a compiler's output may fill pages."""


def storable(text: str) -> str:
    """Return the text with Python escapes for characters that record files cannot hold.

    These are NUL and lone surrogates, which Python uses for bytes that are not UTF-8 (in file names and arguments).
    """
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", r"\x00")


def one_line(text: str) -> str:
    """Return a storable message in one line, with lines joined by ` / `."""
    return cut(storable(joined_lines(text)), LONGEST_LINE)


def joined_lines(text: str) -> str:
    """Return the non-blank lines joined by ` / `, each with runs of blanks reduced to one."""
    return " / ".join(line for line in (" ".join(line.split()) for line in text.splitlines()) if line)
