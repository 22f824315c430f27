"""Make CSV cells and JSON safe for a terminal, and CSV cells safe for a spreadsheet."""

from __future__ import annotations

import json
import re
from typing import IO, Any

from groupbench.tracker.text.wording import printable

_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters of a cell that a spreadsheet reads as a formula:
https://owasp.org/www-community/attacks/CSV_Injection"""


_NOT_ASCII = re.compile(r"[^\x20-\x7e\n]")


def formula_safe(value: Any) -> Any:
    """Return a value with an apostrophe in front if a spreadsheet would evaluate it as a formula.

    Numbers and all other texts are returned unchanged.
    """
    return f"'{value}" if isinstance(value, str) and value.lstrip(" ").startswith(_FORMULAS) else value


def cell_for(file: IO[Any], value: Any) -> Any:
    """Return a cell for `file`: without control characters if it is a terminal, otherwise unchanged."""
    return printable(value) if isinstance(value, str) and file.isatty() else value


def json_for(file: IO[Any], data: bytes) -> bytes:
    """Return JSON for `file`: for a terminal, with characters escaped that would control it or are not shown."""
    return _NOT_ASCII.sub(_shown, data.decode()).encode() if file.isatty() else data


def _shown(char: re.Match[str]) -> str:
    return char[0] if char[0].isprintable() else json.dumps(char[0])[1:-1]
