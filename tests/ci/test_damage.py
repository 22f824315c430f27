"""Run commands on damaged databases: a short version of `ci/benchmarks/damage_marks.py`."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import rarely
from click.testing import CliRunner

from groupbench.tracker.cli import main

PROGRAM = Path(__file__).parents[2] / "ci/benchmarks/damage_marks.py"


@pytest.fixture(scope="module")
def marks() -> Any:
    spec = importlib.util.spec_from_file_location("damage_marks", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["damage_marks"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sound(marks: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return marks.build(tmp_path_factory.mktemp("sound"))


@pytest.mark.exhaustive  # with the other seeds
def test_every_command_does_its_work_on_a_sound_database(marks: Any, sound: Path, tmp_path: Path) -> None:
    """Otherwise a mistyped option would end each command before it reads the damage."""
    for command in [*marks.READING, *marks.WRITING]:
        copy = tmp_path / "copy_of_sound.db"
        shutil.copyfile(sound, copy)
        shutil.copyfile(sound.parent / "more.jsonl", tmp_path / "more.jsonl")
        shutil.copyfile(sound, tmp_path / "sound.db")
        words = [word.format(folder=tmp_path) for word in command]
        result = CliRunner().invoke(main, ["--db", str(copy), *words])
        assert result.exit_code == (1 if command[0] == "gate" else 0), (command, result.stderr)
    assert list(marks.page_problems(sound, {200, 202})) == []


@pytest.mark.parametrize("seed", [0, *rarely(*range(1, 60))])
def test_no_damage_is_a_traceback(marks: Any, sound: Path, seed: int) -> None:
    assert list(marks.problems(sound, seed, sound.parent)) == []
