"""Cells of CSV for those who read them by other means than a program: a terminal, a spreadsheet."""

from __future__ import annotations

from typing import IO, Any

from groupbench.tracker.text.wording import printable

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""What a spreadsheet takes a cell for a formula by: https://owasp.org/www-community/attacks/CSV_Injection"""


def formula_safe(value: Any) -> Any:
    """Return a text that a spreadsheet would evaluate with an apostrophe in front, which makes it text there.

    Numbers stay as they are, and so does any text that begins otherwise.
    """
    return f"'{value}" if isinstance(value, str) and value.lstrip(" ").startswith(_FORMULAS) else value


def cell_for(file: IO[Any], value: Any) -> Any:
    """Return a cell as `file` takes it: on a terminal without what steers one, anywhere else as it is."""
    return printable(value) if isinstance(value, str) and file.isatty() else value
