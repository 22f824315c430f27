"""Import mutated files of every format: a short version of `ci/benchmarks/import_fuzz.py`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from cases import rarely

from groupbench.tracker.formats import FORMATS

PROGRAM = Path(__file__).parents[2] / "ci/benchmarks/import_fuzz.py"


@pytest.fixture(scope="module")
def fuzz() -> Any:
    spec = importlib.util.spec_from_file_location("import_fuzz", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["import_fuzz"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("mutations", [50, *rarely(200)])
@pytest.mark.parametrize("name", FORMATS)
def test_no_mutation_is_a_traceback_or_read_wrong(fuzz: Any, name: str, mutations: int, tmp_path: Path) -> None:
    file, data = fuzz.SAMPLES[name]
    assert fuzz.check(name, tmp_path / file, data) == ("accepted", None)
    problems = {seed: fuzz.problem(name, seed, tmp_path)[1] for seed in range(1, mutations + 1)}
    assert {seed: problem for seed, problem in problems.items() if problem} == {}


def test_a_wrong_value_is_found(fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fuzz.READERS, "csv", lambda data: [])
    file, data = fuzz.SAMPLES["csv"]
    assert "not in the file" in fuzz.check("csv", tmp_path / file, data)[1]
