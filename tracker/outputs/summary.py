"""Markdown for the summary of a CI step: GitHub shows none at all of a step that wrote more than 1 MiB."""

from __future__ import annotations

from pathlib import Path

from groupbench.tracker.errors import OutputError
from groupbench.tracker.outputs import markdown
from groupbench.tracker.outputs.result import Result

LIMIT = 2**20 - 1024
"""Bytes of one step."""

_LEAST = 8192
_GROUPS = 100


def render(result: Result, limit: int = LIMIT) -> str:
    page = markdown.Page(limit)
    page.add(markdown.head(result, "##"))
    page.add(markdown.foot(result) + "\n")
    markdown.changes(page, result, _GROUPS)
    markdown.sections(page, result, result.gate.notable)
    markdown.every(page, result)
    return page.text()


def append(result: Result, path: Path) -> None:
    """Add it to what the step wrote before. Raises OutputError where the file cannot be written, or is full."""
    try:
        there = path.stat().st_size if path.exists() else 0
        if there > LIMIT - _LEAST:
            raise OutputError(f"{path}: holds {there:,} bytes, and no room for more: a summary may have 1 MiB")
        with path.open("ab") as file:
            file.write((("\n" if there else "") + render(result, LIMIT - there - 1)).encode())
    except OSError as cause:
        raise OutputError(f"{path}: cannot be written: {cause.strerror or cause}") from cause
