"""What git says, where the command runs in a checkout. Without git, or elsewhere, it says nothing."""

from __future__ import annotations

import subprocess


def rev_parse(text: str) -> str | None:
    """The full hash of a tag, a branch, HEAD~3 or anything else that git knows as a commit."""
    if not text or "\0" in text:
        return None
    said = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{text}^{{commit}}")
    return said[0] if said else None


def between(first: str, last: str) -> set[str] | None:
    """Hashes of what `first..last` holds; None where git does not know both."""
    if rev_parse(first) is None or rev_parse(last) is None:
        return None
    said = _git("rev-list", "--end-of-options", f"{first}..{last}")
    return None if said is None else set(said)


def is_ancestor(first: str, last: str) -> bool | None:
    """Whether `last` is `first` or comes after it; None where git does not know both."""
    if rev_parse(first) is None or rev_parse(last) is None:
        return None
    return _git("merge-base", "--is-ancestor", first, last) is not None


def user() -> str | None:
    """Who commits here: `Name <address>`."""
    name, address = (" ".join(_git("config", key) or ()) for key in ("user.name", "user.email"))
    return f"{name} <{address}>".strip() if name and address else name or address or None


def _git(*args: str) -> list[str] | None:
    try:
        done = subprocess.run(["git", *args], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.split() if done.returncode == 0 else None
