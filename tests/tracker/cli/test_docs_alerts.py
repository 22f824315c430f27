"""docs/judgement.md on gate, confirm and alerts: its examples run, and its lists are all there is."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from click.testing import Result

from groupbench.tracker.cli import main
from groupbench.tracker.judge import alerts, causes
from groupbench.tracker.stats import thresholds

Cli = Callable[..., Result]

TEXT = (Path(__file__).parents[3] / "docs" / "judgement.md").read_text(encoding="utf-8")
MINE = ("gate", "confirm", "alerts", "ack", "expect", "close")
EXAMPLES = [
    line.removeprefix("$ ") for line in TEXT.split("\n") if line.startswith("$ groupbench ") and line.split()[2] in MINE
]
pytestmark = [pytest.mark.sqlite, pytest.mark.usefixtures("plain_statistics")]


@pytest.fixture
def alerted(cli: Cli, stored: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    stored([*[make(n, rms=2e-3) for n in range(6)], make(6, rms=9e-3)])
    assert cli("gate", "--update").exit_code == 1
    monkeypatch.chdir(tmp_path)
    return cli


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(alerted: Cli, example: str) -> None:
    program, *args = shlex.split(example)
    assert program == "groupbench"
    result = alerted(*args)
    assert result.exit_code in ((0, 1) if args[0] == "gate" else (0,)), result.stderr
    assert result.stdout


def test_python_runs(alerted: Cli, db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = next(code for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "tracker.alerts()" in code)
    exec(code.replace('"groupbench.db"', repr(str(db))), {})
    assert "regressed" in capsys.readouterr().out


def section(name: str) -> str:
    return TEXT.split(f"\n## {name}\n")[1].split("\n## ")[0]


def test_lists_are_complete() -> None:
    assert all(f"`{verdict}`" in section("Verdicts") for verdict in get_args(thresholds.Verdict))
    assert all(f"| `{word}` |" in section("Causes") for word in get_args(causes.Word))
    assert all(f"| `{state}` |" in section("Alerts") for state in alerts.STATES)
    assert {example.split()[1] for example in EXAMPLES} == set(MINE)


def test_every_option_is_told_and_exists() -> None:
    told = "".join(map(section, ("Verdicts", "Accuracy", "Causes", "Confirming", "Alerts")))
    known = set()
    for name in MINE:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        known |= {flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")}
    named = set(re.findall(r"(?<![\w-])(--[a-z][\w-]*)", told))
    assert named <= known, named - known
    assert {"--update", "--strict", "--repo", "--budget", "--setup", "--base-python", "--again", "--until"} <= named
