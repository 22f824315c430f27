"""Kill commands while they run: a short version of `ci/benchmarks/kill_marks.py`."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import rarely

PROGRAM = Path(__file__).parents[2] / "ci/benchmarks/kill_marks.py"


@pytest.fixture(scope="module")
def marks() -> Any:
    spec = importlib.util.spec_from_file_location("kill_marks", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_marks"] = module
    spec.loader.exec_module(module)
    return module


# One command that only measures is killed by default, and one that changes the database. The state that a kill may
# leave of the others is tested where these commands are: logs, comparisons and files that are continued, transactions.
LONGER = rarely("backfill", "bisect", "confirm", "gate", "ingest", "night", "repair", "serve")


@pytest.mark.parametrize("command", ["ab", "migrate", *LONGER])
@pytest.mark.parametrize("kills", [1, *rarely(2)])
def test_a_killed_command_loses_doubles_and_leaves_nothing(
    marks: Any, command: str, kills: int, tmp_path: Path
) -> None:
    """The first kill is after 0.7 s, or 1.4 s of `serve`. A second one, after half of that, hits imports."""
    assert list(marks.problems(command, kills, random.Random(4), tmp_path)) == []


def test_remains_of_a_killed_command_are_found(marks: Any, tmp_path: Path) -> None:
    lab = marks.Lab(tmp_path)
    (lab.temporary / "groupbench-tree-1-x").mkdir()
    lab.git("worktree", "add", "-q", "--detach", str(tmp_path / "tree"), "HEAD")
    (lab.repository / ".git/index.lock").touch()
    (lab.repository / ".groupbench.db.half").touch()
    lab.errors.write_text("Traceback (most recent call last):\n")
    (tmp_path / "ab.jsonl").write_text('{"half": ')
    kinds = [problem.partition(" ")[0].rstrip(":") for problem in lab.left()]
    assert kinds == ["temporary", "checkout", "lock", "file", "traceback"]
    assert len(list(marks.Ab(lab).wrong())) == 1


def test_comparisons_that_are_lost_or_doubled_are_found(marks: Any) -> None:
    victim = object.__new__(marks.Confirm)
    rows = [(f"N={size}", "different") for size in range(marks.SERIES)]
    victim.lab = SimpleNamespace(query=lambda statement: rows)
    assert list(victim.wrong()) == []
    rows[1:2] = [("N=0", "different")]
    assert [problem.partition(":")[0] for problem in victim.wrong()] == ["lost", "doubled"]


def test_changes_that_are_lost_doubled_or_half_stored_are_found(marks: Any) -> None:
    victim = object.__new__(marks.Serve)
    victim.alerts, victim.nights, victim.confirmed = list(range(marks.SERIES)), 1, ["a", "b", "c"]
    events = [(reason, alert) for reason in "ab" for alert in victim.alerts]
    stored = {"event": [*events[:-1], events[0]], "run": [("night-00000", marks.SERIES - 1)]}
    victim.lab = SimpleNamespace(query=lambda statement: stored["event" if "alert_event" in statement else "run"])
    kinds = [problem.partition(":")[0] for problem in victim.wrong()]
    assert kinds == ["doubled", "half stored", "lost", f"night 0 has {marks.SERIES - 1} points"]
