"""Open, update and close alerts, from the gate's verdicts or by hand. Every change of state is an event."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.metrics import LATENCY, METRICS, RMS, of_alert
from groupbench.tracker.facts.record import LONGEST_NAME, LONGEST_TEXT
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.alerts import ITSELF, OPEN, AlertRow, find
from groupbench.tracker.judge.verdicts import PIN, Gate, Judged
from groupbench.tracker.query import filters
from groupbench.tracker.query.resolve import Lookup, commit_hash
from groupbench.tracker.stats.walk import SURE
from groupbench.tracker.store.schema import Alert, AlertEvent, Series
from groupbench.tracker.tools import git


@dataclass(frozen=True)
class Updated:
    """The keys of changed alerts."""

    opened: tuple[int, ...] = ()
    reopened: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """`gate --update`'s line: how many alerts changed, and their first numbers."""
        parts = [
            f"{len(keys)} {name} ({', '.join(map(str, keys[:8]))}{', …' if len(keys) > 8 else ''})"
            for name, keys in (("opened", self.opened), ("reopened", self.reopened), ("fixed", self.fixed))
            if keys
        ]
        advice = "; list them with `groupbench alerts`, then run `groupbench alerts ack`, `expect` or `close`"
        return "alerts: " + (", ".join(parts) or "nothing new") + (advice if self.opened or self.reopened else "")


def update(session: Session, gate: Gate, now: datetime | None = None) -> Updated:
    """Store the gate's verdicts: open new alerts, reopen returned and expired ones, close fixed ones.

    Needs a session that writes. Calling it again changes nothing.
    """
    now = datetime.now(UTC) if now is None else now
    at = f"run {gate.run.id[:12]} at {gate.run.state}"
    # A pin needs no alert: it fails the gate until it is met or removed.
    failing = [row for row in gate.rows if row.verdict.fails and row.what != PIN]
    opened, reopened = _raise_alerts(session, failing, now, at)
    seen = {row.alert.pk for row in gate.rows if row.alert is not None}
    still_open = [alert for alert in gate.alerts if alert.state in OPEN and alert.pk not in opened]
    fixed, lapsed = _settle_alerts(session, gate, still_open, seen, now, at)
    return Updated(tuple(opened), (*reopened, *lapsed), tuple(fixed))


def _raise_alerts(session: Session, failing: Iterable[Judged], now: datetime, at: str) -> tuple[list[int], list[int]]:
    """Open an alert for each row without one, reopen fixed ones, and return the keys of both."""
    opened, reopened = [], []
    for row in failing:
        if row.alert is None:
            opened.append(_open(session, row, now, at))
        elif row.alert.state == "fixed":
            _move(session, row.alert.pk, "new", ITSELF, f"regressed again: {at}", now)
            reopened.append(row.alert.pk)
    return opened, reopened


def _settle_alerts(
    session: Session, gate: Gate, alerts: Iterable[AlertRow], seen: set[int], now: datetime, at: str
) -> tuple[list[int], list[int]]:
    """Close each alert whose level is back, reopen each expired one, and return the keys of both."""
    rows = {(row.series.pk, row.point.environment.machine): row for row in gate.rows if row.point is not None}
    fixed, lapsed = [], []
    for alert in alerts:
        if alert.pk in gate.elsewhere:
            continue
        row = rows.get((alert.series.pk, alert.machine or "")) if alert.run != gate.run else None
        if row is not None and alert.pk not in seen and _is_back(alert, row, gate.lapsed):
            _move(session, alert.pk, "fixed", ITSELF, f"back on the earlier level: {at}", now)
            fixed.append(alert.pk)
        elif alert.pk in gate.lapsed:
            _move(session, alert.pk, "new", ITSELF, f"was expected until {alert.until}", now)
            lapsed.append(alert.pk)
    return fixed, lapsed


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


def _open(session: Session, row: Judged, now: datetime, at: str) -> int:
    """Store an alert for a row, or reopen the stored one of the same change. Returns its key."""
    assert row.point is not None and row.what is not None
    head = row.span.head if row.span else row.point.run
    base = row.span.base if row.span else None
    before, after = levels(row)
    interval = (row.effect.low, row.effect.high) if row.what in METRICS else (None, None)
    identity = select(Series.identity).where(Series.id == row.series.pk)
    identity_fields = [session.scalar(identity), row.what, None if base is None else base.id, head.id]
    size: dict[str, Any] = {
        "before": before,
        "after": after,
        "effect": math.log(after / before) if before and after else None,
        "low": None if interval[0] is None else math.log1p(interval[0]),
        "high": None if interval[1] is None else math.log1p(interval[1]),
    }
    stored_key = session.scalar(select(Alert.id).where(Alert.identity == digest(identity_fields)))
    if stored_key is not None:  # closed earlier, or the change has grown; levels have moved on since
        stored = session.get_one(Alert, stored_key)
        for name, value in size.items():
            setattr(stored, name, value)
        _move(session, stored_key, "new", ITSELF, f"regressed again: {at}", now)
        return stored_key
    alert = Alert(
        identity=digest(identity_fields),
        series_id=row.series.pk,
        metric=row.what,
        state="new",
        cause=row.cause,
        base_run_id=None if base is None else base.pk,
        run_id=head.pk,
        comparison_id=None if row.compared is None else row.compared.pk,
        opened=now,
        **size,
    )
    session.add(alert)
    session.flush()
    _event(session, alert.id, "new", ITSELF, at, now)
    return alert.id


def levels(row: Judged) -> tuple[float | None, float | None]:
    """Return a row's (level before, level after), in the unit of its metric."""
    if row.what == "latency" and row.effect.before_ms and row.change is not None:
        return row.effect.before_ms, row.effect.before_ms * (1 + row.change)
    if row.metric is RMS and row.effect.before_rms is not None and row.point is not None and row.point.rms is not None:
        return row.effect.before_rms, row.point.rms
    if row.what in METRICS and row.effect.before is not None and row.now is not None:
        return row.effect.before, row.now
    return None, None


def accept_improvements(session: Session, gate: Gate, who: str, reason: str | None, now: datetime) -> list[AlertRow]:
    """Accept the new level of every improved series, and return the alerts that record it.

    The gate judges by these levels from now on and no longer reports the improvements.
    """
    at = f"run {gate.run.id[:12]} at {gate.run.state}"
    keys = {
        _open(session, row, now, at)
        for row in gate.rows
        if row.verdict is Verdict.IMPROVED and row.point is not None and row.what in METRICS
    }
    for key in sorted(keys):
        _move(session, key, "expected", who, reason or Verdict.IMPROVED, now)
    return find(session, keys=keys) if keys else []


def accept_transition(session: Session, gate: Gate, who: str, reason: str | None, now: datetime) -> list[AlertRow]:
    """Accept the levels since the newest change of toolchain or machine, and return the alerts that record them.

    Later runs are judged by these levels. Each is stored as an alert closed as invalid, since the code did not cause
    it. A wrong result is never accepted.
    """
    at = f"run {gate.run.id[:12]} at {gate.run.state}"
    keys = set()
    for row in gate.rows:
        transition = row.transition
        if transition is None or row.what not in {*METRICS, "accuracy", "repeatability"}:
            continue
        if row.verdict.changed or row.verdict is Verdict.INCOMPARABLE or transition.machine:
            key = _open(session, row, now, at) if row.alert is None else row.alert.pk
            why = reason or "; ".join(transition.differences)
            _move(session, key, "invalid", who, why, now)
            keys.add(key)
    return find(session, keys=keys) if keys else []


def acknowledge(session: Session, ids: Sequence[int], who: str, reason: str, now: datetime) -> list[AlertRow]:
    """Mark alerts as known and being worked on, and return them. Raises QueryError for an unknown or closed one."""
    for alert in _alerts_by_id(session, ids):
        _must_be_open(alert)
        _move(session, alert.pk, "acknowledged", who, reason, now)
    return find(session, keys=set(ids))


def expect(
    session: Session,
    ids: Sequence[int],
    until: str | None,
    who: str,
    reason: str,
    now: datetime,
    lookup: Lookup = git.rev_parse,
) -> list[AlertRow]:
    """Accept the new levels of alerts, until a date or a commit if given, and return the alerts.

    `lookup` resolves a commit that the database does not know.

    Raises QueryError for an unknown or closed alert, a wrong result, or an `until` in the past or unknown.
    """
    when, commit = _until(session, until, now, lookup)
    for alert in _alerts_by_id(session, ids):
        if alert.metric == "result":
            raise QueryError(f"alert {alert.pk} is a wrong result and cannot be expected; fix the backend")
        _must_be_open(alert)
        _move(session, alert.pk, "expected", who, reason, now, when, commit)
    return find(session, keys=set(ids))


def close(session: Session, ids: Sequence[int], state: str, who: str, reason: str, now: datetime) -> list[AlertRow]:
    """Close alerts as fixed or as invalid, and return them.

    Raises QueryError for an unknown alert, one that is already closed so, or an `invalid` wrong result.
    """
    for alert in _alerts_by_id(session, ids):
        if alert.metric == "result" and state == "invalid":
            raise QueryError(f"alert {alert.pk} is a wrong result and cannot be accepted; fix backend or tolerance")
        if alert.state == state:
            raise QueryError(f"alert {alert.pk} is already closed as {state}; `groupbench alerts --all` lists it")
        _move(session, alert.pk, state, who, reason, now)
    return find(session, keys=set(ids))


def _alerts_by_id(session: Session, ids: Iterable[int]) -> list[AlertRow]:
    wanted = list(dict.fromkeys(ids))
    by_key = {alert.pk: alert for alert in find(session, keys=set(wanted))}
    for key in wanted:
        if key not in by_key:
            raise QueryError(f"no alert {key}; `groupbench alerts --all` lists all alerts")
    return [by_key[key] for key in wanted]


def _must_be_open(alert: AlertRow) -> None:
    if alert.state not in OPEN:
        then = "it reopens if the regression returns" if alert.state == "fixed" else "its level is already accepted"
        raise QueryError(f"alert {alert.pk} is closed as {alert.state}; {then}")


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


def _move(
    session: Session,
    key: int,
    state: str,
    who: str,
    reason: str | None,
    now: datetime,
    until_time: datetime | None = None,
    until_commit: str | None = None,
) -> None:
    """Set an alert's state and store the event. Raises QueryError if a text is too long."""
    filters.refuse_longer("who", who, LONGEST_NAME)
    filters.refuse_longer("reason", reason, LONGEST_TEXT)
    alert = session.get_one(Alert, key)
    alert.state, alert.until_time, alert.until_commit = state, until_time, until_commit
    _event(session, key, state, who, reason, now)


def _event(session: Session, key: int, state: str, who: str, reason: str | None, now: datetime) -> None:
    session.add(AlertEvent(alert_id=key, at=now, who=who, state=state, reason=reason))
    session.flush()
