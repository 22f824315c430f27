"""Git, run in repositories made for the test."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from groupbench.tracker.tools import git

OF_THE_USER = ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of two commits on `main`, tagged `first` and `second`."""
    folder = tmp_path_factory.mktemp("template") / "repository"
    identity = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for name in OF_THE_USER:
            patch.setenv(name, "/dev/null")
        git.run(folder, "init", "-q", "-b", "main")
        for tag in ("first", "second"):
            (folder / "file").write_text(tag)
            git.run(folder, "add", "file")
            git.run(folder, *identity, "commit", "-q", "-m", tag)
            git.run(folder, "tag", tag)
    return folder


@pytest.fixture
def repository(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the checkout."""
    for name in OF_THE_USER:
        monkeypatch.setenv(name, "/dev/null")
    return Path(shutil.copytree(template, tmp_path / "repository"))


def test_the_output_is_returned(repository: Path) -> None:
    assert git.run(repository, "log", "--format=%s") == "second\nfirst\n"


def test_a_folder_without_git_is_one_clear_line(tmp_path: Path, repository: Path) -> None:
    git.require_repository(repository)
    (tmp_path / "plain").mkdir()
    with pytest.raises(git.GitError, match="plain is not in a git repository; run this command in a checkout"):
        git.require_repository(tmp_path / "plain")


def test_a_folder_on_a_file_system_of_its_own_has_the_same_line(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "git").write_text(
        "#!/bin/sh\necho 'fatal: not a git repository (or any parent up to mount point /home)' >&2\n"
        "echo 'Stopping at filesystem boundary (GIT_DISCOVERY_ACROSS_FILESYSTEM not set).' >&2\nexit 128\n"
    )
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(git.GitError, match="is not in a git repository; run this command in a checkout"):
        git.require_repository(tmp_path)


def test_standard_input_is_passed_on(repository: Path) -> None:
    assert (
        git.run(repository, "cat-file", "--batch-check=%(objecttype)", stdin="first\nfirst:file\n") == "commit\nblob\n"
    )


def test_a_refusal_names_the_command_the_folder_and_gits_reason(repository: Path) -> None:
    with pytest.raises(git.GitError, match="bad revision") as refused:
        git.run(repository, "log", "nothing-of-that-name", "--")
    assert str(refused.value).startswith(f"git log in {repository}: fatal: ")
    assert refused.value.reason.startswith("fatal: ")


UNANSWERED = {
    "outside a checkout": ("", ("log",)),
    "in no folder": ("nowhere", ("log",)),
    "a NUL character": ("repository", ("log", "a\0b")),
    "an unknown revision": ("repository", ("log", "nothing-of-that-name", "--")),
}


@pytest.mark.parametrize(("folder", "args"), UNANSWERED.values(), ids=UNANSWERED)
def test_a_failing_command_raises_in_run_and_is_none_in_ask(
    repository: Path, folder: str, args: tuple[str, ...]
) -> None:
    where = repository.parent / folder
    with pytest.raises(git.GitError):
        git.run(where, *args)
    assert git.ask(where, *args) is None


def test_without_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(repository))
    with pytest.raises(git.NoGitError, match="git is not installed"):
        git.run(repository, "log")
    assert git.rev_parse("main", repository) is None


def test_a_git_that_does_not_answer(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = repository.parent / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:/usr/bin:/bin")
    with pytest.raises(git.GitError, match=r"git log in .*: no answer within 0\.1 s"):
        git.run(repository, "log", timeout=0.1)


@pytest.mark.parametrize(
    "name", ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR"]
)
def test_a_hooks_variables_do_not_lead_elsewhere(repository: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, str(repository.parent / "elsewhere"))
    assert git.run(repository, "status", "--porcelain") == ""
    assert git.run(repository, "log", "--format=%s", "-1") == "second\n"


@pytest.mark.parametrize("name", ["HEAD", "main", "second", "HEAD~0", "second^{commit}"])
def test_a_commit_is_found_by_any_name(repository: Path, name: str) -> None:
    head = git.run(repository, "rev-parse", "HEAD").strip()
    assert git.rev_parse(name, repository) == head == git.rev_parse(head[:10], repository)


@pytest.mark.parametrize("name", ["", "--all", "a\0b", "first..second", "first:file", "nothing"])
def test_names_that_are_not_commits_have_no_hash(repository: Path, name: str) -> None:
    assert git.rev_parse(name, repository) is None


def test_ancestry_between_commits(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository)
    first, second = git.rev_parse("first"), git.rev_parse("second")
    assert git.between("first", "second") == {second}
    assert (git.is_ancestor("first", "second"), git.is_ancestor("second", "first")) == (True, False)
    assert git.is_ancestor("first", "nothing") is None
    assert git.between("nothing", "second") is None
    assert first is not None
