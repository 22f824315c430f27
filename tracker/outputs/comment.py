"""Markdown for a pull request: counts first, then only the series that changed, folded.

The first line is an invisible mark by which `groupbench post` finds the comment again and edits it. It differs by plan
and hardware, so that two machines do not overwrite each other's comments.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from groupbench.tracker.outputs import markdown
from groupbench.tracker.outputs.escape import size

if TYPE_CHECKING:
    from groupbench.tracker.outputs.result import GateResult

COMMENT_BYTES = 65_000
"""Largest comment in bytes. GitHub accepts 65,536 characters, and a text never has more characters than bytes."""

_COMMENT_GROUPS = 30  # groups of changes
_MARK = re.compile(r"<!-- groupbench:[0-9a-f]{12} -->")


def render(result: GateResult) -> str:
    page = markdown.MarkdownPage(COMMENT_BYTES)
    page.add(mark(result.gate.run.plan or "", *sorted(result.hardware)) + "\n")
    page.add(markdown.head(result, "###"))
    foot = markdown.foot(result)
    page.limit -= size(foot)
    markdown.changes(page, result, _COMMENT_GROUPS)
    markdown.sections(page, result, result.gate.notable)
    page.limit += size(foot)
    page.add(foot)
    return page.text()


def mark(*key: str) -> str:
    digest = hashlib.sha256("\0".join(key).encode("utf-8", "replace")).hexdigest()
    return f"<!-- groupbench:{digest[:12]} -->"


def mark_of(text: str) -> str | None:
    """Return the mark that a text begins with, or None."""
    match = _MARK.match(text)
    return match[0] if match else None


def fitted(text: str, limit: int = COMMENT_BYTES) -> str:
    """Return Markdown cut to `limit` bytes at the end of a line, with open code blocks and folds closed."""
    if size(text) <= limit:
        return text
    kept: list[str] = []
    room = limit - 400
    fence = ""
    folds = 0
    for line in text.splitlines(keepends=True):
        room -= size(line)
        if room < 0:
            break
        kept.append(line)
        if match := re.match(r"\s{0,3}(`{3,}|~{3,})", line):
            fence = "" if fence and line.strip().startswith(fence) else fence or match[1]
        if not fence:
            folds += len(re.findall("<details", line)) - len(re.findall("</details", line))
    left = len(text.splitlines()) - len(kept)
    ends = (f"\n{fence}\n" if fence else "\n") + "</details>\n" * min(max(folds, 0), 20)
    return "".join(kept) + ends + f"\n{left} lines were left out: a comment is limited to {limit:,} bytes.\n"
