"""Exit codes have names: no place sets one as a number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from groupbench import operators, tracker
from groupbench.tracker.facts.exits import ExitCode

FILES = [
    pytest.param(path, id=f"{package.__name__.rpartition('.')[2]}/{path.relative_to(folder)}")
    for package in (tracker, operators)
    for folder in (Path(package.__path__[0]),)
    for path in sorted(folder.rglob("*.py"))
    if re.search(r"exit\(|SystemExit\(|exit_code[^=\n]*=", path.read_text())
]
"""All files in which `literals` can find something; to parse the others takes a second."""


def literals(tree: ast.AST) -> Iterator[int]:
    """Lines that call something named `exit` with a number, or set an `exit_code` to one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            values = node.args if name in ("exit", "_exit", "SystemExit") else []
        elif isinstance(node, ast.Assign):
            named = any(getattr(target, "id", getattr(target, "attr", "")) == "exit_code" for target in node.targets)
            values = [node.value] if named else []
        else:
            continue
        for value in values:
            if any(isinstance(part, ast.Constant) and isinstance(part.value, int) for part in ast.walk(value)):
                yield node.lineno


@pytest.mark.parametrize("path", FILES)
def test_no_exit_code_is_a_number(path: Path) -> None:
    assert list(literals(ast.parse(path.read_text()))) == []


def test_codes_that_scripts_rely_on_do_not_change() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0, "FAILED": 1, "USAGE": 2, "INCOMPLETE": 3, "INCOMPARABLE": 4, "CANDIDATE": 5, "BUG": 70, "BUSY": 75,
        "INTERRUPTED": 130, "BROKEN_PIPE": 141, "TERMINATED": 143,
    }  # fmt: skip
