"""Markdown for a pull request: counts first, then only what changed, each series folded.

Its first line is a mark that no reader sees, by which `groupbench post` finds the comment again and edits it: one
for each plan and hardware, so that two machines do not write over each other.
"""

from __future__ import annotations

import hashlib
import re

from groupbench.tracker.outputs import markdown
from groupbench.tracker.outputs.escape import size
from groupbench.tracker.outputs.result import Result

LIMIT = 65_000
"""Bytes: GitHub takes 65,536 characters of a comment, by whatever count."""

_GROUPS = 30
_MARK = re.compile(r"<!-- groupbench:[0-9a-f]{12} -->")


def render(result: Result) -> str:
    page = markdown.Page(LIMIT)
    page.add(mark(result.gate.run.plan or "", *sorted(result.hardware)) + "\n")
    page.add(markdown.head(result, "###"))
    foot = markdown.foot(result)
    page.limit -= size(foot)
    markdown.changes(page, result, _GROUPS)
    markdown.sections(page, result, result.gate.notable)
    page.limit += size(foot)
    page.add(foot)
    return page.text()


def mark(*key: str) -> str:
    digest = hashlib.sha256("\0".join(key).encode("utf-8", "replace")).hexdigest()
    return f"<!-- groupbench:{digest[:12]} -->"


def mark_of(text: str) -> str | None:
    """The mark that a text begins with."""
    found = _MARK.match(text)
    return found[0] if found else None


def fitted(text: str, limit: int = LIMIT) -> str:
    """Any Markdown, cut at the end of a line where it is too long; folds that are open are closed."""
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
        if found := re.match(r"\s{0,3}(`{3,}|~{3,})", line):
            fence = "" if fence and line.strip().startswith(fence) else fence or found[1]
        if not fence:
            folds += len(re.findall("<details", line)) - len(re.findall("</details", line))
    left = len(text.splitlines()) - len(kept)
    ends = (f"\n{fence}\n" if fence else "\n") + "</details>\n" * min(max(folds, 0), 20)
    return "".join(kept) + ends + f"\n{left} lines were left out, since a comment may have {limit:,} bytes.\n"
