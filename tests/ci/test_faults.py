"""Run commands on files that hold no database: a short version of `ci/benchmarks/fault_marks.py`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "ci/benchmarks/fault_marks.py"


@pytest.fixture(scope="module")
def marks() -> Iterator[Any]:
    sys.path.insert(0, str(PROGRAM.parent))
    spec = importlib.util.spec_from_file_location("fault_marks", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(PROGRAM.parent))


@pytest.fixture(scope="module")
def sound(marks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return marks.damage_marks.build(tmp_path_factory.mktemp("sound"))


def test_a_file_without_a_database_is_one_line(marks: Any, sound: Path) -> None:
    commands = [["runs"], ["verify"], ["ingest", "{folder}/more.jsonl"], marks.COMMANDS[-1]]
    problems = [problem for name in marks.FILES for problem in marks.file_problems(name, sound, sound.parent, commands)]
    assert problems == []


def test_a_command_that_succeeds_is_a_problem(marks: Any, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(marks.FILES, "text", marks.FILES["no file"])
    (problem,) = marks.file_problems("text", sound, sound.parent, [["ingest", "{folder}/more.jsonl"]])
    assert problem.endswith("ended with 0")
