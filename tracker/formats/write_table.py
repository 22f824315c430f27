"""Write points as tables for other programs: CSV without samples, Parquet with them."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import IO, Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.identity import IDENTITY
from groupbench.tracker.facts.metrics import carried
from groupbench.tracker.store.points import AMOUNTS
from groupbench.tracker.store.schema import Commit, Environment, KernelSet, Point, Run, Series
from groupbench.tracker.text.cells import cell_for, formula_safe

COLUMNS: tuple[tuple[str, Any], ...] = (
    ("run", Run.uuid),
    ("started", Run.started),
    ("trigger", Run.trigger),
    ("plan", Run.plan),
    ("commit", Commit.hash),
    ("dirty", Run.dirty),
    ("branch", Commit.branch),
    ("committed", Commit.time),
    ("subject", Commit.subject),
    *((name, getattr(Series, name)) for name in IDENTITY),
    ("flops", Series.flops),
    ("min_bytes", Series.min_bytes),
    ("status", Point.status),
    ("message", Point.message),
    ("baseline", Point.baseline),
    ("timing", Point.timing),
    ("latency_ms", Point.median_ms),
    ("low_ms", Point.low_ms),
    ("high_ms", Point.high_ms),
    ("error", Point.error),
    ("prepare_ms", Point.prepare_ms),
    ("enqueue_ms", Point.enqueue_ms),
    ("rms", Point.rms),
    ("max_abs", Point.max_abs),
    ("worst_block_rms", Point.worst_block_rms),
    ("mismatch", Point.mismatch),
    ("unwritten", Point.unwritten),
    ("repeatable", Point.repeatable),
    ("kernel_hash", KernelSet.hash),
    ("code_hash", Point.code_hash),
    ("packages_hash", Point.packages_hash),
    ("duration_s", Point.duration_s),
    ("environment", Environment.identity),
    ("driver", Environment.driver),
    ("cuda", Environment.cuda),
    ("torch", Environment.torch),
    ("triton", Environment.triton),
    ("helion", Environment.helion),
)
"""(name, column of the database), in the file's order; the metrics that records carry by name follow."""

_AMOUNTS = {name: place for place, (name, _) in enumerate(COLUMNS) if name in AMOUNTS}
"""Columns in which a point's own record may differ from its series."""


def write_csv(session: Session, file: IO[bytes]) -> int:
    """Write one line per point, in the order of runs; return their number. An unknown value is empty.

    Text that a spreadsheet would read as a formula gets an apostrophe.
    """
    text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, lineterminator="\n")
    names = [metric.name for metric in carried()]
    writer.writerow([*(name for name, _ in COLUMNS), *names])
    count = 0
    for *row, metrics in _rows(session, Point.metrics):
        cells = (*row, *_values(metrics, names))
        writer.writerow([cell_for(file, _text(formula_safe(value))) for value in cells])
        count += 1
    text.detach()
    return count


def _rows(session: Session, *further: Any) -> Iterator[Any]:
    columns = [*(column.label(name) for name, column in COLUMNS), *further]
    query = (
        select(Point.amounts, *columns)
        .select_from(Point)
        .join(Run, Point.run_id == Run.id)
        .join(Commit, Run.commit_id == Commit.id)
        .join(Series, Point.series_id == Series.id)
        .join(Environment, Point.environment_id == Environment.id)
        .outerjoin(KernelSet, Point.kernels_id == KernelSet.id)
        .order_by(Point.run_id, Point.id)
    )
    for amounts, *row in session.execute(query.execution_options(yield_per=5000)):
        for name, place in _AMOUNTS.items() if amounts else ():
            row[place] = amounts.get(name, row[place])
        yield row


def _values(metrics: Mapping[str, float] | None, names: Sequence[str]) -> list[float | None]:
    return [(metrics or {}).get(name) for name in names]


def _text(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else value
