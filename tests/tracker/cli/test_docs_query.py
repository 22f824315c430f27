"""docs/query.md: every command that it names exists, its examples run, and what it lists is all there is."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from groupbench.tracker.cli import COMMANDS, main
from groupbench.tracker.cli.history import known_metrics
from groupbench.tracker.formats import FORMATS
from groupbench.tracker.formats.plain_csv import FIELDS
from groupbench.tracker.record import STATUSES

Cli = Callable[..., Result]

DOCS = Path(__file__).parents[3] / "docs" / "query.md"
TEXT = DOCS.read_text()
EXAMPLES = [
    line.removeprefix("$ ")
    for block in re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
    for line in block.split("\n")
    if line.startswith("$ ")
]
MINE = ("history", "compare", "show", "series", "runs", "commits", "envs", "sql", "import")


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Any, make: Any, write: Any) -> Path:
    """A database of two nights in a folder with the files that the examples name."""
    cells = [("torch_loop", 2.0), ("triton_pointer", 1.0)]
    big = {"dims": {"G": 8, "M": 8192, "N": 4096, "K": 64}, "flops": 10**12, "min_bytes": 10**9}

    def night(n: int) -> list[Any]:
        of = {"run": f"night-00{n}", "commit_facts": {"branch": "main"}, "shape": "G=8,M=8192,N=4096,K=64"}
        return [make(n, backend=name, ms=ms * (1 + n / 10), cell=big, **of) for name, ms in cells]

    path = stored([*night(0), *night(1)])
    write(night(0), "before.jsonl")
    write(night(1), "after.jsonl")
    shutil.copy(Path(__file__).parents[1] / "data" / "tritonbench_grouped_gemm.json", tmp_path / "tritonbench.json")
    (tmp_path / "times.csv").write_text("op,impl,rows,time\ngemm,a,64,100\ngemm,b,64,120\n")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(cli: Cli, filled: Path, example: str) -> None:
    program, *args = shlex.split(example)
    assert program == "groupbench"
    result = cli(*args)
    assert result.exit_code == 0, result.stderr
    quiet = ("--since", "--limit", "--hardware")  # may rightly match nothing
    assert result.stdout.strip() or any(flag in args for flag in quiet), result.stderr


def test_python_runs(filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert '"groupbench.db"' in code
    found: dict[str, Any] = {}
    exec(code.replace('"groupbench.db"', repr(str(filled))).replace('since="30d"', 'since="2026-01-01"'), found)
    assert [round(row.speedup, 1) for row in found["rows"]] == [1.0, 1.0, 2.0, 2.0]
    assert list(found["frame"].points) == [2, 2]
    assert found["comparison"].counts


def test_each_command_has_a_section_with_examples() -> None:
    sections = re.findall(r"^## (\w+)$", TEXT, re.MULTILINE)
    assert set(MINE) <= set(sections)
    used = {shlex.split(example)[1] for example in EXAMPLES}
    assert used == set(MINE)
    for name in re.findall(r"`groupbench (\w+)", TEXT):
        assert name in COMMANDS
    for anchor in re.findall(r"\]\(#(\w+)\)", TEXT):
        assert anchor in {section.lower() for section in sections}


def test_every_option_exists() -> None:
    known = {"--db", "--output-json", "--csv", "--output", "--benchmark_context", "--format"}
    for name in (*MINE, "export"):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        known |= {flag for parameter in command.params for flag in parameter.opts}
    named = {flag for flag in re.findall(r"(?<![\w-])(--[a-z][\w-]*)", TEXT) if not flag.startswith("---")}
    assert named <= known, named - known


def test_lists_are_complete() -> None:
    def section(name: str) -> str:
        return TEXT.split(f"\n## {name}\n")[1].split("\n## ")[0]

    assert all(f"`{name}`" in section("import") for name in (*FORMATS, *FIELDS))
    assert all(f"`{name}`" in section("history") for name in known_metrics())
    assert all(name in section("Glossary") for name in STATUSES)
    for name in ("import", "history", "compare"):
        text = CliRunner().invoke(main, [name, "--help"]).stdout
        shown = set(re.findall(r"(--[a-z][\w-]*)", text)) - {"--help", "--json", "--csv", "--md"}
        assert all(flag in TEXT for flag in shown), {flag for flag in shown if flag not in TEXT}
