"""Find the commit for each cause in a run, within a budget: one search for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from sqlalchemy.orm import Session

from groupbench.tracker.ab.confirm import CELL_S, Measuring
from groupbench.tracker.ab.kept import hardware_of
from groupbench.tracker.ab.result import AbResult, timing_of
from groupbench.tracker.bisect import history as bisect_git
from groupbench.tracker.bisect.log import Header, LogError, bench_of
from groupbench.tracker.bisect.run import OutOfTime, Searched, run
from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.judge.alerts import FAILING
from groupbench.tracker.judge.incident_facts import Causes
from groupbench.tracker.judge.incidents import group
from groupbench.tracker.judge.verdicts import Gate, Judged
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.engine import Store
from groupbench.tracker.text.repro import HOSTS, SEARCH_OF
from groupbench.tracker.text.wording import counted

_CELL = ("operator", "backend", "shape", "dtype", "mode", "seed")


@dataclass
class Searches:
    """Searches of causes with several possible commits, until a time.

    After the end, a search continues with the next run of the command in the same clone. A search without an answer is
    not repeated.

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
            rows = [row for row in due(session, judged) if (row.series.pk, row.what) not in self._impossible]
        for number, row in enumerate(rows):
            if self.clock() >= self.end:
                self.say(f"{counted(len(rows) - number, 'cause')} not searched because the budget is spent")
                break
            try:
                self.done.append(_search(self.db, self.measuring, row, self.say, self.end, self.clock))
            except OutOfTime:
                self.say("the budget is spent; the next `groupbench confirm` continues this search")
            except TrackerError as error:  # such as another machine's suspects: the verdict does not depend on it
                self.say(f"no search for {row.series}: {error.message}")
                self._impossible.add((row.series.pk, row.what))


def due(session: Session, judged: Gate) -> list[Judged]:
    """Return a row for each cause to search, the most frequent cause first: the narrowest range, the largest change."""
    failing = [
        row
        for row in judged.rows
        if row.verdict.fails and row.span is not None and (row.alert is None or row.alert.incident.state in FAILING)
    ]
    facts = Causes(session, failing)
    tried = comparisons.named_of_series(session, {row.series.pk for row in failing})
    rows = []
    for changes in group(facts.changes(), facts.unchanged(row for row in judged.rows if not row.verdict.fails)):
        of_cause = [facts.rows[each.key] for each in changes]
        if not any(_is_answered(row, tried.get(row.series.pk, [])) for row in of_cause):
            can = [row for row in of_cause if _can_be_searched(row)]
            rows += sorted(can, key=lambda row: (row.span.number, -abs(row.change or 0)) if row.span else (0, 0))[:1]
    return rows


def _can_be_searched(row: Judged) -> bool:
    span = row.span
    assert span is not None
    clean = span.base is not None and all(end.state.clean for end in span.ends)
    return clean and (span.number or 0) > 1 and row.what in SEARCH_OF and row.series.host in HOSTS


def _is_answered(row: Judged, searches: list[comparisons.Compared]) -> bool:
    """Return whether a search named the commit, or ended without an answer."""
    span = row.span
    assert span is not None
    ends = None if span.base is None else (span.base.commit, span.head.commit)
    return bool(span.named) or any(one.named is None and (one.base, one.head) == ends for one in searches)


def _search(
    db: str, measuring: Measuring, row: Judged, say: Callable[[str], None], end: float, clock: Callable[[], float]
) -> Searched:
    repository = bisect_git.folder_of(measuring.repo)
    header = _header(measuring, repository, row)
    path = bisect_git.log_folder(repository) / f"bisect-{header.identity}.jsonl"
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


def _header(measuring: Measuring, repository: Path, row: Judged) -> Header:
    span, point = row.span, row.point
    assert span is not None and span.base is not None and point is not None
    cell = {name: getattr(row.series, name) for name in _CELL} | timing_of(row.series.protocol)
    return Header(
        repository=str(repository),
        good=span.base.commit,
        bad=span.head.commit,
        cell={**cell, "device": point.environment.facts.device, "plugins": list(measuring.plugins)},
        metric=SEARCH_OF[row.what or "latency"],
        direction="worse",
        all=False,
        confidence=0.95,
        paths=bisect_git.relevant_paths(repository, span.head.commit, measuring.plugins),
        bench=bench_of(budget=CELL_S, python=measuring.python, **asdict(measuring.recipe)),
    )
