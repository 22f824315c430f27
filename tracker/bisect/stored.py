"""The latencies that nights have stored, by which a search chooses the commits to measure first."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.errors import QueryError, StoreError
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.series import find_series
from groupbench.tracker.store.engine import open_store
from groupbench.tracker.store.schema import TIMED_POINT, Commit, Point, Run


def stored_levels(location: str, cell: Mapping[str, Any], ends: tuple[str, str]) -> dict[str, float]:
    """Return the log of a cell's stored latency for each commit; empty unless both ends have results of one series.

    Args:
        location: Path or URL of the database.
        cell: Operator, backend, shape, mode, and perhaps dtype and seed.
        ends: Hashes of GOOD and BAD.
    """
    if "://" not in location and not Path(location).exists():
        return {}
    names = ("operator", "backend", "mode", "dtype", "shape")
    operator, backend, mode, dtype, shape = ((str(cell[name]),) if cell.get(name) else () for name in names)
    where = Filter(operator, backend, mode, dtype, shape)
    try:
        with open_store(location, create=False) as store, store.read() as session:
            series = [row for row in find_series(session, where) if row.seed == cell.get("seed", 0)]
            each = [levels for row in series if set(ends) <= set(levels := _levels(session, row.pk))]
    except (QueryError, StoreError):  # no such series, or a database of which the keeper reports the fault
        return {}
    return max(each, key=len, default={})


def _levels(session: Session, series: int) -> dict[str, float]:
    query = (
        select(Commit.hash, Point.median_ms)
        .join(Run, Run.commit_id == Commit.id)
        .join(Point, Point.run_id == Run.id)
        .where(Point.series_id == series, ~Run.dirty, TIMED_POINT)
    )
    times: dict[str, list[float]] = defaultdict(list)
    for commit, median_ms in session.execute(query):
        if median_ms:
            times[commit].append(math.log(median_ms))
    return {commit: statistics.median(logs) for commit, logs in times.items()}
