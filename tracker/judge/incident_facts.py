"""Read the facts about a night's changes that show their causes, for `incidents.group`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.metrics import LATENCY
from groupbench.tracker.judge.incidents import NOISE, Change, files_of, group
from groupbench.tracker.judge.pasts import codes_of
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.rows import RunRow
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import LoadedList

Place = tuple[int, int, int]
"""Series, and the runs before and after a change."""


class Cause(NamedTuple):
    """Rows with one likely cause, and the changed files that their processes loaded."""

    rows: list[Judged]
    files: frozenset[str]


def causes_of(
    session: Session, rows: Sequence[Judged], unchanged: Iterable[Judged] = (), *, by_surroundings: bool = True
) -> list[Cause]:
    """Return rows that changed by their likely causes, the most frequent first.

    Args:
        session: The database.
        rows: Rows that changed.
        unchanged: Rows that did not: a file that changed under them as well explains less.
        by_surroundings: A change of the toolchain or machine is another cause than the code.
    """
    runs = {run for row in rows for run in _runs(row)}
    order = {run: place for place, run in enumerate(sorted(runs, key=lambda run: run.order))}
    places = [place for row in rows if (place := _place(row)) is not None]
    files = changed_files(session, places)
    ends = [(base, head) for _, base, head in places]
    base, head = max(sorted(set(ends)), key=ends.count, default=(0, 0))  # the most common runs
    still = {row.series.pk for row in unchanged} - {row.series.pk for row in rows}
    quiet = changed_files(session, [(series, base, head) for series in sorted(still)] if places else ())

    def change(key: int, row: Judged) -> Change:
        place, ran, (size, noise) = _place(row), sorted(order[run] for run in _runs(row)), _size(row)
        return Change(
            key=key,
            kernel=(row.series.operator, row.series.backend),
            effect=size,
            first=ran[0] if len(ran) > 1 else None,
            last=ran[-1] if ran else 0,
            surroundings=_surroundings(row) if by_surroundings else "",
            worse=not row.better,
            wrong=row.what == "result",
            files=files.get(place, frozenset()) if place else frozenset(),
            commit=row.span.commit if row.span is not None and row.span.named else None,
            noise=noise,
            metric=row.what or "",
            exact=row.what != LATENCY.name and (row.metric is None or row.metric.rule != "scatter"),
            series=row.series.pk,
        )

    of_key: dict[Hashable, Judged] = dict(enumerate(rows))
    groups = group(itertools.starmap(change, enumerate(rows)), list(quiet.values()))
    return [Cause([of_key[each.key] for each in of_cause], files_of(of_cause)) for of_cause in groups]


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
