"""Which commit is being measured: asked of git, or said by the user where the tree came without its history."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

from groupbench.operators.errors import UsageError
from groupbench.tracker.record import Commit

UNKNOWN = "unknown"


def find_commit(said: str | None, folder: Path | None = None) -> Commit:
    """The commit of a checkout.

    said    a hash given by the user: looked up in the checkout if there is one, else kept bare
    folder  where to look; the current folder by default

    Raises UsageError where `said` is no hash and git does not know it either.
    """
    folder = folder or Path.cwd()
    # Resolved first: a tag or a file's name would make `show` print more than the commit.
    name = f"{said or 'HEAD'}^{{commit}}"
    found = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", name)
    shown = found and _git(folder, "show", "-s", "--format=%H%x00%P%x00%ct%x00%an%x00%s", found.strip(), "--")
    if not shown:
        if said is None:
            return Commit(hash=UNKNOWN)
        if not 4 <= len(said) <= 64 or not all(c in "0123456789abcdef" for c in said.lower()):
            raise UsageError(f"--commit {said!r} is neither a hash nor a name that git knows here")
        return Commit(hash=said.lower())
    full, parents, seconds, author, subject = shown.rstrip("\n").split("\0", 4)
    head = said is None or full == (_git(folder, "rev-parse", "HEAD") or "").strip()
    branch = (_git(folder, "symbolic-ref", "--short", "-q", "HEAD") or "").strip() if head else ""
    status = _git(folder, "status", "--porcelain", "--untracked-files=no") if head else ""
    return Commit(
        hash=full,
        parents=tuple(parents.split()),
        branch=branch or None,
        dirty=bool(status),
        time=datetime.fromtimestamp(int(seconds), UTC),
        author=author,
        subject=subject,
    )


def _git(folder: Path, *args: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, errors="replace", timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
