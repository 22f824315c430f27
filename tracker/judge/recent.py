"""Read the newest results of every series at once, as arrays for the gate.

Points are stored on disk in the order of ingestion, so the newest points of all series are adjacent. Runs are read
from the newest back until nearly every series has enough points. The few remaining series are then read by key, and so
are all if only a few are asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
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
    """Points by series, oldest first. Point i of series s is at `starts[s] + i`.

    Attributes:
        series: Keys [s], ascending.
        starts: Start of each series [s + 1]; the last entry is the number of points.
        columns: Arrays [p] by name, as in `store.columns`, NaN for unknown numbers. Instead of codes, they have the
            places of status and timing, `repeatable` as 1, 0 or -1 if unknown, and the `error` of log(median_ms).
            Points with one environment identity may have several environments.
        copies: Number of results ignored: the same samples are stored under a newer run of the commit.
    """

    series: NDArray[np.int64]
    starts: NDArray[np.int64]
    columns: Columns
    copies: int = 0


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
    wanted = np.zeros((session.scalar(select(func.max(Series.id))) or 0) + 1, dtype=bool)
    wanted[list(session.scalars(select(Series.id)) if series is None else series)] = True
    commit = by_key((run, of_run) for run, of_run in session.execute(select(Run.id, Run.commit_id)))
    gathered, scanned, read = _Gathered(metrics), _Copies(commit, newest), _Copies(commit, newest)
    missing = wanted
    if wanted.sum() > _BY_KEY * (len(wanted) - 1):
        every_run = (columns.of_run(session, run, metrics) for run in newest)
        missing = _add(gathered, scanned, every_run, wanted, n, _BY_KEY)
        gathered.remove(missing)
    if missing.any():
        of_run = _by_run(session, metrics, np.flatnonzero(missing).tolist())
        _add(gathered, read, (of_run[run] for run in newest if run in of_run), missing, n)
    return gathered.newest(n, max(scanned.number, read.number))


def _add(
    gathered: _Gathered, copies: _Copies, runs: Iterable[Columns], wanted: NDArray[np.bool_], n: int, share: float = 0.0
) -> NDArray[np.bool_]:
    """Add runs until all wanted series have `n` points, but for a share. Return these series, if runs may be left."""
    missing, counts = wanted, np.zeros(len(wanted), dtype=np.int64)
    for place, run in enumerate(runs, 1):
        block = copies.without(_where(run, wanted[run["series"]]))
        gathered.add(block)
        counts[block["series"]] += 1  # a series has one point in a run
        missing = wanted & (counts < n)
        if not missing.any() or (place >= n and missing.sum() <= share * wanted.sum()):
            return missing
    return np.zeros_like(wanted)


def by_key(pairs: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """Return an array with a number at the place of each key, else 0."""
    items = list(pairs)
    numbers = np.zeros(max((key for key, _ in items), default=0) + 1, dtype=np.int64)
    for key, number in items:
        numbers[key] = number
    return numbers


def _by_run(session: Session, metrics: Sequence[Metric], series: Sequence[int]) -> dict[int, Columns]:
    """Return the points of some series by run."""
    read = [columns.of_points(session, columns.POINT.series_id.in_(keys), metrics) for keys in chunks(series, _CHUNK)]
    rows = {name: np.concatenate([block[name] for block in read]) for name in read[0]}
    rows = _where(rows, np.argsort(rows["run"], kind="stable"))
    return {
        int(rows["run"][start]): {name: array[start:end] for name, array in rows.items()}
        for start, end in pairwise(_starts(rows["run"]).tolist())
    }


class _Copies:
    """Finds copies of measurements: the same samples of one commit in the same environment.

    Two measurements never agree in every sample. Results without samples, such as an accuracy alone, may repeat.
    """

    def __init__(self, commit: NDArray[np.int64], runs: Sequence[int]) -> None:
        self._commit = commit  # of each run
        self._repeated = np.bincount(commit[runs]) > 1  # commits that several runs measured
        self._seen: dict[int, NDArray[np.int64]] = {}  # contents in order, by commit
        self.number = 0

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
        order = len(self._array("series")) - 1 - np.argsort(self._array("series")[::-1], kind="stable")
        starts = _starts(self._array("series")[order])
        if len(order) and np.diff(starts).max() > n:
            order = order[np.repeat(starts[1:], np.diff(starts)) - np.arange(len(order)) <= n]
            starts = _starts(self._array("series")[order])
        of: Columns = {}
        for name in self._types:
            of[name] = self._array(name)[order]
            del self._bytes[name]
        keys = of.pop("series")[starts[:-1]].astype(np.int64)
        code, repeatable = np.divmod(of.pop("code"), CODES[1])
        of["status"], of["timing"] = (each.astype(np.int8) for each in np.divmod(code, CODES[0]))
        of["repeatable"] = np.where(repeatable == 2, -1, repeatable).astype(np.int8)
        of["error"] = of.pop("error_ppm").astype(np.float64)
        of["error"] /= PPM
        return Recent(keys, starts, of, copies)


def _starts(ordered: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the start of each group of equal keys, and the length at the end."""
    if not len(ordered):
        return np.zeros(1, dtype=np.int64)
    return np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1, [len(ordered)]]).astype(np.int64)
