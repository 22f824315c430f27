"""Run a search from beginning to end: read the history, drive the comparisons, and store the answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from groupbench.tracker.ab.kept import ComparisonKeeper
from groupbench.tracker.ab.result import AbCell, AbResult
from groupbench.tracker.bisect import drive, report
from groupbench.tracker.bisect import history as bisect_git
from groupbench.tracker.bisect.answers import answers
from groupbench.tracker.bisect.hunt import BisectResult, History, hunt
from groupbench.tracker.bisect.log import Header, Log
from groupbench.tracker.bisect.search import AbFinding, ComparisonRequest, Trace
from groupbench.tracker.bisect.stored import stored_levels
from groupbench.tracker.text.wording import counted


class OutOfTime(bisect_git.BisectError):
    """The time of a search is over. The log has the comparisons, from which it continues."""


@dataclass(frozen=True)
class Searched:
    """A search's result, with the history and the steps."""

    header: Header
    result: BisectResult
    history: History
    trace: Trace

    @property
    def lines(self) -> list[str]:
        """The result as text, with the conclusion first."""
        names = ("operator", "backend", "mode", "dtype", "shape")
        cell = " ".join(str(self.header.cell[name]) for name in names if self.header.cell.get(name))
        return list(report.lines(self.result, self.history, self.trace, self.header.metric, cell))


def run(
    db: str,
    repository: Path,
    header: Header,
    path: Path,
    say: Callable[[str], None],
    *,
    resume: bool,
    replaces: bool,
    end: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
    check: drive.Keep = lambda result, base, head: None,
) -> Searched:
    """Search, and store the comparisons and the answer in the database.

    Args:
        db: Database in which the comparisons of a stored series are kept.
        repository: The repository to search.
        header: The search.
        path: File of the search's log.
        say: Called with lines for the user.
        resume: Continue the search of the log.
        replaces: Overwrite an existing log.
        end: Time of the clock after which no comparison begins.
        clock: Seconds of a steady clock.
        check: Called with each comparison before it is stored.

    Raises:
        OutOfTime: The search did not end in time.
        BisectError: The range cannot be searched.
    """
    history = bisect_git.read_history(repository, header.good, header.bad, header.paths)
    if header.metric == "latency":
        history = replace(history, stored=stored_levels(db, header.cell, (history.base, header.bad)))
    trace = Trace()
    log = Log(path, header, resume=resume, replace=replaces)
    keeper = ComparisonKeeper(db, say, header.metric)

    resolved: AbCell | None = None

    def keep(result: AbResult, base: str, head: str) -> None:
        nonlocal resolved
        resolved = result.cell
        check(result, base, head)
        keeper(result, base, head)

    def print_step(question: ComparisonRequest, finding: AbFinding) -> None:
        say(report.step_line(question, finding, history, header.metric, trace.comparisons.total() + 1))

    with drive.AbComparator(repository, header, keep) as comparator:

        def compare(question: ComparisonRequest) -> AbFinding:
            if clock() >= end:
                raise OutOfTime("the budget is spent")
            return comparator(question)

        say(_plan(history, header, path))
        result = drive.drive(hunt(history, drive.settings_of(header), trace), compare, log, print_step)
    if keeper.stored:
        say(f"{counted(keeper.stored, 'comparison')} stored in the database; the gate judges by them")
    cell = resolved or drive.cell_of(header)
    if cell is not None and trace.hardware:
        keeper.name(cell, trace.hardware, partial(answers, result, history, header.metric, datetime.now(UTC)))
    return Searched(header, result, history, trace)


def _plan(history: History, header: Header, path: Path) -> str:
    """Return the line to print before the search: the number of changes, and the log file."""
    changes = len(history.line(history.base, history.first_parents(history.bad)[1], history.bad).changes)
    verb = "changes" if changes == 1 else "change"
    within = f", {changes} of which {verb} {', '.join(header.paths) or 'the tree'}"
    if history.stored:
        within += f"; the search begins at the step of {counted(len(history.stored), 'commit')} with stored results"
    first_parents = len(history.first_parents(history.bad)[1])
    return f"{counted(first_parents, 'commit')} on the first-parent line{within}; comparisons are kept in {path}"
