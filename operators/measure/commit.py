"""Find the measured commit, from git or from the user if the source tree has no git history."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from groupbench.operators.errors import UsageError
from groupbench.tracker.facts.record import UNKNOWN_COMMIT, Commit, cut
from groupbench.tracker.tools import git


def find_commit(revision: str | None, folder: Path | None = None) -> Commit:
    """Return the commit of a checkout.

    Args:
        revision: A hash given by the user: looked up in the checkout if there is one, otherwise used as it is.
        folder: The checkout; the current folder by default.

    Raises UsageError if `revision` is neither a hash nor known to git, or if git does not read the repository.
    """
    try:
        return _commit_of(revision, folder or Path.cwd())
    except git.GitError as error:
        raise UsageError(error.message) from error


def _commit_of(revision: str | None, folder: Path) -> Commit:
    checked_out = git.head(folder)
    # Resolved first: a tag or a file's name would make `show` print more than the commit.
    full = checked_out if revision is None else git.rev_parse(revision, folder)
    if full is None:
        if revision is None:
            return Commit(hash=UNKNOWN_COMMIT)
        if not 4 <= len(revision) <= 64 or not all(c in "0123456789abcdef" for c in revision.lower()):
            raise UsageError(f"--commit {revision!r} is neither a hash nor a name that git knows here")
        return Commit(hash=revision.lower())
    shown = git.run(folder, "show", "-s", "--format=%H%x00%P%x00%ct%x00%an%x00%s", full, "--")
    full, parents, seconds, author, subject = shown.rstrip("\n").split("\0", 4)
    head = revision is None or full == checked_out
    branch = (git.ask(folder, "symbolic-ref", "--short", "-q", "HEAD") or "").strip() if head else ""
    status = git.run(folder, "status", "--porcelain", "--untracked-files=no") if head else ""
    return Commit(
        hash=full,
        parents=tuple(parents.split()),
        branch=cut(branch) or None,
        dirty=bool(status),
        time=_time(full, int(seconds), folder),
        author=cut(author),
        subject=cut(subject),
    )


def _time(commit: str, seconds: int, folder: Path) -> datetime:
    """Return the committer's time, with a microsecond for each ancestor that is not older.

    Git's times are whole seconds, and a script makes several commits in one. A commit has more such ancestors than any
    of these, so the times of a line of commits are different and in order, wherever the records are read.
    """
    counted = git.run(folder, "rev-list", "--count", f"--max-age={seconds}", commit, "--")
    return datetime.fromtimestamp(seconds, UTC) + timedelta(microseconds=min(int(counted) - 1, 999_999))
