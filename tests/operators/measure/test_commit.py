"""Finding the measured commit, in repositories that the tests make."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from groupbench.operators.errors import UsageError
from groupbench.operators.measure.commit import find_commit
from groupbench.tracker.facts.record import UNKNOWN_COMMIT

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """Make a repository with two commits on `main`, and return a function that runs git in it."""
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "Ada")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "ada@example.org")
        monkeypatch.setenv(f"GIT_{who}_DATE", "2026-01-02T03:04:05+02:00")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")

    def run(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(tmp_path), *args], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    run("init", "-q", "-b", "main")
    for subject in ("First", 'Second: it\'s "quoted"'):
        (tmp_path / "file").write_text(subject)
        run("add", "file")
        run("commit", "-q", "-m", f"{subject}\n\nA body.")
    return run


def test_head(git: Git, tmp_path: Path) -> None:
    commit = find_commit(None, tmp_path)
    assert commit.hash == git("rev-parse", "HEAD")
    assert commit.parents == (git("rev-parse", "HEAD~1"),)
    assert commit.branch == "main"
    assert commit.author == "Ada"
    assert commit.subject == 'Second: it\'s "quoted"'
    assert commit.time is not None
    assert commit.time.replace(microsecond=0) == datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)
    assert not commit.dirty
    (tmp_path / "inner").mkdir()
    assert find_commit(None, tmp_path / "inner") == commit


def test_the_first_commit_has_no_parents(git: Git, tmp_path: Path) -> None:
    git("checkout", "-q", "HEAD~1")
    commit = find_commit(None, tmp_path)
    assert commit.parents == ()
    assert commit.branch is None  # detached


def test_commits_of_one_second_have_times_in_their_order(git: Git, tmp_path: Path) -> None:
    git("checkout", "-q", "-b", "side", "HEAD~1")
    for number in range(3):
        git("commit", "-q", "--allow-empty", "-m", f"Side {number}")
    git("merge", "-q", "-m", "Merge", "-s", "ours", "main")
    git("commit", "-q", "--allow-empty", "-m", "Last")
    line = git("rev-list", "--first-parent", "--reverse", "HEAD").split()
    times = [find_commit(hash_, tmp_path).time for hash_ in line]
    assert times == sorted(set(filter(None, times)))
    assert {time.replace(microsecond=0) for time in times if time} == {datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)}


def test_a_commit_of_a_second_of_its_own_has_its_time(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2026-01-02T03:04:06+02:00")
    git("commit", "-q", "--allow-empty", "-m", "Later")
    assert find_commit(None, tmp_path).time == datetime(2026, 1, 2, 1, 4, 6, tzinfo=UTC)


def test_a_merge_has_two_parents(git: Git, tmp_path: Path) -> None:
    git("checkout", "-q", "-b", "side", "HEAD~1")
    git("commit", "-q", "--allow-empty", "-m", "Side")
    git("merge", "-q", "-m", "Merge", "-s", "ours", "main")
    assert find_commit(None, tmp_path).parents == (git("rev-parse", "HEAD^1"), git("rev-parse", "HEAD^2"))
    assert find_commit(None, tmp_path).branch == "side"


def test_a_changed_file_is_dirty_and_a_new_one_is_not(git: Git, tmp_path: Path) -> None:
    (tmp_path / "new").write_text("x")
    assert not find_commit(None, tmp_path).dirty
    (tmp_path / "file").write_text("changed")
    assert find_commit(None, tmp_path).dirty


@pytest.mark.parametrize("name", ["short", "full", "upper", "HEAD~1", "main~1", "light", "annotated"])
def test_a_name_that_git_knows(git: Git, tmp_path: Path, name: str) -> None:
    full = git("rev-parse", "HEAD~1")
    git("tag", "light", full)
    git("tag", "-a", "annotated", "-m", "A tag\n\nof two lines", full)
    revision = {"short": full[:7], "full": full, "upper": full.upper()}.get(name, name)
    commit = find_commit(revision, tmp_path)
    assert commit.hash == full
    assert commit.subject == "First"
    assert commit.branch is None


def test_head_by_its_hash_is_on_the_branch(git: Git, tmp_path: Path) -> None:
    assert find_commit(git("rev-parse", "--short", "HEAD"), tmp_path).branch == "main"


def test_outside_of_any_repository(tmp_path: Path) -> None:
    assert find_commit(None, tmp_path).hash == UNKNOWN_COMMIT
    commit = find_commit("ABCDEF1234", tmp_path)
    assert commit.hash == "abcdef1234"
    assert commit.parents == ()
    assert commit.branch is None
    assert not commit.dirty


def test_a_hash_that_the_repository_does_not_have_is_kept(git: Git, tmp_path: Path) -> None:
    assert find_commit("0123456789abcdef", tmp_path).hash == "0123456789abcdef"


GARBAGE = {
    "a word": "garbage",
    "too short": "abc",
    "too long": "a" * 65,
    "a path": "../..",
    "a flag": "--all",
    "a flag that writes": "--output=written",
    "a count": "-1",
    "a file of a commit": "HEAD:file",
    "a range": "HEAD~1..HEAD",
    "two": "HEAD HEAD",
    "a semicolon": "HEAD; ls",
}


@pytest.mark.parametrize("revision", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_a_usage_error(git: Git, tmp_path: Path, revision: str) -> None:
    with pytest.raises(UsageError, match="--commit"):
        find_commit(revision, tmp_path)
    assert not (tmp_path / "written").exists()


def test_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_commit(None, tmp_path).hash == UNKNOWN_COMMIT
    assert find_commit("abcdef12", tmp_path).hash == "abcdef12"


# file in the folder of git, its content -> reason
DAMAGE = {
    "a broken HEAD": ("HEAD", "junk\n", "not a git repository.*repair it"),
    "a HEAD without its commit": ("HEAD", f"{'12' * 20}\n", "bad object HEAD.*git fsck"),
    "a broken branch": ("refs/heads/main", "junk\n", "appears to be broken.*git fsck"),
    "a broken configuration": ("config", "[core\n", "bad config line 1.*repair it"),
    "a broken index": ("index", "junk\n", "index file smaller than expected"),
    # A linked worktree without its repository, as in a container.
    "a git folder that is not mounted": ("", "gitdir: /not/mounted\n", "not a git repository.*repair it"),
}


@pytest.mark.parametrize(("file", "content", "reason"), DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("inside", [False, True], ids=["at the top", "in a folder"])
def test_a_damaged_repository_is_not_taken_for_none(
    git: Git, tmp_path: Path, file: str, content: str, reason: str, inside: bool
) -> None:
    (tmp_path / "inner").mkdir()
    if not file:
        (tmp_path / ".git").rename(tmp_path / "moved")
    (tmp_path / ".git" / file).write_text(content)
    with pytest.raises(UsageError, match=reason):
        find_commit(None, tmp_path / "inner" if inside else tmp_path)


@pytest.mark.parametrize("revision", [None, "main", "0123456789abcdef"])
def test_the_repository_of_another_user_is_not_taken_for_none(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None
) -> None:
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    with pytest.raises(UsageError, match=rf"dubious ownership.*safe.directory {tmp_path}"):
        find_commit(revision, tmp_path)


def test_messages_in_another_language_are_understood(git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", "de")
    (tmp_path / "empty").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path / "empty")], check=True)
    assert find_commit(None, tmp_path / "empty").hash == UNKNOWN_COMMIT
