"""`groupbench backfill`: measure past commits in separate checkouts."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from groupbench.tracker.ab.side import measured_tree
from groupbench.tracker.ab.toolchains import interpreter_of, module_path
from groupbench.tracker.ab.worktree import CheckoutError, Spares, WorktreeError, checkout
from groupbench.tracker.cli.declared import argument, command, flag, option, options
from groupbench.tracker.cli.here import hold_device, program_of, recipe_of, wait_option
from groupbench.tracker.cli.night import Places, here, run_command
from groupbench.tracker.cli.options import plan_device_option, toolchain_option
from groupbench.tracker.cli.output import say
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.identity import plan_with
from groupbench.tracker.facts.measured_tree import add_to_path, with_folders
from groupbench.tracker.facts.record import BACKFILL, Record, read
from groupbench.tracker.night.backfill import (
    BackfillCommit,
    BackfillFiles,
    by_halving,
    commits_of,
    plan_of,
    require_writable,
)
from groupbench.tracker.night.measuring import Unmeasured, interrupted, measure
from groupbench.tracker.project import Project, import_folders
from groupbench.tracker.text import repro
from groupbench.tracker.text.scratch import Scratch
from groupbench.tracker.text.wording import change_in_words, counted, printable, run_text
from groupbench.tracker.tools import signals
from groupbench.tracker.tools.parameters import Duration, Number


@dataclass(frozen=True)
class BackfillOptions:
    """Options for `backfill`. Times are in seconds."""

    every: int = option("--every", type=Number(1), default=1, help="Measure only every Nth commit.")
    bisect: bool = flag(
        "--bisect", help="Measure both ends first, then halve the gaps. A coarse history appears early and gets finer."
    )
    budget: float | None = option("--budget", type=Duration(above=True), help="Stop after this time.")
    again: bool = flag("--again", help="Retry commits that failed to build or to load.")
    device: str | None = plan_device_option
    toolchain: str | None = toolchain_option


@command()
@wait_option()
def backfill(
    context: click.Context,
    commits: str = argument(metavar="A..B|COMMIT"),
    options: BackfillOptions = options(BackfillOptions),
) -> None:
    """Measure the commits after A up to and including B, newest first, and store them as history.

    A range excludes A. A commit instead of a range measures the whole history, including the first commit.

    \b
    groupbench backfill v1.0..main --every 5
    groupbench backfill HEAD~40.. --bisect --budget 2h

    Each commit on the first-parent line is checked out, built with groupbench.toml's `setup`, and measured by this
    checkout's groupbench.toml. It gets the files listed in `benchmarks` from here. A commit that does not build or load
    is recorded with the reason. Repeat the command to continue: nothing is measured twice. Commits that failed are
    retried with --again, or if `setup`, `pythonpath` or a benchmark has changed. A commit is skipped if the database
    has a complete run of it with the same plan, device and toolchain, such as one of `night`.

    At the end, the largest step of a latency between neighbouring commits is printed, with the command that confirms or
    rejects it.

    With --toolchain NAME, the plan of the runs is PLAN@NAME. Each toolchain measures a commit once.

    \b
    Exit codes:
    0   every commit is measured, or recorded as failed
    2   usage error
    3   some commits are not measured yet
    75  another run uses this device
    """
    context.exit(_backfill(context, commits, options))


def _backfill(context: click.Context, commits: str, options: BackfillOptions) -> int:
    """Measure the commits, print the outcome, and return the exit code."""
    project = here(context)
    selected = commits_of(project.folder, commits, options.every)
    require_writable(project.folder)
    device = options.device or project.settings.device
    python = None
    toolchain = options.toolchain
    if toolchain is not None:  # before the device is locked: an environment takes minutes to install
        python = interpreter_of(toolchain, project, say)
    lock = hold_device(context, device)
    places = Places.of(context, project)
    os.chdir(project.folder)
    places.make()
    files = BackfillFiles(places.records.absolute(), lock.stem, project, toolchain)
    with plan_of(project) as plan:
        name = project.settings.name if toolchain is None else plan_with(project.settings.name, toolchain)
        words = ["--plan", str(plan), "--trigger", BACKFILL, "--device", device, "--plan-name", name]
        budget_s = math.inf if options.budget is None else options.budget
        run = Backfill(context, project, places, files, name, words, budget_s, python)

        def kept() -> str:
            again = "; repeat the command to continue" if run.settled < len(selected) else ""
            return f"{run.text(len(selected))}{again}"

        with signals.keeping(kept, at_once=False):
            run(by_halving(selected) if options.bisect else selected, options.again)
    click.echo(f"BACKFILL {run.text(len(selected))}")
    if run.outcomes["failed before"]:
        click.echo("to retry the commits that failed before: repeat the command with --again")
    for line in run.hint(selected):
        click.echo(printable(line))
    return ExitCode.OK if run.settled == len(selected) else ExitCode.INCOMPLETE


NOT_CHECKED_OUT = "not checked out"


@dataclass
class Backfill:
    """One pass over the commits.

    Attributes:
        plan: Name of the plan in the records.
        python: Interpreter of a toolchain; None for this one.
    """

    context: click.Context
    project: Project
    places: Places
    files: BackfillFiles
    plan: str
    options: list[str]
    budget_s: float
    python: str | None = None
    clock: Callable[[], float] = time.monotonic
    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def settled(self) -> int:
        return self.outcomes.total() - self.outcomes[NOT_CHECKED_OUT]

    def text(self, total: int) -> str:
        """Return a line with outcome counts and the number left."""
        counts = [f"{number} {outcome}" for outcome, number in self.outcomes.items() if number]
        left = total - self.outcomes.total()
        counts += [f"{left} left"] if left else []
        return f"{counted(total, 'commit')}: {', '.join(counts)}"

    def __call__(self, commits: Sequence[BackfillCommit], again: bool) -> None:
        with Spares() as spares:
            self._measure_all(commits, again, spares)

    def _measure_all(self, commits: Sequence[BackfillCommit], again: bool, spares: Spares) -> None:
        end = self.clock() + self.budget_s
        stored = self._stored(commits)
        for number, commit in enumerate(commits, 1):
            before = self.files.outcome(commit)
            if before == "failed" and (again or self.files.has_new_recipe(commit)):
                self.files.again(commit)
            elif before is not None:
                self.outcomes[f"{before} before"] += 1
                continue
            if commit.hash in stored:
                say(printable(f"[{number}/{len(commits)}] {commit}: measured already: run {stored[commit.hash]}"))
                self.outcomes["measured already"] += 1
                continue
            if self.clock() >= end:
                return
            say(printable(f"[{number}/{len(commits)}] {commit}"))
            outcome = self._commit(commit, end, spares)
            if outcome is None:  # the budget ended in the middle of it
                return
            self.outcomes[outcome] += 1

    def hint(self, commits: Sequence[BackfillCommit]) -> Iterator[str]:
        """Yield lines with the largest step between neighbouring commits, and the command to decide it."""
        from groupbench.tracker.night.steps import find_steps
        from groupbench.tracker.store.engine import open_store

        with open_store(self.places.database, create=True) as store, store.read() as session:
            steps = find_steps(session, self.plan, [commit.hash for commit in reversed(commits)])
        step = steps.largest
        if step is None:
            yield f"{counted(steps.commits, 'commit')} with results: no significant step between neighbours"
            return
        name = next(str(commit) for commit in commits if commit.hash == step.after)
        change = change_in_words(step.ratio - 1)
        yield f"largest step: {step.pair.series} is {change} at {name} than at {step.before[:10]}"
        ends = step.before, step.after
        search = repro.search(program_of(self.context), step.pair.series.pk, *ends, "latency", step.environment)
        options = ["--python", self.python] if self.python is not None else []
        yield f"to confirm or reject it: {search} {shlex.join(options)}".rstrip()

    def _stored(self, commits: Sequence[BackfillCommit]) -> dict[str, str]:
        """Return, by commit, the run of `night` or another backfill with this plan.

        The plan's cells are listed only if the database has any run at these commits, because it takes seconds.
        """
        from groupbench.tracker.night.stored import measured_by, runs_of_plan
        from groupbench.tracker.store.engine import open_store

        new = [commit.hash for commit in commits if not self.files.has_begun(commit)]
        with open_store(self.places.database, create=True) as store:
            with store.read() as session:
                runs = runs_of_plan(session, self.plan, new)
            planned = self._planned(commits[0]) if runs else []
            with store.read() as session:
                measured = measured_by(session, runs, planned)
        return {commit: run_text(run.id) for commit, run in measured.items()}

    def _planned(self, commit: BackfillCommit) -> list[Record]:
        """Return a record for every planned cell, as today's checkout lists them; none if it cannot."""
        with Scratch("planned") as folder:
            path = folder / "planned.jsonl"
            self._unmeasured(commit, path, "listed", subprocess.DEVNULL)
            return [record for _, record in read(path.read_bytes().splitlines(keepends=True))] if path.exists() else []

    def _commit(self, commit: BackfillCommit, end: float, spares: Spares) -> str | None:
        """Measure and store one commit; return the outcome, or None if cells are left."""
        try:
            recipe = recipe_of(self.context, None)
            with checkout(self.project.folder, commit.hash, recipe, self.python or sys.executable, spares) as tree:
                reason = self._measure(commit, tree, end)
        except CheckoutError as error:  # of the machine, not of the commit: the next backfill tries again
            say(printable(f"groupbench: {error.message}"))
            return NOT_CHECKED_OUT
        except WorktreeError as error:
            reason = error.message
            say(printable(f"groupbench: {reason}"))
        if reason is not None:
            self._record_failure(commit, reason)
        path = self.files.records(commit)
        run_command(self.context, self.places.database, "ingest", str(path))
        if _left_out(path):
            return None
        outcome = "measured" if reason is None else "failed"
        self.files.done(commit, outcome)
        return outcome

    def _measure(self, commit: BackfillCommit, tree: Path, end: float) -> str | None:
        """Measure a checkout; return None, or the reason if nothing could be measured, which has been printed."""
        path = self.files.records(commit)
        environment = with_folders(import_folders(tree, self.project.settings.pythonpath), os.environ)
        environment |= measured_tree(tree).variables()
        budget = [] if math.isinf(end) else ["--budget", f"{max(end - self.clock(), 0.001):.3f}s"]
        options = [*self.options, "--commit", commit.hash, "--records", str(path), "--resume", *budget]
        code, last_line = self._run(options, tree, environment)
        if code == ExitCode.INCOMPARABLE:  # begun in another environment, such as before an upgrade
            run_command(self.context, self.places.database, "ingest", str(path))
            self.files.set_aside(commit)
            code, last_line = self._run(options, tree, environment)
        if code != ExitCode.USAGE and path.is_file() and path.stat().st_size:
            return None
        if not last_line:
            last_line = f"tritonbench ended with exit code {code}"
            say(f"groupbench: {last_line}")
        return last_line

    def _record_failure(self, commit: BackfillCommit, reason: str) -> None:
        """Record the reason for every cell of the plan, as today's checkout lists them. Raises Unmeasured."""
        say(printable(f"groupbench: {commit.hash[:10]} is recorded as failed, with this reason"))
        code = self._unmeasured(commit, self.files.records(commit), reason)
        if code != ExitCode.INCOMPLETE:  # the cells do not exist in today's checkout either
            raise Unmeasured("today's checkout cannot be measured either; fix groupbench.toml or the benchmark first")

    def _unmeasured(self, commit: BackfillCommit, path: Path, reason: str, stdout: int | None = None) -> int:
        """Write a record with a reason for every cell of the plan in today's checkout. Return the exit code."""
        environment = with_folders(self.project.python_path(), os.environ)
        options = [*self.options, "--commit", commit.hash, "--records", str(path), "--resume"]
        options += ["--unmeasured", reason, "--quiet"]
        return self._run(options, self.project.folder, environment, stdout)[0]

    def _run(
        self, options: list[str], folder: Path, environment: dict[str, str], stdout: int | None = None
    ) -> tuple[int, str]:
        lines: list[str] = []
        with Scratch("toolchain") as layout:
            if self.python is not None:
                environment = add_to_path(module_path(layout), environment)
            code = measure(options, folder, environment, lines.append, self.python, stdout)
        if interrupted(code):
            raise KeyboardInterrupt
        return code, re.sub("^(tritonbench|groupbench): ", "", lines[-1]) if lines else ""


def _left_out(path: Path) -> bool:
    """Return whether a budget cut short the last run of a records file."""
    with path.open("rb") as file:
        return any(record.status == "skipped" for _, record in read(file))
