"""Commits as folders: detached git worktrees, gone when they are no longer needed, also after Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from groupbench.tracker import git
from groupbench.tracker.errors import TrackerError
from groupbench.tracker.exits import ExitCode

PREFIX = "groupbench-tree-"
SETUP_TIMEOUT_S = 3600.0
CHECKOUT_TIMEOUT_S = 600.0


class WorktreeError(TrackerError):
    """A commit that git does not know or cannot check out."""


class SetupError(WorktreeError):
    """The commit does not build: its set-up command failed."""

    exit_code = ExitCode.INCOMPLETE


def resolve(repo: Path, commit: str) -> str:
    """The full hash of a commit, tag, branch or anything else that git knows as one. Raises WorktreeError."""
    if not commit or "\0" in commit:
        raise WorktreeError("a commit's name is empty or no text")
    try:
        git.run(repo, "rev-parse", "--show-toplevel")
    except git.NoGitError as error:
        raise WorktreeError("git is not installed, so commits cannot be checked out: give folders instead") from error
    except git.GitError as error:
        raise WorktreeError(
            f"{repo} is in no git repository: run this in a checkout, or give folders, not commits"
        ) from error
    full = git.rev_parse(commit, repo)
    if full is None:
        raise WorktreeError(f"git knows no commit {commit!r} in {repo}, and no folder has that name")
    return full


@contextlib.contextmanager
def checkout(repo: Path, commit: str, setup: str | None = None) -> Iterator[Path]:
    """A folder with the files of `commit`, for as long as the context lasts.

    repo   the repository, or a folder within it: then the same folder of that commit is given
    setup  a shell command that is run there first, to build what the commit needs built

    Raises WorktreeError, and SetupError where the command fails.
    """
    full = resolve(repo, commit)
    prefix = (git.ask(repo, "rev-parse", "--show-prefix") or "").rstrip("\n")
    scratch = Path(tempfile.mkdtemp(prefix=PREFIX))
    tree = scratch / full[:12]
    try:
        try:
            git.run(repo, "worktree", "add", "--detach", "--force", str(tree), full, timeout=CHECKOUT_TIMEOUT_S)
        except git.GitError as error:
            raise WorktreeError(f"git cannot check out {commit}: {error.reason}") from error
        folder = tree / prefix
        if not folder.is_dir():
            raise WorktreeError(f"commit {full[:10]} has no folder {prefix}")
        if setup:
            run_setup(folder, setup, full[:10])
        yield folder
    finally:
        with _undisturbed():
            git.ask(repo, "worktree", "remove", "--force", str(tree), timeout=CHECKOUT_TIMEOUT_S)
            shutil.rmtree(scratch, ignore_errors=True)
            git.ask(repo, "worktree", "prune")


def run_setup(folder: Path, command: str, name: str) -> None:
    """Run a build command in a folder. Raises SetupError with the last line it wrote."""
    process = subprocess.Popen(
        ["bash" if shutil.which("bash") else "sh", "-c", command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=SETUP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SetupError(f"{name} does not build: --setup took more than {SETUP_TIMEOUT_S:g} s") from None
    finally:
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        raise SetupError(f"{name} does not build: --setup ended with {process.returncode}: {_last_line(said)}")


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A second Ctrl-C waits until the worktree is gone."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
