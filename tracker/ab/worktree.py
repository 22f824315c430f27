"""Check out commits as detached git worktrees, which are removed after use, even if this process is killed.

If everything is killed, such as a container, the next checkout removes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from groupbench.tracker.ab.submodules import NO_HOOKS, add_submodules
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.measured_tree import add_to_path, measured_folders
from groupbench.tracker.text.files import locked
from groupbench.tracker.text.scratch import Ending, Scratch, is_scratch, remove_abandoned
from groupbench.tracker.tools import git

logger = logging.getLogger(__name__)

SETUP_TIMEOUT_S = 3600.0
CHECKOUT_TIMEOUT_S = 600.0

SETUP_OF_FILE = "`setup` of groupbench.toml"

_BY_CONTENT = tuple(
    word
    for setting in ("trustctime=true", "checkStat=default", "ignoreStat=false", "fsmonitor=false")
    for word in ("-c", f"core.{setting}")
)
"""Settings with which git sees every change of a file, whatever the user's are."""


"""Bytes by which a file in memory may be larger than its contents."""

LAST_LINES, LONGEST_LINE = 5, 200
"""Lines of a setup command's output that an error shows, and the characters of each."""

_LIFELINE = """
import os, signal, subprocess, sys, threading
command = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
def end_with_parent():
    os.read(0, 1)
    os.killpg(command.pid, signal.SIGKILL)
threading.Thread(target=end_with_parent, daemon=True).start()
code = command.wait()
os._exit(code if code >= 0 else 128 - code)
"""
"""A program that runs a command, and kills the process group when the standard input is closed."""


class WorktreeError(TrackerError):
    """A commit is unknown to git or cannot be checked out."""


class CheckoutError(WorktreeError):
    """Git cannot check out an existing commit: a fault of the machine, not the commit."""

    exit_code = ExitCode.INCOMPLETE


class SetupError(WorktreeError):
    """A commit does not build: the setup command failed."""

    exit_code = ExitCode.INCOMPLETE


@dataclass(frozen=True)
class Recipe:
    """The steps from a checkout to a measurable folder. Fields are named as in groupbench.toml.

    Attributes:
        setup: Shell command to build the checkout.
        by_option: Whether `setup` comes from --setup, not groupbench.toml.
        benchmarks: Files and folders to copy from the repository's own checkout if the commit lacks them.
        pythonpath: Folders with modules, in addition to the checkout itself and `src`.
    """

    setup: str | None = None
    benchmarks: tuple[str, ...] = ()
    pythonpath: tuple[str, ...] = ()
    by_option: bool = False


AS_IT_IS = Recipe()


def resolve(repo: Path, commit: str, otherwise: str = "no folder has that name either") -> str:
    """Return the full hash for a commit, tag, branch or any other name.

    Args:
        otherwise: Advice for an unknown commit, if nothing better is known.

    Raises WorktreeError.
    """
    if not commit or "\0" in commit:
        raise WorktreeError("the name of a commit is empty or contains a NUL character")
    try:
        git.require_repository(repo)
    except git.GitError as error:
        raise WorktreeError(f"{error.message}; or give folders instead of commits") from error
    full = git.rev_parse(commit, repo)
    if full is None:
        raise WorktreeError(git.unknown_commit(commit, repo, otherwise))
    return full


class Spares(AbstractContextManager["Spares"]):
    """Unused worktrees, for later commits of the same repository. A context manager.

    Git then writes only the files that differ: in a repository of 50,000 files, a second instead of ten. The end of the
    context removes them.
    """

    def __init__(self) -> None:
        self._free: list[_Worktree] = []

    def __exit__(self, *_: object) -> None:
        while self._free:
            self._free.pop().remove()

    def keep(self, worktree: _Worktree) -> bool:
        """Keep an unused worktree. Returns False for one with submodules, whose files git does not look after."""
        if (worktree.path / ".gitmodules").exists():
            return False
        self._free.append(worktree)
        return True

    def take(self, repo: Path, commit: str) -> _Worktree | None:
        """Return a clean worktree for a commit, with the files of another; None without a suitable one."""
        for worktree in self._free:
            if worktree.repo == repo and _are_written_alike(repo, worktree.commit, commit):
                self._free.remove(worktree)
                return worktree.moved(commit)
        return None


class _Worktree:
    """A worktree in a folder of its own, by `add` or `moved`, without the files of its commit at first."""

    def __init__(self, repo: Path, commit: str, parent: str | None = None) -> None:
        """Make the folder in `parent`, by default in the usual one for temporary files."""
        self.repo, self.commit = repo, commit
        here, name = repo.absolute(), commit[:12]

        def ending(folder: Path) -> Ending:
            return Ending(str(common_folder(here)), git.command(here, *_removing(folder / name)), git.environment())

        self.scratch = Scratch("tree", parent, ending)
        self.path = self.scratch.path / name

    @classmethod
    def add(cls, repo: Path, commit: str) -> _Worktree:
        """Raises GitError."""
        return cls(repo, commit)._begin(repo, "add", "--no-checkout", "--detach", "--force")

    def moved(self, commit: str) -> _Worktree | None:
        """Return this worktree for another commit, in another folder, since caches go by path; None if git cannot."""
        try:
            git.run(self.path, *NO_HOOKS, "clean", "-ffdxq", timeout=CHECKOUT_TIMEOUT_S)
            parent = str(self.scratch.path.parent)
            worktree = _Worktree(self.repo, commit, parent)._begin(self.path, "move", str(self.path))
        except git.GitError as error:
            logger.info("a new worktree instead of %s: %s", self.path, error.message)
            self.remove()
            return None
        self.scratch.remove()
        return worktree

    def _begin(self, folder: Path, *verb: str) -> _Worktree:
        names = (str(self.path), *([self.commit] if verb[0] == "add" else []))
        try:
            with _worktrees_locked(self.repo):
                git.run(folder, *NO_HOOKS, "worktree", *verb, *names, pass_fds=[self.scratch.handle])
        except BaseException:
            self.remove()
            raise
        return self

    def remove(self) -> None:
        with _undisturbed():
            with _worktrees_locked(self.repo):
                _forget(self.repo, self.path)
            self.scratch.remove()


def _are_written_alike(repo: Path, before: str, after: str) -> bool:
    """Return whether two commits have the same attributes: git does not write a file again if only they change."""
    changed = git.ask(repo, "diff", "--name-only", "--no-renames", "-z", before, after)
    return changed is not None and not any(path.endswith(".gitattributes") for path in changed.split("\0"))


@contextlib.contextmanager
def checkout(
    repo: Path, commit: str, recipe: Recipe = AS_IT_IS, python: str = sys.executable, spares: Spares | None = None
) -> Iterator[Path]:
    """Yield a folder with the files of `commit`, which the end of the context removes.

    Args:
        repo: The repository, or a folder within it, whose counterpart in the commit is then returned.
        recipe: Steps to make the folder measurable.
        python: Interpreter for measuring the folder.
        spares: Worktrees to use, and to return this one to.

    Raises WorktreeError, and SetupError if the recipe's command fails.
    """
    with checkouts(repo, [(commit, python)], recipe, spares) as (folder,):
        yield folder


@contextlib.contextmanager
def checkouts(
    repo: Path, wanted: Iterable[tuple[str, str]], recipe: Recipe = AS_IT_IS, spares: Spares | None = None
) -> Iterator[list[Path]]:
    """Yield a folder for each commit and interpreter, as `checkout` does. Git writes all of them at the same time."""
    sides = [(commit, python, resolve(repo, commit)) for commit, python in wanted]
    prefix = (git.ask(repo, "rev-parse", "--show-prefix") or "").rstrip("\n")
    with _worktrees_locked(repo):
        _prune(repo)
    with contextlib.ExitStack() as stack:
        with contextlib.ExitStack() as writing:
            finish = []
            for commit, _, full in sides:
                with _named(commit):
                    worktree = stack.enter_context(_worktree(repo, full, spares))
                    finish.append((commit, full, worktree.path, writing.enter_context(_written(worktree))))
            for commit, full, tree, wait in finish:
                with _named(commit):
                    wait()
                    add_submodules(common_folder(repo), tree, full)
        folders = []
        for (_, python, full), (_, _, tree, _) in zip(sides, finish, strict=True):
            folder = tree / prefix
            if not folder.is_dir():
                raise WorktreeError(f"commit {full[:10]} has no folder {prefix}")
            _add_missing(repo, folder, recipe.benchmarks)
            if recipe.setup:
                source = "--setup" if recipe.by_option else SETUP_OF_FILE
                run_setup(folder, recipe.setup, full[:10], source, python, _folders_in(tree, repo))
            folders.append(folder)
        yield folders


@contextlib.contextmanager
def _worktree(repo: Path, commit: str, spares: Spares | None) -> Iterator[_Worktree]:
    worktree = (spares.take(repo, commit) if spares else None) or _Worktree.add(repo, commit)
    try:
        yield worktree
    finally:
        if spares is None or not spares.keep(worktree):
            worktree.remove()


def _written(worktree: _Worktree) -> AbstractContextManager[Callable[[], str]]:
    """Start to write a worktree's files. If this process is killed, git continues and keeps the lock of the folder."""
    return git.started(
        worktree.path,
        *(*NO_HOOKS, *_BY_CONTENT, "checkout", "--quiet", "--force", "--detach", worktree.commit),
        timeout=CHECKOUT_TIMEOUT_S,
        pass_fds=[worktree.scratch.handle],
    )


@contextlib.contextmanager
def _named(commit: str) -> Iterator[None]:
    """Raise git's failures as CheckoutError."""
    try:
        yield
    except git.GitError as error:
        raise CheckoutError(f"git cannot check out {commit}: {error.reason}") from error


def _worktrees_locked(repo: Path) -> AbstractContextManager[None]:
    """Let one process at a time change the list of worktrees: git removes the list's folder with the last of them."""
    return locked(common_folder(repo))


def common_folder(repo: Path) -> Path:
    """Return the repository's object folder, shared by all worktrees."""
    return Path(repo, (git.ask(repo, "rev-parse", "--git-common-dir") or "").strip())


def _prune(repo: Path) -> None:
    """Remove the checkouts of killed processes, and have git forget them.

    Never `git worktree prune`: it also forgets the user's worktrees on unmounted disks.
    """
    remove_abandoned()
    for tree in git.worktrees(repo):
        if is_scratch(tree.parent, "tree") and not tree.parent.exists():
            _forget(repo, tree)


def _forget(repo: Path, tree: Path) -> None:
    """Remove a checkout of ours and git's record of it, even if git locked it because it is incomplete."""
    git.ask(repo, *_removing(tree), timeout=CHECKOUT_TIMEOUT_S)


def _removing(tree: Path) -> tuple[str, ...]:
    return "worktree", "remove", "--force", "--force", str(tree)


def _add_missing(repo: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Copy named files missing in the commit from the repository's own checkout. Raises WorktreeError."""
    for name in names:
        source, target = repo / name, folder / name
        if target.exists():
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)
        except OSError as error:
            raise WorktreeError(f"cannot copy the benchmark {source}: {error.strerror or error}") from error


def _folders_in(tree: Path, repo: Path) -> list[str]:
    """Return a checkout's counterparts of the user's measured folders."""
    top = (git.ask(repo, "rev-parse", "--show-toplevel") or "").rstrip("\n")
    inner = [os.path.relpath(os.path.realpath(folder), top) for folder in measured_folders()]
    return [str(tree / folder) for folder in inner if not folder.startswith(os.pardir)]


def run_setup(
    folder: Path,
    command: str,
    name: str,
    source: str = SETUP_OF_FILE,
    python: str = sys.executable,
    folders: Iterable[str] | None = None,
) -> None:
    """Run a build command in a folder, in the environment of the measuring interpreter.

    Args:
        name: The checkout, for the error.
        source: Where the command is set, for the error.
        folders: Folders with modules; by default those in which the measured modules are found.

    Raises SetupError with the last lines of output.
    """
    logger.info("%s: %s, waiting up to %g s", name, command, SETUP_TIMEOUT_S)
    modules = measured_folders() if folders is None else folders
    read_end, lifeline = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _LIFELINE, "bash" if shutil.which("bash") else "sh", "-c", command],
        cwd=folder,
        env=_activated(Path(shutil.which(python) or python).absolute(), add_to_path(modules, os.environ)),
        stdin=read_end,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    os.close(read_end)
    try:
        output, _ = process.communicate(timeout=SETUP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise SetupError(f"{name} does not build: {source} took more than {SETUP_TIMEOUT_S:g} s") from None
    finally:
        os.close(lifeline)
        process.wait()
    if process.returncode != 0:
        raise SetupError(f"{name} does not build: {source} ended with {process.returncode}: {_last_lines(output)}")


def _activated(python: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with which a shell finds an interpreter and the programs installed with it.

    A PATH with the interpreter is left alone: the folder of a system's interpreter holds everything else, too.
    """
    path = environment.get("PATH", os.defpath)
    if shutil.which(python.name, path=path) == str(python):
        return dict(environment)
    kept = {name: value for name, value in environment.items() if name not in ("VIRTUAL_ENV", "PYTHONHOME")}
    home = python.parent.parent
    virtual = {"VIRTUAL_ENV": str(home)} if (home / "pyvenv.cfg").is_file() else {}
    return {**kept, **virtual, "PATH": f"{python.parent}{os.pathsep}{path}"}


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl-C until the worktree is removed."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # only the main thread receives signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _last_lines(text: str) -> str:
    """Return an output's last lines on one line: the last alone is often only make's."""
    lines = [line.strip()[:LONGEST_LINE] for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-LAST_LINES:]) or "it printed nothing"
