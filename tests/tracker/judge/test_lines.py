"""History along the commits of one branch: repeated, late and foreign results do not change a verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from nights import Cli
from repositories import git as run_git

from groupbench.tracker.facts.record import UNKNOWN_COMMIT, Record
from groupbench.tracker.judge.gate import judge_run
from groupbench.tracker.query.lines import FirstParents, line_of
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.tools import git

NIGHTS = 30
STEP = 24
"""The first slow commit of the main line."""


def commit_of(number: int, branch: str = "") -> str:
    return f"{number:03d}{branch}".ljust(40, "0")


@pytest.fixture
def measured(make: Any) -> Callable[..., Record]:
    """Return a result of commit `number`: 1 ms, from STEP on 10 % more, with a random scatter for each night."""

    def record(night: float, number: int, *, branch: str = "", ms: float | None = None, **fields: Any) -> Record:
        """`night` is when it was measured; a commit of a branch comes after that commit of the main line."""
        level = (1.1 if number >= STEP else 1.0) if ms is None else ms
        noise = float(np.random.default_rng(int(1000 * night) + 7).normal(0, 0.002))
        parents = [commit_of(number if branch else number - 1)] if branch or number else []
        facts = {"parents": fields.pop("parents", parents), "branch": branch or "main"}
        # A night is a whole number of days: others are moved by hours.
        made = make(
            int(night), level * (1 + noise), commit=commit_of(number, branch), commit_facts=facts,
            run=fields.pop("run", f"run-{night:06.2f}{branch}"), **fields,
        )  # fmt: skip
        return moved(made, night - int(night))

    return record


def moved(record: Record, days: float) -> Record:
    run = msgspec.structs.replace(record.run, started=record.run.started + timedelta(days=days))
    return msgspec.structs.replace(record, run=run)


def judged(db: Any, run: str, first_parents: FirstParents | None = None) -> tuple[Any, ...]:
    """(exit code, verdict, change in whole per cent, first slow commit, results on the new level)."""
    with open_store(db, create=False) as store, store.read() as session:
        gate = judge_run(session, find_run(session, run), first_parents=first_parents)
    row = max(gate.rows, key=lambda each: abs(each.change or 0.0))
    change = None if row.change is None else round(100 * row.change)
    return gate.exit_code, str(row.verdict), change, row.span and row.span.head.commit, row.since


def main_line(measured: Callable[..., Record]) -> list[Record]:
    return [measured(night, night) for night in range(NIGHTS)]


Extra = Callable[[Callable[..., Record]], Iterable[Record]]
DISTURBANCES: dict[str, Extra] = {
    "a slow branch between nights": lambda m: [m(n + 0.5, n, branch="b", ms=1.3) for n in range(10, 23)],
    "a healthy branch after the step": lambda m: [m(n + 0.5, 20, branch=f"h{n}", ms=1.0) for n in range(24, 29)],
    "old commits measured again": lambda m: [m(27 + n / 10, n) for n in range(3, 9)],
    "a slow commit measured again before": lambda m: [m(28.3, 23), m(28.4, 22), m(28.5, 21)],
    "a branch without the slow commit": lambda m: [m(29.0 - n / 50, 23, branch=f"x{n}", ms=1.0) for n in range(1, 9)],
}


@pytest.mark.parametrize("extra", DISTURBANCES.values(), ids=DISTURBANCES)
def test_other_branches_and_old_commits_change_nothing(
    stored: Any, measured: Callable[..., Record], db: Any, extra: Extra
) -> None:
    plain = main_line(measured)
    stored(plain)
    expected = judged(db, "run-029.00")
    assert expected[1:4] == ("regressed", 10, commit_of(STEP))
    stored(extra(measured))
    assert judged(db, "run-029.00") == expected


def test_backfilled_commits_take_their_place(stored: Any, measured: Callable[..., Record], db: Any) -> None:
    """Half of the main line is measured after the night that is judged."""
    plain = main_line(measured)
    stored([record for number, record in enumerate(plain) if number % 2 or number >= STEP - 2])
    stored([measured(29.1 + number / 100, number) for number in range(0, STEP - 2, 2)])
    assert judged(db, "run-029.00")[1:4] == ("regressed", 10, commit_of(STEP))
    with open_store(db, create=False) as store, store.read() as session:
        line = line_of(session, find_run(session, "run-029.00"))
        assert (len(line.runs), line.unknown) == (NIGHTS, 0)


def test_an_old_commit_is_judged_by_the_commits_before_it(
    stored: Any, measured: Callable[..., Record], db: Any
) -> None:
    stored(main_line(measured))
    stored([measured(30, 20)])
    assert judged(db, "run-030.00")[:3] == (0, "ok", None)


def test_a_branch_continues_its_merge_bases_history(stored: Any, measured: Callable[..., Record], db: Any) -> None:
    stored(main_line(measured))
    stored([measured(30, 20, branch="p", ms=1.05)])
    code, verdict, change, head, _ = judged(db, "run-030.00p")
    assert (code, verdict, change, head) == (3, "unconfirmed", 5, commit_of(20, "p"))
    stored([measured(31, 20, branch="q", ms=1.0)])
    assert judged(db, "run-031.00q")[:2] == (0, "ok")


def test_a_merged_branch_is_not_part_of_the_main_line(stored: Any, measured: Callable[..., Record], db: Any) -> None:
    plain = main_line(measured)
    plain[15] = measured(15, 15, parents=[commit_of(14), commit_of(12, "b")])
    stored([*plain, measured(14.5, 12, branch="b", ms=2.0)])
    assert judged(db, "run-023.00")[:2] == (0, "ok")


@pytest.mark.parametrize("complete", [True, False], ids=["a clone", "a shallow clone"])
def test_git_fills_gaps_of_the_database(stored: Any, measured: Callable[..., Record], db: Any, complete: bool) -> None:
    """Nights measure every other commit: no parent that is stored leads from one to the one before."""

    def first_parents(commit: str) -> tuple[Sequence[str], bool] | None:
        number = int(commit[:3])
        line = [commit_of(each) for each in range(number, -1, -1)]
        return (line if complete else line[:1]), complete

    nights = [measured(night, night) for night in range(0, NIGHTS, 2)]
    branch = [measured(night + 0.5, night, branch=f"b{night}", ms=1.3) for night in range(1, 22, 2)]
    stored(nights + branch)
    with open_store(db, create=False) as store, store.read() as session:
        run = find_run(session, "run-028.00")
        line = line_of(session, run, first_parents)
        assert (len(line.runs), line.unknown) == ((15, 0) if complete else (26, 25))
        assert line_of(session, run).unknown == 25


def test_without_ancestry_time_decides_with_a_note(
    cli: Cli, stored: Any, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stored([make(night, 1 + 0.001 * (night % 3)) for night in range(8)])
    assert "ancestry unknown: earlier runs ordered by time" in cli("gate").stderr
    notes = json.loads(cli("gate", "--format=json").stdout)["notes"]
    assert notes == ["ancestry unknown: earlier runs ordered by time, possibly including other branches"]


def test_runs_of_an_unknown_commit_are_ordered_by_time_among_the_others(stored: Any, make: Any, db: Any) -> None:
    stored([make(night, **({"commit": UNKNOWN_COMMIT} if night % 2 else {})) for night in range(4)])
    with open_store(db, create=False) as store, store.read() as session:
        nights = [find_run(session, f"run-{night:03}") for night in range(4)]
        assert line_of(session, nights[3]).runs == tuple(run.pk for run in reversed(nights))


def test_parents_that_go_round_in_a_circle_end(stored: Any, measured: Callable[..., Record], db: Any) -> None:
    stored([measured(0, 0, parents=[commit_of(2)]), measured(1, 1), measured(2, 2)])
    with open_store(db, create=False) as store, store.read() as session:
        assert len(line_of(session, find_run(session, "run-002.00")).runs) == 3


def test_git_gives_the_first_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_git(tmp_path, "init", "-q", "-b", "main", "one")
    one = tmp_path / "one"
    for subject in "abc":
        run_git(one, "commit", "-q", "--allow-empty", "-m", subject)
    commits = run_git(one, "rev-list", "HEAD").split()
    run_git(tmp_path, "clone", "-q", "--depth", "2", one.as_uri(), "shallow")
    monkeypatch.chdir(one)
    assert git.first_parents(commits[0]) == (commits, True) and git.first_parents("0" * 40) is None
    monkeypatch.chdir(tmp_path / "shallow")
    assert git.first_parents(commits[0]) == (commits[:2], False)


# ---- copies


def test_the_same_samples_under_other_runs_do_not_count(
    cli: Cli, stored: Any, measured: Callable[..., Record], db: Any
) -> None:
    """One slow night, stored under six more run ids, proves as much as one slow night."""
    stored([measured(night, night) for night in range(STEP + 1)])
    assert "ancestry" not in cli("gate").stderr
    expected = judged(db, "run-024.00")
    assert expected[:3] == (3, "unconfirmed", 10)
    slow = measured(STEP, STEP)
    stored([renamed(slow, f"copy-{number}", number) for number in range(1, 7)])
    assert judged(db, "copy-6") == expected
    (note,) = json.loads(cli("gate", "--run", "copy-6", "--format=json").stdout)["notes"]
    assert note == "6 results ignored: same samples as in another run of the same commit"


def test_the_same_accuracy_is_not_a_copy(stored: Any, make: Any, db: Any) -> None:
    facts = {"commit": "a" * 40, "ms": None}
    stored([make(night, run=f"r{night}", **facts) for night in range(4)])
    with open_store(db, create=False) as store, store.read() as session:
        assert judge_run(session, find_run(session, "r3")).notes == ()


def renamed(record: Record, run: str, days: int) -> Record:
    return moved(msgspec.structs.replace(record, run=msgspec.structs.replace(record.run, id=run)), days)
