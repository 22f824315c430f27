"""State that all pages share: the database, background jobs, the guard and cached results."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.errors import TrackerError
from groupbench.tracker.identity import SHOWN
from groupbench.tracker.judge import alerts
from groupbench.tracker.query import filters, lines
from groupbench.tracker.query.rows import RunRow, SeriesRow
from groupbench.tracker.serve import queries, work
from groupbench.tracker.serve.database import Database, version
from groupbench.tracker.serve.jobs import Failed, Jobs, Known, Working
from groupbench.tracker.serve.parameters import BadRequest, NotFound, Parameters, resolve_parameter
from groupbench.tracker.serve.security import Guard
from groupbench.tracker.store.engine import Store
from groupbench.tracker.store.schema import Alert, Series

T = TypeVar("T")

PER_PAGE = 50
MOST_PER_PAGE = 500
MOST_WORDS = 16
"""Words of a search: each is compared with every name, shape and hardware of every series."""
RECOUNT_S = 60.0
"""How long the counts of a run are shown before it is asked whether points were removed."""

_KEPT_RUNS = 2_000
_KEPT_LISTS = 24
_KEPT_LINES = 8


@dataclass(frozen=True)
class Page:
    """The result of a view. `data` is the content, and the response in JSON; `shown` is its presentation."""

    template: str
    data: dict[str, Any]
    shown: Mapping[str, Any] = field(default_factory=dict)  # links, choices of a form
    status: int = 200
    again: int | None = None  # seconds until it is worth asking again: something is being worked out
    figures: Callable[[], dict[str, Any]] = dict  # draws the figures by name, for HTML alone


class Site:
    """The open dashboard."""

    def __init__(self, database: Database, jobs: Jobs, guard: Guard, writer: Store | None = None) -> None:
        self.database, self.jobs, self.guard, self.writer = database, jobs, guard, writer
        self._lock = threading.Lock()
        self._facets: tuple[int, dict[str, list[str]]] | None = None
        self._counts: dict[int, _KeptCounts] = {}
        self._counted_to = 0  # the newest point when the counts were last known to be right
        self._lists, self._runs = _Kept(_KEPT_LISTS), _Kept(_KEPT_LINES)

    def series_keys(self, session: Session, where: queries.Slice) -> list[int]:
        """Keys of all series of a slice, in their order: the next page asks for the same."""
        return self._lists.get(("series", where), _last_series(session), lambda: queries.series_keys(session, where))

    def problem_keys(self, session: Session, where: queries.Slice) -> list[list[int]]:
        """The same by problem."""
        return self._lists.get(("problems", where), _last_series(session), lambda: queries.problem_keys(session, where))

    def every_line(self, session: Session) -> lines.CommitLine:
        """Return the runs of all branches in order, which takes the ancestry of every commit."""
        return self._runs.get("every", queries.version_of_runs(session), lambda: lines.every_line(session))

    def line_through(self, session: Session, run: RunRow) -> lines.CommitLine:
        """Return the line of a run: series measured by one run share it."""
        of = ("through", run.pk)
        return self._runs.get(of, queries.version_of_runs(session), lambda: lines.line_through(session, run))

    def facets(self, session: Session) -> dict[str, list[str]]:
        """Return the values that forms offer."""
        last = _last_series(session)
        kept = self._facets
        if kept is None or kept[0] != last:
            kept = self._facets = (last, queries.facets(session))
        return kept[1]

    def counts(self, session: Session, run: RunRow) -> queries.RunCounts:
        """Return the contents of a run, counted once and again after it gained points.

        Counting reads every point of the run, and a list has 50 runs. Only `prune` and `repair` remove points, so that
        is looked for every `RECOUNT_S` seconds.
        """
        newest = self._forget_grown(session)
        with self._lock:
            kept = self._counts.get(run.pk)
        now = time.monotonic()
        if kept is None or now - kept.checked >= RECOUNT_S:
            number = queries.number_of_points(session, run.pk)
            same = kept is not None and kept.number == number
            counts = kept.counts if kept is not None and same else queries.count_run(session, run.pk)
            kept = _KeptCounts(counts, number, now)
            with self._lock:
                if len(self._counts) >= _KEPT_RUNS:
                    self._counts.clear()
                if self._counted_to == newest:  # else another request has seen a later state
                    self._counts[run.pk] = kept
        return kept.counts

    def _forget_grown(self, session: Session) -> int:
        """Forget the counts of runs that have gained points; return the newest point."""
        newest = queries.newest_point(session)
        with self._lock:
            since = self._counted_to
        if newest == since:
            return newest
        grown = queries.runs_since(session, since) if self._counts and newest > since else set(self._counts)
        with self._lock:
            self._counted_to = newest
            for key in grown:
                self._counts.pop(key, None)
        return newest

    def verdict(
        self, session: Session, run: RunRow, *, patience: float | None = None, keep: bool = False
    ) -> Known | Working | Failed:
        """Return the gate's verdict on a run; `keep` finishes it even if no client waits.

        A page without a verdict shows the rest.
        """
        of, where = ("verdict", run.pk), self.database.location
        try:
            return self.jobs.ask(of, version(session), work.judge, where, run.id, patience=patience, keep=keep)
        except TrackerError as error:
            return Failed(error.message)

    def alerts_of(self, session: Session, series: int) -> list[alerts.AlertRow]:
        """Return the alerts of one series: an index shows that most are without."""
        keys = set(session.scalars(select(Alert.id).where(Alert.series_id == series)))
        return alerts.find(session, keys=keys) if keys else []

    def close(self) -> None:
        self.jobs.close()
        if self.writer is not None:
            self.writer.close()
        self.database.close()


class _Kept:
    """The answers to the questions that were asked last, each for the version of the data that it is of."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, tuple[Hashable, Any]] = OrderedDict()

    def get(self, of: Hashable, version: Hashable, ask: Callable[[], T]) -> T:
        """Return the answer to `of`: the kept one, if it is of this version, or that of `ask`."""
        with self._lock:
            kept = self._answers.get(of)
        if kept is None or kept[0] != version:
            kept = (version, ask())
        with self._lock:
            self._answers[of] = kept
            self._answers.move_to_end(of)
            while len(self._answers) > self._most:
                self._answers.popitem(last=False)
        value: T = kept[1]
        return value


@dataclass(frozen=True)
class _KeptCounts:
    """The contents of a run, and its number of points when that was last looked at."""

    counts: queries.RunCounts
    number: int
    checked: float  # time.monotonic()


def _last_series(session: Session) -> int:
    """Series are only ever added: as long as their last key is the same, so are they."""
    return session.scalar(select(func.max(Series.id))) or 0


def slice_of(site: Site, session: Session, parameters: Parameters) -> tuple[queries.Slice, dict[str, Any]]:
    """(the slice that a request asks for, the choices of its form). Raises BadRequest, also for an unknown name."""
    choices = site.facets(session)
    words = tuple(dict.fromkeys((parameters.text("q") or "").split()))
    if len(words) > MOST_WORDS:  # each is looked for in every name
        raise BadRequest(f"q has {len(words)} words; {MOST_WORDS} are the most")
    names = {name: parameters.texts(name) for name in queries.FACETS}
    for name, values in names.items():
        for value in values:
            if value not in choices[name]:
                first = ", ".join(choices[name][:12]) + (", …" if len(choices[name]) > 12 else "")
                raise BadRequest(f"no {name} {value[:80]!r}; known: {first or 'none'}")
    shapes, sizes = parameters.texts("shape"), parameters.texts("where")
    for text in sizes:
        resolve_parameter("where", partial(filters.sizes, text))
    form_values = {"q": " ".join(words), **names, "shape": shapes, "where": sizes}
    where = queries.Slice(words, tuple(names.items()), shapes, sizes)
    return where, {
        "choices": {name: values for name, values in choices.items() if len(values) > 1},
        "given": form_values,
    }


@dataclass(frozen=True)
class Paging:
    """Which part of a long list a page shows."""

    number: int  # of the page, from 1
    size: int

    @property
    def offset(self) -> int:
        return (self.number - 1) * self.size

    def part(self, whole: Sequence[T]) -> Sequence[T]:
        """Return the page's part of a list."""
        return whole[self.offset : self.offset + self.size]

    def data(self, total: int) -> dict[str, int]:
        """Raises NotFound where a list of `total` has no such page: a program that turns pages is to see the end."""
        pages = max(1, -(-total // self.size))
        if self.number > pages:
            raise NotFound(f"no page {self.number} of this list; the last is {pages}")
        return {"page": self.number, "per_page": self.size, "pages": pages, "total": total}


def paging_of(parameters: Parameters) -> Paging:
    return Paging(parameters.number("page", 1, 1, 10**6), parameters.number("per_page", PER_PAGE, 1, MOST_PER_PAGE))


def series_facts(series: SeriesRow) -> dict[str, Any]:
    return {"series": series.pk, **{name: getattr(series, name) for name in SHOWN}}


def run_facts(run: RunRow) -> dict[str, Any]:
    return {
        "run": run.id,
        "started": run.started,
        "commit": run.commit_text,
        "branch": run.branch,
        "subject": run.subject,
        "plan": run.plan,
        "trigger": run.trigger,
    }
