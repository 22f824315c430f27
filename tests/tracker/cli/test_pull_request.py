"""`groupbench pull-request`: which commits it compares, which cells, and the comment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from repositories import git

from groupbench.tracker.ab.bench import AbCell, AbResult, AbSide
from groupbench.tracker.ab.worktree import WorktreeError
from groupbench.tracker.cli.pull_request import _cells, _comment, _ends
from groupbench.tracker.project import PlanEntry, Project, ProjectSettings


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Root")
    git(tmp_path, "switch", "-q", "-c", "change")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Change")
    git(tmp_path, "switch", "-q", "main")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "Meanwhile")
    return tmp_path


def test_the_base_is_the_common_commit(repository: Path) -> None:
    ends = _ends(repository, "main", "change")
    assert ends == (git(repository, "rev-parse", "main~1"), git(repository, "rev-parse", "change"))


@pytest.mark.parametrize("head", ["main", "main~1"])
def test_what_the_base_holds_already_is_nothing_to_compare(head: str, repository: Path) -> None:
    with pytest.raises(click.UsageError, match="nothing to compare"):
        _ends(repository, "main", head)


def test_a_commit_that_git_does_not_know(repository: Path) -> None:
    with pytest.raises(WorktreeError, match="nonsense"):
        _ends(repository, "nonsense", "main")


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
    assert text.startswith(
        "**groupbench: something got worse.** `cccccccccc` compared with its merge base `bbbbbbbbbb`"
    )
    assert text.index("| slower |") < text.index("| same | N=1") if "| same | N=1" in text else "| slower |" in text
