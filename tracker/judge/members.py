"""Read incidents' members from the database, and the commits named by searches."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from groupbench.tracker.judge.incident_rows import NOTE, OPEN, IncidentRow, MemberRow, StateChange
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.ancestry import ancestors, commit_order
from groupbench.tracker.query.lines import CommitLine, CommitsBetween, FirstParents, line_of
from groupbench.tracker.query.points import environment_rows
from groupbench.tracker.query.rows import RunRow
from groupbench.tracker.query.runs import run_rows
from groupbench.tracker.query.series import series_rows
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.comparisons import Compared, NamedCommits
from groupbench.tracker.store.schema import ABComparison, Alert, Incident, IncidentEvent, Point
from groupbench.tracker.text.repro import SEARCH_OF
from groupbench.tracker.tools import git

__all__ = ["OPEN", "MemberRow", "contains", "find", "lapsed", "named_in", "number_of_commits"]

_MAX_KEYS = 500
_STORED = ("metric", "cause", "before", "after", "effect", "low", "high", "opened", "ended")
"""Columns that a row has too."""
_OF_INCIDENT = ("identity", "state", "opened", "until_time", "until_commit", "link", "posted")


def find(
    session: Session,
    *,
    keys: Collection[int] | None = None,  # of incidents
    series: Collection[int] | None = None,
    states: Collection[str] | None = None,
    runs: Collection[int] | None = None,  # keys of the first run after the change
    first_parents: FirstParents | None = None,  # ancestry beyond the database, such as git's
    between: CommitsBetween = lambda first, last: None,
) -> list[MemberRow]:
    """Return members ordered by commit, operator and backend, so that those of one change are adjacent."""
    at_run = and_(Point.series_id == Alert.series_id, Point.run_id == Alert.run_id)
    statement = select(Alert, ABComparison, Point.environment_id).order_by(Alert.id)
    statement = statement.outerjoin(ABComparison, Alert.comparison_id == ABComparison.id).outerjoin(Point, at_run)
    if states is not None:
        statement = statement.join(Incident, Alert.incident_id == Incident.id).where(Incident.state.in_(states))
    wanted = [(Alert.incident_id, keys), (Alert.series_id, series), (Alert.run_id, runs)]
    for column, values in wanted:  # a statement binds a limited number: of more, read all rows, and filter them below
        if values is not None and len(values) <= _MAX_KEYS:
            statement = statement.where(column.in_(values))
    stored = [
        each
        for each in session.execute(statement)
        if all(values is None or getattr(each[0], column.key) in values for column, values in wanted)
    ]
    rows = [row for row, _, _ in stored]
    of_series = series_rows(session, {row.series_id for row in rows})
    of_run = run_rows(session, {key for row in rows for key in (row.run_id, row.base_run_id) if key})
    of_incident = _incidents(session, {row.incident_id for row in rows})
    environments = environment_rows(session, {key for _, _, key in stored if key is not None})
    searches = comparisons.named_of_series(session, {row.series_id for row in rows})
    between = cache(between)

    def member(row: Alert, compared: ABComparison | None, environment: int | None) -> MemberRow:
        span = Span(None if row.base_run_id is None else of_run[row.base_run_id], of_run[row.run_id])
        answers = searches.get(row.series_id, [])
        line = line_of(session, span.head, first_parents) if answers else None
        ends = "" if span.base is None else span.base.commit, span.head.commit
        tried = (one.message or "undecided" for one in answers if one.named is None and (one.base, one.head) == ends)
        return MemberRow(
            pk=row.id,
            series=of_series[row.series_id],
            incident=of_incident[row.incident_id],
            span=replace(
                span,
                number=number_of_commits(span, between),
                named=named_in(session, answers, span, row.metric, row.effect, line) if line else (),
            ),
            environment=None if environment is None else environments[environment],
            compared=None if compared is None else comparisons.from_row(compared),
            tried=next(tried, ""),
            **{name: getattr(row, name) for name in _STORED},
        )

    return sorted((member(*each) for each in stored), key=lambda each: each.place)


def _incidents(session: Session, keys: Collection[int]) -> dict[int, IncidentRow]:
    """Return incidents with their events, by key."""
    events: dict[int, list[StateChange]] = {key: [] for key in keys}
    states: dict[int, str] = {}
    rows: dict[int, IncidentRow] = {}
    for chunk in chunks(keys):
        of_chunk = select(IncidentEvent).where(IncidentEvent.incident_id.in_(chunk))
        for event in session.scalars(of_chunk.order_by(IncidentEvent.at, IncidentEvent.id)):
            state = NOTE if states.get(event.incident_id) == event.state else event.state
            events[event.incident_id].append(StateChange(event.at, event.who, state, event.reason))
            states[event.incident_id] = event.state
        for row in session.scalars(select(Incident).where(Incident.id.in_(chunk))):
            facts = {name: getattr(row, name) for name in _OF_INCIDENT}
            rows[row.id] = IncidentRow(pk=row.id, fallback=row.owner, events=tuple(events[row.id]), **facts)
    return rows


def lapsed(session: Session, member: MemberRow, run: RunRow) -> bool:
    """Return whether an expected member has expired at a run: by its date, or because the run contains its commit."""
    incident = member.incident
    if member.state != "expected":
        return False
    if incident.until_time is not None and run.started >= incident.until_time:
        return True
    return incident.until_commit is not None and contains(session, run.commit, incident.until_commit)


def contains(session: Session, commit: str, wanted: str) -> bool:
    """Return whether a commit is another or its descendant: by parents, by git, or else by the stored order."""
    if commit == wanted or wanted in ancestors(session, commit):
        return True
    by_git = git.is_ancestor(wanted, commit)
    if by_git is not None:
        return by_git
    order = [node.hash for node in commit_order(session)]
    return wanted in order and commit in order and order.index(wanted) <= order.index(commit)


# ---- the commits that searches named


def named_in(
    session: Session,
    stored: Sequence[Compared],  # answers of searches in the series, newest first
    span: Span,
    metric: str | None,  # that changed
    change: float | None,  # whose sign the named change has; None if unknown
    line: CommitLine,  # of the span's runs
) -> tuple[NamedCommits, ...]:
    """Return the commits that the newest search in the span named, the largest change first."""
    if span.base is None or not any(_is_of(one, metric, change) for one in stored):
        return ()
    place = {commit: number for number, commit in enumerate(_commits(session, line))}
    inside = [one for one in stored if _is_of(one, metric, change) and _is_inside(one, span, place)]
    together = [one for one in inside if one.measured == inside[0].measured]
    together.sort(key=lambda one: -abs(one.effect or 0.0))
    return tuple(one.named for one in together if one.named is not None)


def number_of_commits(span: Span, between: CommitsBetween) -> int | None:
    """Return the number of commits among which a change is, or None if unknown."""
    if span.base is None or not all(end.state.clean for end in span.ends):
        return None
    commits = between(span.base.commit, span.head.commit)
    return None if commits is None else len(commits)


def _is_of(one: Compared, metric: str | None, change: float | None) -> bool:
    """Return whether a search looked for a change of this metric and found one in this direction."""
    if one.named is None or one.named.metric != SEARCH_OF.get(metric or ""):
        return False
    return change is None or one.effect is None or change * one.effect > 0


def _is_inside(one: Compared, span: Span, place: dict[str, int]) -> bool:
    """Return whether the commits that a search named are between the runs of a span.

    Often none of them was measured. Then the measured commits around them decide.
    """
    assert span.base is not None and one.named is not None
    base, head = span.base.commit, span.head.commit
    if (one.base, one.head) == (base, head):
        return True
    first, last = place.get(base), place.get(head)
    if first is None or last is None:
        return False
    if place.get(one.named.commits[-1]["hash"], -1) in range(first + 1, last + 1):
        return True
    return first <= place.get(one.base, -1) < place.get(one.head, -1) <= last


def _commits(session: Session, line: CommitLine) -> list[str]:
    """Return the commits of a line's runs, oldest first."""
    of_run = run_rows(session, line.runs)
    return list(dict.fromkeys(of_run[run].commit for run in reversed(line.runs) if run in of_run))
