"""Open, update and close incidents, from the gate's verdicts or by hand. Each state change is an event."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.metrics import LATENCY, METRICS, of_alert
from groupbench.tracker.facts.record import LONGEST_NAME, LONGEST_TEXT
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.alerts import FAILING, ITSELF, OPEN, AlertRow, contains, find
from groupbench.tracker.judge.incident_facts import Causes
from groupbench.tracker.judge.incidents import group
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.verdicts import PIN, Gate, Judged
from groupbench.tracker.query import filters
from groupbench.tracker.query.resolve import Lookup, commit_hash
from groupbench.tracker.query.rows import RunRow
from groupbench.tracker.stats.walk import SURE
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.comparisons import DIFFERENT
from groupbench.tracker.store.schema import Alert, Commit, Incident, IncidentEvent, Point, Run, Series
from groupbench.tracker.tools import git

OwnerOf = Callable[[Sequence[Span], Collection[str]], str | None]


@dataclass(frozen=True)
class Updated:
    """The keys of changed incidents."""

    opened: tuple[int, ...] = ()
    reopened: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """`gate --update`'s line: how many incidents changed, and their first numbers."""
        parts = [
            f"{len(keys)} {name} ({', '.join(map(str, keys[:8]))}{', …' if len(keys) > 8 else ''})"
            for name, keys in (("opened", self.opened), ("reopened", self.reopened), ("fixed", self.fixed))
            if keys
        ]
        advice = "; list them with `groupbench incidents`, then run `groupbench incidents ack`, `expect` or `close`"
        return "incidents: " + (", ".join(parts) or "nothing new") + (advice if self.opened or self.reopened else "")


def update(
    session: Session, gate: Gate, now: datetime | None = None, owner: OwnerOf = lambda spans, files: None
) -> Updated:
    """Store the gate's verdicts: open new incidents, reopen returned and expired ones, close fixed ones.

    Needs a session that writes. Calling it again changes nothing.

    Args:
        owner: Finds an incident's owner by the members' spans and the files that changed under them.
    """
    now = datetime.now(UTC) if now is None else now
    at = f"run {gate.run.id[:12]} at {gate.run.state}"
    # A pin needs no alert: it fails the gate until it is met or removed.
    failing = [row for row in gate.rows if row.verdict.fails and row.what != PIN]
    stored = _Stored(session, failing)
    reopened: set[int] = set()
    for row in failing:
        if (key := _reopened(session, row, stored.alert(row), now, at, reopened)) is not None:
            reopened.add(key)
    joined = [
        row for row in failing if row.alert is not None and row.alert.incident.state in (*FAILING, "acknowledged")
    ]
    fresh = [row for row in failing if row.alert is None and stored.alert(row) is None]
    opened = _join(session, gate, stored, fresh, joined, now, at, owner)
    still_open = [alert for alert in gate.alerts if alert.state in OPEN]
    fixed, lapsed = _settle(session, gate, still_open, now, at)
    return Updated(tuple(sorted(opened)), tuple(sorted(reopened | lapsed)), tuple(sorted(fixed)))


class _Stored:
    """The identities of rows' changes, and their stored alerts."""

    def __init__(self, session: Session, rows: Sequence[Judged]) -> None:
        select_series = select(Series.id, Series.identity)
        series = [select_series.where(Series.id.in_(page)) for page in chunks({row.series.pk for row in rows})]
        self._series = {key: text for query in series for key, text in session.execute(query)}
        pages = chunks({self.identity(row) for row in rows})
        alerts = (one for page in pages for one in session.scalars(select(Alert).where(Alert.identity.in_(page))))
        self._alerts = {one.identity: one for one in alerts}

    def identity(self, row: Judged) -> str:
        """Return the identity of a row's change: the series, the metric, and the runs at its ends."""
        base, head = _ends(row)
        return digest([self._series[row.series.pk], row.what, None if base is None else base.id, head.id])

    def alert(self, row: Judged) -> Alert | None:
        """Return the stored alert about a row's change."""
        return self._alerts.get(self.identity(row))


def _reopened(
    session: Session, row: Judged, earlier: Alert | None, now: datetime, at: str, reopened: Collection[int]
) -> int | None:
    """Return the incident's key that a row reopens: its member is back, or has grown since it was accepted.

    The other members that are back tonight stay in an incident that the first one has reopened.
    """
    if row.alert is not None and row.alert.state != "fixed":
        return None
    stored = earlier if row.alert is None else session.get_one(Alert, row.alert.pk)
    if stored is None:
        return None
    if row.alert is None:  # closed earlier, or the change has grown; levels have moved on since
        for name, value in _size(row).items():
            setattr(stored, name, value)
    stored.ended = None
    incident = session.get_one(Incident, stored.incident_id)
    together = incident.state == "fixed" or incident.id in reopened
    key = incident.id if together else _apart(session, {stored.id}).pop()
    if session.get_one(Incident, key).state not in (*FAILING, "acknowledged"):
        _move(session, key, "new", ITSELF, f"regressed again: {at}", now)
    return key


def _join(
    session: Session,
    gate: Gate,
    stored: _Stored,
    fresh: Sequence[Judged],
    joined: Sequence[Judged],
    now: datetime,
    at: str,
    owner: OwnerOf,
) -> list[int]:
    """Store an alert for each fresh row, in an incident by cause, and return the new incidents' keys."""
    facts = Causes(session, [*fresh, *joined])
    quiet = [row for row in gate.rows if not row.verdict.fails] if fresh else []
    opened = []
    for changes in group(facts.changes(), facts.unchanged(quiet)):
        rows = [facts.rows[each.key] for each in changes]
        new = [row for row in rows if row.alert is None]
        keys = Counter(each.incident for each in changes if each.incident is not None)
        confirmed = any(row.compared is not None and row.compared.verdict == DIFFERENT for row in rows)
        if keys:
            key = keys.most_common(1)[0][0]
            if new:
                state = session.get_one(Incident, key).state
                _event(session, key, state, ITSELF, f"{len(new)} more series: {at}", now)
        else:
            key = _open(session, stored.identity(new[0]), "confirmed" if confirmed else "new", now, at)
            opened.append(key)
        session.add_all([_alert(stored.identity(row), row, key, now) for row in new])
        session.flush()
        incident = session.get_one(Incident, key)
        if confirmed and incident.state == "new":
            _move(session, key, "confirmed", ITSELF, f"by an A/B: {at}", now)
        spans = [_counted(session, row.span) for row in rows if row.span is not None]
        incident.owner = owner(spans, {file for each in changes for file in each.files}) or incident.owner
    return opened


def _counted(session: Session, span: Span) -> Span:
    """Return a span that is known to have one commit, if its head's parent is its base: git may not have them here."""
    if span.number is not None or span.base is None or not all(end.state.clean for end in span.ends):
        return span
    parents = session.scalar(select(Commit.parents).where(Commit.hash == span.head.commit))
    return replace(span, number=1) if parents and parents[0] == span.base.commit else span


def _settle(
    session: Session, gate: Gate, alerts: Iterable[AlertRow], now: datetime, at: str
) -> tuple[set[int], set[int]]:
    """End each alert whose level is back, and return the keys (fixed incidents, expired ones)."""
    seen = {row.alert.pk for row in gate.rows if row.alert is not None}
    rows = {(row.series.pk, row.point.environment.machine): row for row in gate.rows if row.point is not None}
    fixed, lapsed = set(), set()
    for alert in alerts:
        key = alert.incident.pk
        if alert.pk in gate.elsewhere:
            continue
        row = rows.get((alert.series.pk, alert.machine or "")) if alert.run != gate.run else None
        if row is not None and alert.pk not in seen and _is_back(alert, row, gate.lapsed):
            session.get_one(Alert, alert.pk).ended = now
            session.flush()
            if all(session.scalars(select(Alert.ended).where(Alert.incident_id == key))):
                _move(session, key, "fixed", ITSELF, f"back on the earlier level: {at}", now)
                fixed.add(key)
        elif alert.pk in gate.lapsed and session.get_one(Incident, key).state == "expected":
            _move(session, key, "new", ITSELF, f"was expected until {alert.incident.until}", now)
            lapsed.add(key)
    return fixed, lapsed - fixed


def _is_back(alert: AlertRow, row: Judged, lapsed: Collection[int]) -> bool:
    """Return whether no row has an alert because its level is over: tonight's value is not on it any more."""
    point = row.point
    assert point is not None
    if alert.metric == "result":
        return True
    if point.status != "ok":
        return False
    metric = of_alert(alert.metric)
    now = point.value(metric)
    if alert.metric == "repeatability":
        return point.repeatable is True
    if now is None or (metric is LATENCY and not point.timed):
        return False
    if alert.state != "expected" or alert.pk in lapsed:
        return True
    if alert.before is None or alert.distance is None:  # accepted: compare with the level before
        return False
    sigma = row.evidence.sigma or 0.0
    slack = max(row.evidence.counts or math.log1p(metric.least), SURE * sigma)
    away = (metric.log(now) - metric.log(alert.before)) * math.copysign(1, alert.distance)
    return away <= min(slack, abs(alert.distance) / 2)


def _open(session: Session, first: str, state: str, now: datetime, at: str, who: str = ITSELF) -> int:
    """Store an incident without members, given the identity of the first one. Returns its key."""
    incident = Incident(identity=digest(["incident", first, at]), state=state, opened=now)
    session.add(incident)
    session.flush()
    _event(session, incident.id, state, who, at, now)
    return incident.id


def _ends(row: Judged) -> tuple[RunRow | None, RunRow]:
    assert row.point is not None
    return (row.span.base, row.span.head) if row.span else (None, row.point.run)


def _size(row: Judged) -> dict[str, Any]:
    """Return the columns of a change: both of its levels or none, as they are shown, and the effect."""
    levels = (row.shown.before, row.shown.now)
    before, after = (None, None) if row.metric is None or None in levels else levels
    low, high = (row.effect.low, row.effect.high) if row.what in METRICS else (None, None)
    return {
        "before": before,
        "after": after,
        "effect": math.log(after / before) if before and after else None,
        "low": None if low is None else math.log1p(low),
        "high": None if high is None else math.log1p(high),
    }


def _alert(identity: str, row: Judged, incident: int, now: datetime) -> Alert:
    """Return a new alert for a row."""
    assert row.what is not None
    base, head = _ends(row)
    return Alert(
        identity=identity,
        series_id=row.series.pk,
        metric=row.what,
        cause=row.cause,
        base_run_id=None if base is None else base.pk,
        run_id=head.pk,
        comparison_id=None if row.compared is None else row.compared.pk,
        opened=now,
        incident_id=incident,
        **_size(row),
    )


def accept_improvements(session: Session, gate: Gate, who: str, reason: str | None, now: datetime) -> list[AlertRow]:
    """Accept each improved series' new level, and return the alerts that record it.

    The gate judges by these levels from now on and no longer reports the improvements.
    """
    rows = [row for row in gate.rows if row.verdict is Verdict.IMPROVED and row.point and row.what in METRICS]
    return _accepted(session, gate, rows, "expected", who, lambda row: reason or Verdict.IMPROVED, now)


def accept_transition(session: Session, gate: Gate, who: str, reason: str | None, now: datetime) -> list[AlertRow]:
    """Accept the levels since the newest change of toolchain or machine, and return the alerts that record them.

    Later runs are judged by these levels. They are incidents closed as invalid, since the code did not cause them. A
    wrong result is never accepted.
    """

    def why(row: Judged) -> str:
        return reason or "; ".join(row.transition.differences if row.transition else ())

    rows = [
        row
        for row in gate.rows
        if row.transition is not None
        and row.what in {*METRICS, "accuracy", "repeatability"}
        and (row.verdict.changed or row.verdict is Verdict.INCOMPARABLE or row.transition.machine)
    ]
    return _accepted(session, gate, rows, "invalid", who, why, now)


def _accepted(
    session: Session,
    gate: Gate,
    rows: Sequence[Judged],
    state: str,
    who: str,
    why: Callable[[Judged], str],
    now: datetime,
) -> list[AlertRow]:
    """Store rows' levels as incidents in an accepted state, one for each cause, and return their alerts."""
    at = f"run {gate.run.id[:12]} at {gate.run.state}"
    facts, stored, keys = Causes(session, rows), _Stored(session, rows), set()
    for changes in group(facts.changes()):
        members = [facts.rows[each.key] for each in changes]
        alerts = {alert.id for row in members if (alert := stored.alert(row)) is not None}
        alerts |= {row.alert.pk for row in members if row.alert is not None}
        of_cause = _apart(session, alerts)
        new = [row for row in members if row.alert is None and stored.alert(row) is None]
        if new and not of_cause:
            of_cause = {_open(session, stored.identity(new[0]), "new", now, at)}
        session.add_all([_alert(stored.identity(row), row, min(of_cause), now) for row in new])
        for key in of_cause:
            _move(session, key, state, who, why(members[0]), now)
        keys |= of_cause
    return find(session, keys=keys) if keys else []


def _apart(session: Session, alerts: Collection[int]) -> set[int]:
    """Return the incidents with exactly these alerts, as keys: they leave an incident that has others too."""
    keys = set()
    rows = [session.get_one(Alert, key) for key in sorted(alerts)]
    for key in {row.incident_id for row in rows}:
        moved = [row for row in rows if row.incident_id == key]
        members = session.scalar(select(func.count()).select_from(Alert).where(Alert.incident_id == key))
        if members == len(moved):
            keys.add(key)
            continue
        old = session.get_one(Incident, key)
        facts = {name: getattr(old, name) for name in ("state", "owner", "opened", "until_time", "until_commit")}
        new = Incident(identity=digest(["incident", moved[0].identity, old.identity]), **facts)
        session.add(new)
        session.flush()
        for event in session.scalars(select(IncidentEvent).where(IncidentEvent.incident_id == key)).all():
            _event(session, new.id, event.state, event.who, event.reason, event.at)
        for row in moved:
            row.incident_id = new.id
        session.flush()
        keys.add(new.id)
    return keys


def acknowledge(
    session: Session, ids: Sequence[int], who: str, reason: str, now: datetime, series: Collection[int] = ()
) -> list[AlertRow]:
    """Mark incidents as known and being worked on, and return their alerts.

    Args:
        series: Only the members about these series, which become a separate incident.

    Raises QueryError for an unknown or closed incident.
    """
    return _moved(session, _chosen(session, ids, series, _must_be_open), "acknowledged", who, reason, now)


def note(session: Session, ids: Sequence[int], who: str, text: str, now: datetime) -> list[AlertRow]:
    """Add a note to incidents, and return their alerts. Raises QueryError for an unknown one."""
    for key in _chosen(session, ids, (), lambda alert: None):
        filters.refuse_longer("reason", text, LONGEST_TEXT)
        _event(session, key, session.get_one(Incident, key).state, who, text, now)
    return find(session, keys=set(ids))


def expect(
    session: Session,
    ids: Sequence[int],
    until: str | None,
    who: str,
    reason: str,
    now: datetime,
    lookup: Lookup = git.rev_parse,
    series: Collection[int] = (),
) -> list[AlertRow]:
    """Accept incidents' new levels, until a date or a commit if given, and return their alerts.

    Args:
        lookup: Resolves a commit that the database does not know.
        series: Only the members about these series, which become a separate incident.

    Raises QueryError for an unknown or closed incident, a wrong result, or an `until` in the past, unknown or measured.
    """
    when, commit = _until(session, until, now, lookup)

    def check(alert: AlertRow) -> None:
        if commit is not None:
            newest = select(Commit.hash).join(Run).join(Point).where(Point.series_id == alert.series.pk)
            measured = session.scalar(newest.order_by(Run.started.desc()).limit(1))
            if measured is not None and contains(session, measured, commit):
                raise QueryError(
                    f"commit {commit[:10]} is already measured for {alert.series}, so nothing is left to expect; "
                    "give a later commit, or a date"
                )
        if alert.metric == "result":
            raise QueryError(f"incident {alert.incident.pk} is a wrong result and cannot be expected; fix the backend")
        _must_be_open(alert)

    return _moved(session, _chosen(session, ids, series, check), "expected", who, reason, now, when, commit)


def close(
    session: Session,
    ids: Sequence[int],
    state: str,
    who: str,
    reason: str,
    now: datetime,
    series: Collection[int] = (),
) -> list[AlertRow]:
    """Close incidents as fixed or as invalid, and return their alerts.

    Args:
        series: Only the members about these series, which become a separate incident.

    Raises QueryError for an unknown incident, one that is already closed so, or an `invalid` wrong result.
    """

    def check(alert: AlertRow) -> None:
        key = alert.incident.pk
        if alert.metric == "result" and state == "invalid":
            raise QueryError(f"incident {key} is a wrong result and cannot be accepted; fix backend or tolerance")
        if alert.incident.state == state:
            raise QueryError(f"incident {key} is already closed as {state}; `groupbench incidents --all` lists it")

    keys = _chosen(session, ids, series, check)
    if state == "fixed":
        for alert in session.scalars(select(Alert).where(Alert.incident_id.in_(keys), Alert.ended.is_(None))):
            alert.ended = now
    return _moved(session, keys, state, who, reason, now)


def _chosen(
    session: Session, ids: Iterable[int], series: Collection[int], check: Callable[[AlertRow], None]
) -> set[int]:
    """Return the keys to change, after a check on every member. Raises QueryError for an unknown one."""
    wanted = list(dict.fromkeys(ids))
    alerts = find(session, keys=set(wanted))
    for key in wanted:
        if not any(alert.incident.pk == key for alert in alerts):
            raise QueryError(f"no incident {key}; `groupbench incidents --all` lists all incidents")
    if series:
        alerts = [alert for alert in alerts if alert.series.pk in series]
        if not alerts:
            raise QueryError("no member of these incidents is about these series; `groupbench incidents --each`")
    for alert in alerts:
        check(alert)
    return _apart(session, {alert.pk for alert in alerts})


def _must_be_open(alert: AlertRow) -> None:
    incident = alert.incident
    if incident.state not in OPEN:
        then = "it reopens if the regression returns" if incident.state == "fixed" else "its level is already accepted"
        raise QueryError(f"incident {incident.pk} is closed as {incident.state}; {then}")


def _until(session: Session, text: str | None, now: datetime, lookup: Lookup) -> tuple[datetime | None, str | None]:
    """Parse a date, a duration from now (30d) or a commit. Raises QueryError."""
    if text is None:
        return None, None
    if filters.looks_like_date(text) and not re.fullmatch(r"[0-9a-f]{7,40}", text):
        ahead = re.fullmatch(r"\d+\s*[mhdwy]", text.strip())
        when = now + (now - filters.instant(text, now=now)) if ahead else filters.instant(text, end=True)
        if when <= now:
            raise QueryError(f"{text!r} is in the past; give a future date, a duration such as 30d, or a commit")
        return when, None
    hash_ = commit_hash(session, text, lookup)
    if hash_ is None:
        raise QueryError(f"{text!r} is neither a date nor one known commit; give 2026-01-31, 30d or a hash")
    return None, hash_


def _moved(session: Session, keys: Collection[int], *move: Any) -> list[AlertRow]:
    """Set incidents' states as `_move` does, and return their alerts."""
    for key in keys:
        _move(session, key, *move)
    return find(session, keys=keys)


def _move(
    session: Session, key: int, state: str, who: str, reason: str | None, now: datetime,
    until_time: datetime | None = None, until_commit: str | None = None,
) -> None:  # fmt: skip
    """Set an incident's state and store the event. Raises QueryError if a text is too long."""
    filters.refuse_longer("who", who, LONGEST_NAME)
    filters.refuse_longer("reason", reason, LONGEST_TEXT)
    incident = session.get_one(Incident, key)
    incident.state, incident.until_time, incident.until_commit = state, until_time, until_commit
    _event(session, key, state, who, reason, now)


def _event(session: Session, key: int, state: str, who: str, reason: str | None, now: datetime) -> None:
    session.add(IncidentEvent(incident_id=key, at=now, who=who, state=state, reason=reason))
    session.flush()
