"""The guides to verdicts and alerts: their examples run, and their lists are complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
from cases import Cli

from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import causes, incident_rows

GUIDE = Path(__file__).parents[3] / "docs" / "guide"
VERDICTS, ALERTS, PYTHON = ((GUIDE / f"{name}.md").read_text() for name in ("verdicts", "incidents", "python"))
TEXT = VERDICTS + ALERTS
RUN_HERE = ("gate", "confirm", "pins", *("incidents" + name for name in ("", " ack", " expect", " close", " note")))
NOT_HERE = ("pins add", "pins remove", "incidents accept-transition", "triage", "post")
"""Their examples need what these tests do not store."""
EXAMPLES = [
    line.removeprefix("$ ")
    for line in TEXT.split("\n")
    if line.startswith(tuple(f"$ groupbench {name}" for name in RUN_HERE))
    and not line.startswith(tuple(f"$ groupbench {name}" for name in NOT_HERE))
]
pytestmark = [pytest.mark.sqlite, pytest.mark.usefixtures("two_nights_are_certain")]


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
    assert result.stdout or "no pin" in result.stderr


def test_python_runs(alerted: Cli, db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = next(code for code in re.findall(r"```python\n(.*?)```", PYTHON, re.DOTALL) if "tracker.incidents()" in code)
    exec(code.replace('"groupbench.db"', repr(str(db))), {})
    assert "regressed" in capsys.readouterr().out


def test_lists_are_complete() -> None:
    verdicts = [verdict for verdict in Verdict if verdict is not Verdict.UNKNOWN]
    assert all(re.search(rf"^\|.* `{verdict}`[^|]*\|", VERDICTS, re.MULTILINE) for verdict in verdicts)
    assert all(f"`{word}`" in VERDICTS for word in get_args(causes.Word))
    assert all(f"| `{state}` |" in ALERTS for state in incident_rows.STATES)
    for name in RUN_HERE:
        assert any(f"{each} ".startswith(f"groupbench {name} ") for each in EXAMPLES), name
