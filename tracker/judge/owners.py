"""Find an incident's owner: the commit's author, else the files' code owner, else the plan's owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from groupbench.tracker.judge.spans import Span

PLACES = (".github/CODEOWNERS", ".gitlab/CODEOWNERS", "CODEOWNERS", "docs/CODEOWNERS")


def owner_in(folder: Path, default: str | None) -> Callable[[Sequence[Span], Collection[str]], str | None]:
    """Return a function that finds an incident's owner.

    Args:
        folder: The repository.
        default: The plan's owner.
    """
    rules = next((_rules(folder / place) for place in PLACES if (folder / place).is_file()), [])

    def owner(spans: Sequence[Span], files: Collection[str]) -> str | None:
        authors = {span.author for span in agreed(spans) if span.author and _is_one(span)}
        if len(authors) == 1:
            return authors.pop()
        owners = {name for file in files if (name := _owner_of(file, rules))}
        return owners.pop() if len(owners) == 1 else default

    return owner


def agreed(spans: Sequence[Span]) -> list[Span]:
    """Return the spans with a run in common with the most frequent one: noise moves some by one run."""
    ends = [(span.base, span.head) for span in spans]
    main = max(spans, key=lambda span: ends.count((span.base, span.head)), default=None)
    return [span for span in spans if main is None or span.overlaps(main)]


def _is_one(span: Span) -> bool:
    """Return whether a change is known to be in one commit."""
    return len(span.named) == 1 and len(span.named[0].commits) == 1 if span.named else span.number == 1


def _rules(path: Path) -> list[tuple[str, str]]:
    """Return a CODEOWNERS file's patterns with first owners, in order."""
    lines = (line.partition("#")[0].split() for line in path.read_text("utf-8", "replace").splitlines())
    return [(words[0], words[1] if len(words) > 1 else "") for words in lines if words and words[0][0] not in "[^"]


def _owner_of(file: str, rules: Sequence[tuple[str, str]]) -> str:
    """Return the owner by the last pattern that matches, or "" for none."""
    return next((owner for pattern, owner in reversed(rules) if _matches(file, pattern)), "")


def _matches(file: str, pattern: str) -> bool:
    """Return whether a pattern, as in .gitignore, matches a path in the repository."""
    anchored = "/" in pattern.rstrip("/")
    text = pattern.strip("/").replace("**/", "*").replace("/**", "/*")
    wanted = [text, f"{text}/*"] if not pattern.endswith("/*") else [text]
    if pattern.endswith("/*"):  # files of the folder itself
        return fnmatchcase(file, text) and file.count("/") == text.count("/")
    return any(fnmatchcase(file, each) or (not anchored and fnmatchcase(file, f"*/{each}")) for each in wanted)
