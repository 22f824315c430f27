"""Limits on the size of classes, and a map that has every module. ruff limits the complexity of functions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_METHODS = 20


@pytest.mark.parametrize("folder", ["kernels", "operators", "tracker"])
def test_no_class_has_too_many_methods(folder: str) -> None:
    counts = {
        f"{path.relative_to(ROOT)}: {node.name}": sum(isinstance(part, ast.FunctionDef) for part in node.body)
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: count for name, count in counts.items() if count > MOST_METHODS} == {}


@pytest.mark.parametrize("folder", ["kernels", "operators", "tracker", "ci"])
def test_the_map_has_every_module_and_folder(folder: str) -> None:
    section = (ROOT / "ARCHITECTURE.md").read_text().partition(f"\n## {folder}/\n")[2].partition("\n## ")[0]
    names = [
        path.name + "/" * path.is_dir()
        for path in (ROOT / folder).iterdir()
        if (path.is_dir() and any(path.rglob("*.py")) and path.name != "__pycache__")
        or (path.suffix == ".py" and not path.name.startswith("__"))
    ]
    assert [name for name in names if f"`{name}`" not in section] == []
