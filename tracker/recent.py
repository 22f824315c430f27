"""The newest results of every series at once, as arrays: what a gate reads.

Points lie on disk in the order in which they were stored, so the newest of all series stand together. Runs are
read from the newest back until every series has its share; the few that were not measured for long are then
looked up one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import and_, func, or_, select
from sqlalchemy.orm import Session

from groupbench.tracker.points import PPM
from groupbench.tracker.record import STATUSES
from groupbench.tracker.rows import RunRow
from groupbench.tracker.schema import Point, Run, Series, table_of

TIMINGS = (None, "gpu", "cpu", "interpreted")
"""None where no latency was taken."""

_STATUS = {name: place for place, name in enumerate(STATUSES)}
_TIMING = {name: place for place, name in enumerate(TIMINGS)}

_STRAGGLERS = 0.02  # share of the series that is looked up rather than scanned for
_CHUNK = 200


@dataclass(frozen=True)
class Recent:
    """Points by series; within one, the newest first. Point i of series s is `starts[s] + i`.

    `environment` and `kernels` are keys of the tables; points of one identity may have several environments.
    """

    series: NDArray[np.int64]  # [s] keys, ascending
    starts: NDArray[np.int64]  # [s + 1] where each series begins; the last is the number of points
    run: NDArray[np.int64]  # [p] key
    environment: NDArray[np.int64]  # [p] key
    kernels: NDArray[np.int64]  # [p] key; -1 where unknown
    status: NDArray[np.int8]  # [p] place in STATUSES
    timing: NDArray[np.int8]  # [p] place in TIMINGS
    median_ms: NDArray[np.float64]  # [p] NaN where unknown, as the following
    error: NDArray[np.float64]  # [p] standard error of log(median_ms)
    rms: NDArray[np.float64]  # [p]
    repeatable: NDArray[np.int8]  # [p] 1, 0, or -1 where unknown

    def of(self, series: int) -> slice:
        """Where the points of a series stand; empty for one that has none."""
        place = int(np.searchsorted(self.series, series))
        if place == len(self.series) or self.series[place] != series:
            return slice(0, 0)
        return slice(int(self.starts[place]), int(self.starts[place + 1]))


_POINT = table_of(Point).columns
_COLUMNS = (  # of the table: those of the mapped class would cost as much again
    _POINT.series_id,
    _POINT.run_id,
    _POINT.environment_id,
    _POINT.kernels_id,
    _POINT.status,
    _POINT.timing,
    _POINT.median_ms,
    _POINT.error_ppm,
    _POINT.rms,
    _POINT.repeatable,
)


def recent_points(
    session: Session,
    n: int,
    *,
    until: RunRow | None = None,  # the newest run that counts
    series: Collection[int] | None = None,  # keys of the series that are asked for; None is all
) -> Recent:
    """The `n` newest points of every series, by when their runs began."""
    began = select(Run.id).order_by(Run.started.desc(), Run.id.desc())
    if until is not None:
        began = began.where(or_(Run.started < until.started, and_(Run.started == until.started, Run.id <= until.pk)))
    newest = list(session.scalars(began))
    rank = np.full((session.scalar(select(func.max(Run.id))) or 0) + 1, -1, dtype=np.int64)
    rank[newest] = np.arange(len(newest))
    top = session.scalar(select(func.max(Series.id))) or 0
    have = np.zeros(top + 1, dtype=np.int64)
    known = np.zeros(top + 1, dtype=bool)
    known[list(session.scalars(select(Series.id)) if series is None else series)] = True

    blocks: list[_Block] = []
    for place, run in enumerate(newest):
        lacking = int((known & (have < n)).sum())
        if lacking == 0 or (place >= n and lacking <= _STRAGGLERS * known.sum()):
            break
        block = _block(session.execute(select(*_COLUMNS).where(_POINT.run_id == run)).all())
        block = block.where(known[block.series])
        if len(block.series):
            blocks.append(block)
            have[block.series] += 1
    else:
        return _joined(blocks, rank, n)

    stragglers = np.flatnonzero(known & (have < n)).tolist()
    if stragglers:
        lookups = set(stragglers)
        blocks = [block.where(~np.isin(block.series, list(lookups))) for block in blocks]
        for start in range(0, len(stragglers), _CHUNK):
            query = select(*_COLUMNS).where(_POINT.series_id.in_(stragglers[start : start + _CHUNK]))
            block = _block(session.execute(query).all())
            blocks.append(block.where(rank[block.columns[1]] >= 0))
    return _joined(blocks, rank, n)


@dataclass(frozen=True)
class _Block:
    """Some points, in the order of `_COLUMNS`."""

    columns: tuple[NDArray[Any], ...]

    @property
    def series(self) -> NDArray[np.int64]:
        return self.columns[0]

    def where(self, keep: NDArray[np.bool_]) -> _Block:
        return self if keep.all() else _Block(tuple(column[keep] for column in self.columns))


def _block(rows: Any) -> _Block:
    series, run, environment, kernels, status, timing, median, error, rms, repeatable = (
        zip(*rows, strict=True) if rows else [()] * len(_COLUMNS)
    )
    return _Block(
        (
            np.array(series, dtype=np.int64),
            np.array(run, dtype=np.int64),
            np.array(environment, dtype=np.int64),
            np.array([-1 if key is None else key for key in kernels], dtype=np.int64),
            np.array([_STATUS[name] for name in status], dtype=np.int8),
            np.array([_TIMING[name] for name in timing], dtype=np.int8),
            np.array(median, dtype=np.float64),
            np.array(error, dtype=np.float64) / PPM,
            np.array(rms, dtype=np.float64),
            np.array([-1 if told is None else told for told in repeatable], dtype=np.int8),
        )
    )


def _joined(blocks: list[_Block], rank: NDArray[np.int64], n: int) -> Recent:
    columns = tuple(np.concatenate(parts) for parts in zip(*(b.columns for b in blocks or [_block([])]), strict=True))
    series, run = columns[0], columns[1]
    order = np.lexsort((rank[run] if len(run) else run, series))
    ordered = series[order]
    starts = _starts(ordered)
    within = np.arange(len(ordered)) - np.repeat(starts[:-1], np.diff(starts))
    order = order[within < n]
    kept = series[order]
    return Recent(kept[_starts(kept)[:-1]], _starts(kept), *(column[order] for column in columns[1:]))


def _starts(ordered: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each run of equal keys begins, and the length at the end."""
    if not len(ordered):
        return np.zeros(1, dtype=np.int64)
    return np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1, [len(ordered)]]).astype(np.int64)


def series_of(recent: Recent) -> Iterator[tuple[int, slice]]:
    """(key of each series, where its points stand)."""
    for place, key in enumerate(recent.series.tolist()):
        yield key, slice(int(recent.starts[place]), int(recent.starts[place + 1]))
