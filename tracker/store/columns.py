"""The point values that the gate compares, as arrays, and a copy for each run in one row.

A run of 20,000 points is read in two milliseconds from its copy, and in forty from its points. Triggers remove a copy
when one point changes (`schema.make_triggers`), so no copy is ever stale; then the points are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, case, delete, func, insert, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.metrics import Metric, judged
from groupbench.tracker.facts.record import STATUSES
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import NEWEST_FIRST, Point, Run, RunColumns, Series, table_of

TIMINGS = (None, "gpu", "cpu", "interpreted")
"""None for points without a latency."""
CODES = (len(TIMINGS), 3)
"""Number of codes for timing and repeatable, which share an integer with status."""
COPIED = 128
"""Points for each series, on average, that have a copy: as many as a gate compares, and more."""

Columns: TypeAlias = dict[str, NDArray[Any]]
"""Arrays [p] by name, those of further metrics by `key`. A metric that no point has is missing."""

POINT = table_of(Point).columns
_COPY = table_of(RunColumns)
_TYPES = {
    "series": np.int32, "run": np.int32, "environment": np.int32, "code": np.int16, "median_ms": np.float64,
    "error_ppm": np.float32, "rms": np.float64, "content": np.int64,
}  # fmt: skip


def _code() -> Any:
    """Return SQL that encodes status, timing and repeatable as one integer.

    Reading them as two million texts would take longer than everything else.
    """
    status = case({name: place for place, name in enumerate(STATUSES)}, value=POINT.status)
    timing = case({name: place for place, name in enumerate(TIMINGS) if name}, value=POINT.timing, else_=0)
    repeatable = case((POINT.repeatable.is_(True), 1), (POINT.repeatable.is_(False), 0), else_=2)
    return (status * CODES[0] + timing) * CODES[1] + repeatable


def key(metric: Metric) -> str:
    """Return a further metric's column name."""
    return f"metric {metric.name}"


def _value(metric: Metric) -> ColumnElement[float]:
    """Return SQL for the stored value of a metric."""
    if metric.column is not None:
        return POINT[metric.column]
    value: ColumnElement[float] = POINT.metrics[metric.name].as_float()
    return value


def nothing() -> Columns:
    """Return empty columns."""
    return {name: np.zeros(0, dtype=kind) for name, kind in _TYPES.items()}


def of_points(session: Session, condition: ColumnElement[bool], metrics: Sequence[Metric] = ()) -> Columns:
    """Return the points that meet a condition as columns."""
    dtype = np.dtype([*_TYPES.items(), *((key(metric), np.float64) for metric in metrics)])
    query = select(  # of the table; the mapped class would double the time
        POINT.series_id, POINT.run_id, POINT.environment_id, _code(), POINT.median_ms, POINT.error_ppm,
        POINT.rms, POINT.content, *map(_value, metrics),
    )  # fmt: skip
    result: Any = session.execute(query.where(condition))
    with result:  # the driver's cursor gives plain tuples, with None for missing numbers
        rows = np.fromiter(result.cursor, dtype=dtype)
    return {name: np.ascontiguousarray(rows[name]) for name in dtype.names or ()}


def of_run(session: Session, run: int, metrics: Sequence[Metric] = ()) -> Columns:
    """Return a run's columns, from the copy if there is one with the metrics."""
    data = session.scalar(select(_COPY.c.data).where(_COPY.c.id == run))
    copied = None if data is None else unpacked(data, run, list(map(key, metrics)))
    return of_points(session, POINT.run_id == run, metrics) if copied is None else copied


def packed(columns: Columns, read: Sequence[str]) -> bytes:
    """Return one run's columns as bytes: their size, names and types as JSON, and the arrays.

    Args:
        columns: The columns.
        read: All metrics that were looked for, by name. Those that no point has have no column.
    """
    arrays = {name: array for name, array in columns.items() if name != "run"}
    head = len(columns["run"]), read, [(name, array.dtype.str) for name, array in arrays.items()]
    return b"".join([msgspec.json.encode(head), b"\n", *(array.tobytes() for array in arrays.values())])


def unpacked(data: bytes, run: int, metrics: Sequence[str]) -> Columns | None:
    """Return the columns from `packed` with some metrics; None if these were not read for it."""
    head, _, _ = data.partition(b"\n")
    n, read, arrays = msgspec.json.decode(head)
    if not set(metrics) <= set(read):
        return None
    columns, start = {"run": np.full(n, run, dtype=_TYPES["run"])}, len(head) + 1
    for name, kind in arrays:
        if name in _TYPES or name in metrics:
            columns[name] = np.frombuffer(data, kind, n, start)
        start += n * np.dtype(kind).itemsize
    return columns


def differs(session: Session, run: int) -> bool:
    """Return whether a run's copy differs from the points, which only damage can cause. May raise anything then."""
    data = session.scalars(select(_COPY.c.data).where(_COPY.c.id == run)).one()
    read = msgspec.json.decode(data.partition(b"\n")[0])[1]
    metrics = [metric for metric in judged() if key(metric) in read]
    copied, points = unpacked(data, run, read), of_points(session, POINT.run_id == run, metrics)
    assert copied is not None
    missing = np.full(len(points["run"]), np.nan)
    of_copy, order = (np.argsort(each["series"]) for each in (copied, points))
    return any(
        not np.array_equal(copied.get(name, missing)[of_copy], array[order], equal_nan=True)
        for name, array in points.items()
    )


def copy_newest(session: Session) -> None:
    """Copy the newest runs that have no copy, and remove older runs' copies."""
    rest = COPIED * (session.scalar(select(func.count(Series.id))) or 0)
    query = select(Run.id, _COPY.c.points).outerjoin(_COPY, _COPY.c.id == Run.id).order_by(*NEWEST_FIRST)
    old = []
    for run, number in session.execute(query).all():
        if number is None and rest > 0:
            number = _copy(session, run)
        elif number is not None and rest <= 0:
            old.append(run)
        rest -= number or 0
    for chunk in chunks(old):
        session.execute(delete(_COPY).where(_COPY.c.id.in_(chunk)))


def _copy(session: Session, run: int) -> int:
    """Copy a run's points, and return their number."""
    of_run, metrics = POINT.run_id == run, judged()
    found = session.scalars(select(POINT.metrics).where(of_run, POINT.metrics.is_not(None)))
    names = {name for values in found for name in values}
    columns = of_points(session, of_run, [each for each in metrics if each.column or each.name in names])
    number = len(columns["run"])
    data = packed(columns, list(map(key, metrics)))
    session.execute(insert(_COPY).values(id=run, points=number, data=data))
    return number
