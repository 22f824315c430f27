"""The past of each series of a run, as arrays: what the statistics are asked about."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.causes import Facts
from groupbench.tracker.query import chunks, environment_rows, run_rows
from groupbench.tracker.recent import TIMINGS, Recent, recent_points
from groupbench.tracker.record import STATUSES, Kernel
from groupbench.tracker.rows import RunRow
from groupbench.tracker.schema import Commit, Environment, KernelSet, Point, Run

_OK = STATUSES.index("ok")


@dataclass(frozen=True)
class Past:
    """Good results of one series, of one kind of timing: the oldest first, that of the run last."""

    series: int
    run: NDArray[np.int64]  # [n] keys
    environment: NDArray[np.int64]  # [n] results compare where it is equal
    state: NDArray[np.int64]  # [n] the code is the same where it is equal
    log: NDArray[np.float64]  # [n] logarithm of the value
    error: NDArray[np.float64]  # [n] its standard error; NaN where unknown

    def __len__(self) -> int:
        return len(self.run)

    @property
    def alike(self) -> NDArray[np.int64]:
        """[m] Places of the results in the environment of the last one."""
        return np.flatnonzero(self.environment == self.environment[-1])

    def where(self, keep: NDArray[Any]) -> Past:
        return Past(
            self.series, self.run[keep], self.environment[keep], self.state[keep], self.log[keep], self.error[keep]
        )

    def shifted(self, places: NDArray[Any], by: float) -> Past:
        """With some results moved, as if they had always been on another level."""
        log = self.log.copy()
        log[places] += by
        return replace(self, log=log)


class Pasts:
    """The newest results up to a run, of the series that it holds."""

    def __init__(self, session: Session, run: RunRow, series: Collection[int], window: int) -> None:
        self.run = run
        self.points: Recent = recent_points(session, window + 1, until=run, series=series)
        identities: dict[str, int] = {}
        rows = list(session.execute(select(Environment.id, Environment.identity)))
        self.identity = _by_key((key, identities.setdefault(text, len(identities))) for key, text in rows)
        runs = list(session.execute(select(Run.id, Run.commit_id, Run.dirty)))
        # A dirty tree is like no other, its own included.
        self.state = _by_key((key, -key - 1 if dirty else commit) for key, commit, dirty in runs)

    def latency(self, series: int, timing: str) -> Past:
        """Of results that are right and were timed like this."""
        at = self._newest_last(series)
        points = self.points
        good = (points.status[at] == _OK) & (points.timing[at] == TIMINGS.index(timing))
        return self._past(series, at[good & ~np.isnan(points.median_ms[at])], points.median_ms, np.log, points.error)

    def accuracy(self, series: int, timing: str | None, floor: float) -> Past:
        """Relative RMS error of results that are within tolerance; what is below `floor` hardly counts."""
        at = self._newest_last(series)
        points = self.points
        good = (points.status[at] == _OK) & (points.timing[at] == TIMINGS.index(timing))
        return self._past(series, at[good & ~np.isnan(points.rms[at])], points.rms, lambda rms: np.log(rms + floor))

    def repeatable(self, series: int, timing: str | None) -> Past:
        """1 where two executions agreed bit by bit, and 0 where they did not."""
        at = self._newest_last(series)
        points = self.points
        good = (points.status[at] == _OK) & (points.timing[at] == TIMINGS.index(timing)) & (points.repeatable[at] >= 0)
        return self._past(series, at[good], points.repeatable, lambda told: told.astype(np.float64))

    def earlier_ok(self, series: int) -> int:
        """How many good results there are before the run's own, of whatever timing and environment."""
        at = self._newest_last(series)
        return int((self.points.status[at[:-1]] == _OK).sum())

    def _newest_last(self, series: int) -> NDArray[np.int64]:
        place = self.points.of(series)
        return np.arange(place.start, place.stop)[::-1]

    def _past(
        self,
        series: int,
        at: NDArray[np.int64],
        values: NDArray[Any],
        log: Callable[[NDArray[Any]], NDArray[np.float64]],
        errors: NDArray[np.float64] | None = None,
    ) -> Past:
        points = self.points
        run = points.run[at]
        unknown = np.full(len(at), np.nan)
        environment = self.identity[points.environment[at]]
        return Past(
            series, run, environment, self.state[run], log(values[at]), unknown if errors is None else errors[at]
        )


def facts_at(session: Session, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Facts]:
    """What the points of (series, run) say beside their results; what is not stored is left out."""
    wanted = set(places)
    query = (
        select(Point.series_id, Point.run_id, Point.environment_id, KernelSet.hash, KernelSet.kernels)
        .outerjoin(KernelSet, Point.kernels_id == KernelSet.id)
        .where(Point.run_id.in_({run for _, run in wanted}))
    )
    found = []
    for chunk in chunks({series for series, _ in wanted}):
        found += [row for row in session.execute(query.where(Point.series_id.in_(chunk))) if (row[0], row[1]) in wanted]
    runs = run_rows(session, {row[1] for row in found})
    environments = environment_rows(session, {row[2] for row in found})
    return {
        (series, run): Facts(
            state=runs[run].state,
            environment=environments[environment].facts,
            kernel_hash=hash_,
            kernels=msgspec.convert(kernels or (), tuple[Kernel, ...]),
        )
        for series, run, environment, hash_, kernels in found
    }


def authors(session: Session, commits: Iterable[str]) -> dict[str, str | None]:
    """Who wrote each commit, as far as it is stored."""
    return {
        hash_: author
        for chunk in chunks(set(commits))
        for hash_, author in session.execute(select(Commit.hash, Commit.author).where(Commit.hash.in_(chunk)))
    }


def _by_key(pairs: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    told = list(pairs)
    codes = np.zeros(max((key for key, _ in told), default=0) + 1, dtype=np.int64)
    for key, code in told:
        codes[key] = code
    return codes
