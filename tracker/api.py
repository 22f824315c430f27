"""The store from Python: `open_tracker(FILE)` gives a `Tracker`, whose methods answer with frozen dataclasses.

    from groupbench.tracker import open_tracker

    with open_tracker("groupbench.db") as tracker:
        for row in tracker.history(operator="grouped_gemm", where="M>=4096", baseline="torch_loop"):
            print(row.point.run.started, row.point.series, row.point.median_ms, row.speedup)
        table = tracker.series().to_pandas()

Every answer is a list of dataclasses with `to_pandas()` and `to_arrow()`, whose columns are those of `--json`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from groupbench.tracker.compare.comparison import Comparison, compare
from groupbench.tracker.query import filters, listing
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.history import history
from groupbench.tracker.query.points import find_point, points_of_run
from groupbench.tracker.query.resolve import find_run
from groupbench.tracker.query.rows import (
    CommitSummary,
    EnvironmentSummary,
    HistoryRow,
    PointDetail,
    PointRow,
    RunSummary,
    SeriesSummary,
)
from groupbench.tracker.query.tables import Rows
from groupbench.tracker.store.engine import Store, open_store

if TYPE_CHECKING:
    from groupbench.tracker.judge.alerts import AlertRow
    from groupbench.tracker.judge.verdicts import Gate
    from groupbench.tracker.store.sql import SqlResult

Words = str | Iterable[str]
"""One word, or several as alternatives."""
When = datetime | str
"""An instant, or what `--since` takes: 2026-01-31, 7d."""


def open_tracker(location: str | os.PathLike[str] = "groupbench.db") -> Tracker:
    """The store at a path or SQLAlchemy URL, to be asked. Nothing is created. Raises StoreError."""
    return Tracker(open_store(location, create=False), location)


class Tracker:
    """An open store, to be asked. A context manager; each question sees one state of the database.

    Names, shapes and sizes are what the command line takes. An unknown name raises QueryError, which lists what exists.
    """

    def __init__(self, store: Store, location: str | os.PathLike[str]) -> None:
        self._store = store
        self._location = location

    def history(
        self,
        *,
        baseline: str | None = None,
        limit: int | None = None,
        all_branches: bool = False,
        operator: Words = (),
        backend: Words = (),
        mode: Words = (),
        dtype: Words = (),
        shape: Words = (),
        where: Words = (),
        host: Words = (),
        protocol: Words = (),
        hardware: Words = (),
        branch: Words = (),
        commit: Words = (),
        commits: Words = (),
        since: When | None = None,
        until: When | None = None,
    ) -> Rows[HistoryRow]:
        """Points by series, along the commits of the newest run's branch, or of `branch`; see `groupbench history`.

        `baseline` is the backend that speed-ups are over.
        """
        from groupbench.tracker import git

        asked = _filter(
            {
                "operator": operator,
                "backend": backend,
                "mode": mode,
                "dtype": dtype,
                "shape": shape,
                "where": where,
                "host": host,
                "protocol": protocol,
                "hardware": hardware,
                "branch": branch,
                "commit": commit,
                "commits": commits,
            },
            since,
            until,
        )
        with self._store.read() as session:
            found = history(
                session,
                asked,
                baseline=baseline,
                limit=limit,
                all_branches=all_branches,
                first_parents=git.first_parents,
            )
            return Rows(HistoryRow, found.rows)

    def compare(
        self, a: str, b: str, *, force: bool = False, min_effect: float | None = None, **series: Words
    ) -> Comparison:
        """Two commits, branches, tags, dates, runs (`run:ID`) or files of records. `series` are names as in history."""
        with self._store.read() as session:
            return compare(session, a, b, force=force, min_effect=min_effect, where=_filter(series))

    def series(self, *, since: When | None = None, until: When | None = None, **slice_: Words) -> Rows[SeriesSummary]:
        """The series of a slice, named as in history, with how many points each has."""
        with self._store.read() as session:
            return Rows(SeriesSummary, listing.series(session, _filter(slice_, since, until)))

    def runs(
        self, limit: int | None = None, *, since: When | None = None, until: When | None = None, **slice_: Words
    ) -> Rows[RunSummary]:
        """The newest runs first. `slice_` is of branch, commit and commits."""
        with self._store.read() as session:
            return Rows(RunSummary, listing.runs(session, limit, _filter(slice_, since, until)))

    def commits(
        self, limit: int | None = None, *, since: When | None = None, until: When | None = None, **slice_: Words
    ) -> Rows[CommitSummary]:
        """The commits that were measured, newest first. `slice_` is of branch, commit and commits."""
        with self._store.read() as session:
            return Rows(CommitSummary, listing.commits(session, _filter(slice_, since, until), limit))

    def environments(
        self, *, since: When | None = None, until: When | None = None, **slice_: Words
    ) -> Rows[EnvironmentSummary]:
        """The environments, each with what differs from the one before it on its hardware."""
        with self._store.read() as session:
            return Rows(EnvironmentSummary, listing.environments(session, _filter(slice_, since, until)))

    def point(self, id: str) -> PointDetail:
        """Everything of one point, samples included; its id is `row.point.id` of a history."""
        with self._store.read() as session:
            return find_point(session, id)

    def run(self, id: str) -> Rows[PointRow]:
        """The points of the run whose id starts like this."""
        with self._store.read() as session:
            return Rows(PointRow, points_of_run(session, find_run(session, id)))

    def gate(
        self, run: str | None = None, *, window: int = 100, min_effect: float | None = None, strict: bool = False
    ) -> Gate:
        """The verdict on the newest run, or on the one whose id starts like this. Only reads."""
        from groupbench.tracker import git
        from groupbench.tracker.judge.gate import judge_run

        with self._store.read() as session:
            found = find_run(session, run)
            return judge_run(
                session, found, window=window, min_effect=min_effect, strict=strict, first_parents=git.first_parents
            )

    def alerts(self, *, all: bool = False) -> Rows[AlertRow]:
        """The alerts that are open; with `all` closed ones, too."""
        from groupbench.tracker.judge import alerts

        with self._store.read() as session:
            return Rows(alerts.AlertRow, alerts.find(session, states=None if all else alerts.OPEN))

    def sql(self, statement: str, params: Mapping[str, str] | None = None) -> SqlResult:
        """One statement of your own, which can only read."""
        from groupbench.tracker.store.sql import ask

        return ask(self._location, statement, params)

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _filter(fields: Mapping[str, Words], since: When | None = None, until: When | None = None) -> Filter:
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise TypeError(f"no filter {unknown[0]!r}; known: {', '.join(_FIELDS)}")
    words = {name: (value,) if isinstance(value, str) else tuple(value) for name, value in fields.items()}
    since = filters.instant(since) if isinstance(since, str) else since
    until = filters.instant(until, end=True) if isinstance(until, str) else until
    return Filter(**words, since=since, until=until)


_FIELDS = tuple(name for name in Filter.__dataclass_fields__ if name not in ("since", "until"))
