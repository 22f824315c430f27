"""State shared by all pages: the database, background answers, the guard and cached results."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.facts.identity import SHOWN
from groupbench.tracker.query import filters, lines
from groupbench.tracker.query.rows import RunRow, SeriesRow
from groupbench.tracker.query.runs import run_rows
from groupbench.tracker.query.traffic import NO_TRAFFIC, Traffic
from groupbench.tracker.serve import queries, verdict
from groupbench.tracker.serve.answers import Answers, Failed, Known, Working
from groupbench.tracker.serve.database import Database, SlowError, version
from groupbench.tracker.serve.limits import LIMITS
from groupbench.tracker.serve.parameters import BadRequest, NotFound, Parameters, resolve_parameter
from groupbench.tracker.serve.security import Guard
from groupbench.tracker.store.engine import Store
from groupbench.tracker.store.failures import damage_of
from groupbench.tracker.store.schema import Series
from groupbench.tracker.text.wording import printable

T = TypeVar("T")

MOST_WORDS = 16
"""Maximum number of words in a search. Each is compared with all names, shapes and hardware of every series."""
DAMAGE_S = 2.0
"""Time in seconds that a request waits for the search for damage that explains its error."""


@dataclass(frozen=True)
class Page:
    """A view's result. `data` is the content, and the response in JSON; `shown` is the presentation."""

    template: str
    data: dict[str, Any]
    shown: Mapping[str, Any] = field(default_factory=dict)  # links, choices of a form
    status: int = 200
    again: int | None = None  # seconds after which the page reloads, while work is in progress
    figures: Callable[[], dict[str, Any]] = dict  # draws the figures by name, for HTML alone


class Site:
    """The state shared by a dashboard's pages."""

    def __init__(
        self,
        database: Database,
        answers: Answers,
        guard: Guard,
        writer: Store | None = None,
        traffic: Traffic = NO_TRAFFIC,
    ) -> None:
        self.database, self.answers, self.guard, self.writer, self.traffic = database, answers, guard, writer, traffic
        self.name = printable(database.store.name)
        self._lock = threading.Lock()
        self._lists, self._runs, self._rows = _Kept(LIMITS.lists), _Kept(LIMITS.lines), _Kept(1)
        self._counts = _Kept(LIMITS.counted_runs)

    def series_keys(self, session: Session, where: queries.Slice) -> list[int]:
        """Return `queries.series_keys`, cached, because the next page needs the same keys."""
        return self._lists.get(("series", where), _last_series(session), lambda: queries.series_keys(session, where))

    def every_line(self, session: Session) -> lines.CommitLine:
        """Return `lines.every_line`, cached, because it reads every commit's ancestry."""
        return self._runs.get("every", _version_of_runs(session), lambda: lines.every_line(session))

    def line_through(self, session: Session, run: RunRow) -> lines.CommitLine:
        """Return `lines.line_through`, cached, because a run's series share it."""
        of = ("through", run.pk)
        return self._runs.get(of, _version_of_runs(session), lambda: lines.line_through(session, run))

    def run_rows(self, session: Session, keys: Iterable[int]) -> Mapping[int, RunRow]:
        """Return runs by key, like `runs.run_rows`, cached. The mapping also holds other requests' runs."""
        kept: dict[int, RunRow] = self._rows.get("rows", _version_of_runs(session), dict)
        missing = [key for key in keys if key not in kept]
        if missing:
            kept.update(run_rows(session, missing))
        return kept

    def facets(self, session: Session) -> dict[str, list[str]]:
        """Return `queries.facets`, the form choices, cached."""
        return self._lists.get("facets", _last_series(session), lambda: queries.facets(session))

    def counts(self, session: Session, run: RunRow) -> queries.RunCounts:
        """Return `queries.count_run`, cached, because it reads every point in a run, and a list has 50 runs."""
        points = queries.version_of_points(session, run.pk)
        return self._counts.get(run.pk, points, lambda: queries.count_run(session, run.pk))

    def verdict(self, session: Session, run: RunRow, *, patience: float | None = None) -> Known | Working | Failed:
        """Return the gate's verdict on a run, or Failed: a page shows the other contents even without a verdict.

        Args:
            session: A session of the database.
            run: The run to judge.
            patience: Seconds to wait for the verdict. Default: the answers' patience.
        """
        work = partial(verdict.judge, self.database, run.id)
        try:
            return self.answers.ask(("verdict", run.pk), version(session), work, patience=patience)
        except SlowError as error:
            return Failed(f"{error.message}; run `groupbench gate --run {run.id}`")
        except TrackerError as error:
            return Failed(error.message)

    def damage(self) -> str | None:
        """Return known database damage, or None; the answer is cached.

        A long search continues in the background; until it ends, no damage is known.
        """
        with self.database.read() as session:
            now = version(session)
        progress = self.answers.ask(("damage",), now, partial(damage_of, self.database.location), patience=DAMAGE_S)
        return progress.value if isinstance(progress, Known) and not progress.stale else None

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.database.close()


class _Kept:
    """A least-recently-used cache, with each value tied to a data version."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, tuple[Hashable, Any]] = OrderedDict()

    def get(self, of: Hashable, version: Hashable, ask: Callable[[], T]) -> T:
        """Return the cached value for a key if it has this version, else the one from `ask`, which is kept."""
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


def _last_series(session: Session) -> int:
    """Return the largest series key. Series are only added, so as long as it is the same, all series are."""
    return _once(session, "last series", lambda: session.scalar(select(func.max(Series.id))) or 0)


def _version_of_runs(session: Session) -> tuple[Any, ...]:
    return _once(session, "version of runs", lambda: queries.version_of_runs(session))


def _once(session: Session, what: str, ask: Callable[[], T]) -> T:
    """Return the result from `ask`, called once per session, so all page parts see the same version."""
    if what not in session.info:
        session.info[what] = ask()
    value: T = session.info[what]
    return value


def slice_of(site: Site, session: Session, parameters: Parameters) -> tuple[queries.Slice, dict[str, Any]]:
    """Return (the slice selected by a request, the form's choices and values).

    Raises BadRequest for an invalid value or an unknown name.
    """
    choices = site.facets(session)
    words = tuple(dict.fromkeys((parameters.text("q") or "").split()))
    if len(words) > MOST_WORDS:
        raise BadRequest(f"q has {len(words)} words; at most {MOST_WORDS} are allowed")
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
    """The visible part in a long list."""

    number: int  # of the page, from 1
    size: int  # items per page

    @property
    def offset(self) -> int:
        return (self.number - 1) * self.size

    def part(self, whole: Sequence[T]) -> Sequence[T]:
        """Return the page's part from a list."""
        return whole[self.offset : self.offset + self.size]

    def data(self, total: int) -> dict[str, int]:
        """Return the page facts for a list with `total` items.

        Raises NotFound for a page beyond the list, so a program reading page after page notices the end.
        """
        pages = max(1, -(-total // self.size))
        if self.number > pages:
            raise NotFound(f"no page {self.number} of this list; the last is {pages}")
        return {"page": self.number, "per_page": self.size, "pages": pages, "total": total}


def paging_of(parameters: Parameters) -> Paging:
    return Paging(
        parameters.number("page", 1, 1, 10**6), parameters.number("per_page", LIMITS.rows, 1, LIMITS.most_rows)
    )


def series_facts(series: SeriesRow) -> dict[str, Any]:
    return {"series": series.pk, **{name: getattr(series, name) for name in SHOWN}}
