"""Incidents and their members, the alerts: certain changes for the worse, tracked until they are resolved.

    new           not yet reviewed; the gate fails
    confirmed     the same, and an A/B confirmed a member
    acknowledged  known and being worked on; the gate lists it and passes unless --strict
    expected      the new levels are accepted, optionally until a date or a commit; the gate judges by them
    fixed         back on the earlier levels, seen by the gate or declared by a person
    invalid       not caused by the code; the new levels are accepted for good

An alert is one series' change in a metric, however many runs see it. Alerts with one likely cause are one
incident (`incidents`), which has the state, the owner and the events. In incident_moves, `update` opens, closes and
reopens incidents by the gate's verdicts, and `acknowledge`, `expect` and `close` change their state by hand. A wrong
result always fails the gate, whatever the state of its incident, and can never be expected.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.identity import SHOWN
from groupbench.tracker.facts.metrics import LATENCY, METRICS, of_alert, relative
from groupbench.tracker.facts.verdicts import INCIDENT_STATES
from groupbench.tracker.judge.named import named_in, number_of_commits
from groupbench.tracker.judge.pasts import authors
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.ancestry import ancestors, commit_order
from groupbench.tracker.query.lines import CommitsBetween, FirstParents, line_of
from groupbench.tracker.query.points import environment_rows
from groupbench.tracker.query.rows import EnvironmentRow, RunRow, SeriesRow
from groupbench.tracker.query.runs import run_rows
from groupbench.tracker.query.series import series_rows
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.comparisons import DIFFERENT, Compared, NamedCommits
from groupbench.tracker.store.schema import ABComparison, Alert, Incident, IncidentEvent, Point
from groupbench.tracker.text import repro
from groupbench.tracker.text.wording import date
from groupbench.tracker.tools import git

STATES = tuple(INCIDENT_STATES)
FAILING = ("new", "confirmed")
OPEN = (*FAILING, "acknowledged", "expected")
FIX = "the gate fails until the result is correct: fix the backend"
NOTE = "note"
"""The word for an event that leaves the state as it is. Such a row has the state of the row before."""
ITSELF = "groupbench"
"""The author of automatic changes."""

_AT_RUN = re.compile(r"(: )?run \S+ at \S+$")
"""The end of a reason naming the run, as `incident_moves` writes it."""

_MAX_KEYS = 500
_SAME = ("metric", "cause", "before", "after", "effect", "low", "high", "opened", "ended")
"""Columns of Alert that AlertRow has too."""


@dataclass(frozen=True)
class StateChange:
    """A change of an incident's state, or a note about it."""

    at: datetime
    who: str
    state: str  # the new one, or NOTE
    reason: str | None

    @property
    def text(self) -> str:
        return f"{self.state} by {self.who}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class IncidentRow:
    """An incident without its members."""

    pk: int
    identity: str
    state: str
    owner: str | None
    opened: datetime
    until_time: datetime | None = None
    until_commit: str | None = None
    link: str | None = None  # of its issue
    posted: str | None = None  # state of its issue when last posted
    events: tuple[StateChange, ...] = ()

    @property
    def until(self) -> str | None:
        """When an expected incident becomes new again."""
        if self.until_time is not None:
            return f"{date(self.until_time)} UTC"
        return None if self.until_commit is None else f"commit {self.until_commit[:10]}"

    @property
    def changed(self) -> StateChange | None:
        """The newest change of the state."""
        return next((event for event in reversed(self.events) if event.state != NOTE), None)

    @property
    def text(self) -> str:
        """The incident in the gate's output: `incident 3 acknowledged by Ada: on it`."""
        last = self.changed
        who = f" by {last.who}" if last is not None and last.who != ITSELF else ""
        until = f", until {self.until}" if self.state == "expected" and self.until else ""
        since = f" since {date(self.opened)}" if self.state in FAILING else ""
        why = "" if last is None or last.reason is None else last.reason
        if not who:  # the run that changed the state is in the list of events
            why = _AT_RUN.sub("", why)
        return f"incident {self.pk} {self.state}{since}{who}{until}{': ' if why else ''}{why}"


@dataclass(frozen=True)
class AlertRow:
    """A member of an incident. Levels are in the metric's unit; effects log(after / before), None if one is 0."""

    pk: int
    series: SeriesRow
    metric: str
    incident: IncidentRow
    cause: str | None
    base_run: RunRow | None
    run: RunRow
    environment: EnvironmentRow | None  # in which the change was measured
    before: float | None
    after: float | None
    effect: float | None
    low: float | None
    high: float | None
    opened: datetime
    ended: datetime | None  # when the level was back
    author: str | None  # of the first commit after the change
    compared: Compared | None
    named: tuple[NamedCommits, ...] = ()  # by a search, the largest change first
    number: int | None = None  # number of commits among which the change is; None if unknown

    @property
    def machine(self) -> str | None:
        """The identity of the machine with the change."""
        return None if self.environment is None else self.environment.machine

    @property
    def repro(self) -> str | None:
        """The command that measures the metric again at the first commit after the change, if groupbench can."""
        environment = None if self.environment is None else self.environment.facts
        metric = METRICS.get(self.metric)
        measured = None if metric is None or metric.has_own_rule else metric
        return repro.measure(self.series, None if self.run.dirty else self.run.commit, environment, measured)

    @property
    def span(self) -> Span:
        """The runs between which the series changed, with the commit that a search named."""
        return Span(self.base_run, self.run, self.author, self.number, self.named)

    @property
    def commits(self) -> str:
        return self.span.text

    @property
    def size(self) -> AlertRow | Compared:
        """The effect with its interval: an A/B's if one found the change, since it measured both levels alternately."""
        one = self.compared if self.metric == LATENCY.name else None
        return self if one is None or one.verdict != DIFFERENT else one

    @property
    def change(self) -> float | None:
        """The relative change: 0.03 is a 3 % increase."""
        return relative(self.size.effect)

    @property
    def distance(self) -> float | None:
        """The log distance between the levels, with the metric's floor, as the gate compares them."""
        if self.before is None or self.after is None:
            return None
        metric = of_alert(self.metric)
        return metric.log(self.after) - metric.log(self.before)

    @property
    def state(self) -> str:
        """The incident's state; `fixed` for a member whose level is back."""
        return "fixed" if self.ended is not None else self.incident.state

    @property
    def text(self) -> str:
        """The incident in the gate's output, or that this member is fixed."""
        if self.ended is not None and self.incident.state != "fixed":
            return f"incident {self.incident.pk} {self.incident.state}, fixed here since {date(self.ended)}"
        return self.incident.text

    @property
    def advice(self) -> str | None:
        """The commands for a new incident, or the remedy of a wrong result if it is open; else None."""
        if self.metric == "result":
            return FIX if self.state in OPEN else None
        if self.state not in FAILING:
            return None
        key = self.incident.pk
        return f"handle it with `groupbench incidents ack {key}` or `groupbench incidents expect {key}`"

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Return the keys of `flat`, in the order of CSV."""
        return (
            *("incident", "state", "metric", "cause", *SHOWN),
            *("commits", "commit", "subject", "author", "before", "after", "change", "low", "high"),
            *("ab", "opened", "until", "last", "repro", "owner", "link", "events"),
        )

    def flat(self) -> dict[str, Any]:
        """Return the alert as one row of JSON or CSV."""
        series = {name: getattr(self.series, name) for name in SHOWN}
        return {
            **{name: getattr(self, name) for name in ("state", "metric", "cause", "commits", "before", "after")},
            **series,
            "incident": self.incident.pk,
            "commit": self.span.commit if self.named else self.run.commit_text,
            "subject": self.span.subject,
            "author": self.span.author,
            "change": self.change,
            "low": relative(self.size.low),
            "high": relative(self.size.high),
            "ab": None if self.compared is None else self.compared.verdict,
            "opened": self.opened,
            "until": self.incident.until,
            "last": self.incident.events[-1].text if self.incident.events else None,
            "repro": self.repro,
            "owner": self.incident.owner,
            "link": self.incident.link,
            "named": [asdict(each) for each in self.named] or None,
            "events": [f"{event.at:%Y-%m-%d %H:%M} {event.text}" for event in self.incident.events],
        }


def find(
    session: Session,
    *,
    keys: Collection[int] | None = None,  # of incidents
    series: Collection[int] | None = None,
    states: Collection[str] | None = None,
    runs: Collection[int] | None = None,  # keys of the first run after the change
    first_parents: FirstParents | None = None,  # ancestry beyond the database, such as git's
    between: CommitsBetween = lambda first, last: None,
) -> list[AlertRow]:
    """Return alerts ordered by commit, operator and backend, so that one change's alerts are adjacent."""
    statement = select(Alert).order_by(Alert.id)
    if states is not None:
        statement = statement.join(Incident, Alert.incident_id == Incident.id).where(Incident.state.in_(states))
    # A statement binds a limited number of keys: for more, read all rows and filter below.
    if keys is not None and len(keys) <= _MAX_KEYS:
        statement = statement.where(Alert.incident_id.in_(keys))
    if series is not None and len(series) <= _MAX_KEYS:
        statement = statement.where(Alert.series_id.in_(series))
    alerts = _rows(
        session,
        [
            row
            for row in session.scalars(statement)
            if (keys is None or row.incident_id in keys)
            and (series is None or row.series_id in series)
            and (runs is None or row.run_id in runs)
        ],
        first_parents,
        cache(between),
    )
    return sorted(alerts, key=lambda alert: (alert.run.when, alert.series.operator, alert.series.backend, alert.pk))


def _rows(
    session: Session, rows: Sequence[Alert], first_parents: FirstParents | None, between: CommitsBetween
) -> list[AlertRow]:
    """Return stored alerts with their series, runs, events, comparison and environment, in a few queries for all."""
    of_series = series_rows(session, {row.series_id for row in rows})
    runs = run_rows(session, {row.run_id for row in rows} | {row.base_run_id for row in rows if row.base_run_id})
    of_incident = incident_rows(session, {row.incident_id for row in rows})
    compared: dict[int, Compared] = {}
    environment_of: dict[tuple[int, int], int] = {}
    for chunk in chunks(row.id for row in rows):
        comparison_query = (
            select(ABComparison).join(Alert, Alert.comparison_id == ABComparison.id).where(Alert.id.in_(chunk))
        )
        compared.update((row.id, comparisons.from_row(row)) for row in session.scalars(comparison_query))
        place_query = (
            select(Alert.series_id, Alert.run_id, Point.environment_id)
            .join(Point, and_(Point.series_id == Alert.series_id, Point.run_id == Alert.run_id))
            .where(Alert.id.in_(chunk))
        )
        environment_of.update(((series, run), key) for series, run, key in session.execute(place_query))
    environments = environment_rows(session, set(environment_of.values()))
    author_of = authors(session, {runs[row.run_id].commit for row in rows})
    searches = comparisons.named_of_series(session, {row.series_id for row in rows})

    def span(row: Alert) -> Span:
        return Span(None if row.base_run_id is None else runs[row.base_run_id], runs[row.run_id])

    def named(row: Alert) -> tuple[NamedCommits, ...]:
        if row.series_id not in searches:
            return ()
        line = line_of(session, runs[row.run_id], first_parents)
        return named_in(session, searches[row.series_id], span(row), row.metric, row.effect, line)

    return [
        AlertRow(
            pk=row.id,
            series=of_series[row.series_id],
            incident=of_incident[row.incident_id],
            base_run=None if row.base_run_id is None else runs[row.base_run_id],
            run=runs[row.run_id],
            environment=environments.get(environment_of.get((row.series_id, row.run_id), -1)),
            author=author_of.get(runs[row.run_id].commit),
            compared=None if row.comparison_id is None else compared.get(row.comparison_id),
            named=named(row),
            number=number_of_commits(span(row), between),
            **{name: getattr(row, name) for name in _SAME},
        )
        for row in rows
    ]


def incident_rows(session: Session, keys: Collection[int]) -> dict[int, IncidentRow]:
    """Return incidents with their events, by key."""
    events: dict[int, list[StateChange]] = {}
    states: dict[int, str] = {}
    rows: dict[int, IncidentRow] = {}
    for chunk in chunks(keys):
        of_chunk = select(IncidentEvent).where(IncidentEvent.incident_id.in_(chunk))
        for event in session.scalars(of_chunk.order_by(IncidentEvent.at, IncidentEvent.id)):
            state = NOTE if states.get(event.incident_id) == event.state else event.state
            events.setdefault(event.incident_id, []).append(StateChange(event.at, event.who, state, event.reason))
            states[event.incident_id] = event.state
        for row in session.scalars(select(Incident).where(Incident.id.in_(chunk))):
            facts = {each.name: getattr(row, each.name) for each in fields(IncidentRow) if hasattr(row, each.name)}
            rows[row.id] = IncidentRow(pk=row.id, events=tuple(events.get(row.id, ())), **facts)
    return rows


def lapsed(session: Session, alert: AlertRow, run: RunRow) -> bool:
    """Return whether an expected alert has expired at a run: by its date, or because the run contains its commit."""
    incident = alert.incident
    if alert.state != "expected":
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
