"""Markdown for the summary of a CI step. GitHub drops the whole summary of a step that writes more than 1 MiB."""

from __future__ import annotations

from pathlib import Path

from groupbench.tracker.facts.errors import OutputError
from groupbench.tracker.outputs import markdown
from groupbench.tracker.outputs.result import GateResult
from groupbench.tracker.text.files import append_whole

SUMMARY_BYTES = 2**20 - 1024
"""Largest summary of one step, in bytes."""

_LEFT_FOR_STEP = 8192  # bytes for the step's other text
_SUMMARY_GROUPS = 100  # groups of changes


def render(result: GateResult, limit: int = SUMMARY_BYTES) -> str:
    page = markdown.MarkdownPage(limit)
    page.add(markdown.head(result, "##"))
    page.add(markdown.foot(result) + "\n")
    markdown.changes(page, result, _SUMMARY_GROUPS)
    markdown.sections(page, result, result.gate.notable)
    markdown.every(page, result)
    return page.text()


def append(result: GateResult, path: Path) -> None:
    """Append the summary to the step's earlier output. Raises OutputError if the file is full or cannot be written."""
    append_text(render(result, room(path)), path)


def room(path: Path) -> int:
    """Return how many bytes of text the step's file still holds. Raises OutputError if the file is full."""
    try:
        used = path.stat().st_size if path.exists() else 0
    except OSError as cause:
        raise OutputError(f"{path}: cannot be written: {cause.strerror or cause}") from cause
    if used > SUMMARY_BYTES - _LEFT_FOR_STEP:
        raise OutputError(f"{path}: no room left: it has {used:,} bytes, and a summary is limited to 1 MiB")
    return SUMMARY_BYTES - used - 1


def append_text(text: str, path: Path) -> None:
    """Append a text to the step's earlier output: all of it or nothing. Raises OutputError."""
    data = text.encode()
    left = room(path)
    if len(data) > left:
        raise OutputError(f"{path}: no room left for {len(data):,} bytes: a summary is limited to 1 MiB")
    append_whole(path, (b"\n" if left < SUMMARY_BYTES - 1 else b"") + data, OutputError)
