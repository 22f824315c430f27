"""The earlier results of each series of a run, as arrays for the statistics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import ab_software
from groupbench.tracker.facts.identity import toolchain_of
from groupbench.tracker.facts.metrics import LATENCY, REPEATABLE, RMS, TINY, Metric
from groupbench.tracker.facts.record import MEASURED, STATUSES, TIMED, Kernel
from groupbench.tracker.judge.causes import Facts
from groupbench.tracker.judge.recent import by_key, recent_points
from groupbench.tracker.judge.toolchain_lines import LineSoftware, in_turns, lines_of
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.loaded import loaded_lists
from groupbench.tracker.query.points import environment_rows
from groupbench.tracker.query.runs import code_of_runs, run_rows
from groupbench.tracker.store import columns
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import KernelSet, Point, Run

_OK = STATUSES.index("ok")

AT_ONCE = 4096
"""Most series in a group: few enough for small arrays."""
MIN_SEGMENT = 4
"""Number of results of a toolchain that make a level of its own."""


@dataclass(frozen=True)
class Past:
    """The good results of one series with the run's timing, oldest first; the run's own is last.

    Several series that were measured in the same runs have one row each in `log` and `error`, [s, n].
    """

    series: int  # 0 for several
    run: NDArray[np.int32]  # [n] keys
    environment: NDArray[np.signedinteger[Any]]  # [n] machine; results with an equal one are comparable
    toolchain: NDArray[np.signedinteger[Any]]  # [n] equal for the same toolchain
    state: NDArray[np.int64]  # [n] equal for the same code and toolchain
    log: NDArray[np.float64]  # [n] logarithm of the value
    error: NDArray[np.float64]  # [n] standard error of the logarithm; NaN if unknown

    def __len__(self) -> int:
        return len(self.run)

    @cached_property
    def alike(self) -> NDArray[np.int64]:
        """The indices [m] of the results on the machine of the last one."""
        return np.flatnonzero(self.environment == self.environment[-1:])

    def where(self, keep: NDArray[Any]) -> Past:
        arrays = {name: getattr(self, name)[..., keep] for name in _ARRAYS}
        return Past(self.series, **arrays)

    def one(self, at: int, series: int) -> Past:
        """Return one series' results."""
        return replace(self, series=series, log=self.log[at], error=self.error[at])

    def on_its_machine(self) -> Past:
        """Return the results on the machine of the last one."""
        return self if len(self.alike) == len(self) else self.where(self.alike)

    def of_its_toolchain(self) -> Past:
        """Return the results of the last one's line, and of the toolchains in use before that line began.

        A toolchain of before that came back after that belongs to this past only if it was in use long enough to be a
        level of its own.
        """
        alike = self.alike
        used = self.toolchain[alike]
        if (used == used[-1:]).all():
            return self
        lines = np.array(lines_of(used.tolist()))
        of_line = lines == lines[-1]
        begin = int(np.argmax(of_line))
        while begin:
            back = set(used[begin:].tolist())
            before = used[:begin].tolist()
            older = (one for one in reversed(before) if one not in back or before.count(one) >= MIN_SEGMENT)
            toolchain = next(older, None)
            if toolchain is None:
                break
            end, begin = begin, before.index(toolchain)
            of_line[begin:end] = used[begin:end] == toolchain
        if of_line.all():
            return self
        keep = np.ones(len(self), dtype=bool)
        keep[alike] = of_line
        return self.where(keep)


_ARRAYS = ("run", "environment", "toolchain", "state", "log", "error")


class Pasts:
    """The newest results along a line of commits, up to the run that ends it. Prepares all series at once."""

    def __init__(
        self,
        session: Session,
        line: CommitLine,
        series: Collection[int],
        window: int,
        metrics: Sequence[Metric] = (),  # further metrics to prepare
    ) -> None:
        points = recent_points(session, window + 1, line=line, series=series, metrics=metrics)
        of = points.columns
        self.copies, self._starts = points.copies, points.starts
        environments = environment_rows(session, np.unique(of["environment"]).tolist())
        machine = coded({key: row.machine for key, row in environments.items()})
        toolchain = coded({key: row.toolchain for key, row in environments.items()})
        self._software = {int(toolchain[key]): ab_software(row.facts) for key, row in environments.items()}
        runs = list(session.execute(select(Run.id, code_of_runs(), Run.plan)))
        code = by_key((key, of_run) for key, of_run, _ in runs)
        self._plans = {key: plan for key, _, plan in runs}
        self._named = coded({key: toolchain_of(plan) for key, _, plan in runs})
        self._place = {key: place for place, key in enumerate(points.series.tolist())}
        self._run = of["run"]
        self._environment, self._toolchain = (codes[of["environment"]] for codes in (machine, toolchain))
        self._code = code * (len(environments) + 1)
        self._ok = of["status"] == _OK
        place = np.repeat(np.arange(len(points.series)), np.diff(points.starts))
        timing = np.zeros(len(points.series), dtype=np.int8)
        timing[place[self._ok]] = of["timing"][self._ok]  # that of the newest good result, which is written last
        self._like_newest = self._ok & (of["timing"] == timing[place])
        ms = of["median_ms"]
        ms[~(ms > 0)] = np.nan
        self._values: dict[Metric, NDArray[Any]] = {LATENCY: ms, RMS: of["rms"], REPEATABLE: of["repeatable"]}
        self._values |= {metric: of[columns.key(metric)] for metric in metrics}
        self._error = of["error"]
        self.runs: list[int] = np.unique(self._run).tolist()

    def latency(self, series: int) -> Past:
        """Return the past of a series' latency."""
        return self.of_its_toolchain(self.latencies.of(series))

    @cached_property
    def latencies(self) -> Table:
        """All comparable latencies, also of toolchains that are measured alternately."""
        return self.table(LATENCY)

    def of_its_toolchain(self, past: Past) -> Past:
        """Return the results of the toolchain of the last one.

        Those of a toolchain that a plan names are one line, whatever is upgraded in it.
        """
        named = self._named[past.run]
        if (named == named[-1:]).all():
            return past.of_its_toolchain()
        return past.where((named == named[-1:]) | (past.environment != past.environment[-1:])).of_its_toolchain()

    def software_of(self, series: int, runs: Collection[int]) -> LineSoftware:
        """Return the software that measured some results of a series, which are on one line."""
        rows = self._rows(series)
        run, used = self._run[rows], self._toolchain[rows]
        lines = lines_of(used.tolist(), self._named[run].tolist(), self._environment[rows].tolist())
        chosen = np.isin(run, list(runs))
        plans = {self._plans[key] for key in run[chosen].tolist()} - {None}
        return LineSoftware(
            name=toolchain_of(plans.pop()) if plans else None,
            software=[self._software[each] for each in np.unique(used[chosen]).tolist()],
            alone=not any(lines),
        )

    def elsewhere(self, series: int) -> set[int]:
        """Return the runs on lines other than the newest result's that are measured alternately with it."""
        rows = self._rows(series)
        alike = np.flatnonzero(self._environment[rows] == self._environment[rows][-1:])
        run, used = self._run[rows][alike], self._toolchain[rows][alike]
        if not len(run):
            return set()
        named = self._named[run]
        same = named == named[-1]
        lines = lines_of(used[same].tolist())
        return set(run[~same].tolist()) | set(run[same][np.isin(lines, list(in_turns(lines)))].tolist())

    def _rows(self, series: int) -> slice:
        place = self._place[series]
        return slice(int(self._starts[place]), int(self._starts[place + 1]))

    def earlier_ok(self, series: int) -> int:
        """Return the number of good results before the run's own, in any timing and environment."""
        return int(self._ok[self._rows(series)][:-1].sum())

    def table(self, metric: Metric) -> Table:
        """Return a metric's results, once: a night may have millions, so their memory is used again.

        A floor is added to values, so that tiny ones hardly count.
        """
        good = self._like_newest if metric.has_own_rule else self._ok
        values = self._values.pop(metric)
        good = good & ((values >= 0) if metric is REPEATABLE else ~np.isnan(values))
        kept = slice(None) if good.all() else good  # a slice copies nothing
        log = values[kept].astype(np.float64, copy=False)
        log += metric.negligible
        np.log(np.maximum(log, TINY, out=log), out=log)
        error = self._error[kept] if metric is LATENCY else None
        starts = np.concatenate([[0], np.cumsum(good)])[self._starts]
        return Table(
            self._place, starts, self._run[kept], self._environment[kept], self._toolchain[kept], self._code, log, error
        )


@dataclass(frozen=True)
class Table:
    """The pasts of all series, concatenated."""

    place: dict[int, int]  # of each series
    starts: NDArray[np.int64]  # [s + 1]
    run: NDArray[np.int32]  # [p]
    environment: NDArray[np.signedinteger[Any]]  # [p]
    toolchain: NDArray[np.signedinteger[Any]]  # [p]
    code: NDArray[np.int64]  # [r] of each run, equal for the same code; `state` is the sum with the toolchain
    log: NDArray[np.float64]  # [p]
    error: NDArray[np.float64] | None  # [p]

    def of(self, series: int) -> Past:
        rows = self._rows(series)
        return self._past(series, rows, rows)

    def _rows(self, series: int) -> slice:
        place = self.place[series]
        return slice(int(self.starts[place]), int(self.starts[place + 1]))

    def _past(self, series: int, rows: Any, of_one: Any) -> Past:
        """Return the results at some rows, maybe for several series; `of_one` are one series' rows."""
        log = self.log[rows]
        error = np.broadcast_to(np.nan, log.shape) if self.error is None else self.error[rows]
        run, environment, toolchain = (each[of_one] for each in (self.run, self.environment, self.toolchain))
        return Past(series, run, environment, toolchain, self.code[run] + toolchain, log, error)

    def _together(self, begin: NDArray[np.int64], n: int) -> Past:
        """Return several series' results; their first rows are given in order."""
        first = slice(int(begin[0]), int(begin[0]) + n)
        if (np.diff(begin) != n).any():
            return self._past(0, begin[:, None] + np.arange(n), first)
        past = self._past(0, slice(first.start, first.start + n * len(begin)), first)  # copies nothing
        shape = len(begin), n
        return replace(past, log=past.log.reshape(shape), error=past.error.reshape(shape))

    def alike(self, series: Sequence[int]) -> Iterator[tuple[NDArray[np.int64], Past]]:
        """Yield the pasts for series that were measured in the same runs and environments, with their places."""
        begin = self.starts[[self.place[key] for key in series]]
        groups: dict[int, list[int]] = {}
        for at in np.argsort(begin).tolist():
            rows = self._rows(series[at])
            equal = hash(tuple(each[rows].tobytes() for each in (self.run, self.environment, self.toolchain)))
            groups.setdefault(equal, []).append(at)
        for group in groups.values():
            rows = self._rows(series[group[0]])
            for start in range(0, len(group), AT_ONCE):
                members = np.array(group[start : start + AT_ONCE])
                yield members, self._together(begin[members], rows.stop - rows.start)

    def moved(self, least: float) -> set[int]:
        """Return the series whose logarithms differ by more than `least`; no other can have changed."""
        long = np.flatnonzero(np.diff(self.starts) > 0)
        if not len(long):
            return set()
        begin = self.starts[:-1][long]  # the others have no points
        spread = np.maximum.reduceat(self.log, begin) - np.minimum.reduceat(self.log, begin)
        return set(np.array(list(self.place), dtype=np.int64)[long[spread > least]].tolist())


@dataclass(frozen=True)
class Turn:
    """The runs between which a series' result became wrong."""

    head: int  # key of the first run with a wrong result
    base: int | None = None  # key of the last run with a correct result, if stored
    ms: float | None = None  # latency at the base
    rms: float | None = None


def turns_wrong(session: Session, line: CommitLine, series: Iterable[int]) -> dict[int, Turn]:
    """Return when each series became wrong, by key, for series that are wrong in the last run of a line.

    Failed and unmeasured cells are not results and do not count.
    """
    rank = {run: place for place, run in enumerate(reversed(line.runs))}
    columns = (Point.series_id, Point.run_id, Point.status, Point.median_ms, Point.timing, Point.rms)
    turns: dict[int, Turn] = {}
    for chunk in chunks(series):
        query = select(*columns).where(Point.series_id.in_(chunk), Point.status.in_(MEASURED))
        right: dict[int, Turn] = {}
        rows = [row for row in session.execute(query) if row.run_id in rank]
        for key, at, status, ms, timing, rms in sorted(rows, key=lambda row: rank[row.run_id]):
            if status == "ok":
                right[key] = Turn(at, at, ms if timing in TIMED else None, rms)
                turns.pop(key, None)
            elif key not in turns:
                turns[key] = replace(right.get(key, Turn(at)), head=at)
    return turns


def facts_at(session: Session, places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Facts]:
    """Return the facts of the points at (series, run). Points that are not stored are left out."""
    wanted = set(places)
    columns = (Point.series_id, Point.run_id, Point.environment_id, KernelSet.hash, KernelSet.kernels)
    query = select(*columns, Point.code_hash, Point.packages_hash)
    query = query.outerjoin(KernelSet, Point.kernels_id == KernelSet.id).where(
        Point.run_id.in_({run for _, run in wanted})
    )
    rows = []
    for chunk in chunks({series for series, _ in wanted}):
        rows += [row for row in session.execute(query.where(Point.series_id.in_(chunk))) if (row[0], row[1]) in wanted]
    runs = run_rows(session, {row[1] for row in rows})
    environments = environment_rows(session, {row[2] for row in rows})
    versions = loaded_lists(session, {row[6] for row in rows if row[6] is not None})
    return {
        (series, run): Facts(
            state=runs[run].state,
            environment=environments[environment].facts,
            kernel_hash=hash_,
            kernels=msgspec.convert(kernels or (), tuple[Kernel, ...]),
            code_hash=code,
            packages=versions.get(packages, {}),
        )
        for series, run, environment, hash_, kernels, code, packages in rows
    }


def codes_of(session: Session, series: Iterable[int], run: int | None = None) -> dict[tuple[int, int], int]:
    """Return the known keys of the code that some series loaded, by series and run: in one run, or in all."""
    query = select(Point.series_id, Point.run_id, Point.code_id).where(Point.code_id.is_not(None))
    query = query if run is None else query.where(Point.run_id == run)
    rows = (row for chunk in chunks(series) for row in session.execute(query.where(Point.series_id.in_(chunk))))
    return {(key, at): code or 0 for key, at, code in rows}


def coded(texts: Mapping[int, str]) -> NDArray[np.signedinteger[Any]]:
    """Return a number for each key, equal for equal texts, in a small type: millions use it."""
    numbers: dict[str, int] = {}
    codes = by_key((key, numbers.setdefault(text, len(numbers))) for key, text in texts.items())
    return codes.astype(np.min_scalar_type(-1 - len(numbers)))
