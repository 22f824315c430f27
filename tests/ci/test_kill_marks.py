"""Commands that are killed: a few of what `ci/benchmarks/kill_marks.py` does at length."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "ci/benchmarks/kill_marks.py"


@pytest.fixture(scope="module")
def marks() -> Any:
    spec = importlib.util.spec_from_file_location("kill_marks", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_marks"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("command", ["ab", "backfill"])
def test_a_killed_command_loses_doubles_and_leaves_nothing(marks: Any, command: str, tmp_path: Path) -> None:
    assert list(marks.problems(command, 3, random.Random(4), tmp_path)) == []


def test_what_is_left_is_found(marks: Any, tmp_path: Path) -> None:
    lab = marks.Lab(tmp_path)
    (lab.temporary / "groupbench-tree-1-x").mkdir()
    lab.git("worktree", "add", "-q", "--detach", str(tmp_path / "tree"), "HEAD")
    (tmp_path / "ab.jsonl").write_text('{"half": ')
    assert [problem.partition(" ")[0] for problem in lab.left()] == ["temporary", "checkout"]
    assert len(list(lab.wrong_records())) == 1
