"""Run commands on damaged databases: a short version of `ci/benchmarks/damage_marks.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(3, 60))])
def test_no_damage_is_a_traceback(marks: Any, sound: Path, seed: int) -> None:
    assert list(marks.problems(sound, seed, sound.parent)) == []
