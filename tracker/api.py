"""Use the store from Python: `open_tracker(FILE)` returns a `Tracker`, whose methods return frozen dataclasses.

    from groupbench.tracker import open_tracker

    with open_tracker("groupbench.db") as tracker:
        for row in tracker.history(operator="grouped_gemm", where="M>=4096", baseline="torch_loop"):
            print(row.point.run.started, row.point.series, row.point.median_ms, row.speedup)
        table = tracker.series().to_pandas()

Lists of dataclasses have `to_pandas()`, whose columns are those of `--format json`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
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
from groupbench.tracker.text.wording import no_such

if TYPE_CHECKING:
    from groupbench.tracker.judge.incident_rows import IncidentRow
    from groupbench.tracker.judge.verdicts import Gate
    from groupbench.tracker.store.sql import SqlResult

Words = str | Iterable[str]
"""One value, or several alternatives."""
When = datetime | str
"""A time, or a text as for `--since`: 2026-01-31, 7d."""


def open_tracker(location: str | os.PathLike[str] = "groupbench.db") -> Tracker:
    """Open the existing store at a path or SQLAlchemy URL for queries. Raises StoreError."""
    return Tracker(open_store(location, create=False), location)


class Tracker(AbstractContextManager["Tracker"]):
    """An open store. A context manager; each query sees one snapshot of the database.

    Names, shapes and sizes are as on the command line. An unknown name raises QueryError, which lists the known ones.
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
        since: When | None = None,
        until: When | None = None,
        **where: Words,
    ) -> Rows[HistoryRow]:
        """Return points by series, along the commits of `branch` or the newest run's branch.

        `baseline` is the backend for speed-ups. `where` may contain operator, backend, mode, dtype, shape, host,
        protocol, hardware, branch and commit, as in `groupbench history`.
        """
        chosen = _filter(where, since, until)
        with self._store.read() as session:
            points = history(session, chosen, baseline=baseline, limit=limit, all_branches=all_branches)
            return Rows(HistoryRow, points.rows)

    def compare(
        self, a: str, b: str, *, force: bool = False, min_effect: float | None = None, **series: Words
    ) -> Comparison:
        """Compare two commits, branches, tags, dates, runs (`run:ID`) or files of records.

        `series` are filters as in `history`.
        """
        with self._store.read() as session:
            return compare(session, a, b, force=force, min_effect=min_effect, where=_filter(series))

    def series(self, *, since: When | None = None, until: When | None = None, **where: Words) -> Rows[SeriesSummary]:
        """Return the series that match filters as in `history`, with their numbers of points."""
        with self._store.read() as session:
            return Rows(SeriesSummary, listing.series(session, _filter(where, since, until)))

    def runs(
        self, limit: int | None = None, *, since: When | None = None, until: When | None = None, **where: Words
    ) -> Rows[RunSummary]:
        """Return summaries of runs, newest first. `where` may contain branch and commit."""
        with self._store.read() as session:
            return Rows(RunSummary, listing.runs(session, limit, _filter(where, since, until)))

    def commits(
        self, limit: int | None = None, *, since: When | None = None, until: When | None = None, **where: Words
    ) -> Rows[CommitSummary]:
        """Return summaries of measured commits, newest first. `where` may contain branch and commit."""
        with self._store.read() as session:
            return Rows(CommitSummary, listing.commits(session, _filter(where, since, until), limit))

    def environments(
        self, *, since: When | None = None, until: When | None = None, **where: Words
    ) -> Rows[EnvironmentSummary]:
        """Return the environments, each with differences from the one before on the same hardware."""
        with self._store.read() as session:
            return Rows(EnvironmentSummary, listing.environments(session, _filter(where, since, until)))

    def point(self, id: str) -> PointDetail:
        """Return one point with samples. The id is `row.point.id` of a history row."""
        with self._store.read() as session:
            return find_point(session, id)

    def run(self, id: str) -> Rows[PointRow]:
        """Return the points of the run whose id starts with `id`."""
        with self._store.read() as session:
            return Rows(PointRow, points_of_run(session, find_run(session, id)))

    def gate(
        self, run: str | None = None, *, window: int = 100, min_effect: float | None = None, strict: bool = False
    ) -> Gate:
        """Return the verdict on the newest run, or on the run whose id starts with `run`. Only reads."""
        from groupbench.tracker.judge.gate import judge_run
        from groupbench.tracker.tools import git

        with self._store.read() as session:
            run_row = find_run(session, run)
            return judge_run(
                session,
                run_row,
                window=window,
                min_effect=min_effect,
                strict=strict,
                first_parents=git.first_parents,
                between=git.between,
            )

    def incidents(self, *, all: bool = False) -> Rows[IncidentRow]:
        """Return the open incidents; with `all`, closed ones too."""
        from groupbench.tracker.judge import incident_rows, triage

        with self._store.read() as session:
            return Rows(incident_rows.IncidentRow, triage.of(session, states=None if all else incident_rows.OPEN))

    def sql(self, statement: str, params: Mapping[str, str] | None = None) -> SqlResult:
        """Run one SQL statement, which can only read."""
        from groupbench.tracker.store.sql import ask

        return ask(self._location, statement, params)

    def close(self) -> None:
        self._store.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _filter(fields: Mapping[str, Words], since: When | None = None, until: When | None = None) -> Filter:
    unknown = sorted(set(fields) - set(_FIELDS))
    if unknown:
        raise TypeError(no_such("no filter", unknown[0], _FIELDS))
    words = {name: (value,) if isinstance(value, str) else tuple(value) for name, value in fields.items()}
    since = filters.instant(since) if isinstance(since, str) else since
    until = filters.instant(until, end=True) if isinstance(until, str) else until
    return Filter(**words, since=since, until=until)


_FIELDS = tuple(name for name in Filter.__dataclass_fields__ if name not in ("since", "until"))
