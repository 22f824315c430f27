"""Commits as folders: there while they are needed, gone afterwards whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from cases import rarely
from repositories import git

from groupbench.tracker.ab import worktree
from groupbench.tracker.ab.named_sides import open_sides
from groupbench.tracker.ab.worktree import (
    CheckoutError,
    Recipe,
    SetupError,
    Spares,
    WorktreeError,
    checkout,
    checkouts,
    resolve,
    run_setup,
)
from groupbench.tracker.facts.programs import FOLDERS


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "repo"
    (folder / "part").mkdir(parents=True)
    git(folder, "init", "-q")
    for text in ("one", "two"):
        (folder / "part" / "file").write_text(text)
        commit(folder, text)
    git(folder, "tag", "first", "HEAD~1")
    return folder


def commit(repo: Path, subject: str) -> None:
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", subject)


def add_submodule(repo: Path, library: Path) -> None:
    git(repo, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(library), "lib")


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


def test_setup_runs_in_the_folder(repo: Path) -> None:
    """A folder within the repository stays that folder."""
    with checkout(repo / "part", "first", Recipe("cp file built")) as tree:
        assert (tree / "file").read_text() == (tree / "built").read_text() == "one"


@pytest.mark.parametrize("name", ["nothing-of-that-name", "", "--help", "first:part/file"])
def test_what_is_no_commit_is_refused(repo: Path, name: str) -> None:
    with pytest.raises(WorktreeError):
        resolve(repo, name)
    with pytest.raises(WorktreeError, match="not in a git repository"):
        resolve(repo.parent, "HEAD")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_it_is_gone_after_an_interrupt(repo: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), checkout(repo, "first") as tree:
        (tree / "made meanwhile").write_text("x")
        raise error
    assert not tree.parent.exists() and worktrees(repo) == 1


def test_one_commit_twice(repo: Path) -> None:
    with checkout(repo, "HEAD") as one, checkout(repo, "HEAD") as other:
        assert one != other and one.is_dir() and other.is_dir()


def test_setup_runs_in_the_environment_of_the_interpreter_that_measures(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build finds its `python` and `pip` first, and knows a virtual environment by VIRTUAL_ENV."""
    write = Recipe("echo $(command -v python) $VIRTUAL_ENV > built")
    monkeypatch.setenv("VIRTUAL_ENV", "/elsewhere")
    for name in ("plain", "virtual"):
        python = tmp_path / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
    (tmp_path / "virtual" / "pyvenv.cfg").touch()
    for name, home in (("plain", ""), ("virtual", str(tmp_path / "virtual"))):
        python = tmp_path / name / "bin" / "python"
        with checkout(repo, "first", write, str(python)) as tree:
            assert (tree / "built").read_text().split() == [str(python), *home.split()]
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path / 'plain' / 'bin'}:{os.environ['PATH']}")
    with checkout(repo, "first", Recipe("echo $PATH $VIRTUAL_ENV > built"), str(tmp_path / "plain/bin/python")) as tree:
        assert (tree / "built").read_text().split() == [os.environ["PATH"], "/elsewhere"]  # finds it already


def test_setup_finds_the_checkouts_folder_for_one_of_the_users(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDERS, f"{repo / 'part'}:{tmp_path / 'elsewhere'}")
    monkeypatch.setenv("PYTHONPATH", "/kept")
    with checkout(repo, "first", Recipe("echo $PYTHONPATH > built")) as tree:
        assert (tree / "built").read_text() == f"{tree / 'part'}:/kept\n"
    run_setup(repo, "echo $PYTHONPATH > built", "this checkout")
    assert (repo / "built").read_text() == f"{repo / 'part'}:{tmp_path / 'elsewhere'}:/kept\n"


def test_two_interpreters_have_a_build_of_a_commit_each(repo: Path, tmp_path: Path) -> None:
    recipe = Recipe("command -v python > built")
    others = [tmp_path / name / "python" for name in ("old", "new")]
    for python in others:
        python.parent.mkdir()
        python.symlink_to(sys.executable)
    pythons = dict(zip(("base_python", "head_python"), map(str, others), strict=True))
    with open_sides("first", "first", repo=repo, recipe=recipe, **pythons) as sides:
        built = [(side.tree / "built").read_text().strip() for side in sides if side.tree is not None]
    assert built == [side.python for side in sides] == list(map(str, others))
    with open_sides("first", "first", repo=repo, recipe=recipe) as (base, head):
        assert base == head


@pytest.mark.parametrize(("by_option", "source"), [(True, "--setup"), (False, "`setup` of groupbench.toml")])
def test_a_commit_that_does_not_build_says_so_in_one_line(repo: Path, by_option: bool, source: str) -> None:
    with (
        pytest.raises(SetupError, match=rf"does not build: {source} ended with 3: trying \| no compiler$"),
        checkout(repo, "first", Recipe("echo trying; echo no compiler >&2; exit 3", by_option=by_option)),
    ):
        raise AssertionError("not reached")
    assert worktrees(repo) == 1


def test_a_commit_that_a_shallow_clone_lacks(repo: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repo}", "shallow")
    with pytest.raises(WorktreeError, match=r"'first'.*this is a shallow clone: run `git fetch --unshallow`"):
        resolve(tmp_path / "shallow", "first")


def test_a_hooks_variables_do_not_lead_elsewhere(repo: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    with checkout(repo, "first") as tree:
        assert (tree / "part" / "file").read_text() == "one"


HOLDER = """
import sys
from pathlib import Path
from groupbench.tracker.ab.worktree import Recipe, checkout
with checkout(Path(sys.argv[1]), "HEAD", Recipe(sys.argv[2] or None)) as tree:
    print(tree, flush=True)
    sys.stdin.read()
"""


def hold(repo: Path, setup: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(repo), setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("locked", [False, True], ids=["complete", "half made"])
def test_the_checkout_of_a_killed_process_is_removed_by_the_next(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with hold(repo) as killed, hold(repo) as living:
        assert killed.stdout is not None and living.stdout is not None
        left, kept = (Path(process.stdout.readline().strip()) for process in (killed, living))
        if locked:
            git(repo, "worktree", "lock", str(left))
        killed.kill()
        killed.wait()
        with checkout(repo, "first") as tree:
            until = time.monotonic() + 10  # its keeper may still be removing it
            while (left.parent.exists() or worktrees(repo) > 3) and time.monotonic() < until:
                time.sleep(0.01)
            assert set(tmp_path.glob("groupbench-tree-*")) == {kept.parent, tree.parent}
            assert worktrees(repo) == 3
        living.communicate()
    assert worktrees(repo) == 1 and not list(tmp_path.glob("groupbench-*"))


def test_a_build_ends_with_a_process_that_is_killed(repo: Path, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    with hold(repo, f"sleep 1000 & echo $! > {noted}.part; mv {noted}.part {noted}; wait") as killed:
        while not noted.exists():
            assert killed.poll() is None
            time.sleep(0.01)
        killed.kill()
    sleeper = int(noted.read_text())
    for _ in range(1000):
        if has_ended(sleeper):
            return
        time.sleep(0.01)
    os.kill(sleeper, signal.SIGKILL)
    raise AssertionError("it is still there")


def has_ended(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends while it is read
        return True


@pytest.mark.parametrize("rounds", [1, *rarely(4)])
def test_checkouts_that_begin_together_do_not_remove_each_other(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for _ in range(rounds):
        together = [hold(repo) for _ in range(6)]
        trees = {process.communicate()[0] for process in together}
        assert len(trees) == 6 and "" not in trees
    assert worktrees(repo) == 1 and not list(tmp_path.glob("groupbench-*"))


def test_a_worktree_of_the_user_that_is_not_mounted_is_kept(repo: Path, tmp_path: Path) -> None:
    git(repo, "worktree", "add", "--quiet", "--detach", str(tmp_path / "disk/mine"), "HEAD")
    (tmp_path / "disk").rename(tmp_path / "unmounted")
    with checkout(repo, "HEAD"):
        pass
    (tmp_path / "unmounted").rename(tmp_path / "disk")
    assert git(tmp_path / "disk/mine", "status", "--porcelain") == ""


def test_the_users_hooks_do_not_run(repo: Path, tmp_path: Path) -> None:
    hook = repo / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexit 1\n")
    hook.chmod(0o755)
    with checkout(repo, "HEAD") as tree:
        assert tree.is_dir()
    assert not (tmp_path / "ran").exists()


def test_a_commit_has_its_own_submodules_and_the_repository_is_unchanged(repo: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "--quiet")
    for text in ("old", "new"):
        (library / "version").write_text(text)
        commit(library, text)
    add_submodule(repo, library)
    for version in ("HEAD~1", "-"):
        git(repo / "lib", "checkout", "--quiet", version)
        commit(repo, f"with the library's {version}")

    def state() -> dict[str, bytes]:
        files = (path for path in (repo / ".git").rglob("*") if path.is_file() and "objects" not in path.parts)
        return {str(path): path.read_bytes() for path in files if path.name not in ("index", "COMMIT_EDITMSG")}

    before = state()
    for name, text in (("HEAD~1", "old"), ("HEAD", "new")):
        with checkout(repo, name) as tree:
            assert (tree / "lib/version").read_text() == text
    assert state() == before


def test_a_submodule_whose_commit_is_not_here_is_a_fault_of_the_machine(repo: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "--quiet")
    git(library, "commit", "--quiet", "--allow-empty", "-m", "empty")
    add_submodule(repo, library)
    git(repo, "update-index", "--cacheinfo", f"160000,{'a' * 40},lib")
    git(repo, "commit", "--quiet", "-m", "with a lost library")
    with pytest.raises(CheckoutError, match="git fetch --recurse-submodules"), checkout(repo, "HEAD"):
        pass


def listing(tree: Path) -> dict[str, str]:
    files = (path for path in tree.rglob("*") if path.name != ".git")
    return {str(path.relative_to(tree)): path.read_text() if path.is_file() else "" for path in files}


def added(repo: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the commits for which git makes a new worktree."""
    made: list[str] = []
    add = worktree._Worktree.add

    def note(repo: Path, commit: str) -> worktree._Worktree:
        made.append(commit)
        return add(repo, commit)

    monkeypatch.setattr(worktree._Worktree, "add", note)
    return made


def test_a_spare_worktree_has_the_files_of_its_new_commit_alone(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the first commit's build and measured code left there."""
    (repo / ".gitignore").write_text("build/\n")
    (repo / "gone").write_text("only in the next commit")
    commit(repo, "three")
    git(repo, "rm", "-q", "gone")
    git(repo, "commit", "-qm", "four")
    made = added(repo, monkeypatch)
    with Spares() as spares:
        with checkout(repo, "HEAD~1", spares=spares) as first:
            status = (first / "part/file").stat()
            (first / "part/file").write_text("not")  # of the same size and time
            os.utime(first / "part/file", ns=(status.st_atime_ns, status.st_mtime_ns))
            (first / "gone").unlink()
            (first / "made").write_text("by the measured code")
            for folder in ("build", "other"):
                (first / folder).mkdir()
                (first / folder / "made").write_text("by a build")
            git(first / "other", "init", "-q")
        for name in ("HEAD", "HEAD~1", "first"):
            with checkout(repo, name) as fresh, checkout(repo, name, spares=spares) as moved:
                assert listing(moved) == listing(fresh)
                assert moved != first and not first.exists() and moved.name == resolve(repo, name)[:12]
                assert worktrees(repo) == 3
        assert worktrees(repo) == 2
    assert worktrees(repo) == 1 and len(made) == 1 + 3 and not first.parent.exists()


@pytest.mark.parametrize("file", [".gitattributes", ".gitmodules"])
def test_a_spare_worktree_that_git_would_not_write_whole_is_not_used(
    repo: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    git(repo, "config", "filter.loud.smudge", "tr a-z A-Z")
    (repo / file).write_text("* filter=loud\n" if file == ".gitattributes" else "")
    commit(repo, "three")
    made = added(repo, monkeypatch)
    with Spares() as spares:
        for name in ("HEAD", "HEAD~1", "HEAD"):
            with checkout(repo, name, spares=spares) as tree:
                loud = file == ".gitattributes" and name == "HEAD"
                assert (tree / "part/file").read_text() == ("TWO" if loud else "two")
    assert len(made) >= 2 and worktrees(repo) == 1


def test_two_commits_are_written_together(repo: Path) -> None:
    with checkouts(repo, [("first", sys.executable), ("HEAD", sys.executable)]) as (first, head):
        assert [(tree / "part/file").read_text() for tree in (first, head)] == ["one", "two"]
    with pytest.raises(WorktreeError), checkouts(repo, [("first", sys.executable), ("nothing", sys.executable)]):
        pass
    assert worktrees(repo) == 1
