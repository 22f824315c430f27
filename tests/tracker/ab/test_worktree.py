"""Commits as folders: there while they are needed, gone afterwards whatever happens."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from groupbench.tracker.ab.worktree import (
    PREFIX,
    Recipe,
    SetupError,
    WorktreeError,
    checkout,
    remove_abandoned,
    resolve,
)


def git(repo: Path, *args: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", str(repo), *identity, *args], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "part").mkdir(parents=True)
    git(folder, "init", "-q")
    for text in ("one", "two"):
        (folder / "part" / "file").write_text(text)
        git(folder, "add", ".")
        git(folder, "commit", "-qm", text)
    git(folder, "tag", "first", "HEAD~1")
    return folder


def worktrees(repo: Path) -> int:
    return len(git(repo, "worktree", "list").splitlines())


@pytest.mark.parametrize("name", ["HEAD~1", "first"])
def test_a_commit_is_a_folder_meanwhile(repo: Path, name: str) -> None:
    (repo / "part" / "file").write_text("not committed")
    with checkout(repo, name) as tree:
        assert (tree / "part" / "file").read_text() == "one"
        assert worktrees(repo) == 2
    assert not tree.exists() and worktrees(repo) == 1
    assert (repo / "part" / "file").read_text() == "not committed"


def test_a_folder_within_the_repository_stays_that_folder(repo: Path) -> None:
    with checkout(repo / "part", "first") as tree:
        assert (tree / "file").read_text() == "one"


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_it_is_gone_after_an_interrupt(repo: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), checkout(repo, "first") as tree:
        (tree / "made meanwhile").write_text("x")
        raise error
    assert not tree.parent.exists() and worktrees(repo) == 1


def test_one_commit_twice(repo: Path) -> None:
    with checkout(repo, "HEAD") as one, checkout(repo, "HEAD") as other:
        assert one != other and one.is_dir() and other.is_dir()
    assert worktrees(repo) == 1


def test_setup_runs_in_the_folder(repo: Path) -> None:
    with checkout(repo, "first", Recipe("cp part/file built")) as tree:
        assert (tree / "built").read_text() == "one"


def test_a_commit_that_does_not_build_says_so_in_one_line(repo: Path) -> None:
    with (
        pytest.raises(SetupError, match=r"does not build: --setup ended with 3: no compiler$"),
        checkout(repo, "first", Recipe("echo trying; echo no compiler >&2; exit 3")),
    ):
        raise AssertionError("not reached")
    assert worktrees(repo) == 1


@pytest.mark.parametrize("name", ["nothing-of-that-name", "", "--help", "first:part/file"])
def test_what_is_no_commit_is_refused(repo: Path, name: str) -> None:
    with pytest.raises(WorktreeError):
        resolve(repo, name)


def test_outside_a_repository(tmp_path: Path) -> None:
    with pytest.raises(WorktreeError, match="in no git repository"):
        resolve(tmp_path, "HEAD")


def test_a_hooks_variables_do_not_lead_elsewhere(repo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    with checkout(repo, "first") as tree:
        assert (tree / "part" / "file").read_text() == "one"


def test_checkouts_of_killed_processes_are_removed(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    empty, full, registered = (tmp_path / f"{PREFIX}{ended.pid}-{name}" for name in "abc")
    living = tmp_path / f"{PREFIX}{os.getpid()}-d"
    for folder in (empty, full, living):
        folder.mkdir()
    (full / "kept").touch()  # not of this repository
    git(repo, "worktree", "add", "-q", "--detach", str(registered / "x"), "HEAD")
    remove_abandoned(repo)
    assert set(tmp_path.glob(f"{PREFIX}*")) == {full, living}
    assert worktrees(repo) == 1
