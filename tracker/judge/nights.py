"""A night is all its runs: of one commit and plan, close in time, on any number of machines, programs and files."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.points import outcomes_of_run
from groupbench.tracker.query.rows import PointOutcome, RunRow
from groupbench.tracker.query.runs import run_rows
from groupbench.tracker.store.decisions import rejected
from groupbench.tracker.store.schema import Commit, Point, Run, Series

CLOSE = timedelta(hours=12)
"""Longest time between two runs of one night."""
IMPORT = "import"
"""Trigger of imported runs. Those without a plan are runs of one plan."""


def runs_of_night(session: Session, run: RunRow) -> list[RunRow]:
    """Return the runs of a run's night that are not newer, the newest, which is the run itself, first."""
    rows = run_rows(session, keys_of_night(session, run)).values()
    earlier = [row for row in rows if row.when <= run.when]
    return sorted(earlier, key=lambda row: row.when, reverse=True)


def keys_of_night(session: Session, run: RunRow) -> set[int]:
    """Return the keys of all runs of a run's night, but for other rejected ones."""
    if run.plan is None and run.trigger != IMPORT:
        return {run.pk}
    commit = select(Commit.id).where(Commit.hash == run.commit).scalar_subquery()
    query = select(Run.id).where(
        Run.commit_id == commit, Run.dirty.is_(run.dirty),
        Run.started >= run.started - CLOSE, Run.started <= run.started + CLOSE,
        Run.plan.is_(None) if run.plan is None else Run.plan == run.plan, Run.trigger == run.trigger,
    )  # fmt: skip
    return set(session.scalars(query)) - (rejected(session) - {run.pk})


def previous_night(
    session: Session, night: Collection[RunRow], hardware: Iterable[str], line: CommitLine
) -> tuple[list[RunRow], dict[int, PointOutcome]]:
    """Return the newest earlier night's runs on a line with any of the hardware, and their outcomes.

    The outcomes are by series. Both are empty without a plan.
    """
    run = next(iter(night))
    if run.plan is None and run.trigger != IMPORT:
        return [], {}
    same = Run.plan.is_(None) & (Run.trigger == IMPORT) if run.plan is None else Run.plan == run.plan
    of_plan = set(session.scalars(select(Run.id).where(same)))
    keys = {each.pk for each in night}
    on_it = select(Point.id).join(Series, Point.series_id == Series.id).where(Series.hardware.in_(list(hardware)))
    for key in line.runs:
        if key in keys or key not in of_plan:
            continue
        # one run at a time, since a list of all runs would read every point
        if session.scalar(on_it.where(Point.run_id == key).limit(1)) is not None:
            runs = [each for each in runs_of_night(session, run_rows(session, [key])[key]) if each.pk not in keys]
            outcomes: dict[int, PointOutcome] = {}
            for each in reversed(runs):
                outcomes.update(outcomes_of_run(session, each))
            return runs, outcomes
    return [], {}
