"""The guides to asking, comparing, importing and keeping data: their examples run, and their lists are complete."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from cases import Cli, commands

from groupbench.operators.cli import command as tritonbench
from groupbench.tracker.cli import export, main
from groupbench.tracker.cli.history import known_metrics
from groupbench.tracker.facts.record import STATUSES
from groupbench.tracker.formats import FORMATS
from groupbench.tracker.formats.plain_csv import FIELDS

pytestmark = pytest.mark.sqlite

GUIDE = Path(__file__).parents[3] / "docs" / "guide"
HISTORY, COMPARING, IMPORTING, KEEPING, PYTHON = (
    (GUIDE / f"{name}.md").read_text(encoding="utf-8")
    for name in ("history", "comparing", "importing", "keeping-data", "python")
)
EXAMPLES = [
    line.removeprefix("$ ")
    for text in (HISTORY, COMPARING.split("\n## compare\n")[1].split("\n## ")[0], IMPORTING, KEEPING)
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    for line in block.split("\n")
    if line.startswith("$ ")
]
LISTS = ("list series", "list runs", "list commits", "list envs")
KEEP = ("ingest", *(f"db {name}" for name in ("export", "prune", "backup", "verify", "merge")))
COMMANDS = ("history", "compare", "show", *LISTS, "db sql", "import", *KEEP)

COMMIT = "1" * 40
OF_OTHERS = {
    "asv/results/benchmarks.json": '{"version": 2, "time_sort": {"type": "time", "unit": "seconds"}}',
    "asv/results/i7/machine.json": '{"machine": "i7", "version": 1}',
    "asv/results/i7/11111111-py.json": json.dumps(
        {
            "commit_hash": COMMIT, "env_name": "py", "date": 1767225600000, "params": {"machine": "i7", "cpu": "i7"},
            "result_columns": ["result"], "results": {"time_sort": [[0.5]]}, "version": 2,
        }
    ),
    "nights/first/sort.json": json.dumps(
        {
            "context": {"date": "2026-01-01T03:00:00+00:00", "host_name": "i7", "num_cpus": 8, "commit": COMMIT},
            "benchmarks": [{"name": "BM_Sort/8", "real_time": 1.5, "cpu_time": 1.5, "time_unit": "us"}],
        }
    ),
    "data.js": "window.BENCHMARK_DATA = " + json.dumps(
        {
            "entries": {
                "Sort": [
                    {
                        "commit": {"id": COMMIT, "timestamp": "2026-01-01T03:00:00Z", "message": "Sort faster"},
                        "date": 1767236400000, "tool": "cargo",
                        "benches": [{"name": "sort", "value": 150, "range": "+/- 3", "unit": "ns/iter"}],
                    }
                ]
            }
        }
    ),
}  # fmt: skip
"""Files of other benchmarks, by the paths in the guide."""


@pytest.fixture
def filled(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: Any, make: Any, write: Any) -> Path:
    """A database of two nights in a folder with the files that the examples name."""
    cells = [("torch_loop", 2.0), ("triton_pointer", 1.0)]
    big = {"dims": {"G": 8, "M": 8192, "N": 4096, "K": 64}, "flops": 10**12, "min_bytes": 10**9}

    def night(n: int, branch: str = "main") -> list[Any]:
        of = {"run": f"night-00{n}", "commit_facts": {"branch": branch}, "shape": "G=8,M=8192,N=4096,K=64"}
        return [make(n, backend=name, ms=ms * (1 + n / 10), cell=big, **of) for name, ms in cells]

    path = stored([*night(0), *night(1)])
    write(night(0), "before.jsonl")
    write(night(1), "after.jsonl")
    write(night(2, "my-branch"), "branch.jsonl")
    for name in ("other.db", "damaged.db"):
        assert cli("ingest", write([make(2)], "other.jsonl"), db=tmp_path / name).exit_code == 0
    shutil.copy(Path(__file__).parents[1] / "data" / "tritonbench_grouped_gemm.json", tmp_path / "tritonbench.json")
    (tmp_path / "times.csv").write_text("op,impl,rows,time\ngemm,a,64,100\ngemm,b,64,120\n")
    for name, content in OF_OTHERS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(cli: Cli, filled: Path, example: str) -> None:
    program, *args = shlex.split(example)
    assert program == "groupbench"
    if "my-branch" in args:
        assert cli("ingest", "branch.jsonl").exit_code == 0
    result = cli(*args)
    assert result.exit_code == 0, result.stderr
    quiet = ("--since", "--limit", "--hardware", "export")  # which may rightly match nothing, or writes a file
    assert result.stdout.strip() or any(flag in args for flag in quiet), result.stderr


def test_python_runs(filled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pandas")
    code = re.findall(r"```python\n(.*?)```", PYTHON, re.DOTALL)[0]
    assert '"groupbench.db"' in code
    printed: dict[str, Any] = {}
    exec(code.replace('"groupbench.db"', repr(str(filled))).replace('since="30d"', 'since="2026-01-01"'), printed)
    assert [round(row.speedup, 1) for row in printed["rows"]] == [1.0, 1.0, 2.0, 2.0]
    assert list(printed["frame"].points) == [2, 2]
    assert printed["comparison"].counts


def test_each_command_has_an_example() -> None:
    for name in COMMANDS:
        assert any(f"{example} ".startswith(f"groupbench {name} ") for example in EXAMPLES), name
    assert all(f"\n### {name}\n" in KEEPING for name in KEEP)


def test_lists_are_complete() -> None:
    assert all(f"`{name}`" in IMPORTING for name in (*FORMATS, *FIELDS))
    assert all(f"\n| `{form}` |" in KEEPING for form in export.FORMATS)
    metrics = (GUIDE.parent / "reference" / "metrics.md").read_text(encoding="utf-8")
    elsewhere = ("accuracy", "speedup")
    assert all(f"`{name}`" in metrics for name in known_metrics() if name not in elsewhere)
    glossary = (GUIDE.parent / "reference" / "glossary.md").read_text(encoding="utf-8")
    assert all(name in glossary for name in STATUSES)


OF_OTHER_PROGRAMS = {"--groupbench", "--groupbench-records", "--groupbench-wait"}  # pytest's
OF_OTHER_PROGRAMS |= {"--json", "--export-json", "--jsonbin", "--metadata"}


@pytest.mark.parametrize("page", sorted(GUIDE.glob("*.md")), ids=lambda page: page.stem)
def test_every_option_exists(page: Path) -> None:
    every = [part for command in (main, tritonbench, *dict(commands(main)).values()) for part in command.params]
    flags = {flag for part in every for flag in (*part.opts, *part.secondary_opts)} | OF_OTHER_PROGRAMS
    assert set(re.findall(r"(?<![\w-])(--[a-z][\w-]*)", page.read_text(encoding="utf-8"))) <= flags
