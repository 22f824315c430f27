"""Store A/B comparisons by series, and find the one across a change.

A search for a commit ends with a row of its own, with the verdict `named`: two measured commits, and the guilty commit
between them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from operator import attrgetter
from typing import Any

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import ABComparison, Series
from groupbench.tracker.text.unchecked import Unchecked

SAME, DIFFERENT, UNKNOWN, FAILED = "same", "different", "unknown", "failed"
NAMED = "named"
UNMEASURED = "unmeasured"
"""Mark in the details of a search's answer: no side could be measured."""
DECIDED = (SAME, DIFFERENT)

_FACTS = ("base", "head", "verdict", "effect", "low", "high", "base_ms", "head_ms", "pairs", "seconds")
_FURTHER = ("measured", "message", "details")


@dataclass(frozen=True)
class NamedCommits:
    """The commit named by a search, or several it could not separate."""

    commits: tuple[dict[str, str], ...]  # hash, subject and author, oldest first
    parent: str  # hash of the commit before them
    metric: str  # latency or accuracy
    confidence: float  # probability that the cause is among the commits


@dataclass(frozen=True)
class Compared:
    """One series' A/B comparison. Effects are log(head / base)."""

    base: str  # hash of the commit
    head: str
    verdict: str  # same, different, unknown, failed, named
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
    pk: int | None = None  # None until stored

    @property
    def decided(self) -> bool:
        return self.verdict in DECIDED

    @property
    def named(self) -> NamedCommits | None:
        """The search answer in this row, if any."""
        facts = self.details.get(NAMED)
        return None if facts is None else NamedCommits(**{**facts, "commits": tuple(facts["commits"])})

    @property
    def software(self) -> tuple[dict[str, str], dict[str, str]] | None:
        """The versions on base and head, by package; None in rows from before these were stored."""
        sides = self.details.get("software")
        return None if sides is None else (sides[0], sides[1])

    @property
    def unchecked(self) -> Unchecked:
        """The checks not made, by side; empty in rows from before these were stored."""
        sides: Unchecked = self.details.get("unchecked", {})
        return sides

    @property
    def toolchain(self) -> str | None:
        """The toolchain in the suspects' plan, as in RunRow.toolchain."""
        return self.details.get("toolchain")

    @property
    def toolchains(self) -> tuple[str, str] | None:
        """The software identities on base and head if the comparison is between toolchains, else None."""
        sides = self.details.get("toolchains")
        return None if sides is None else (str(sides[0]), str(sides[1]))


def store(session: Session, series: int, compared: Compared) -> int:
    """Store a comparison unless it is already stored, and return the key."""
    identity = session.scalar(select(Series.identity).where(Series.id == series))
    content = content_of(identity, compared)
    stored_key = session.scalar(select(ABComparison.id).where(ABComparison.content == content))
    if stored_key is not None:
        return stored_key
    facts = {name: getattr(compared, name) for name in (*_FACTS, *_FURTHER)}
    row = ABComparison(content=content, series_id=series, **facts)
    session.add(row)
    session.flush()
    return row.id


def content_of(series: str | None, compared: Compared) -> str:
    """Return a comparison's content hash, given the series' identity."""
    facts = {name: getattr(compared, name) for name in _FACTS}
    return digest([series, facts, compared.measured.astimezone(UTC), compared.message, compared.details])


def of_series(session: Session, series: Collection[int]) -> dict[int, list[Compared]]:
    """Return all A/Bs by series key, newest first."""
    return _read(session, series, ABComparison.verdict != NAMED)


def named_of_series(session: Session, series: Collection[int]) -> dict[int, list[Compared]]:
    """Return all search answers by series key, newest first."""
    return _read(session, series, ABComparison.verdict == NAMED)


def _read(session: Session, series: Collection[int], condition: ColumnElement[bool]) -> dict[int, list[Compared]]:
    query = select(ABComparison).order_by(ABComparison.measured.desc(), ABComparison.id.desc()).where(condition)
    read = (session.scalars(query.where(ABComparison.series_id.in_(chunk))) for chunk in chunks(series))
    by_series = grouped(chain.from_iterable(read), attrgetter("series_id"))
    return {key: list(map(from_row, rows)) for key, rows in by_series.items()}


def from_row(row: ABComparison) -> Compared:
    return Compared(**{name: getattr(row, name) for name in (*_FACTS, *_FURTHER)}, pk=row.id)


def about(
    comparisons: Iterable[Compared],  # of the series, newest first
    before: Collection[str],  # hashes of commits measured before the change
    after: Collection[str],  # and since
) -> Compared | None:
    """Return the comparison of two commits across a change: the newest decided one, or else the newest."""
    return _decisive(
        one
        for one in comparisons
        if one.toolchains is None and one.base in before and one.head in after and one.base != one.head
    )


def about_toolchains(
    comparisons: Iterable[Compared],  # of the series, newest first
    before: Collection[str],  # software identities in use before the change
    after: Collection[str],  # and since
    commits: Collection[str],  # hashes of commits whose comparisons count
) -> Compared | None:
    """Return the comparison of two toolchains across a change: the newest decided one, or else the newest."""
    return _decisive(
        one
        for one in comparisons
        if one.toolchains and one.toolchains[0] in before and one.toolchains[1] in after and one.base in commits
    )


def _decisive(comparisons: Iterable[Compared]) -> Compared | None:
    spanning = list(comparisons)
    return next((one for one in spanning if one.decided), spanning[0] if spanning else None)
