"""Find the measured commit, from git or from the user if the source tree has no git history."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from groupbench.operators.errors import UsageError
from groupbench.tracker.facts.record import UNKNOWN_COMMIT, Commit, cut
from groupbench.tracker.tools import git


def find_commit(revision: str | None, folder: Path | None = None) -> Commit:
    """Return the commit of a checkout.

    revision  a hash given by the user: looked up in the checkout if there is one, otherwise used as it is
    folder    the checkout; the current folder by default

    Raises UsageError if `revision` is neither a hash nor known to git.
    """
    folder = folder or Path.cwd()
    # Resolved first: a tag or a file's name would make `show` print more than the commit.
    full = git.rev_parse(revision or "HEAD", folder)
    shown = full and git.ask(folder, "show", "-s", "--format=%H%x00%P%x00%ct%x00%an%x00%s", full, "--")
    if not shown:
        if revision is None:
            return Commit(hash=UNKNOWN_COMMIT)
        if not 4 <= len(revision) <= 64 or not all(c in "0123456789abcdef" for c in revision.lower()):
            raise UsageError(f"--commit {revision!r} is neither a hash nor a name that git knows here")
        return Commit(hash=revision.lower())
    full, parents, seconds, author, subject = shown.rstrip("\n").split("\0", 4)
    head = revision is None or full == (git.ask(folder, "rev-parse", "HEAD") or "").strip()
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
