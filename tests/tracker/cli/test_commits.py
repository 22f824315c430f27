"""`groupbench list commits`."""

from __future__ import annotations

import json
from typing import Any

from cases import Cli


def test_newest_first_with_what_was_measured(cli: Cli, stored: Any, make: Any) -> None:
    of = {"parents": ["f" * 40], "branch": "main", "author": "Ann", "subject": "Faster"}
    stored(
        [
            make(0, commit_facts=of),
            make(1, commit="000" + "c" * 37, commit_facts={"dirty": True}),
            make(2, commit_facts={"time": "2026-01-03T00:00:00Z"}),
            make(2, backend="b"),
        ]
    )
    commits = json.loads(cli("list", "commits", "--format=json").stdout)
    assert [r["commit"][:3] for r in commits] == ["002", "000"]
    assert [(r["runs"], r["dirty_runs"], r["points"]) for r in commits] == [(1, 0, 2), (2, 1, 2)]
    assert commits[1]["parents"] == ["f" * 40]
    assert (commits[1]["author"], commits[1]["subject"], commits[1]["branch"]) == ("Ann", "Faster", "main")
    assert (commits[1]["first"][:10], commits[1]["last"][:10]) == ("2026-01-01", "2026-01-02")
    for option, value, commit in (("--limit", "1", "002"), ("--branch", "main", "000")):
        (row,) = json.loads(cli("list", "commits", option, value, "--format=json").stdout)
        assert row["commit"][:3] == commit
    assert "000ccccccc" in cli("list", "commits").stdout
    assert "no commits match" in cli("list", "commits", "--since", "2030-01-01").stderr
