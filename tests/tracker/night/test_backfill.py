"""Test `groupbench backfill`: the commits, their order, and complete results even if the command is killed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from cases import rarely
from hypothesis import given
from hypothesis import strategies as st
from repositories import git

from groupbench.tracker.bisect.history import BisectError, resolve
from groupbench.tracker.facts.record import read
from groupbench.tracker.night import measuring
from groupbench.tracker.night.backfill import BackfillCommit, BackfillError, by_halving, commits_of
from groupbench.tracker.night.stored import measured_by, runs_of_plan
from groupbench.tracker.store.engine import open_store

Forked = Callable[..., subprocess.CompletedProcess[str]]
COMMITS = 12
CELLS = 3

FAKE = '''
"""A fake `tritonbench` that slowly measures CELLS cells of the checkout it runs in, and writes each at once."""
import os, sys, time
from datetime import UTC, datetime
from pathlib import Path
import msgspec
from groupbench.tracker.facts.record import Record, decode, encode

def option(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None

path, commit, reason = Path(option("--records")), option("--commit"), option("--unmeasured")
lines = path.read_bytes().split(b"\\n") if path.exists() else [b""]
path.write_bytes(b"".join(line + b"\\n" for line in lines[:-1]))  # a kill can leave half a record
done = [decode(line) for line in lines[:-1]]
name = done[0].run.id if done else f"{commit[:8]}-{time.monotonic_ns()}"
run = {"id": name, "started": datetime(2026, 1, 1, tzinfo=UTC),
       "trigger": "backfill", "plan": option("--plan-name") or "nightly", "commit": {"hash": commit}}
if not reason and not Path("kernel.py").exists():
    print("tritonbench: plugin 'kernel.K' does not load: No module named 'kernel'", file=sys.stderr)
    sys.exit(2)
slow = not reason and int(Path("kernel.py").read_text()[2:]) >= 9
with path.open("ab", buffering=0) as file:
    for number in range(3):
        shape = f"N={number}"
        if any(record.cell.shape == shape for record in done):
            continue
        time.sleep(0.02)
        ms = 1.5 if slow and number == 1 else 1.0
        body = {"status": "error", "message": reason} if reason else {
            "status": "ok", "accuracy": {"rms": 0.0},
            "latency": {"timing": "cpu", "bursts_ms": [[ms], [1.001 * ms], [0.999 * ms]]}}
        cell = {"operator": "canary", "backend": "torch", "shape": shape, "dtype": "fp32"}
        line = encode(msgspec.convert({"schema": 1, "run": run, "environment": {
                                           "device": "cpu", "cpu": "X", "os": os.environ.get("OTHER")},
                                       "cell": cell, **body}, Record))
        file.write(line[:20])
        file.write(line[20:])
sys.exit(3 if reason else 0)
'''

DRIVER = """
import sys
from groupbench.tracker.cli import main
from groupbench.tracker.night import measuring
measuring.PROGRAM = (sys.executable, {fake!r})
main()
"""


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of a root and COMMITS commits, of which the oldest two have no kernel yet."""
    folder = tmp_path_factory.mktemp("history")
    git(folder, "init", "-q", "-b", "main")
    (folder / ".gitignore").write_text("groupbench.db*\nrecords/\n")
    (folder / "groupbench.toml").write_text('plugins = ["kernel.K"]\n[[measure]]\noperator = "canary"\n')
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "Root")
    for number in range(COMMITS):
        (folder / ("notes.txt" if number < 2 else "kernel.py")).write_text(f"# {number}\n")
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", f"Commit {number}{ODD if number == 3 else ''}")
    return folder


ODD = "\x0c\x85\u2028odd"
"""Characters at which Python ends a line, and git does not."""


def subjects(commits: list[BackfillCommit]) -> list[str]:
    return [commit.subject.removesuffix(ODD) for commit in commits]


def test_commits_are_the_newest_first_and_without_the_first(history: Path) -> None:
    assert subjects(commits_of(history, "HEAD~3..main")) == ["Commit 11", "Commit 10", "Commit 9"]
    assert subjects(commits_of(history, "HEAD~3..")) == subjects(commits_of(history, "HEAD~3..main"))
    assert subjects(commits_of(history, "HEAD~9..", every=4)) == ["Commit 11", "Commit 7", "Commit 3"]


def test_a_commit_alone_is_its_whole_history_with_the_root(history: Path) -> None:
    assert subjects(commits_of(history, f"main~{COMMITS - 1}")) == ["Commit 0", "Root"]
    assert len(commits_of(history, "main")) == COMMITS + 1
    assert "Root" not in subjects(commits_of(history, f"main~{COMMITS}..main"))


@pytest.mark.parametrize("text", ["", "..main", "nonsense..main", "main..nonsense", "main..HEAD", "HEAD~2...main"])
def test_what_is_no_range(text: str, history: Path) -> None:
    with pytest.raises(BackfillError):
        commits_of(history, text)


def test_a_shallow_clone_is_named(history: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{history}", "shallow")
    with pytest.raises(BackfillError, match=r"HEAD~1.*this is a shallow clone: run `git fetch --unshallow`"):
        commits_of(tmp_path / "shallow", "HEAD~1..")
    with pytest.raises(BisectError, match="run `git fetch --unshallow`"):
        resolve(tmp_path / "shallow", "HEAD~1")


@given(st.integers(1, 70))
def test_halving_takes_every_commit_once_and_coarse_to_fine(number: int) -> None:
    commits = [BackfillCommit(f"{at:040d}", "") for at in range(number)]
    order = [int(commit.hash) for commit in by_halving(commits)]
    assert sorted(order) == list(range(number)) and set(order[:2]) == {0, number - 1}
    for count in range(3, number + 1):
        gaps = [b - a for a, b in zip(sorted(order[:count]), sorted(order[:count])[1:], strict=False)]
        assert max(gaps) <= 2 * max(min(gaps), 1) * 2


def sql(database: Path, statement: str) -> list[Any]:
    with closing(sqlite3.connect(database)) as connection:
        rows = connection.execute(statement).fetchall()
        connection.commit()
    return rows


class Repository:
    """The history, and a groupbench whose `tritonbench` is FAKE."""

    def __init__(self, folder: Path, forked: Forked) -> None:
        self.folder = folder
        self.forked = forked
        (folder.parent / "fake.py").write_text(FAKE)
        self.command = [sys.executable, "-c", DRIVER.format(fake=str(folder.parent / "fake.py")), "backfill"]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GROUPBENCH_")}
        self.environment = kept | {"GROUPBENCH_ALONE": "/tmp/groupbench-cpu-x.lock", "TMPDIR": str(folder.parent)}

    def start(self, *options: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self.command, *options], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *options: str) -> tuple[int, str]:
        where = {"cwd": self.folder, "env": self.environment}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measuring, "PROGRAM", (sys.executable, str(self.folder.parent / "fake.py")))
            done = self.forked("groupbench.tracker.cli:main", "backfill", *options, **where)
        return done.returncode, done.stdout + done.stderr

    def sql(self, statement: str) -> list[Any]:
        return sql(self.folder / "groupbench.db", statement)

    def stored(self) -> Counter[tuple[str, str]]:
        """Return the number of points of each commit and shape."""
        query = (
            'SELECT "commit".hash, series.shape FROM point JOIN run ON run.id = point.run_id '
            'JOIN "commit" ON "commit".id = run.commit_id JOIN series ON series.id = point.series_id'
        )
        return Counter(self.sql(query))

    def lines_written(self) -> int:
        return sum(file.read_bytes().count(b"\n") for file in (self.folder / "records").glob("backfill-*/*.jsonl"))

    def written(self) -> Counter[tuple[str, str]]:
        files = (self.folder / "records").glob("backfill-*/*.jsonl")
        records = [record for file in files for _, record in read(file.read_bytes().splitlines(keepends=True))]
        return Counter((record.run.commit.hash, record.cell.shape) for record in records)


@pytest.fixture
def repository(history: Path, tmp_path: Path, forked: Forked) -> Repository:
    folder = tmp_path / "clone"
    git(tmp_path, "clone", "-q", str(history), str(folder))
    return Repository(folder, forked)


@pytest.mark.parametrize(("kills", "newest"), [(1, "HEAD~9"), *rarely((5, "HEAD"))])
def test_killed_it_measures_nothing_twice_and_loses_nothing(repository: Repository, kills: int, newest: str) -> None:
    chance = random.Random(7)
    span = f"HEAD~{COMMITS}..{newest}"
    for kill in range(kills):
        process = repository.start(span, "--bisect")
        enough = 6 * kill + chance.randint(1, 6)
        while repository.lines_written() < enough and process.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.05))
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    code, output = repository.run(span, "--bisect")
    assert code == 0, output
    assert "2 failed" in output or "failed before" in output
    commits = git(repository.folder, "rev-list", span).split()
    every = {(commit, f"N={cell}") for commit in commits for cell in range(CELLS)}
    assert repository.stored() == Counter(every) and repository.written() == Counter(every)
    code, output = repository.run(span)
    assert code == 0 and f"{len(commits) - 2} measured before, 2 failed before" in output
    assert repository.stored() == Counter(every)
    # Check this last: git runs in its own session, so an orphan of the last kill may outlive the start of the next run.
    assert len(git(repository.folder, "worktree", "list").splitlines()) == 1
    assert not list(repository.folder.parent.glob("groupbench-tree-*"))


def test_a_commit_that_the_database_holds_is_skipped(repository: Repository) -> None:
    assert "1 commit: 1 measured" in repository.run("HEAD~1..")[1]
    (repository.folder / "records").rename(repository.folder.parent / "elsewhere")
    code, output = repository.run("HEAD~2..")
    assert (code, "2 commits: 1 measured already, 1 measured" in output) == (0, True), output
    newest = git(repository.folder, "rev-parse", "HEAD")
    assert f"[1/2] {newest[:10]} Commit 11: measured already: run {newest[:8]}-" in output
    assert set(repository.stored().values()) == {1}
    shutil.rmtree(repository.folder / "records")
    repository.sql(OTHER_RUNS["part of the plan"])
    assert f"[1/2] {newest[:10]} Commit 11\n" in repository.run("HEAD~2..")[1], "measured again"


OTHER_RUNS = {
    "part of the plan": "DELETE FROM point WHERE id IN (SELECT min(id) FROM point)",
    "a skipped cell": "UPDATE point SET status = 'skipped' WHERE id IN (SELECT min(id) FROM point)",
    "no result": "UPDATE point SET status = 'error'",
    "another plan": "UPDATE run SET plan = 'weekly'",
    "uncommitted changes": "UPDATE run SET dirty = true",
    "another toolchain": "UPDATE environment SET facts = json_set(facts, '$.triton', '3.0.0')",
    "another machine": "UPDATE environment SET facts = json_set(facts, '$.cpu', 'Y')",
}


@pytest.fixture(scope="module")
def measured(history: Path, tmp_path_factory: pytest.TempPathFactory, forked: Forked) -> Path:
    """Return a repository whose newest commit is measured, to be copied."""
    folder = tmp_path_factory.mktemp("measured") / "clone"
    git(folder.parent, "clone", "-q", str(history), str(folder))
    assert "1 commit: 1 measured" in Repository(folder, forked).run("HEAD~1..")[1]
    return folder


@pytest.mark.parametrize("change", OTHER_RUNS.values(), ids=OTHER_RUNS)
def test_another_run_of_a_commit_does_not_count(change: str, measured: Path, tmp_path: Path) -> None:
    commit = git(measured, "rev-parse", "HEAD")
    (file,) = (measured / "records").glob("backfill-*/*.jsonl")
    planned = [record for _, record in read(file.read_bytes().splitlines(keepends=True))]
    database = Path(shutil.copy(measured / "groupbench.db", tmp_path))

    def counting() -> list[str]:
        with open_store(database, create=False) as store, store.read() as session:
            return list(measured_by(session, runs_of_plan(session, "nightly", [commit]), planned))

    assert counting() == [commit]
    sql(database, change)
    assert counting() == []


def test_the_largest_step_is_named_with_the_command_that_decides_it(repository: Repository) -> None:
    before, after = (git(repository.folder, "rev-parse", name) for name in ("HEAD~3", "HEAD~2"))
    output = repository.run("HEAD~4..HEAD~2")[1]
    step = f"largest step: canary torch fwd fp32 N=1 is 50.0% slower at {after[:10]} Commit 9 than at {before[:10]}"
    assert step in output and f"groupbench bisect {before} {after} --series 2 --device cpu\n" in output
    again = repository.run("HEAD~4..HEAD~2")[1]
    assert "2 measured before" in again and step in again


def test_without_a_step_it_counts_the_commits(repository: Repository) -> None:
    output = repository.run("HEAD~5..HEAD~3")[1]
    assert "2 commits with results: no significant step between neighbours" in output
    assert "largest step" not in output


def test_what_does_not_load_is_recorded_with_the_reason(repository: Repository) -> None:
    code, output = repository.run(f"HEAD~{COMMITS}..HEAD~{COMMITS - 2}")
    assert code == 0 and "2 commits: 2 failed" in output
    assert output.count("No module named 'kernel'") == 2  # once for each commit
    assert output.count("is recorded as failed, with this reason") == 2
    skipped = repository.sql("SELECT DISTINCT status, message FROM point")
    assert skipped == [("error", "plugin 'kernel.K' does not load: No module named 'kernel'")]


def test_what_does_not_build_is_recorded_and_tried_again_when_asked(repository: Repository) -> None:
    file = repository.folder / "groupbench.toml"
    compiler = repository.folder.parent / "compiler"
    file.write_text(f"setup = 'test -e {compiler}'\n{file.read_text()}")
    assert "1 failed" in repository.run("HEAD~1..")[1]
    before = repository.run("HEAD~1..")[1]
    assert "1 failed before\nto retry the commits that failed before: repeat the command with --again\n" in before
    compiler.touch()
    assert "1 measured" in repository.run("HEAD~1..", "--again")[1]


@pytest.mark.parametrize("new", ["benchmarks = ['kernel.py']\n", *rarely("setup = 'true'\n")])
def test_what_failed_is_tried_again_if_the_recipe_changes(new: str, repository: Repository) -> None:
    file = repository.folder / "groupbench.toml"
    good = file.read_text()
    file.write_text("setup = 'echo no compiler; exit 3'\n" + good)
    output = repository.run("HEAD~1..")[1]
    assert "1 failed" in output and output.count("no compiler: ") + output.count(": no compiler\n") == 1
    file.write_text(new + good)
    output = repository.run("HEAD~1..")[1]
    assert "1 measured" in output and "failed before" not in output


def test_a_budget_leaves_the_rest_for_the_next_time(repository: Repository) -> None:
    code, output = repository.run("HEAD~2..", "--budget", "1ms")
    assert code == 3 and "left" in output
    code, output = repository.run("HEAD~2..")
    assert code == 0, output
    assert set(repository.stored().values()) == {1}


def test_an_old_commit_gets_the_benchmark_of_today(repository: Repository) -> None:
    file = repository.folder / "groupbench.toml"
    file.write_text("benchmarks = ['kernel.py']\n" + file.read_text())
    code, output = repository.run(f"HEAD~{COMMITS}..HEAD~{COMMITS - 1}")
    assert code == 0 and "1 measured" in output


def test_each_toolchain_measures_a_commit_and_builds_for_itself(repository: Repository) -> None:
    file, python = repository.folder / "groupbench.toml", repository.folder.parent / "other" / "python"
    built = repository.folder.parent / "built"
    packages = (path for path in sys.path if path.endswith("site-packages"))
    folders = os.pathsep.join([str(python.parent), *packages])
    python.parent.mkdir()
    (python.parent / "torch.py").touch()
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{folders}" OTHER=yes exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    setup = f"setup = 'command -v python >> {built}'\n"
    file.write_text(f"{setup}{file.read_text()}\n[toolchains]\nnew = '{python}'\n")
    assert "1 commit: 1 measured" in repository.run("HEAD~1..")[1]
    code, output = repository.run("HEAD~1..", "--toolchain", "new")
    assert (code, "1 commit: 1 measured" in output) == (0, True), output
    assert "1 commit: 1 measured before" in repository.run("HEAD~1..", "--toolchain", "new")[1]
    assert "1 commit: 1 measured before" in repository.run("HEAD~1..")[1]
    assert sorted(repository.sql("SELECT plan FROM run")) == [("nightly",), ("nightly@new",)]
    measured = repository.sql(
        "SELECT DISTINCT run.plan, facts ->> '$.os' FROM point "
        "JOIN run ON run.id = run_id JOIN environment ON environment.id = environment_id"
    )
    assert set(measured) == {("nightly", None), ("nightly@new", "yes")}
    ours, others = built.read_text().splitlines()
    assert (ours != others, others) == (True, str(python))


def test_an_unknown_toolchain_is_a_usage_error(repository: Repository) -> None:
    code, output = repository.run("HEAD~2..", "--toolchain", "nwe")
    assert (code, "no toolchain 'nwe'; it has no [toolchains]" in output) == (2, True)
