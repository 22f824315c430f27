"""List the stored series, runs, commits and environments, with counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import environment_differences, hardware_class
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.query import filters
from groupbench.tracker.query.ancestry import commit_order
from groupbench.tracker.query.filters import Filter
from groupbench.tracker.query.patterns import any_pattern, starts
from groupbench.tracker.query.points import environment_rows
from groupbench.tracker.query.resolve import dates, run_conditions
from groupbench.tracker.query.rows import CommitSummary, EnvironmentRow, EnvironmentSummary, RunSummary, SeriesSummary
from groupbench.tracker.query.runs import summaries_of_runs
from groupbench.tracker.query.series import find_series
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import NEWEST_FIRST, Commit, Point, Run
from groupbench.tracker.store.schema import Environment as EnvironmentTable
from groupbench.tracker.text.wording import some


def series(session: Session, where: Filter) -> list[SeriesSummary]:
    """Return the selected series with point counts. Dates and commits select the points to count."""
    by_key = {row.pk: row for row in find_series(session, where)}
    conditions = run_conditions(session, where)
    ok = func.sum(case((Point.status == "ok", 1), else_=0))
    query = (
        select(Point.series_id, func.count(), ok, func.min(Run.started), func.max(Run.started))
        .join(Run, Point.run_id == Run.id)
        .join(Commit, Run.commit_id == Commit.id)
        .where(*conditions)
        .group_by(Point.series_id)
    )
    everything = len(by_key) > 2000  # one pass over all points is faster than many lists of keys
    queries = [query] if everything else [query.where(Point.series_id.in_(chunk)) for chunk in chunks(by_key)]
    counted = {row[0]: row[1:] for each in queries for row in session.execute(each) if row[0] in by_key}
    narrow = bool(conditions)
    rows = [SeriesSummary(row, *counted.get(pk, (0, 0, None, None))) for pk, row in by_key.items()]
    return sorted((row for row in rows if row.points or not narrow), key=lambda row: row.series.sort_key)


def runs(session: Session, limit: int | None = None, where: Filter = Filter()) -> list[RunSummary]:  # noqa: B008
    """Return run summaries, newest first. Only branch, commits and dates in `where` apply."""
    query = select(Run.id).join(Commit).where(*run_conditions(session, where)).order_by(*NEWEST_FIRST).limit(limit)
    return summaries_of_runs(session, list(session.scalars(query)))


def commits(session: Session, where: Filter = Filter(), limit: int | None = None) -> list[CommitSummary]:  # noqa: B008
    """Return summaries for measured commits, newest first. Only branch, commits and dates in `where` apply."""
    conditions = run_conditions(session, where)
    counted: dict[int, dict[str, Any]] = {}
    query = (
        select(
            Run.commit_id,
            func.count(),
            func.sum(case((Run.dirty, 1), else_=0)),
            func.min(Run.started),
            func.max(Run.started),
        )
        .join(Commit)
        .where(*conditions)
        .group_by(Run.commit_id)
    )
    for key, number, dirty, first, last in session.execute(query):
        counted[key] = {"runs": number, "dirty_runs": dirty, "first": first, "last": last}
    place = {hash_: i for i, hash_ in enumerate(node.hash for node in commit_order(session))}
    rows = [row for chunk in chunks(counted) for row in session.scalars(select(Commit).where(Commit.id.in_(chunk)))]
    rows = sorted(rows, key=lambda row: place[row.hash], reverse=True)[:limit]
    points: dict[int, int] = {}
    for chunk in chunks([row.id for row in rows]):
        number = select(Run.commit_id, func.count()).join(Point, Point.run_id == Run.id)
        for key, count in session.execute(
            number.where(Run.commit_id.in_(chunk), *dates(where)).group_by(Run.commit_id)
        ):
            points[key] = count
    return [
        CommitSummary(
            hash=row.hash,
            parents=tuple(row.parents or ()),
            branch=row.branch,
            time=row.time,
            author=row.author,
            subject=row.subject,
            points=points.get(row.id, 0),
            **counted[row.id],
        )
        for row in rows
    ]


def environments(session: Session, where: Filter = Filter()) -> list[EnvironmentSummary]:  # noqa: B008
    """Return environments by hardware, oldest first, each with differences from the one before."""
    query = (
        select(
            Point.environment_id,
            func.count(),
            func.count(Point.run_id.distinct()),
            func.min(Run.started),
            func.max(Run.started),
        )
        .join(Run, Point.run_id == Run.id)
        .join(Commit, Run.commit_id == Commit.id)
        .where(*run_conditions(session, where))
        .group_by(Point.environment_id)
    )
    used = {row[0]: row[1:] for row in session.execute(query)}
    rows = environment_rows(session, used).values()
    groups = grouped(rows, lambda row: (hardware_class(row.facts), row.identity))
    filters.refuse_unknown("hardware", where.hardware, sorted({hardware for hardware, _ in groups}))
    fits = any_pattern(where.hardware) if where.hardware else lambda text: True
    ordered = sorted(groups.items(), key=lambda item: (item[0][0], min(used[row.pk][2] for row in item[1]), item[0][1]))
    summaries: list[EnvironmentSummary] = []
    for (hardware, identity), members in ordered:
        if not fits(hardware):
            continue
        facts = max(members, key=lambda row: used[row.pk][3]).facts
        points, _, first, last = zip(*(used[row.pk] for row in members), strict=True)
        before = summaries[-1] if summaries and summaries[-1].hardware == hardware else None
        summaries.append(
            EnvironmentSummary(
                identity=identity,
                hardware=hardware,
                facts=facts,
                variants=len(members),
                runs=_runs_in(session, [row.pk for row in members], where),
                points=sum(points),
                first=min(first),
                last=max(last),
                differs=tuple(environment_differences(before.facts, facts)) if before else (),
            )
        )
    return summaries


def find_environment(session: Session, text: str) -> EnvironmentRow:
    """Return the environment whose identity starts with `text`, with the newest facts. Raises QueryError."""
    query = select(EnvironmentTable.identity).where(starts(EnvironmentTable.identity, text)).distinct().limit(6)
    identities = list(session.scalars(query)) if text else []
    if not identities:
        raise QueryError(f"no environment {text!r}; `groupbench list envs` lists them")
    if len(identities) > 1:
        raise QueryError(f"environment {text!r} is ambiguous: {some([identity[:12] for identity in identities])}")
    newest = select(func.max(EnvironmentTable.id)).where(EnvironmentTable.identity == identities[0])
    key = session.scalar(newest)
    assert key is not None
    return environment_rows(session, [key])[key]


def _runs_in(session: Session, environments: Sequence[int], where: Filter) -> int:
    query = select(func.count(Point.run_id.distinct())).join(Run, Point.run_id == Run.id)
    query = query.join(Commit, Run.commit_id == Commit.id).where(Point.environment_id.in_(environments))
    return session.scalar(query.where(*run_conditions(session, where))) or 0
