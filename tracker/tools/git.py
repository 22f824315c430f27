"""Run git. Needs only the standard library, so that a GPU machine can import it.

`run` raises a GitError that names the command and git's reason. `ask` returns None instead, for queries that may have
no answer, such as outside a checkout or without git. Both raise a RefusedError in a repository that git does not read:
results of such a checkout would otherwise count as results outside git.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from groupbench.tracker.facts.errors import TrackerError

GIT_LIMIT_S = 120.0

_REPOSITORY_VARIABLES = frozenset(
    f"GIT_{name}"
    for name in (
        *("DIR", "WORK_TREE", "IMPLICIT_WORK_TREE", "COMMON_DIR", "INDEX_FILE", "OBJECT_DIRECTORY", "PREFIX"),
        *("ALTERNATE_OBJECT_DIRECTORIES", "SHALLOW_FILE", "GRAFT_FILE", "REPLACE_REF_BASE", "NO_REPLACE_OBJECTS"),
        *("NAMESPACE", "CONFIG", "INTERNAL_SUPER_PREFIX", "LITERAL_PATHSPECS", "GLOB_PATHSPECS", "ICASE_PATHSPECS"),
    )
)
"""Variables that git sets for hooks. They would redirect every command to the hook's repository.

Variables that configure git itself (GIT_CONFIG_GLOBAL, GIT_SSH_COMMAND, GIT_CEILING_DIRECTORIES) are kept.
"""


_NO_REASON = "Stopping at filesystem boundary"
"""Start of the line that follows git's reason where a folder and its root are on two file systems."""


class GitError(TrackerError):
    """Git is not installed, timed out, or failed."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason  # git's last line of output, without the command


class NoGitError(GitError):
    """Git is not installed."""

    def __init__(self) -> None:
        super().__init__("git is not installed", "git is not installed")


class RefusedError(GitError):
    """There is a repository, and git does not read it: it belongs to another user, or is damaged or unreadable."""


_FAILED = 128
"""Git's exit code for an error. A query without an answer has another."""

_SIMPLEST = ("rev-parse", "--absolute-git-dir")
"""The query that git answers in every repository that it reads."""


def run(
    folder: str | os.PathLike[str],
    *args: str,
    timeout: float = GIT_LIMIT_S,
    stdin: str | None = None,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Run git in a folder and return the output.

    Args:
        folder: Where to run it.
        *args: Arguments of git.
        timeout: Seconds after which git is killed.
        stdin: Text for standard input.
        pass_fds: Descriptors that git keeps open.
        variables: Environment variables to add, such as an index file.

    Raises:
        RefusedError: Git does not read this repository.
        GitError: Git is missing, does not answer, or fails.
    """
    with started(folder, *args, timeout=timeout, stdin=stdin, pass_fds=pass_fds, variables=variables) as finish:
        return finish()


@contextlib.contextmanager
def started(
    folder: str | os.PathLike[str],
    *args: str,
    timeout: float = GIT_LIMIT_S,
    stdin: str | None = None,
    pass_fds: Sequence[int] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Callable[[], str]]:
    """Start git and yield a function that waits for the output, as `run` returns it. The context's end kills git."""
    try:
        process = subprocess.Popen(
            command(folder, *args),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**environment(), **variables},
            pass_fds=pass_fds,
            start_new_session=True,  # Ctrl-C in the terminal must not interrupt git
        )
    except FileNotFoundError:
        raise NoGitError from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in an argument
        raise GitError(f"git {args[0]} in {folder}: {error}", str(error)) from error

    def finish() -> str:
        try:
            output, errors = process.communicate((stdin or "").encode(), timeout)
            reason = _reason(errors)
        except subprocess.TimeoutExpired:
            reason = f"no answer within {timeout:g} s"
        if process.returncode == 0:
            return output.decode("utf-8", "replace")
        if process.returncode == _FAILED and args != _SIMPLEST:
            _check_readable(folder)
        raise GitError(f"git {_verb(args)} in {folder}: {reason}", reason)

    with process:
        try:
            yield finish
        finally:
            process.kill()  # does nothing to an ended process


def command(folder: str | os.PathLike[str], *args: str) -> list[str]:
    """Return the command that runs git in a folder, with `environment`."""
    return ["git", "-C", os.fspath(folder), *args]


def environment() -> dict[str, str]:
    """Return git's environment. A query such as `status` neither writes to the user's index nor locks it."""
    inherited = {name: value for name, value in os.environ.items() if name not in _REPOSITORY_VARIABLES}
    return inherited | {"LANGUAGE": "C", "GIT_OPTIONAL_LOCKS": "0"}  # messages are compared below


def _reason(errors: bytes) -> str:
    """Return git's reason for a failure: its last error, without the advice that may follow."""
    printed = [line.strip() for line in errors.decode("utf-8", "replace").splitlines()]
    lines = [line for line in printed if line and not line.startswith(_NO_REASON)]
    fatal = [line for line in lines if line.startswith("fatal: ")]
    return (fatal or lines or ["failed"])[-1][:300]


def _check_readable(folder: str | os.PathLike[str]) -> None:
    """Raise RefusedError if a folder is in a repository that git does not read, rather than in none.

    Git's messages are not compared with known ones, apart from one remedy: any failure of the simplest query counts.
    """
    try:
        run(folder, *_SIMPLEST)
    except GitError as error:
        if (place := _repository_above(Path(folder))) is None:
            return
        if "dubious ownership" in error.reason:
            remedy = f"run `git config --global --add safe.directory {place.parent}`, if you trust its owner"
        else:
            remedy = f"{place} exists: repair it or its permissions, or remove it"
        message = f"git does not read this repository: {error.reason}; {remedy}"
        raise RefusedError(message, error.reason) from None


def _repository_above(folder: Path) -> Path | None:
    """Return the `.git` that git finds for a folder, or None without one. Git stops at the border of a disk."""
    try:
        here = folder.resolve()
        device = here.stat().st_dev
        ceilings = {
            Path(place).resolve() for place in os.environ.get("GIT_CEILING_DIRECTORIES", "").split(":") if place
        }
        for place in (here, *here.parents):
            if place in ceilings and place != here:
                break
            if place.stat().st_dev != device and not os.environ.get("GIT_DISCOVERY_ACROSS_FILESYSTEM"):
                break
            if os.path.lexists(place / ".git") and not _is_empty(place / ".git"):
                return place / ".git"
    except OSError:
        pass
    return None


def _is_empty(place: Path) -> bool:
    """Return whether a folder is empty. One that cannot be listed counts as full."""
    try:
        return place.is_dir() and not any(place.iterdir())
    except OSError:
        return False


def _verb(args: Sequence[str]) -> str:
    """Return git's command, without options before it such as `-c NAME=VALUE` and `--git-dir=FOLDER`."""
    position = 0
    while args[position].startswith("-"):
        position += 2 if args[position] == "-c" else 1
    return args[position]


def ask(folder: str | os.PathLike[str], *args: str, timeout: float = GIT_LIMIT_S) -> str | None:
    """Run git and return the output, or None on failure. Raises RefusedError."""
    try:
        return run(folder, *args, timeout=timeout)
    except RefusedError:
        raise
    except GitError:
        return None


def require_repository(folder: str | os.PathLike[str]) -> None:
    """Raise GitError with one clear line unless a folder is in a git repository."""
    try:
        run(folder, "rev-parse", "--show-toplevel")
    except RefusedError:
        raise
    except GitError as error:
        if "not a git repository" not in error.reason:
            raise
        raise GitError(f"{folder} is not in a git repository; run this command in a checkout", error.reason) from error


def rev_parse(name: str, folder: str | os.PathLike[str] = ".") -> str | None:
    """Return the full hash of any name that git resolves to a commit (tag, branch, HEAD~3), or None."""
    if not name:
        return None
    commit = name if name.startswith(":/") else f"{name}^{{commit}}"  # the search for `:/TEXT` takes the rest as text
    output = ask(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", commit)
    return output.strip() if output else None


def head(folder: str | os.PathLike[str] = ".") -> str | None:
    """Return the hash of the commit that is checked out, or None outside a checkout and in one without commits.

    Raises:
        RefusedError: Git does not read the repository, or its HEAD names no commit.
    """
    if (full := rev_parse("HEAD", folder)) is not None or ask(folder, "rev-parse", "--git-dir") is None:
        return full
    try:
        return run(folder, "log", "-1", "--format=%H").strip()
    except GitError as error:
        if "does not have any commits yet" in error.reason:
            return None
        remedy = "check out a branch, or repair the repository (`git fsck`)"
        raise RefusedError(
            f"git does not know the commit that is checked out: {error.reason}; {remedy}", error.reason
        ) from error


def worktrees(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of all worktrees, the main one first; none outside a repository."""
    fields = (ask(folder, "worktree", "list", "--porcelain", "-z") or "").split("\0")
    return [Path(field.removeprefix("worktree ")) for field in fields if field.startswith("worktree ")]


def is_shallow(folder: str | os.PathLike[str] = ".") -> bool:
    """Return whether a folder is in a shallow clone, which lacks most commits."""
    return (ask(folder, "rev-parse", "--is-shallow-repository") or "").strip() == "true"


def unknown_commit(name: str, folder: str | os.PathLike[str], otherwise: str) -> str:
    """Return the error for a commit that git does not know here, with advice: a shallow clone lacks most commits."""
    meant = _similar_name(name, folder)
    advice = otherwise if meant is None else f"did you mean {meant!r}?"
    if is_shallow(folder):
        advice = "this is a shallow clone: run `git fetch --unshallow`, or check the spelling"
        advice += "" if meant is None else f" ({meant!r}?)"
    return f"git knows no commit {name!r} in {folder}; {advice}"


def _similar_name(name: str, folder: str | os.PathLike[str]) -> str | None:
    """Return the branch or tag that a mistyped name, or a name of another remote, probably means."""
    from difflib import get_close_matches  # needed only for errors

    refs = (ask(folder, "for-each-ref", "--format=%(refname:short)") or "").split()
    elsewhere = [ref for ref in refs if ref.rpartition("/")[2] == name.rpartition("/")[2]]
    return next(iter(elsewhere or get_close_matches(name, refs, n=1)), None)


def first_parents(commit: str) -> tuple[list[str], bool] | None:
    """Return a commit and the first parents, newest first, and whether they end at a root.

    Returns None if git does not know the commit. In a shallow clone, the parents end where the clone ends.
    """
    output = ask(".", "rev-list", "--first-parent", "--end-of-options", commit, "--")
    if not output:
        return None
    return output.split(), (ask(".", "rev-parse", "--is-shallow-repository") or "").strip() == "false"


def between(first: str, last: str) -> set[str] | None:
    """Return the hashes of `first..last`, or None if git does not know both."""
    if rev_parse(first) is None or rev_parse(last) is None:
        return None
    output = ask(".", "rev-list", "--end-of-options", f"{first}..{last}")
    return None if output is None else set(output.split())


def is_ancestor(first: str, last: str) -> bool | None:
    """Return whether `last` is `first` or a descendant of it; None if git does not know both."""
    if rev_parse(first) is None or rev_parse(last) is None:
        return None
    return ask(".", "merge-base", "--is-ancestor", first, last) is not None


def user() -> str | None:
    """Return the configured git user as `Name <address>`, or None."""
    name, address = (" ".join((ask(".", "config", key) or "").split()) for key in ("user.name", "user.email"))
    return f"{name} <{address}>".strip() if name and address else name or address or None
