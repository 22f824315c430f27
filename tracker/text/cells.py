"""Make CSV cells safe for a terminal or a spreadsheet."""

from __future__ import annotations

from typing import IO, Any

from groupbench.tracker.text.wording import printable

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters of a cell that a spreadsheet reads as a formula:
https://owasp.org/www-community/attacks/CSV_Injection"""


def formula_safe(value: Any) -> Any:
    """Return a value with an apostrophe in front if a spreadsheet would evaluate it as a formula.

    Numbers and all other texts are returned unchanged.
    """
    return f"'{value}" if isinstance(value, str) and value.lstrip(" ").startswith(_FORMULAS) else value


def cell_for(file: IO[Any], value: Any) -> Any:
    """Return a cell for `file`: without control characters if it is a terminal, otherwise unchanged."""
    return printable(value) if isinstance(value, str) and file.isatty() else value
