"""Prune old points: keep everything for some days, then one run a week.

Points at which a history changes stay, whatever their age: the first and last point in each stretch with one
environment, status and timing. So steps, outages and driver changes stay in place, and a series never disappears.

A backfill measures months within a day. Such runs are placed by commit, and count in their commits' weeks: one per week
stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Select, and_, delete, func, or_, select, union
from sqlalchemy.orm import Session

from groupbench.tracker.facts.record import BACKFILL
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import (
    OLDEST_FIRST,
    Alert,
    Commit,
    Environment,
    KernelSet,
    LoadedList,
    Pin,
    Point,
    Run,
    Series,
)

_ALERTS = select(Point.id).join(
    Alert,
    and_(Alert.series_id == Point.series_id, or_(Alert.run_id == Point.run_id, Alert.base_run_id == Point.run_id)),
)
"""The evidence of alerts: the last point before the change and the first after it."""

_PINNED = (
    select(Point.id)
    .join(Run, Point.run_id == Run.id)
    .join(Commit, Run.commit_id == Commit.id)
    .join(Pin, and_(Pin.commit == Commit.hash, Pin.ended.is_(None)))
)
"""The reference of later runs: every point of a pinned commit."""


@dataclass(frozen=True)
class Policy:
    """The ages up to which points are kept."""

    all_days: int = 90  # keep all points younger than this
    every_days: int = 7  # of older ones, keep one run in each such span, counted from Monday 1970-01-05


@dataclass(frozen=True)
class Pruning:
    """The points removed by a policy, and why the rest stays. A point counts under the first reason."""

    points: int
    young: int
    edges: int  # first or last of a stretch with one environment, status and timing
    evidence: int  # referred to by an alert, a pin or the caller
    periodic: int  # the one kept for its span
    remove: NDArray[np.int64]  # keys of points
    before: datetime  # points of runs started earlier are old

    @property
    def removed(self) -> int:
        return len(self.remove)


def plan_pruning(
    session: Session,
    policy: Policy = Policy(),
    *,
    now: datetime | None = None,
    evidence: Sequence[Select[tuple[int]]] = (),  # queries of further keys of points to keep
    order: Sequence[int] = (),  # keys of runs along the history, oldest first; without it, runs are ordered by time
) -> Pruning:
    """Plan a pruning over all points, without changing anything.

    Age is relative to the newest run, or to now if the newest run is in the future. So a database without new runs
    loses nothing, and a clock ahead of time does not age the rest.
    """
    newest = session.scalar(select(func.max(Run.started)))
    now = datetime.now(UTC) if now is None else now
    reference = now if newest is None else min(newest, now)
    before = reference - timedelta(days=policy.all_days)
    runs = _runs(session, order)
    identities = _codes(session.execute(select(Environment.id, Environment.identity)))
    resting: list[Select[Any]] = [_ALERTS, _PINNED, *evidence]
    pinned = np.array(sorted({key for query in resting for key in session.scalars(query)}), dtype=np.int64)

    counts = {"points": 0, "young": 0, "edges": 0, "evidence": 0, "periodic": 0}
    removed: list[NDArray[np.int64]] = []
    keys = session.scalars(select(Series.id).order_by(Series.id))
    query = select(Point.id, Point.series_id, Point.run_id, Point.environment_id, Point.status, Point.timing)
    for chunk in chunks(keys, 1000):
        rows = session.execute(query.where(Point.series_id.between(chunk[0], chunk[-1]))).all()
        if not rows:
            continue
        point, series, run, environment = (np.array([row[i] for row in rows], dtype=np.int64) for i in range(4))
        kinds: dict[tuple[str, str | None], int] = {}
        kind = np.array([kinds.setdefault((row[4], row[5]), len(kinds)) for row in rows], dtype=np.int64)
        by_place = np.lexsort((runs.rank[run], series))
        point, series, run, kind = point[by_place], series[by_place], run[by_place], kind[by_place]
        stretch = np.stack([series, identities[environment[by_place]], kind])
        new = np.any(stretch[:, 1:] != stretch[:, :-1], axis=0)
        edge = np.concatenate([[True], new]) | np.concatenate([new, [True]])
        old = runs.started[run] < before.timestamp()
        span = np.floor((runs.dated[run] - 4 * 86400) / (86400 * policy.every_days))
        good = np.isin(kind, [code for (status, _), code in kinds.items() if status == "ok"])
        keep_of_span = _first_of_each(series, span, good)
        evident = np.isin(point, pinned)
        reasons = {"young": ~old, "edges": edge, "evidence": evident, "periodic": keep_of_span}
        kept = np.zeros(len(point), dtype=bool)
        for name, holds in reasons.items():
            counts[name] += int((holds & ~kept).sum())
            kept |= holds
        counts["points"] += len(point)
        removed.append(point[~kept])
    remove = np.concatenate(removed) if removed else np.zeros(0, dtype=np.int64)
    return Pruning(**counts, remove=np.sort(remove), before=before)


def apply_pruning(session: Session, pruning: Pruning) -> None:
    """Remove the points, and the runs, kernels and environments without remaining points.

    Series and commits stay: series list the measured cells, and commits define the history's order.
    """
    for chunk in chunks(pruning.remove.tolist()):
        session.execute(delete(Point).where(Point.id.in_(chunk)))
    session.execute(delete(Run).where(~select(Point.id).where(Point.run_id == Run.id).exists()))
    used = select(Point.kernels_id).where(Point.kernels_id.is_not(None)).distinct()
    session.execute(delete(KernelSet).where(KernelSet.id.not_in(used)))
    lists = (select(key).where(key.is_not(None)) for key in (Point.code_id, Point.packages_id))
    session.execute(delete(LoadedList).where(LoadedList.id.not_in(union(*lists))))
    session.execute(delete(Environment).where(Environment.id.not_in(select(Point.environment_id).distinct())))


@dataclass(frozen=True)
class _Runs:
    rank: NDArray[np.int64]  # position in the history, by key
    started: NDArray[np.float64]  # seconds since 1970, by key
    dated: NDArray[np.float64]  # the time whose span the run counts in, in seconds since 1970, by key


def _runs(session: Session, order: Sequence[int]) -> _Runs:
    columns = (Run.id, Run.started, Run.trigger, Commit.time)
    rows = list(session.execute(select(*columns).join(Commit).order_by(*OLDEST_FIRST)))
    size = max((row[0] for row in rows), default=0) + 1
    rank, started, dated = np.zeros(size, dtype=np.int64), np.zeros(size), np.zeros(size)
    for place, (key, when, trigger, committed) in enumerate(rows):
        rank[key], started[key] = place, when.timestamp()
        dated[key] = (committed or when).timestamp() if trigger == BACKFILL else started[key]
    rank[list(order)] = np.arange(len(order))
    return _Runs(rank, started, dated)


def _codes(rows: Iterable[tuple[int, str]]) -> NDArray[np.int64]:
    """Return a number for each distinct text, by key."""
    codes_by_text: dict[str, int] = {}
    pairs = [(key, codes_by_text.setdefault(text, len(codes_by_text))) for key, text in rows]
    codes = np.zeros(max((key for key, _ in pairs), default=0) + 1, dtype=np.int64)
    for key, code in pairs:
        codes[key] = code
    return codes


def _first_of_each(
    series: NDArray[np.int64], span: NDArray[np.float64], preferred: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Mark the first preferred point, or else the first, in each series' span.

    Points must be ordered by series and history.
    """
    order = np.lexsort((np.arange(len(series)), ~preferred, span, series))
    firsts = np.ones(len(series), dtype=bool)
    ordered_series, ordered_span = series[order], span[order]
    firsts[1:] = (ordered_series[1:] != ordered_series[:-1]) | (ordered_span[1:] != ordered_span[:-1])
    kept = np.zeros(len(series), dtype=bool)
    kept[order[firsts]] = True
    return kept
