"""A/B results as database rows, by which the gate judges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.ab.result import AbCell, AbResult, timing_of
from groupbench.tracker.facts.environment import ab_software, hardware_class
from groupbench.tracker.facts.errors import QueryError, StoreError
from groupbench.tracker.facts.metrics import finite_or_none
from groupbench.tracker.facts.record import MEASURED, Environment
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.rows import SeriesRow
from groupbench.tracker.query.series import find_series
from groupbench.tracker.stats.thresholds import least_effect
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import DECIDED, SAME, Compared
from groupbench.tracker.store.engine import Store, open_store
from groupbench.tracker.store.schema import Commit, Point, Run


def compared_of(
    result: AbResult,
    base: str,  # hash of the commit
    head: str,
    details: Mapping[str, Any],  # facts about the software of both sides
    message: str | None,
) -> Compared:
    """Return an A/B result for two commits, for the database."""
    sides = ((result.base_accuracy, result.base_hash), (result.head_accuracy, result.head_hash))
    return Compared(
        base=base,
        head=head,
        verdict=result.verdict,
        measured=datetime.now(UTC),
        effect=finite_or_none(result.effect),
        low=finite_or_none(result.low),
        high=finite_or_none(result.high),
        base_ms=finite_or_none(result.base_ms),
        head_ms=finite_or_none(result.head_ms),
        pairs=result.blocks,
        seconds=finite_or_none(result.seconds),
        message=message,
        details={
            "accuracy": [None if accuracy is None else msgspec.to_builtins(accuracy) for accuracy, _ in sides],
            "kernel_hash": [hash_ for _, hash_ in sides],
            "gpu_uuid": result.head_environment.get("gpu_uuid"),
            **({"unchecked": result.unchecked} if result.unchecked else {}),
            **details,
        },
    )


def keep(store: Store, result: AbResult, base: str, head: str) -> int:
    """Store an A/B result for the measured series, and return their number.

    Only a decision counts. "same" is one only if the comparison could have seen the gate's smallest
    relevant change.
    """
    software = software_of(result)
    if result.verdict not in DECIDED or result.effect is None or result.base_ms is None or software is None:
        return 0
    seen = least_effect(result.timing or "", result.base_ms)
    if result.verdict == SAME and (result.min_effect is None or result.min_effect > seen):
        return 0
    compared = compared_of(result, base, head, {"software": software}, result.note)
    with store.write() as session:
        series = _series_of(session, result.cell, hardware_of(result))
        for row in series:
            comparisons.store(session, row.pk, compared)
    return len(series)


class ComparisonKeeper:
    """Stores A/Bs of a search in a database as they finish. If one cannot be stored, reports the first reason.

    Args:
        location: Path or URL of the database.
        say: Prints a line.
        metric: Latency or accuracy, the metric of the search; A/Bs of accuracy alone are not stored.
    """

    def __init__(self, location: str, say: Callable[[str], None], metric: str = "latency") -> None:
        self._location, self._say, self._metric = location, say, metric
        self.stored = 0
        self._exists = "://" in location or Path(location).exists()
        self._failed = False

    def __call__(self, result: AbResult, base: str, head: str) -> None:
        """Store an A/B of the commits with these hashes."""
        if self._metric == "latency":
            self.stored += bool(self._kept(lambda store: keep(store, result, base, head)))

    def name(self, cell: AbCell, hardware: str, answers: Callable[[Collection[str]], Sequence[Compared]]) -> int:
        """Store the search's answers for each measured series, and return the number of series.

        Args:
            cell: The searched cell, and `hardware` where it was measured.
            answers: Maps the commits with results of a series to rows to store.
        """
        return self._kept(lambda store: _name(store, cell, hardware, answers))

    def _kept(self, write: Callable[[Store], int]) -> int:
        if not self._exists:
            return 0
        try:
            with open_store(self._location, create=False) as store:
                return write(store)
        except StoreError as error:
            if not self._failed:
                self._say(f"not every comparison is stored: {error.message}")
            self._failed = True
            return 0


def _name(store: Store, cell: AbCell, hardware: str, answers: Callable[[Collection[str]], Sequence[Compared]]) -> int:
    """Store answers for each series of a search, and return the number of series."""
    with store.write() as session:
        series = _series_of(session, cell, hardware)
        for row in series:
            for answer in answers(_measured(session, row.pk)):
                comparisons.store(session, row.pk, answer)
    return len(series)


def _measured(session: Session, series: int) -> set[str]:
    """Return the commits with a right or wrong result of a series."""
    query = select(Commit.hash).join(Run, Run.commit_id == Commit.id).join(Point, Point.run_id == Run.id)
    return set(session.scalars(query.where(Point.series_id == series, Point.status.in_(MEASURED), ~Run.dirty)))


def software_of(result: AbResult) -> Sequence[dict[str, str]] | None:
    """Return both sides' versions by package, or None if a side did not start."""
    sides = result.base_environment, result.head_environment
    return [ab_software(environment_of(each)) for each in sides] if all(sides) else None


def environment_of(facts: dict[str, Any]) -> Environment:
    return msgspec.convert(facts, Environment, strict=False)


def hardware_of(result: AbResult) -> str:
    """Return where an A/B measured; empty if the head's side did not start."""
    return hardware_class(environment_of(result.head_environment)) if result.head_environment else ""


def _series_of(session: Session, cell: AbCell, hardware: str) -> list[SeriesRow]:
    """Return the series of an A/B's cell on some hardware: none if several shapes match the cell's text."""
    where = Filter((cell.operator,), (cell.backend,), (cell.mode,), (cell.dtype,), (cell.shape,))
    timing: dict[str, Any] = {} if cell.idle_s is None else {"idle_s": cell.idle_s}
    timing |= {"cudagraph": True} if cell.cudagraph else {}
    try:
        series = [
            row
            for row in find_series(session, where)
            if row.seed == cell.seed and row.hardware == hardware and timing_of(row.protocol) == timing
        ]
    except QueryError:  # no series has that name
        return []
    return series if len({row.shape for row in series}) == 1 else []
