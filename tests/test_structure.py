"""Limits on the size of the product's classes. ruff limits the complexity of functions."""

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
