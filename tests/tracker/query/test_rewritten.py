"""Results of commits that the branch no longer has are matched by their changes, ordered by time, or left out."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from groupbench.tracker.query.lines import CommitLine, line_of
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.tools import git as tools
from tests.shared.repositories import git

NIGHTS = 6


def _nothing(folder: Path) -> None:
    pass


def _new_hashes(folder: Path) -> None:
    """Change the author's address, but no file of any commit."""
    rewrite(folder, "--env-filter", "GIT_AUTHOR_EMAIL=b@example.org GIT_COMMITTER_EMAIL=b@example.org")


def _without_a_large_file(folder: Path) -> None:
    """Remove a file from every commit. Only the first commit gets another patch."""
    rewrite(folder, "--index-filter", "git rm -q --cached large")


def _without_the_last_three(folder: Path) -> None:
    git(folder, "reset", "-q", "--hard", "HEAD~3")


def _with_another_change(folder: Path) -> None:
    (folder / "file").write_text("another change")
    git(folder, "commit", "-q", "-a", "--amend", "-m", "5")


def _collected(folder: Path) -> None:
    """Change all hashes and remove the old commits, which a fresh clone lacks too."""
    _new_hashes(folder)
    shutil.rmtree(folder / ".git/refs/original")
    git(folder, "reflog", "expire", "--expire=now", "--all")
    git(folder, "gc", "-q", "--prune=now")


def _onto_a_branch(folder: Path) -> None:
    """The results are of another branch, so they count for nothing and are not worth a word."""
    git(folder, "switch", "-q", "--orphan", "other")


def rewrite(folder: Path, *filters: str) -> None:
    git(folder, "filter-branch", "-f", *filters, "--", "main")
    git(folder, "reset", "-q", "--hard")


@dataclass(frozen=True)
class Case:
    """A change of the branch, and its effect on earlier results.

    Attributes:
        rewrite: The change.
        runs: Earlier runs that still count.
        note: The parts of the gate's line, or nothing.
    """

    rewrite: Callable[[Path], None]
    runs: int
    note: str | None


CASES = {
    "nothing": Case(_nothing, NIGHTS, None),
    "new hashes": Case(
        _new_hashes, NIGHTS, "6 earlier runs of commits that have left main: 6 matched by their changes"
    ),
    "a file less": Case(_without_a_large_file, NIGHTS - 1, "5 matched by their changes, 1 left out, since"),
    "dropped": Case(
        _without_the_last_three, NIGHTS - 3, "3 earlier runs of .*: 3 left out, since no commit of the branch"
    ),
    "amended": Case(_with_another_change, NIGHTS - 1, "1 earlier run of .*: 1 left out"),
    "collected": Case(
        _collected, NIGHTS, "6 earlier runs .*: 6 ordered by time, since git no longer has their commits"
    ),
    "another branch": Case(_onto_a_branch, 0, None),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_rewritten_branch(stored: Any, make: Any, db: Any, tmp_path: Path, monkeypatch: Any, case: Case) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    monkeypatch.chdir(repository)
    monkeypatch.setenv("FILTER_BRANCH_SQUELCH_WARNING", "1")
    git(repository, "init", "-q", "-b", "main")
    records = [measured(make, repository, night) for night in range(NIGHTS)]
    case.rewrite(repository)
    records.append(measured(make, repository, NIGHTS))
    stored(records)
    line = newest_line(db, records[-1].run.id)
    assert len(line.runs) == case.runs + 1
    assert list(line.runs) == sorted(line.runs, reverse=True)
    if case.note is None:
        assert line.note is None
    else:
        assert line.note is not None
        assert re.search(case.note, line.note), line.note


def measured(make: Any, repository: Path, night: int) -> Any:
    """Commit a change, and return a result of it."""
    (repository / "file").write_text(f"{night}")
    (repository / "large").write_text("large") if night == 0 else None
    git(repository, "add", "-A")
    git(repository, "commit", "-q", "-m", f"{night}")
    commit, *parents = git(repository, "log", "-1", "--format=%H %P").split()
    facts = {"parents": parents, "branch": git(repository, "symbolic-ref", "--short", "HEAD")}
    return make(night, 1.0, commit=commit, commit_facts=facts, run=f"run-{night}")


def newest_line(db: Any, run: str) -> CommitLine:
    with open_store(db, create=False) as store, store.read() as session:
        return line_of(session, find_run(session, run), tools.first_parents)


def test_commits_measured_after_an_old_one_are_not_rewritten(
    stored: Any, make: Any, db: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "-q", "-b", "main")
    old, *newer = [measured(make, tmp_path, night) for night in range(4)]
    again = make(9, 1.0, commit=old.run.commit.hash, commit_facts={"parents": [], "branch": "main"}, run="run-9")
    stored([*newer, again])
    line = newest_line(db, "run-9")
    assert (len(line.runs), line.note) == (1, None)
