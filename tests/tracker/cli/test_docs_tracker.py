"""The guide to keeping data: its examples run, and it covers each command and format."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, commands

from groupbench.tracker.cli import main
from groupbench.tracker.cli.export import FORMATS

TEXT = (Path(__file__).parents[3] / "docs" / "guide" / "keeping-data.md").read_text(encoding="utf-8")
EXAMPLES = [line.removeprefix("$ ") for line in TEXT.split("\n") if line.startswith("$ ")]
COMMANDS_HERE = ("ingest", *(f"db {name}" for name in ("export", "prune", "backup", "verify", "merge")))
pytestmark = pytest.mark.sqlite


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(
    cli: Cli, stored: Any, make: Any, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, example: str
) -> None:
    stored([make(0), make(1)])
    for name in ("other.db", "damaged.db"):
        assert cli("ingest", write([make(2)]), db=tmp_path / name).exit_code == 0
    monkeypatch.chdir(tmp_path)
    program, *args = shlex.split(example)
    assert program == "groupbench"
    result = cli(*args)
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("name", COMMANDS_HERE)
def test_each_command_is_covered(name: str) -> None:
    assert name in dict(commands(main))
    assert f"\n### {name}\n" in TEXT
    assert any(example.startswith(f"groupbench {name}") for example in EXAMPLES)


def test_each_format_is_covered() -> None:
    assert all(re.search(rf"^\| `{form}` \|", TEXT, re.MULTILINE) for form in FORMATS)
