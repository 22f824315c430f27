"""Store the decisions of the plan about series: new names, cells that it no longer has, the changes that count."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime

from sqlalchemy.orm import Session

from groupbench.tracker.judge.nights import previous_night, runs_of_night
from groupbench.tracker.project import PlanEntry
from groupbench.tracker.query.lines import FirstParents, line_of
from groupbench.tracker.query.points import points_of_run
from groupbench.tracker.query.rows import RunRow, SeriesRow
from groupbench.tracker.query.series import series_rows
from groupbench.tracker.store import decisions
from groupbench.tracker.store.rename import rename_to


def may_measure(entry: PlanEntry, series: SeriesRow) -> bool:
    """Return whether an entry may have measured a series. Only fields that the entry names rule it out."""
    if entry.operator != series.operator or entry.mode != series.mode or entry.seed != series.seed:
        return False
    if entry.dtypes and series.dtype not in entry.dtypes:
        return False
    if (entry.only and series.backend not in entry.only) or series.backend in entry.skip:
        return False
    return not entry.shapes or bool(entry.suites) or any(_alike(shape, series.shape) for shape in entry.shapes)


def _alike(written: str, canonical: str) -> bool:
    """Return whether a shape may be written as `written` in a plan: all numbers are in the canonical text."""
    numbers = set(re.findall(r"\d+", canonical))
    return set(re.findall(r"\d+", written)) <= numbers


def store_plan(
    session: Session,
    run: RunRow,
    entries: Sequence[PlanEntry],
    now: datetime,
    first_parents: FirstParents | None = None,
    renamed: Mapping[str, str] | None = None,
) -> None:
    """Store the decisions of the plan about a run's series, and about those that it no longer measures."""
    night = runs_of_night(session, run)
    points = [point for each in night for point in points_of_run(session, each)]
    if renamed:
        rename_to(session, {point.series.pk for point in points}, renamed)
    hardware = {point.series.hardware for point in points}
    _, expected = previous_night(session, night, hardware, line_of(session, run, first_parents))
    present = {point.series.pk: point.series for point in points}
    before = decisions.in_force(session, now)
    for key, series in series_rows(session, [key for key in expected if key not in present]).items():
        if key not in before.removed and not any(may_measure(entry, series) for entry in entries):
            decisions.decide(session, "removed", now, series=key)
    for key in before.removed & present.keys():
        decisions.withdraw(session, "removed", now, series=key)
    for key, series in present.items():
        limit = next((entry.min_effect for entry in entries if may_measure(entry, series)), None)
        if limit is None and key in before.limits:
            decisions.withdraw(session, "limit", now, series=key)
        elif limit is not None and before.limits.get(key) != limit:
            decisions.decide(session, "limit", now, series=key, value=limit)
