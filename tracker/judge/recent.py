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
from sqlalchemy import and_, case, func, or_, select
from sqlalchemy.orm import Session
from sqlalchemy.sql import Select

from groupbench.tracker.query.rows import RunRow
from groupbench.tracker.record import STATUSES
from groupbench.tracker.store.points import PPM
from groupbench.tracker.store.schema import Point, Run, Series, table_of

TIMINGS = (None, "gpu", "cpu", "interpreted")
"""None where no latency was taken."""

_STRAGGLERS = 0.02  # share of the series that is looked up rather than scanned for
_CHUNK = 200


@dataclass(frozen=True)
class Recent:
    """Points by series; within one, the newest first. Point i of series s is `starts[s] + i`.

    `run` and `environment` are keys of the tables; points of one identity may have several environments.
    """

    series: NDArray[np.int64]  # [s] keys, ascending
    starts: NDArray[np.int64]  # [s + 1] where each series begins; the last is the number of points
    run: NDArray[np.int64]  # [p] key
    environment: NDArray[np.int64]  # [p] key
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
_CODES = (len(TIMINGS), 3)  # of timing and repeatable, which share an integer with status


def _code() -> Any:
    """Status, timing and repeatable as one integer: two million texts would take longer to read than all the rest."""
    status = case({name: place for place, name in enumerate(STATUSES)}, value=_POINT.status)
    timing = case({name: place for place, name in enumerate(TIMINGS) if name}, value=_POINT.timing, else_=0)
    repeatable = case((_POINT.repeatable.is_(True), 1), (_POINT.repeatable.is_(False), 0), else_=2)
    return (status * _CODES[0] + timing) * _CODES[1] + repeatable


_COLUMNS = (  # of the table: those of the mapped class would cost as much again
    _POINT.series_id,
    _POINT.run_id,
    _POINT.environment_id,
    _code(),
    _POINT.median_ms,
    _POINT.error_ppm,
    _POINT.rms,
)
_ROW = np.dtype(
    [
        ("series", np.int64),
        ("run", np.int64),
        ("environment", np.int64),
        ("code", np.int64),
        ("median_ms", np.float64),
        ("error_ppm", np.float64),
        ("rms", np.float64),
    ]
)
_Rows = NDArray[Any]
"""[p] of _ROW."""


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

    blocks: list[_Rows] = []
    for place, run in enumerate(newest):
        lacking = int((known & (have < n)).sum())
        if lacking == 0 or (place >= n and lacking <= _STRAGGLERS * known.sum()):
            break
        block = _where(_rows(session, select(*_COLUMNS).where(_POINT.run_id == run)), known)
        if len(block):
            blocks.append(block)
            have[block["series"]] += 1
    else:
        return _joined(blocks, rank, n)

    stragglers = known & (have < n)
    lookups = np.flatnonzero(stragglers).tolist()
    if lookups:
        blocks = [_where(block, ~stragglers) for block in blocks]
        for start in range(0, len(lookups), _CHUNK):
            block = _rows(session, select(*_COLUMNS).where(_POINT.series_id.in_(lookups[start : start + _CHUNK])))
            blocks.append(block[rank[block["run"]] >= 0])
    return _joined(blocks, rank, n)


def _rows(session: Session, query: Select[Any]) -> _Rows:
    result: Any = session.execute(query)
    with result:  # its cursor is the driver's: plain tuples, None where a number is missing
        return np.fromiter(result.cursor, dtype=_ROW)


def _where(block: _Rows, keys: NDArray[np.bool_]) -> _Rows:
    """Those whose series is one of `keys`."""
    keep = keys[block["series"]]
    return block if keep.all() else block[keep]


def _joined(blocks: list[_Rows], rank: NDArray[np.int64], n: int) -> Recent:
    rows = np.concatenate(blocks) if blocks else np.zeros(0, dtype=_ROW)
    order = np.lexsort((rank[rows["run"]] if len(rows) else rows["run"], rows["series"]))
    ordered = rows["series"][order]
    starts = _starts(ordered)
    order = order[np.arange(len(ordered)) - np.repeat(starts[:-1], np.diff(starts)) < n]
    rows = rows[order]
    starts = _starts(rows["series"])
    code, repeatable = np.divmod(rows["code"], _CODES[1])
    status, timing = np.divmod(code, _CODES[0])
    return Recent(
        series=rows["series"][starts[:-1]],
        starts=starts,
        run=rows["run"].copy(),
        environment=rows["environment"].copy(),
        status=status.astype(np.int8),
        timing=timing.astype(np.int8),
        median_ms=rows["median_ms"].copy(),
        error=rows["error_ppm"] / PPM,
        rms=rows["rms"].copy(),
        repeatable=np.where(repeatable == 2, -1, repeatable).astype(np.int8),
    )


def _starts(ordered: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each run of equal keys begins, and the length at the end."""
    if not len(ordered):
        return np.zeros(1, dtype=np.int64)
    return np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1, [len(ordered)]]).astype(np.int64)


def series_of(recent: Recent) -> Iterator[tuple[int, slice]]:
    """(key of each series, where its points stand)."""
    for place, key in enumerate(recent.series.tolist()):
        yield key, slice(int(recent.starts[place]), int(recent.starts[place + 1]))
