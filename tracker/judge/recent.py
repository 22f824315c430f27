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
from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.metrics import Metric
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.store import columns
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.columns import CODES, Columns
from groupbench.tracker.store.points import PPM
from groupbench.tracker.store.schema import NEWEST_FIRST, Run, Series

_BY_KEY = 0.03
"""Share of the series to read by key instead of scanning runs: a key takes the time of some fifty points of a scan."""
_CHUNK = 200


@dataclass(frozen=True)
class Recent:
    """Points by series, newest first. Point i of series s is at `starts[s] + i`.

    `run` and `environment` are table keys. Points with one environment identity may have several environments.
    """

    series: NDArray[np.int64]  # [s] keys, ascending
    starts: NDArray[np.int64]  # [s + 1] start of each series; the last entry is the number of points
    run: NDArray[np.int32]  # [p] key
    environment: NDArray[np.int32]  # [p] key
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
    counts = np.zeros(len(wanted), dtype=np.int64)
    few = wanted.sum() <= _BY_KEY * (len(wanted) - 1)
    copies, gathered = _Copies(commit, newest), _Gathered(metrics)
    if few:
        rows = _on_line(session, metrics, np.flatnonzero(wanted).tolist(), rank)
        if not copies.possible:
            gathered.add(rows)
            return gathered.newest(n, 0)
        by_run = _by_run(rows)
    unfinished = int(wanted.sum())
    for place, run in enumerate(newest):
        if unfinished == 0 or (place >= n and unfinished <= _BY_KEY * wanted.sum()):
            break
        if few and run not in by_run:
            continue
        block = by_run[run] if few else columns.of_run(session, run, metrics)
        block = copies.without(_where(block, wanted[block["series"]]))
        gathered.add(block)
        counts[block["series"]] += 1
        unfinished -= int((counts[block["series"]] == n).sum())  # a series has one point in a run
    else:
        return gathered.newest(n, copies.number)

    stragglers = wanted & (counts < n)
    if stragglers.any():
        gathered.remove(stragglers)
        rest = _by_run(_on_line(session, metrics, np.flatnonzero(stragglers).tolist(), rank))
        older = _Copies(commit, newest)
        for run in newest:
            if run in rest:
                gathered.add(older.without(rest[run]))
    return gathered.newest(n, copies.number)


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


def _by_run(rows: Columns) -> dict[int, Columns]:
    """Return points by run."""
    rows = _where(rows, np.argsort(rows["run"], kind="stable"))
    return {
        int(rows["run"][start]): {name: array[start:end] for name, array in rows.items()}
        for start, end in pairwise(_starts(rows["run"]).tolist())
    }


def _on_line(session: Session, metrics: Sequence[Metric], series: Sequence[int], rank: NDArray[np.int64]) -> Columns:
    """Return some series' points in the runs on the line, the newest first."""
    rows = columns.nothing()
    read = [columns.of_points(session, columns.POINT.series_id.in_(keys), metrics) for keys in chunks(series, _CHUNK)]
    if read:
        rows = {name: np.concatenate([block[name] for block in read]) for name in read[0]}
    rows = _where(rows, rank[rows["run"]] >= 0)
    return _where(rows, np.argsort(rank[rows["run"]], kind="stable"))


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

    def without(self, block: Columns) -> Columns:
        """Return the columns of one run without copies of earlier runs. The content hash includes the series."""
        commit = int(self._commit[block["run"][0]]) if len(block["run"]) else 0
        content = block.pop("content")
        if not len(content) or not self._repeated[commit]:
            return block
        seen = self._seen.get(commit)
        if seen is not None:
            place = np.minimum(np.searchsorted(seen, content), len(seen) - 1)
            copied = (seen[place] == content) & ~np.isnan(block["median_ms"])
            self.number += int(copied.sum())
            block, content = _where(block, ~copied), content[~copied]
        contents = content if seen is None else np.concatenate([seen, np.sort(content)])
        self._seen[commit] = np.sort(contents, kind="stable")  # merges sorted parts in linear time
        return block


def _where(block: Columns, keep: NDArray[Any]) -> Columns:
    """Return some points: by a mask, or by their places."""
    if keep.dtype == bool and keep.all():
        return block
    return {name: array[keep] for name, array in block.items()}


class _Gathered:
    """Many runs' points, the newest first: one growing buffer for each column, so freed ones leave no gaps."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics
        self._types = {name: array.dtype for name, array in columns.nothing().items() if name != "content"}
        self._types |= {columns.key(metric): np.dtype(np.float64) for metric in metrics}
        self._bytes = {name: bytearray() for name in self._types}

    def add(self, block: Columns) -> None:
        for name, kind in self._types.items():
            self._bytes[name] += block[name].data if name in block else np.full(len(block["run"]), np.nan, kind).data

    def remove(self, series: NDArray[np.bool_]) -> None:
        """Remove the marked series' points, by key."""
        keep = ~series[self._array("series")]
        for name in self._types:
            self._bytes[name] = bytearray(self._array(name)[keep].data)

    def _array(self, name: str) -> NDArray[Any]:
        return np.frombuffer(self._bytes[name], self._types[name])

    def newest(self, n: int, copies: int) -> Recent:
        """Return each series' newest `n` points, and forget all."""
        order = np.argsort(self._array("series"), kind="stable")
        series = self._array("series")[order]
        starts = _starts(series)
        if len(series) and np.diff(starts).max() > n:
            order = order[np.arange(len(order)) - np.repeat(starts[:-1], np.diff(starts)) < n]
            series = self._array("series")[order]
            starts = _starts(series)

        def column(name: str) -> NDArray[Any]:
            array = self._array(name)[order]
            del self._bytes[name]
            return array

        keys = series[starts[:-1]].astype(np.int64)
        code, repeatable = np.divmod(column("code"), CODES[1])
        status, timing = (each.astype(np.int8) for each in np.divmod(code, CODES[0]))
        error = column("error_ppm").astype(np.float64)
        error /= PPM
        return Recent(
            series=keys,
            starts=starts,
            run=column("run"),
            environment=column("environment"),
            status=status,
            timing=timing,
            median_ms=column("median_ms"),
            error=error,
            rms=column("rms"),
            repeatable=np.where(repeatable == 2, -1, repeatable).astype(np.int8),
            further={metric.name: column(columns.key(metric)) for metric in self._metrics},
            copies=copies,
        )


def _starts(ordered: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the start of each group of equal keys, and the length at the end."""
    if not len(ordered):
        return np.zeros(1, dtype=np.int64)
    return np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1, [len(ordered)]]).astype(np.int64)
