"""Read the newest results of every series at once, as arrays for the gate.

Points are stored on disk in the order of ingestion, so the newest points of all series are adjacent. Runs are read
from the newest back until nearly every series has enough points. The few remaining series are then read by key, and so
are all if only a few are asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.metrics import Metric
from groupbench.tracker.facts.record import STATUSES
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.points import PPM
from groupbench.tracker.store.schema import NEWEST_FIRST, Point, Run, Series, table_of

TIMINGS = (None, "gpu", "cpu", "interpreted")
"""None for points without a latency."""

_BY_KEY = 0.02
"""Share of the series to read by key instead of scanning runs: a key takes the time of some fifty points of a scan."""
_CHUNK = 200


@dataclass(frozen=True)
class Recent:
    """Points by series, newest first. Point i of series s is at `starts[s] + i`.

    `run` and `environment` are table keys. Points with one environment identity may have several environments.
    """

    series: NDArray[np.int64]  # [s] keys, ascending
    starts: NDArray[np.int64]  # [s + 1] start of each series; the last entry is the number of points
    run: NDArray[np.int64]  # [p] key
    environment: NDArray[np.int64]  # [p] key
    status: NDArray[np.int8]  # [p] place in STATUSES
    timing: NDArray[np.int8]  # [p] place in TIMINGS
    median_ms: NDArray[np.float64]  # [p] NaN if unknown, like the next two
    error: NDArray[np.float64]  # [p] standard error of log(median_ms)
    rms: NDArray[np.float64]  # [p]
    repeatable: NDArray[np.int8]  # [p] 1, 0, or -1 if unknown
    further: dict[str, NDArray[np.float64]]  # [p] of each further metric, by name; NaN if unknown
    copies: int = 0  # results ignored: the same samples are stored under a newer run of the commit

    def of(self, series: int) -> slice:
        """Return the slice of a series' points, which may be empty."""
        place = int(np.searchsorted(self.series, series))
        if place == len(self.series) or self.series[place] != series:
            return slice(0, 0)
        return slice(int(self.starts[place]), int(self.starts[place + 1]))


_POINT = table_of(Point).columns
_CODES = (len(TIMINGS), 3)  # number of codes for timing and repeatable, which share an integer with status


def _code() -> Any:
    """Return SQL that encodes status, timing and repeatable as one integer.

    Reading them as two million texts would take longer than everything else.
    """
    status = case({name: place for place, name in enumerate(STATUSES)}, value=_POINT.status)
    timing = case({name: place for place, name in enumerate(TIMINGS) if name}, value=_POINT.timing, else_=0)
    repeatable = case((_POINT.repeatable.is_(True), 1), (_POINT.repeatable.is_(False), 0), else_=2)
    return (status * _CODES[0] + timing) * _CODES[1] + repeatable


class _Layout:
    """The columns to read, and the array of their rows."""

    def __init__(self, metrics: Sequence[Metric] = ()) -> None:
        self.metrics = metrics
        self.columns = (  # of the table; the mapped class would double the time
            _POINT.series_id,
            _POINT.run_id,
            _POINT.environment_id,
            _code(),
            _POINT.median_ms,
            _POINT.error_ppm,
            _POINT.rms,
            _POINT.content,
            *map(_value, metrics),
        )
        self.dtype = np.dtype(
            [
                ("series", np.int32),
                ("run", np.int32),
                ("environment", np.int32),
                ("code", np.int16),
                ("median_ms", np.float64),
                ("error_ppm", np.float32),
                ("rms", np.float64),
                ("content", np.int64),
                *((f"metric {metric.name}", np.float64) for metric in metrics),
            ]
        )
        self.nothing: _Rows = np.zeros(0, dtype=self.dtype)

    def rows(self, session: Session, condition: ColumnElement[bool]) -> _Rows:
        """Return the points that meet a condition."""
        result: Any = session.execute(select(*self.columns).where(condition))
        with result:  # the driver's cursor gives plain tuples, with None for missing numbers
            return np.fromiter(result.cursor, dtype=self.dtype)


def _value(metric: Metric) -> ColumnElement[float]:
    """Return SQL for the stored value of a metric."""
    if metric.column is not None:
        return _POINT[metric.column]
    return _POINT.metrics[metric.name].as_float()


_Rows = NDArray[Any]
"""An array [p] of a layout's rows."""


def recent_points(
    session: Session,
    n: int,
    *,
    line: CommitLine | None = None,  # the runs that count; None for all runs by time
    series: Collection[int] | None = None,  # keys of the series to read; None for all
    metrics: Sequence[Metric] = (),  # further metrics to read
) -> Recent:
    """Return the `n` newest points of every series, in the order of the line, without copies of samples."""
    newest = list(session.scalars(select(Run.id).order_by(*NEWEST_FIRST)) if line is None else line.runs)
    rank, commit = _ranks_and_commits(session, newest)
    wanted = _wanted(session, series)
    layout = _Layout(metrics)
    counts = np.zeros(len(wanted), dtype=np.int64)

    few = wanted.sum() <= _BY_KEY * (len(wanted) - 1)
    copies = _Copies(commit, newest)
    if few and not copies.possible:
        return _joined(layout, [_on_line(session, layout, np.flatnonzero(wanted).tolist(), rank)], rank, n, 0)
    by_run = _by_run(session, layout, np.flatnonzero(wanted).tolist(), rank) if few else {}
    blocks: list[_Rows] = []
    unfinished = int(wanted.sum())
    for place, run in enumerate(newest):
        if unfinished == 0 or (place >= n and unfinished <= _BY_KEY * wanted.sum()):
            break
        if few:
            block = by_run.get(run, layout.nothing)
        else:
            block = _where(layout.rows(session, _POINT.run_id == run), wanted)
        block = copies.without(block)
        if len(block):
            blocks.append(block)
            counts[block["series"]] += 1
            unfinished -= int((counts[block["series"]] == n).sum())  # a series has one point in a run
    else:
        return _joined(layout, blocks, rank, n, copies.number)

    stragglers = wanted & (counts < n)
    if stragglers.any():
        blocks = [_where(block, ~stragglers) for block in blocks]
        rest = _by_run(session, layout, np.flatnonzero(stragglers).tolist(), rank)
        older = _Copies(commit, newest)
        blocks += [older.without(rest[run]) for run in newest if run in rest]
    return _joined(layout, blocks, rank, n, copies.number)


def _ranks_and_commits(session: Session, newest: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each run's key its place on the line, -1 if it is not on it, and the key of its commit."""
    size = (session.scalar(select(func.max(Run.id))) or 0) + 1
    rank, commit = np.full(size, -1, dtype=np.int64), np.zeros(size, dtype=np.int64)
    rank[newest] = np.arange(len(newest))
    for run, of_run in session.execute(select(Run.id, Run.commit_id)):
        commit[run] = of_run
    return rank, commit


def _wanted(session: Session, series: Collection[int] | None) -> NDArray[np.bool_]:
    """Return for each series' key whether it is to be read."""
    top = session.scalar(select(func.max(Series.id))) or 0
    wanted = np.zeros(top + 1, dtype=bool)
    wanted[list(session.scalars(select(Series.id)) if series is None else series)] = True
    return wanted


def _by_run(session: Session, layout: _Layout, series: Sequence[int], rank: NDArray[np.int64]) -> dict[int, _Rows]:
    """Return every point of some series by run, for the runs on the line."""
    rows = _on_line(session, layout, series, rank)
    rows = rows[np.argsort(rows["run"], kind="stable")]
    return {int(rows["run"][start]): rows[start:end] for start, end in pairwise(_starts(rows["run"]).tolist())}


def _on_line(session: Session, layout: _Layout, series: Sequence[int], rank: NDArray[np.int64]) -> _Rows:
    """Return every point of some series in the runs on the line."""
    blocks = [layout.rows(session, _POINT.series_id.in_(keys)) for keys in chunks(series, _CHUNK)]
    rows = np.concatenate([layout.nothing, *blocks])
    return rows[rank[rows["run"]] >= 0]


class _Copies:
    """Finds copies of measurements: the same samples of one commit in the same environment.

    Two measurements never agree in every sample. Results without samples, such as an accuracy alone, may repeat.
    """

    def __init__(self, commit: NDArray[np.int64], runs: Sequence[int]) -> None:
        self._commit = commit  # of each run
        self._repeated = np.bincount(commit[runs]) > 1  # commits that several runs measured
        self._seen: dict[int, NDArray[np.int64]] = {}  # contents in order, by commit
        self.number = 0

    @property
    def possible(self) -> bool:
        """Whether several runs measured a commit."""
        return bool(self._repeated.any())

    def without(self, block: _Rows) -> _Rows:
        """Return the rows of one run without copies of earlier runs. The content hash includes the series."""
        commit = int(self._commit[block["run"][0]]) if len(block) else 0
        if not len(block) or not self._repeated[commit]:
            return block
        seen = self._seen.get(commit)
        if seen is not None:
            place = np.minimum(np.searchsorted(seen, block["content"]), len(seen) - 1)
            copied = (seen[place] == block["content"]) & ~np.isnan(block["median_ms"])
            self.number += int(copied.sum())
            block = block[~copied] if copied.any() else block
        contents = block["content"] if seen is None else np.concatenate([seen, np.sort(block["content"])])
        self._seen[commit] = np.sort(contents, kind="stable")  # merges sorted parts in linear time
        return block


def _where(block: _Rows, keys: NDArray[np.bool_]) -> _Rows:
    """Return the rows whose series is marked in `keys`."""
    keep = keys[block["series"]]
    return block if keep.all() else block[keep]


def _joined(layout: _Layout, blocks: list[_Rows], rank: NDArray[np.int64], n: int, copies: int) -> Recent:
    """Return the newest `n` rows of each series. rank: [runs] place of each run from the newest."""
    blocks = [layout.nothing, *blocks]

    def column(name: str) -> NDArray[Any]:  # one at a time: all of them are large
        return np.concatenate([block[name] for block in blocks])

    run, series = column("run"), column("series")
    order = np.lexsort((rank[run] if len(run) else run, series))
    ordered = series[order]
    starts = _starts(ordered)
    order = order[np.arange(len(ordered)) - np.repeat(starts[:-1], np.diff(starts)) < n]
    series = series[order]
    starts = _starts(series)
    code, repeatable = np.divmod(column("code")[order], _CODES[1])
    status, timing = np.divmod(code, _CODES[0])
    return Recent(
        series=series[starts[:-1]].astype(np.int64),
        starts=starts,
        run=run[order].astype(np.int64),
        environment=column("environment")[order].astype(np.int64),
        status=status.astype(np.int8),
        timing=timing.astype(np.int8),
        median_ms=column("median_ms")[order],
        error=column("error_ppm")[order].astype(np.float64) / PPM,
        rms=column("rms")[order],
        repeatable=np.where(repeatable == 2, -1, repeatable).astype(np.int8),
        further={metric.name: column(f"metric {metric.name}")[order] for metric in layout.metrics},
        copies=copies,
    )


def _starts(ordered: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the start of each group of equal keys, and the length at the end."""
    if not len(ordered):
        return np.zeros(1, dtype=np.int64)
    return np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1, [len(ordered)]]).astype(np.int64)
