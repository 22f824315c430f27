"""What A/B runs said, kept: each comparison of two commits for one series, and which of them speaks of a change."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.environment import digest
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import ABComparison, Series

SAME, DIFFERENT, UNKNOWN, FAILED = "same", "different", "unknown", "failed"
DECIDED = (SAME, DIFFERENT)

_FACTS = ("base", "head", "verdict", "effect", "low", "high", "base_ms", "head_ms", "pairs", "seconds")


@dataclass(frozen=True)
class Compared:
    """An A/B of one series. Effects are log(head / base)."""

    base: str  # hash of the commit
    head: str
    verdict: str  # same, different, unknown, failed
    measured: datetime
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    base_ms: float | None = None
    head_ms: float | None = None
    pairs: int | None = None
    seconds: float | None = None
    message: str | None = None
    details: dict[str, Any] = field(default_factory=dict)
    pk: int | None = None  # None while it is not stored

    @property
    def decided(self) -> bool:
        return self.verdict in DECIDED

    @property
    def toolchains(self) -> tuple[str, str] | None:
        """The software identities of base and head, where an A/B compared two toolchains with the same code."""
        sides = self.details.get("toolchains")
        return None if sides is None else (str(sides[0]), str(sides[1]))


def store(session: Session, series: int, compared: Compared) -> int:
    """Keep it; gives its key. What is stored already stays as it is."""
    identity = session.scalar(select(Series.identity).where(Series.id == series))
    facts = {name: getattr(compared, name) for name in _FACTS}
    content = content_of(identity, compared)
    known = session.scalar(select(ABComparison.id).where(ABComparison.content == content))
    if known is not None:
        return known
    row = ABComparison(
        content=content,
        series_id=series,
        measured=compared.measured,
        message=compared.message,
        details=compared.details,
        **facts,
    )
    session.add(row)
    session.flush()
    return row.id


def content_of(series: str | None, compared: Compared) -> str:
    """The hash of all that it says of the series of an identity."""
    facts = {name: getattr(compared, name) for name in _FACTS}
    return digest([series, facts, compared.measured.astimezone(UTC), compared.message, compared.details])


def of_series(session: Session, series: Collection[int]) -> dict[int, list[Compared]]:
    """Every comparison of some series, by key, the newest first."""
    found: dict[int, list[Compared]] = {}
    for chunk in chunks(series):
        query = select(ABComparison).where(ABComparison.series_id.in_(chunk))
        for row in session.scalars(query.order_by(ABComparison.measured.desc(), ABComparison.id.desc())):
            found.setdefault(row.series_id, []).append(from_row(row))
    return found


def from_row(row: ABComparison) -> Compared:
    facts = {name: getattr(row, name) for name in _FACTS}
    return Compared(**facts, measured=row.measured, message=row.message, details=row.details, pk=row.id)


def about(
    comparisons: Iterable[Compared],  # of the series, the newest first
    before: Collection[str],  # hashes of commits measured before the change
    after: Collection[str],  # and since
) -> Compared | None:
    """The comparison of two commits that spans a change: the newest that decided, or else the newest."""
    return _decisive(
        one
        for one in comparisons
        if one.toolchains is None and one.base in before and one.head in after and one.base != one.head
    )


def about_toolchains(
    comparisons: Iterable[Compared],  # of the series, the newest first
    before: Collection[str],  # identities of the software that was in use before the change
    after: Collection[str],  # and since
    commits: Collection[str],  # hashes of those whose comparison counts
) -> Compared | None:
    """The comparison of two toolchains that spans a change: the newest that decided, or else the newest."""
    return _decisive(
        one
        for one in comparisons
        if one.toolchains and one.toolchains[0] in before and one.toolchains[1] in after and one.base in commits
    )


def _decisive(comparisons: Iterable[Compared]) -> Compared | None:
    spanning = list(comparisons)
    return next((one for one in spanning if one.decided), spanning[0] if spanning else None)
