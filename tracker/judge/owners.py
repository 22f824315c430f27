"""Find changed files' owner: the code owner, else the plan's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

PLACES = (".github/CODEOWNERS", ".gitlab/CODEOWNERS", "CODEOWNERS", "docs/CODEOWNERS")


def owner_in(folder: Path, default: str | None) -> Callable[[Collection[str]], str | None]:
    """Return a function that finds files' owner.

    Args:
        folder: The repository.
        default: The plan's owner.
    """
    rules = next((_rules(folder / place) for place in PLACES if (folder / place).is_file()), [])

    def owner(files: Collection[str]) -> str | None:
        owners = {name for file in files if (name := _owner_of(file, rules))}
        return owners.pop() if len(owners) == 1 else default

    return owner


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
