"""`groupbench pull-request`: which commits it compares, which cells, and the comment."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from repositories import git

from groupbench.tracker.ab.result import AbCell, AbResult, SideAccuracy
from groupbench.tracker.ab.side import AbSide
from groupbench.tracker.ab.worktree import WorktreeError
from groupbench.tracker.cli import main
from groupbench.tracker.cli.bisect import bisect
from groupbench.tracker.cli.pull_request import _cells, _comment, _ends, _search
from groupbench.tracker.project import PlanEntry, Project, ProjectSettings


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "commit", "-q", "--allow-empty", "-m", "Root")
    git(folder, "switch", "-q", "-c", "change")
    git(folder, "commit", "-q", "--allow-empty", "-m", "Change")
    git(folder, "switch", "-q", "main")
    git(folder, "commit", "-q", "--allow-empty", "-m", "Meanwhile")
    return folder


@pytest.fixture
def repository(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path, dirs_exist_ok=True))


def test_the_base_is_the_common_commit(repository: Path) -> None:
    ends = _ends(repository, "main", "change")
    assert ends == (git(repository, "rev-parse", "main~1"), git(repository, "rev-parse", "change"))


@pytest.mark.parametrize("head", ["main", "main~1"])
def test_what_the_base_holds_already_is_nothing_to_compare(head: str, repository: Path) -> None:
    with pytest.raises(click.UsageError, match="nothing to compare"):
        _ends(repository, "main", head)


@pytest.mark.parametrize(("name", "meant"), [("nonsense", ""), ("origin/main", r"; did you mean 'main'\?")])
def test_a_commit_that_git_does_not_know(name: str, meant: str, repository: Path) -> None:
    with pytest.raises(WorktreeError, match=f"git knows no commit '{name}' in .*{meant}$"):
        _ends(repository, name, "change")


def test_a_shallow_clone_is_named(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    clone = tmp_path_factory.mktemp("clone")
    git(clone, "clone", "-q", "--depth", "1", f"file://{repository}", ".")
    for name, meant in (("HEAD~1", ""), ("mian", r" \('main'\?\)")):
        fetch = "this is a shallow clone: run `git fetch --unshallow`, or check the spelling"
        with pytest.raises(WorktreeError, match=f"{fetch}{meant}$"):
            _ends(clone, name, "HEAD")
    git(clone, "fetch", "-q", "--depth", "1", "origin", "change")
    with pytest.raises(click.UsageError, match="no common commit here; run `git fetch --unshallow`"):
        _ends(clone, "FETCH_HEAD", "HEAD")


def stop(*arguments: object, **options: object) -> None:
    raise click.UsageError("stopped")


HELD = "groupbench.tracker.cli.pull_request.hold_device"
STARTED = "groupbench.tracker.cli.pull_request.open_sides"


@pytest.mark.parametrize(("ends_at", "staged", "named"), [(STARTED, True, 1), (STARTED, False, 0), (HELD, True, 0)])
def test_uncommitted_changes_are_named_once(
    ends_at: str, staged: bool, named: int, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command begins again to hold the device, so that a text before would be printed twice."""
    git(repository, "switch", "-q", "change")
    (repository / "new").touch()
    if staged:
        git(repository, "add", "new")
    (repository / "groupbench.toml").write_text('[[measure]]\noperator = "grouped_gemm"\n')
    monkeypatch.chdir(repository)
    monkeypatch.setattr(HELD, lambda context, device: None)
    monkeypatch.setattr(ends_at, stop)
    done = CliRunner().invoke(main, ["pull-request", "main"])
    assert "stopped" in done.stderr
    assert done.stderr.count("uncommitted changes are left out") == named


class Bench:
    """Has every backend that is asked for."""

    selections: list[dict[str, Any]]

    def __init__(self) -> None:
        self.selections = []

    def start(self, device: str) -> str:
        return "cpu"

    def cells(self, device: str, **selection: Any) -> tuple[list[AbCell], list[str]]:
        self.selections.append(selection)
        return [AbCell(selection["operator"], name, "N=1", "fp32") for name in selection["backends"]], []


def test_every_entry_for_the_device_is_compared_once() -> None:
    entries = (
        PlanEntry("a", only=("x", "y"), skip=("y",)),
        PlanEntry("a", only=("x",), shapes=("N=1",)),
        PlanEntry("b", only=("x",), device="cuda"),
        PlanEntry("c", only=("x",), device="cpu"),
    )
    bench: Any = Bench()
    cells = _cells(bench, Project(ProjectSettings(entries, plugins=("m.p",))), "auto")
    assert [(cell.operator, cell.backend) for cell in cells] == [("a", "x"), ("c", "x")]
    assert {selection["plugins"] for selection in bench.selections} == {("m.p",)}


def test_the_comment_begins_with_the_verdict_and_shows_changes_first() -> None:
    side = AbSide("x")
    same = AbResult(AbCell("op", "same", "N=1", "fp32"), side, side, "same")
    slower = AbResult(AbCell("op", "slower", "N=1", "fp32"), side, side, "different", effect=0.1, base_ms=1.0)
    text = _comment([same, slower], 1, "b" * 40, "c" * 40)
    start = "**groupbench: something got worse.** `cccccccccc` compared with its merge base `bbbbbbbbbb`"
    assert text.startswith(start) and "| slower |" in text.partition("| same |")[0]


def test_the_comment_says_what_could_not_be_checked() -> None:
    side, busy = AbSide("x"), "times, because other work kept the CPU busy"
    result = AbResult(AbCell("op", "b", "N=1", "fp32"), side, side, "same", unchecked={"base": [busy], "head": [busy]})
    text = _comment([result], 0, "b" * 40, "c" * 40)
    assert "nothing got worse" in text and text.endswith(f" |\n\nnot checked in base and head: {busy}\n")


def worse(backend: str, effect: float, head: str = "ok") -> AbResult:
    accurate = {"base_accuracy": SideAccuracy("ok", 1e-7), "head_accuracy": SideAccuracy(head, 1e-7)}
    verdict: Any = "different" if effect else "same"
    cell = AbCell("op", backend, "N=1", "fp32", mode="bwd")
    return AbResult(cell, AbSide("x"), AbSide("x"), verdict, effect=effect, base_ms=1.0, **accurate)


SEARCHES = {
    "the slowest": ([worse("a", 0.1), worse("b", 0.3), worse("wrong", 0.0, "wrong")], "b", []),
    "a wrong one": ([worse("wrong", 0.0, "wrong")], "wrong", ["--metric", "accuracy"]),
}


@pytest.mark.parametrize(("results", "searched", "more"), SEARCHES.values(), ids=SEARCHES)
def test_the_comment_ends_with_the_search_among_several_commits(
    results: list[AbResult], searched: str, more: list[str]
) -> None:
    *_, command, _ = _search(["groupbench"], results, 2, "b" * 40, "c" * 40, "cpu").splitlines()
    cell = ["--operator", "op", "--backend", searched, "--shape", "N=1", "--dtype", "fp32", "--mode", "bwd"]
    assert shlex.split(command) == ["groupbench", "bisect", "b" * 40, "c" * 40, *cell, *more, "--device", "cpu"]
    bisect.make_context("bisect", shlex.split(command)[2:])  # all options exist


def test_one_commit_or_nothing_worse_needs_no_search() -> None:
    assert _search(["groupbench"], [worse("a", 0.1)], 1, "b", "c", "cpu") == ""
    assert _search(["groupbench"], [worse("a", -0.1)], 2, "b", "c", "cpu") == ""


class Bisectable(Bench):
    """Finds every cell slower. Like the real bench, it has a device only until it is closed."""

    device: str | None = "cpu"

    def __init__(self, *sides: Any, **options: Any) -> None:
        super().__init__()
        self.results: list[AbResult] = []

    def __enter__(self) -> Bisectable:
        return self

    def __exit__(self, *error: object) -> None:
        self.device = None

    def compare(self, cell: AbCell) -> None:
        self.results.append(worse(cell.backend, 0.1))


@pytest.fixture
def invoke(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[type[Bisectable]], str]:
    """Return a function that compares two backends of a branch with two commits, and returns the output."""
    git(repository, "switch", "-q", "change")
    git(repository, "commit", "-q", "--allow-empty", "-m", "Another change")
    (repository / "groupbench.toml").write_text('[[measure]]\noperator = "a"\nonly = ["x", "y"]\n')
    monkeypatch.chdir(repository)
    monkeypatch.setattr("signal.signal", lambda *arguments: None)
    monkeypatch.setattr("groupbench.tracker.cli.pull_request.open_sides", lambda *ends, **options: nullcontext(ends))
    monkeypatch.setattr("groupbench.tracker.cli.here.ensure_alone", lambda *arguments: Path("cpu.lock"))

    def run(bench: type[Bisectable]) -> str:
        monkeypatch.setattr("groupbench.tracker.cli.pull_request.Bench", bench)
        return CliRunner().invoke(main, ["pull-request", "main"], standalone_mode=False).output

    return run


def test_the_command_writes_the_comment_with_the_search(
    repository: Path, invoke: Callable[[type[Bisectable]], str]
) -> None:
    invoke(Bisectable)
    text = (repository / "artifacts/comment.md").read_text()
    assert "To find which of the 2 commits made it worse:" in text and "--device cpu\n```\n" in text


def test_an_interrupt_names_the_comparisons_that_are_kept(
    repository: Path, invoke: Callable[[type[Bisectable]], str]
) -> None:
    class Interrupted(Bisectable):
        def compare(self, cell: AbCell) -> None:
            if self.results:
                raise KeyboardInterrupt
            super().compare(cell)

    assert "interrupted; 1 of 2 cells compared, kept in artifacts/comparisons.jsonl; " in invoke(Interrupted)
    assert not (repository / "artifacts/comment.md").exists()


def test_a_step_summary_that_is_full_is_one_line(
    repository: Path, invoke: Callable[[type[Bisectable]], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("earlier")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    invoke(Bisectable)
    assert summary.read_text() == "earlier\n" + (repository / "artifacts/comment.md").read_text()
    before = CliRunner().invoke(main, ["pull-request", "main"])
    summary.write_text("x" * 2**20)
    result = CliRunner().invoke(main, ["pull-request", "main"])
    assert "summary.md: no room left" in result.output
    assert result.exit_code == before.exit_code
    assert summary.stat().st_size == 2**20
