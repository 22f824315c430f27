"""Find the commit for each cause in a run, within a budget: one search for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from pathlib import Path

from sqlalchemy.orm import Session

from groupbench.tracker.ab.confirm import CELL_S, Measuring
from groupbench.tracker.ab.kept import hardware_of
from groupbench.tracker.ab.result import AbResult, cell_of_series
from groupbench.tracker.bisect import history as bisect_git
from groupbench.tracker.bisect.log import Header, LogError, bench_of
from groupbench.tracker.bisect.run import OutOfTime, Searched, run
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.judge.incident_facts import causes_of
from groupbench.tracker.judge.incident_rows import FAILING
from groupbench.tracker.judge.verdicts import Gate, Judged
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import NAMED, UNMEASURED, Compared
from groupbench.tracker.store.engine import Store
from groupbench.tracker.text.repro import HOSTS, SEARCH_OF
from groupbench.tracker.text.wording import counted
from groupbench.tracker.tools import git


@dataclass
class Searches:
    """Searches of causes with several possible commits, until a time.

    After the end, a search continues with the next run of the command in the same clone. A search without an answer is
    not repeated, except one that could measure nothing: it waits for the other causes.

    Args:
        store: The database; `db` is the location.
        measuring: Where and how the commits are measured.
        say: Called with lines for the user.
        end: Time of the clock after which no comparison begins.
        clock: Seconds of a steady clock.
    """

    store: Store
    db: str
    measuring: Measuring
    say: Callable[[str], None]
    end: float
    clock: Callable[[], float] = time.monotonic
    done: list[Searched] = field(default_factory=list)
    _impossible: set[tuple[int, str | None]] = field(default_factory=set)

    def __call__(self, judged: Gate) -> None:
        """Search each cause of a run that is not searched yet, and add the finished searches to `done`."""
        with self.store.read() as session:
            causes = due(session, judged)
        for _, members, is_answered in causes:
            if is_answered:
                self._share(members)
        waiting = [(row, members) for row, members, is_answered in causes if not is_answered]
        waiting = [each for each in waiting if (each[0].series.pk, each[0].what) not in self._impossible]
        for number, (row, members) in enumerate(waiting):
            if self.clock() >= self.end:
                self.say(f"{counted(len(waiting) - number, 'cause')} not searched because the budget is spent")
                break
            try:
                self.done.append(_search(self.db, self.measuring, row, self.say, self.end, self.clock))
                if not self.done[-1].trace.hardware:
                    self._wait(row, self.done[-1])
                self._share(members)
            except OutOfTime:
                self.say("the budget is spent; the next `groupbench confirm` continues this search")
            except TrackerError as error:  # such as another machine's suspects: the verdict does not depend on it
                self.say(f"no search for {row.series}: {error.message}")
                self._impossible.add((row.series.pk, row.what))

    def _wait(self, row: Judged, searched: Searched) -> None:
        """Store why a search could measure nothing. The next one starts from the beginning, after the other causes."""
        header, result = searched.header, searched.result
        self._impossible.add((row.series.pk, row.what))
        _log_of(Path(header.repository), header).unlink(missing_ok=True)
        one = Compared(
            header.good, header.bad, NAMED, datetime.now(UTC), message=result.message, details={UNMEASURED: True}
        )
        with self.store.write() as session:
            comparisons.store(session, row.series.pk, one)

    def _share(self, members: Sequence[Judged]) -> None:
        """Store the answer about a cause for each member without one, if the named commits are in the range."""
        with self.store.read() as session:
            stored = comparisons.named_of_series(session, {row.series.pk for row in members})
        for row in members:
            assert row.span is not None
            span, earlier = row.span, stored.get(row.series.pk, [])
            inside = git.between(span.base.commit, span.head.commit) if span.base is not None else None
            fit = [
                one
                for one in chain.from_iterable(stored.values())
                if one.named is not None and one.named.metric == SEARCH_OF.get(row.what or "")
                and {commit["hash"] for commit in one.named.commits} <= (inside or set())
            ]  # fmt: skip
            if span.base is None or not fit or any(one in fit for one in earlier):
                continue
            newest = max(fit, key=lambda one: one.measured)
            with self.store.write() as session:
                for one in (each for each in fit if each.measured == newest.measured):
                    inherited = replace(one, base=span.base.commit, head=span.head.commit, pk=None)
                    comparisons.store(session, row.series.pk, inherited)


def due(session: Session, judged: Gate) -> list[tuple[Judged, list[Judged], bool]]:
    """Return each cause to search: a row, the members, and whether a search answered. The most frequent come first.

    The row has the narrowest range, and of those the largest change. A search that could measure nothing comes last.
    """
    failing = [
        row
        for row in judged.rows
        if row.verdict.fails and row.span is not None and (row.alert is None or row.alert.incident.state in FAILING)
    ]
    unchanged = (row for row in judged.rows if not row.verdict.fails)
    tried = comparisons.named_of_series(session, {row.series.pk for row in failing})
    causes = []
    for of_cause, _ in causes_of(session, failing, unchanged):
        searches = [(row, one) for row in of_cause for one in tried.get(row.series.pk, []) if _is_about(row, one)]
        answered = any(row.span and row.span.named for row in of_cause)
        answered |= any(UNMEASURED not in one.details for _, one in searches)
        can = [row for row in of_cause if _can_be_searched(row)]
        can.sort(key=lambda row: (row.span.number, -abs(row.change or 0)) if row.span else (0, 0))
        causes += [(bool(searches), (row, of_cause, answered)) for row in can[:1]]
    return [cause for _, cause in sorted(causes, key=lambda each: each[0])]


def _can_be_searched(row: Judged) -> bool:
    span = row.span
    assert span is not None
    clean = span.base is not None and all(end.state.clean for end in span.ends)
    return clean and (span.number or 0) > 1 and row.what in SEARCH_OF and row.series.host in HOSTS


def _is_about(row: Judged, search: Compared) -> bool:
    """Return whether a search ended without an answer about a row."""
    ends = None if row.span is None or row.span.base is None else (row.span.base.commit, row.span.head.commit)
    return search.named is None and (search.base, search.head) == ends


def _search(
    db: str, measuring: Measuring, row: Judged, say: Callable[[str], None], end: float, clock: Callable[[], float]
) -> Searched:
    repository = bisect_git.folder_of(measuring.repo)
    header = _header(measuring, repository, row)
    path = _log_of(repository, header)
    say(f"bisect {header.good[:10]}..{header.bad[:10]}: {row.series}")

    def check(result: AbResult, base: str, head: str) -> None:
        here = hardware_of(result)
        if here not in ("", row.series.hardware):
            raise bisect_git.BisectError(f"this machine has {here}, not {row.series.hardware}: run `confirm` there")

    search = partial(run, db, repository, header, path, say, end=end, clock=clock, check=check)
    try:
        return search(resume=path.exists(), replaces=False)
    except LogError:  # the history or the program changed: begin again
        return search(resume=False, replaces=True)


def _log_of(repository: Path, header: Header) -> Path:
    return bisect_git.log_folder(repository) / f"bisect-{header.identity}.jsonl"


def _header(measuring: Measuring, repository: Path, row: Judged) -> Header:
    span, point = row.span, row.point
    assert span is not None and span.base is not None and point is not None
    return Header(
        repository=str(repository),
        good=span.base.commit,
        bad=span.head.commit,
        cell={
            **cell_of_series(row.series),
            "device": point.environment.facts.device,
            "plugins": list(measuring.plugins),
        },
        metric=SEARCH_OF[row.what or "latency"],
        all=False,
        confidence=0.95,
        paths=bisect_git.relevant_paths(repository, span.head.commit, measuring.plugins),
        bench=bench_of(budget=CELL_S, python=measuring.python, **asdict(measuring.recipe)),
    )
