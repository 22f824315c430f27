"""Decisions about runs and series: rejected runs, muted series, removed cells, and limits of the plan.

rejected  the run does not count: it was measured on a disturbed machine
muted     the gate passes the series, unless its result is wrong, until a date
removed   the plan no longer has the cell, so that it is not missing
limit     the smallest relative change of the latency that counts, by the plan
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from sqlalchemy import Subquery, func, select
from sqlalchemy.orm import Session

from groupbench.tracker.store.schema import Decision
from groupbench.tracker.text.wording import date

Kind = Literal["rejected", "muted", "removed", "limit"]
PLAN = "groupbench"
"""Who makes the decisions of the plan."""


@dataclass(frozen=True)
class Muted:
    """A series that is muted.

    Attributes:
        until: The end.
        reason: Why.
    """

    until: datetime
    reason: str | None

    @property
    def text(self) -> str:
        """The note of a muted row."""
        return f"muted until {date(self.until)} UTC" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Decisions:
    """The decisions in force at a time, by series.

    Attributes:
        muted: Muted series.
        removed: Series that the plan no longer has.
        limits: Smallest relative change that counts, of some series.
    """

    muted: Mapping[int, Muted] = field(default_factory=dict)
    removed: frozenset[int] = frozenset()
    limits: Mapping[int, float] = field(default_factory=dict)


def in_force(session: Session, at: datetime) -> Decisions:
    """Return the decisions about series in force at a time."""
    query = select(Decision).where(Decision.ended.is_(None), Decision.series_id.is_not(None)).order_by(Decision.id)
    rows = [(row.series_id, row) for row in session.scalars(query) if row.series_id is not None]
    return Decisions(
        {
            key: Muted(row.until, row.reason)
            for key, row in rows
            if row.kind == "muted" and row.until and at < row.until
        },
        frozenset(key for key, row in rows if row.kind == "removed"),
        {key: row.value for key, row in rows if row.kind == "limit" and row.value is not None},
    )


_REJECTED = (Decision.kind == "rejected", Decision.ended.is_(None))


def rejected(session: Session) -> set[int]:
    """Return the keys of the rejected runs."""
    return {key for key in session.scalars(select(Decision.run_id).where(*_REJECTED)) if key is not None}


def rejections() -> Subquery:
    """Return a table with the rejected runs: the run's key and the reason."""
    reason = func.coalesce(func.max(func.nullif(Decision.reason, "")), "rejected").label("reason")
    return select(Decision.run_id, reason).where(*_REJECTED).group_by(Decision.run_id).subquery()


def decide(
    session: Session,
    kind: Kind,
    at: datetime,
    *,
    run: int | None = None,
    series: int | None = None,
    who: str = PLAN,
    reason: str | None = None,
    value: float | None = None,
    until: datetime | None = None,
) -> None:
    """Store a decision in the place of the one in force of this kind about the same run or series."""
    withdraw(session, kind, at, run=run, series=series)
    row = Decision(kind=kind, run_id=run, series_id=series, at=at, who=who, reason=reason)
    row.value, row.until = value, until
    session.add(row)
    session.flush()


def withdraw(session: Session, kind: Kind, at: datetime, *, run: int | None = None, series: int | None = None) -> bool:
    """Withdraw the decision in force of a kind about a run or a series. Returns whether there was one."""
    about = Decision.run_id == run if run is not None else Decision.series_id == series
    rows = list(session.scalars(select(Decision).where(Decision.kind == kind, about, Decision.ended.is_(None))))
    for row in rows:
        row.ended = at
    session.flush()
    return bool(rows)
