"""`groupbench history` along the commits of a branch, whenever each of them was measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from cases import Cli

from groupbench.tracker.cli.history_plot import trends
from groupbench.tracker.facts.record import Record
from groupbench.tracker.tools import git

Stored = Callable[..., Any]
MS = (0.20, 0.56, 0.57)
"""By commit."""


def hash_of(name: str) -> str:
    return name.encode().hex().ljust(40, "0")


@pytest.fixture
def measured(make: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Record]:
    """A result of commit `name`, measured on a night; git knows nothing."""
    monkeypatch.setattr(git, "first_parents", lambda commit: None)

    def record(night: int, name: str, parent: str = "", **fields: Any) -> Record:
        facts = {"parents": [hash_of(parent)] if parent else [], **fields.pop("facts", {})}
        trigger = fields.pop("trigger", "schedule")
        made: Record = make(night, fields.pop("ms", 1.0), commit=hash_of(name), commit_facts=facts, **fields)
        return msgspec.structs.replace(made, run=msgspec.structs.replace(made.run, trigger=trigger))

    return record


def backfill(measured: Callable[..., Record]) -> list[Record]:
    """Three commits, the newest measured first, as `groupbench backfill` does."""
    line = [("a", ""), ("b", "a"), ("c", "b")]
    return [measured(2 - n, *line[n], ms=MS[n], trigger="backfill") for n in (2, 1, 0)]


def listed(cli: Cli, *args: str) -> list[str]:
    """The commits of a history, in its order."""
    result = cli("history", "--format=json", *args)
    assert result.exit_code == 0, result.stderr
    return [bytes.fromhex(row["commit"]).decode().rstrip("\0") for row in json.loads(result.stdout)]


def test_a_backfill_reads_in_the_order_of_commits(cli: Cli, stored: Stored, measured: Any) -> None:
    stored(backfill(measured))
    assert listed(cli) == ["a", "b", "c"]
    assert listed(cli, "--limit", "1") == ["c"]
    rows = json.loads(cli("history", "--format=json").stdout)
    assert rows[0]["change"] is None
    assert rows[1]["change"] == pytest.approx(0.56 / 0.20 - 1, rel=0.01)
    shown = cli("history")
    assert shown.stderr == ""
    assert shown.stdout.split(maxsplit=1)[0] == "measured"  # these times run backwards


def test_plots_are_in_the_order_of_commits(cli: Cli, stored: Stored, measured: Any) -> None:
    stored(backfill(measured))
    rows = json.loads(cli("history", "--format=json").stdout)
    (panel,) = trends(rows, [row["run"] for row in rows], "latency")
    assert panel.curves[0].y == pytest.approx(MS, rel=0.01)
    assert cli("history", "--plot").exit_code == 0


def test_the_newest_run_of_a_backfill_is_of_its_newest_commit(cli: Cli, stored: Stored, measured: Any) -> None:
    stored(backfill(measured))
    (row,) = json.loads(cli("gate", "--format=json").stdout)["series"]
    assert row["latency_ms"] == pytest.approx(MS[2], rel=0.01)
    stored([measured(9, "a", ms=MS[0])])  # by hand: this one is meant
    (row,) = json.loads(cli("gate", "--format=json").stdout)["series"]
    assert row["latency_ms"] == pytest.approx(MS[0], rel=0.01)


def test_other_branches_are_left_out_and_counted(cli: Cli, stored: Stored, measured: Any) -> None:
    main, side = {"branch": "main"}, {"branch": "side"}
    stored([
        measured(0, "a", facts=main), measured(1, "s", "a", facts=side), measured(2, "b", "a", facts=main),
        measured(3, "c", "b", facts=main),
    ])  # fmt: skip
    assert listed(cli) == ["a", "b", "c"]
    assert cli("history").stderr == "1 result of other branches left out; --all lists them\n"
    assert cli("history", "--until", "2026-01-01").stderr == ""
    assert listed(cli, "--branch", "side") == ["a", "s"]
    assert cli("history", "--branch", "side").stderr == ""
    assert sorted(listed(cli, "--all")) == ["a", "b", "c", "s"]
    assert sorted(listed(cli, "--branch", "side", "--branch", "main")) == ["a", "b", "c", "s"]
    assert listed(cli, "--commit", hash_of("s")) == ["s"]  # named, so meant
    assert listed(cli, "--commit", hash_of("b")) == ["b"]


def test_a_commit_measured_again_stays_among_its_neighbours(cli: Cli, stored: Stored, measured: Any) -> None:
    stored([measured(0, "a"), measured(1, "b", "a"), measured(2, "c", "b"), measured(3, "b", "a")])
    assert listed(cli) == ["a", "b", "b", "c"]
    runs = [row["run"] for row in json.loads(cli("history", "--format=json").stdout)]
    assert runs == ["run-000", "run-001", "run-003", "run-002"]


def test_unknown_ancestry_is_by_time_with_a_note(cli: Cli, stored: Stored, measured: Any) -> None:
    stored([measured(2, "a"), measured(0, "c"), measured(1, "b")])
    assert listed(cli) == ["c", "b", "a"]
    assert "ancestry unknown" in cli("history").stderr


@pytest.mark.parametrize(("head", "commits"), [("c", ["a", "c"]), ("s", ["a", "s"])])
def test_a_fork_is_followed_to_the_checkouts_head(
    cli: Cli, stored: Stored, measured: Any, monkeypatch: pytest.MonkeyPatch, head: str, commits: list[str]
) -> None:
    """Git knows the commits between measured ones, and the commit of the checkout."""
    stored([measured(1, "c", "b"), measured(2, "s", "a"), measured(3, "a")])
    lines = {"c": ["c", "b", "a"], "b": ["b", "a"], "s": ["s", "a"], "a": ["a"]}
    lines = {hash_of(name): [hash_of(each) for each in line] for name, line in lines.items()}
    lines["HEAD"] = lines[hash_of(head)]
    monkeypatch.setattr(git, "first_parents", lambda commit: (lines[commit], True) if commit in lines else None)
    assert listed(cli) == commits
