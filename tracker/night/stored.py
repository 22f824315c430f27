"""Find past commits whose cells the database holds already, so that a backfill does not measure them again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import TOOLCHAIN, declared, hardware_class
from groupbench.tracker.facts.identity import OF_PROBLEM
from groupbench.tracker.facts.record import MEASURED, Cell, Environment, Record
from groupbench.tracker.query.points import points_of_run
from groupbench.tracker.query.rows import PointRow, RunRow, SeriesRow
from groupbench.tracker.query.runs import run_row, run_select
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import NEWEST_FIRST, Commit, Run


def runs_of_plan(session: Session, plan: str, commits: Iterable[str]) -> list[RunRow]:
    """Return the runs of a plan on clean trees of these commits, newest first."""
    clean = select(Run.id).join(Commit).where(Run.plan == plan, Run.dirty.is_(False))
    keys = [key for chunk in chunks(commits) for key in session.scalars(clean.where(Commit.hash.in_(chunk)))]
    query = run_select().order_by(*NEWEST_FIRST)
    rows = [row for chunk in chunks(keys) for row in session.execute(query.where(Run.id.in_(chunk)))]
    return [run_row(row) for row in rows]


def measured_by(session: Session, runs: Iterable[RunRow], planned: Sequence[Record]) -> dict[str, RunRow]:
    """Return by commit the newest run that has a result for every planned problem, in the environment of the plan.

    Args:
        planned: A record for every cell of the plan; backends do not count, because old commits may have others.
    """
    problems = {_problem(record.cell, record.environment) for record in planned}
    newest: dict[str, RunRow] = {}
    for run in runs:
        if run.commit not in newest and problems and _is_complete(points_of_run(session, run), problems):
            newest[run.commit] = run
    return newest


def _is_complete(points: Sequence[PointRow], problems: set[tuple[object, ...]]) -> bool:
    """Return whether a run has all problems. Without any result, the commit did not build or load."""
    statuses = {point.status for point in points}
    measured = {_problem(point.series, point.environment.facts) for point in points}
    return "skipped" not in statuses and not statuses.isdisjoint(MEASURED) and problems <= measured


def _problem(cell: Cell | SeriesRow, environment: Environment) -> tuple[object, ...]:
    """Return what two measurements share if the second adds nothing: the problem, the hardware and the toolchain."""
    versions = declared(environment)
    return (
        *(getattr(cell, name) for name in OF_PROBLEM),
        hardware_class(environment),
        *(versions.get(name) for name in TOOLCHAIN),
    )
