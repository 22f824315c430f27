"""Read the facts about a night's changes that show their causes, for `incidents.group`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from functools import cache

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.metrics import LATENCY
from groupbench.tracker.judge.incident_rows import ACTIVE
from groupbench.tracker.judge.incidents import NOISE, Change
from groupbench.tracker.judge.pasts import codes_of
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.rows import RunRow
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import LoadedList

Place = tuple[int, int, int]
"""Series, and the runs before and after a change."""


class Causes:
    """The facts about some rows.

    Args:
        session: The database.
        rows: Rows that changed. Each `Change.key` is a row's number.
    """

    def __init__(self, session: Session, rows: Sequence[Judged]) -> None:
        self.session = session
        self.rows: dict[Hashable, Judged] = {key: row for key, row in enumerate(rows)}  # noqa: C416 # of wider keys
        runs = {run for row in rows for run in _runs(row)}
        self._places = {run: place for place, run in enumerate(sorted(runs, key=lambda run: run.order))}
        self._files = changed_files(session, [place for row in rows if (place := _place(row)) is not None])

    def changes(self) -> list[Change]:
        """Return each row's facts."""
        return [self._change(key, row) for key, row in self.rows.items()]

    def unchanged(self, rows: Iterable[Judged]) -> list[frozenset[str]]:
        """Return the files that changed under other rows between the most common runs."""
        places = [place for row in self.rows.values() if (place := _place(row)) is not None]
        if not places:
            return []
        ends = [(base, head) for _, base, head in places]
        base, head = max(sorted(set(ends)), key=ends.count)
        series = {row.series.pk for row in rows} - {row.series.pk for row in self.rows.values()}
        return list(changed_files(self.session, [(key, base, head) for key in sorted(series)]).values())

    def _change(self, key: Hashable, row: Judged) -> Change:
        alert, span, place = row.alert, row.span, _place(row)
        places = sorted(self._places[run] for run in _runs(row))
        named = span.named[0].commits[-1]["hash"] if span is not None and span.named else None
        size, noise = _size(row)
        joins = alert is not None and alert.incident.state in ACTIVE
        return Change(
            key=key,
            kernel=(row.series.operator, row.series.backend),
            effect=size,
            first=places[0] if len(places) > 1 else None,
            last=places[-1] if places else 0,
            surroundings=_surroundings(row),
            worse=not row.better,
            wrong=row.what == "result",
            files=self._files.get(place, frozenset()) if place else frozenset(),
            commit=named,
            noise=noise,
            incident=alert.incident.pk if alert is not None and joins else None,
            metric=row.what or "",
            exact=row.what != LATENCY.name and (row.metric is None or row.metric.rule != "scatter"),
            series=row.series.pk,
        )


def _size(row: Judged) -> tuple[float | None, float]:
    """Return the size of the change's logarithm, and its standard error: by the A/B if there is one."""
    one, by_history = row.compared, (row.change, row.effect.low, row.effect.high)
    has_ab = one is not None and one.decided and one.effect is not None
    ends = (None if each is None or each <= -1 else math.log1p(each) for each in by_history)
    size, low, high = (one.effect, one.low, one.high) if one is not None and has_ab else ends
    noise = 0.0 if low is None or high is None else (high - low) / 4
    return None if size is None else abs(size), max(noise, NOISE)


def _surroundings(row: Judged) -> str:
    """Return the toolchain or machine that changed, or "" for the code."""
    if row.cause in ("toolchain", "code and toolchain"):
        return "; ".join(row.transition.differences) if row.transition is not None else str(row.cause)
    if row.cause in ("environment", "machine", "infrastructure"):
        return f"machine {'' if row.point is None else row.point.environment.machine}"
    return ""


def _runs(row: Judged) -> tuple[RunRow, ...]:
    """Return the runs at the ends of a row's change; tonight's if it has no ends."""
    if row.span is not None:
        return row.span.ends
    return () if row.point is None else (row.point.run,)


def _place(row: Judged) -> Place | None:
    span = row.span
    return None if span is None or span.base is None else (row.series.pk, span.base.pk, span.head.pk)


def changed_files(session: Session, places: Sequence[Place]) -> dict[Place, frozenset[str]]:
    """Return the loaded files that differ between two runs, for each series.

    Places where these are not known are left out.
    """
    lists: dict[tuple[int, int], int] = {}
    runs = {run for _, base, head in places for run in (base, head)}
    for run in runs:
        lists |= codes_of(session, {series for series, base, head in places if run in (base, head)}, run)
    items = {}
    for chunk in chunks(set(lists.values())):
        for key, stored in session.execute(select(LoadedList.id, LoadedList.items).where(LoadedList.id.in_(chunk))):
            items[key] = stored or {}

    @cache  # most places have the same two lists
    def differences(before: int, after: int) -> frozenset[str]:
        old, new = items[before], items[after]
        return frozenset(file for file in old.keys() | new.keys() if old.get(file) != new.get(file))

    return {
        (series, base, head): differences(lists[series, base], lists[series, head])
        for series, base, head in places
        if (series, base) in lists and (series, head) in lists
    }
