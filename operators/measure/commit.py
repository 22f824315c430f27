"""Which commit is being measured: asked of git, or said by the user where the tree came without its history."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from groupbench.operators.errors import UsageError
from groupbench.tracker import git
from groupbench.tracker.record import Commit, cut

UNKNOWN = "unknown"


def find_commit(said: str | None, folder: Path | None = None) -> Commit:
    """The commit of a checkout.

    said    a hash given by the user: looked up in the checkout if there is one, else kept bare
    folder  where to look; the current folder by default

    Raises UsageError where `said` is no hash and git does not know it either.
    """
    folder = folder or Path.cwd()
    # Resolved first: a tag or a file's name would make `show` print more than the commit.
    full = git.rev_parse(said or "HEAD", folder)
    shown = full and git.ask(folder, "show", "-s", "--format=%H%x00%P%x00%ct%x00%an%x00%s", full, "--")
    if not shown:
        if said is None:
            return Commit(hash=UNKNOWN)
        if not 4 <= len(said) <= 64 or not all(c in "0123456789abcdef" for c in said.lower()):
            raise UsageError(f"--commit {said!r} is neither a hash nor a name that git knows here")
        return Commit(hash=said.lower())
    full, parents, seconds, author, subject = shown.rstrip("\n").split("\0", 4)
    head = said is None or full == (git.ask(folder, "rev-parse", "HEAD") or "").strip()
    branch = (git.ask(folder, "symbolic-ref", "--short", "-q", "HEAD") or "").strip() if head else ""
    status = git.ask(folder, "status", "--porcelain", "--untracked-files=no") if head else ""
    return Commit(
        hash=full,
        parents=tuple(parents.split()),
        branch=cut(branch) or None,
        dirty=bool(status),
        time=datetime.fromtimestamp(int(seconds), UTC),
        author=cut(author),
        subject=cut(subject),
    )
