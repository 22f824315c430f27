"""The package's own programs, each a process of its own."""

from __future__ import annotations

import sys


def own_program(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs a module of this package, without the current folder's modules."""
    return [python, "-P", "-m", module, *arguments]
