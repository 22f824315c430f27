"""Summarise incidents for the morning: their members, evidence and cost, and the summary of a week."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.record import MEASURED
from groupbench.tracker.judge import members
from groupbench.tracker.judge.incident_rows import ACTIVE, STATES, IncidentRow, MemberRow, names
from groupbench.tracker.judge.members import number_of_commits
from groupbench.tracker.judge.nights import keys_of_night
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.lines import CommitsBetween
from groupbench.tracker.query.resolve import latest_run
from groupbench.tracker.query.rows import RunRow, SeriesRow
from groupbench.tracker.query.runs import run_row, run_select
from groupbench.tracker.query.series import series_rows
from groupbench.tracker.query.traffic import CallsOf
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import NEWEST_FIRST, TIMED_POINT, Commit, Point, Run, Series
from groupbench.tracker.text.wording import commit_text, counted
from groupbench.tracker.tools import git

NO_CALLS = CallsOf()
MOST = 6
"""Most incidents on the first screen, at three lines each."""
ASKED = 100
"""Number of unmeasured series whose last result is looked for."""
GAINED = 0.02
"""Least relative gain of another problem that counts as time moved to the incident."""


def of(session: Session, calls: CallsOf = NO_CALLS, *, asks_git: bool = True, **which: Any) -> list[IncidentRow]:
    """Return incidents with their members, the most expensive first.

    Args:
        calls: Calls in a model's step. Without any, the cost is a share of the night's latencies.
        asks_git: Ask git in the present folder for commits missing in the database.
        which: Which members, as for `members.find`.
    """

    def between(first: str, last: str) -> Collection[str] | None:
        commits = git.between(first, last) if asks_git else None
        parents = session.scalar(select(Commit.parents).where(Commit.hash == last)) if commits is None else None
        return {last} if parents and parents[0] == first else commits

    rows = members.find(session, first_parents=git.first_parents if asks_git else None, between=between, **which)
    of_incident = grouped(_with_ab(session, rows, between), lambda member: member.incident.pk)
    incidents = [replace(rows[0].incident, members=tuple(rows)) for rows in of_incident.values()]
    runs = {} if calls else {each.lead.run.pk: each.lead.run for each in incidents}
    night = {key: _night_ms(session, run) for key, run in runs.items()}
    incidents = [_with_cost(session, each, calls, night.get(each.lead.run.pk)) for each in incidents]

    def order(one: IncidentRow) -> tuple[Any, ...]:
        cost = one.us - one.moved_us if one.us is not None else one.share or 0.0
        return max(STATES.index(one.state), 1), not one.is_wrong, -cost, one.pk

    return [
        replace(one, members=tuple(replace(each, incident=one) for each in one.members))
        for one in sorted(incidents, key=order)
    ]


def _with_ab(session: Session, rows: list[MemberRow], between: CommitsBetween) -> list[MemberRow]:
    """Return members with their newest A/Bs, which may be newer than the members."""
    stored = comparisons.of_series(session, {member.series.pk for member in rows})
    for at, member in enumerate(rows):
        before = set() if member.span.base is None else {member.span.base.commit}
        about = comparisons.about(stored.get(member.series.pk, ()), before, {member.run.commit})
        rows[at] = replace(member, compared=about if about is not None and about.decided else member.compared)
    commits = {commit for each in rows if (one := each.own_ab) is not None for commit in (one.base, one.head)}
    runs = {
        run.commit: run
        for chunk in chunks(commits)
        for run in map(run_row, session.execute(run_select().where(Commit.hash.in_(chunk), Run.dirty.is_(False))))
    }

    def span(member: MemberRow) -> Span | None:
        if (one := member.own_ab) is None or one.base not in runs or one.head not in runs:
            return None
        ends = Span(runs[one.base], runs[one.head])
        return replace(ends, number=number_of_commits(ends, between))

    return [replace(member, ab_span=span(member)) for member in rows]


def _with_cost(session: Session, one: IncidentRow, calls: CallsOf, night_ms: float | None) -> IncidentRow:
    lost = [
        (each, each.before * each.change)
        for each in one.members
        if each.metric == "latency" and each.ended is None and each.before and each.change is not None
    ]
    if not lost:
        return one
    if calls:
        of_layer = _us_by_layer(calls, ((each.series, ms) for each, ms in lost))
        gained = _gained_us(session, one, calls, {layer for layer in of_layer if layer})
        moved = sum(max(0.0, min(us, gained.get(layer, 0.0))) for layer, us in of_layer.items())
        return replace(one, us=sum(of_layer.values()), moved_us=moved)
    if not night_ms:
        return one
    extra = sum(ms for _, ms in lost)
    # By A/Bs, the members may take longer than that night measured.
    return replace(one, share=extra / max(night_ms, extra + sum(each.before or 0.0 for each, _ in lost)))


def _gained_us(session: Session, one: IncidentRow, calls: CallsOf, layers: Collection[str]) -> dict[str, float]:
    """Return the time per step gained by other problems of each layer in the same runs, backends and modes."""
    lead = one.lead
    if lead.span.base is None or not layers:
        return {}
    base, head = lead.span.base.pk, lead.run.pk
    query = (
        select(Point.series_id, Point.run_id, Point.median_ms)
        .join(Series, Point.series_id == Series.id)
        .where(
            Point.run_id.in_((base, head)), TIMED_POINT,
            Series.backend.in_({each.series.backend for each in one.members}),
            Series.mode.in_({each.series.mode for each in one.members}),
        )
    )  # fmt: skip
    of_series: dict[int, dict[int, float]] = {}
    for series, run, ms in session.execute(query):
        of_series.setdefault(series, {})[run] = ms or 0.0
    inside = {each.series.pk for each in one.members}
    gained = {
        key: ms[base] - ms[head]
        for key, ms in of_series.items()
        if key not in inside and len(ms) == 2 and ms[base] > (1 + GAINED) * ms[head]
    }
    return _us_by_layer(calls, ((row, gained[key]) for key, row in series_rows(session, gained).items()))


def _us_by_layer(calls: CallsOf, changes: Iterable[tuple[SeriesRow, float]]) -> dict[str, float]:
    """Return the changes' µs per step by layer. A step runs one backend and dtype of a problem: the largest change."""
    of_problem: dict[tuple[str, str, str, str], float] = {}
    for row, ms in changes:
        key = calls.layer(row), row.operator, row.mode, row.shape
        of_problem[key] = max(of_problem.get(key, 0.0), 1000 * ms * calls.number(row), key=abs)
    of_layer: dict[str, float] = {}
    for (layer, *_), us in of_problem.items():
        of_layer[layer] = of_layer.get(layer, 0.0) + us
    return of_layer


def _night_ms(session: Session, run: RunRow) -> float | None:
    """Return the summed latencies of a run's night."""
    keys = keys_of_night(session, run)
    return session.scalar(select(func.sum(Point.median_ms)).where(Point.run_id.in_(keys)))


def notes(session: Session, calls: CallsOf) -> list[str]:
    """Return the last lines of the first screen: unmeasured cells, and entries of the traffic without a problem."""
    return [*filter(None, [unmeasured(session), calls.remark])]


def unmeasured(session: Session) -> str:
    """Return the cells without a result in the newest night, such as `not measured: 3 oom of gemm helion, last ...`."""
    run = latest_run(session)
    if run is None:
        return ""
    query = select(Point.series_id, Point.status).where(Point.run_id.in_(keys_of_night(session, run)))
    measured = query.where(Point.status.in_(MEASURED)).with_only_columns(Point.series_id)
    rest = query.where(Point.status.not_in(MEASURED), Point.series_id.not_in(measured)).order_by(Point.id)
    statuses = {series: status for series, status in session.execute(rest)}  # noqa: C416 # rows
    if not statuses:
        return ""
    counts = ", ".join(f"{number} {status}" for status, number in Counter(statuses.values()).items())
    backends = {f"{each.operator} {each.backend}" for each in series_rows(session, statuses).values()}
    before = select(Run.started, Commit.hash, Run.dirty).join(Commit).join(Point, Point.run_id == Run.id)
    of_some = before.where(Point.series_id.in_(list(statuses)[:ASKED]), Point.status.in_(MEASURED))
    last = session.execute(of_some.order_by(*NEWEST_FIRST).limit(1)).first()
    since = ", never measured before"
    if last:
        since = f", last measured {last.started:%Y-%m-%d} at {commit_text(last.hash, last.dirty)}"
    return f"not measured: {counts} of {names(sorted(backends))}{since}; `groupbench gate` lists them"


def screen(incidents: Sequence[IncidentRow], notes: Sequence[str], most: int | None = MOST) -> list[str]:
    """Return the first screen's lines: at most `most` incidents, then the notes."""
    shown = incidents[:most]
    lines = [line for one in shown for line in one.lines]
    if len(incidents) > len(shown):
        more = counted(len(incidents) - len(shown), "more incident")
        lines.append(f"and {more}; `groupbench incidents --format csv`")
    return [*lines, *notes]


def week(incidents: Sequence[IncidentRow], since: datetime) -> dict[str, list[IncidentRow]]:
    """Return the incidents that are open, and those accepted or fixed since a time."""
    moved = [one for one in incidents if one.changed is None or one.changed.at >= since]
    return {
        "open": [one for one in incidents if one.state in ACTIVE],
        "accepted": [one for one in moved if one.state in ("expected", "invalid")],
        "fixed": [one for one in moved if one.state == "fixed"],
    }


def markdown(parts: Mapping[str, Sequence[IncidentRow]], new: int, since: datetime, notes: Sequence[str]) -> str:
    """Return a week's summary in Markdown, with the count `new`."""
    counts = ", ".join(f"{len(of_part)} {name}" for name, of_part in parts.items())
    lines = [f"# Performance triage since {since:%Y-%m-%d}", "", f"{counted(new, 'new incident')}, {counts}"]
    for name, of_part in parts.items():
        lines += ["", f"## {name.capitalize()}", ""] if of_part else []
        for one in of_part:
            first, *rest = one.lines
            lines += [f"- **{first}**", *rest]
    return "\n".join([*lines, "", *notes])
