"""Alerts: a change for the worse of one series, from the night that confirmed it until it is dealt with.

    new           nobody has looked yet; the gate fails
    acknowledged  known and worked on; the gate lists it, and passes unless --strict
    expected      the new level is accepted, until a date or a commit if one is named: the gate judges by it
    fixed         the level is back; by itself, or because somebody says so
    invalid       not a change of the code: the level is accepted as with `expected`, for good

One alert for each series and change, however many nights see it. `update` opens, closes and reopens them by what the
gate found; people move them by `acknowledge`, `expect` and `close`. Every transition is an event with who, when and
why. A wrong result fails the gate whatever its alert says, and can be no expected level.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import and_, or_, select
from sqlalchemy.orm import Session

from groupbench.tracker import comparisons, filters, gitinfo, query
from groupbench.tracker.commits import ancestors, commit_order
from groupbench.tracker.comparisons import Compared
from groupbench.tracker.environment import digest
from groupbench.tracker.errors import QueryError
from groupbench.tracker.judge import MIN_EFFECT, RMS_FLOOR, RMS_RATIO
from groupbench.tracker.pasts import authors
from groupbench.tracker.rows import RunRow, SeriesRow
from groupbench.tracker.schema import Alert, AlertEvent, Commit, Comparison, Environment, Point, Run, Series
from groupbench.tracker.verdicts import Gate, Judged

STATES = ("new", "acknowledged", "expected", "fixed", "invalid")
OPEN = ("new", "acknowledged", "expected")
ITSELF = "groupbench"
"""Who moves an alert that no person moved."""

LATEST = 9
"""Of the newest results, as many at most decide whether a level is back."""

_SIGMAS = 3.0
_ASKED = 500
_LEVELS = ("before", "after", "effect", "low", "high")


@dataclass(frozen=True)
class Event:
    """A transition."""

    at: datetime
    who: str
    state: str  # from then on
    reason: str | None

    @property
    def text(self) -> str:
        return f"{self.state} by {self.who}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class AlertRow:
    """An alert. Levels are ms, or relative RMS errors; effects log(after / before)."""

    pk: int
    series: SeriesRow
    metric: str
    state: str
    cause: str | None
    base_run: RunRow | None
    run: RunRow
    environment: str | None  # identity of where the change was seen
    before: float | None
    after: float | None
    effect: float | None
    low: float | None
    high: float | None
    opened: datetime
    until_time: datetime | None
    until_commit: str | None
    author: str | None  # of the first commit after the change
    compared: Compared | None
    events: tuple[Event, ...] = field(default=())

    @property
    def commits(self) -> str:
        return f"{'' if self.base_run is None else self.base_run.state}..{self.run.state}"

    @property
    def change(self) -> float | None:
        """Relative: 0.03 is three per cent more."""
        return None if self.effect is None else math.expm1(self.effect)

    @property
    def until(self) -> str | None:
        """When an expected one returns to new."""
        if self.until_time is not None:
            return f"{self.until_time:%Y-%m-%d %H:%M}"
        return None if self.until_commit is None else f"commit {self.until_commit[:10]}"

    @property
    def text(self) -> str:
        """What the gate says of it."""
        last = self.events[-1] if self.events else None
        who = f" by {last.who}" if last is not None and last.who != ITSELF else ""
        until = f", until {self.until}" if self.state == "expected" and self.until else ""
        why = f": {last.reason}" if last is not None and last.reason else ""
        return f"alert {self.pk} {self.state}{who}{until}{why}"

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        return (
            *("alert", "state", "metric", "cause", "operator", "backend", "mode", "shape", "dtype", "hardware"),
            *("commits", "commit", "subject", "author", "before", "after", "change", "low", "high"),
            *("ab", "opened", "until", "last", "events"),
        )

    def flat(self) -> dict[str, Any]:
        series = {name: getattr(self.series, name) for name in _SERIES}
        return {
            **{name: getattr(self, name) for name in ("state", "metric", "cause", "commits", "before", "after")},
            **series,
            "alert": self.pk,
            "commit": self.run.commit_text,
            "subject": self.run.subject,
            "author": self.author,
            "change": self.change,
            "low": None if self.low is None else math.expm1(self.low),
            "high": None if self.high is None else math.expm1(self.high),
            "ab": None if self.compared is None else self.compared.verdict,
            "opened": self.opened,
            "until": self.until,
            "last": self.events[-1].text if self.events else None,
            "events": [f"{event.at:%Y-%m-%d %H:%M} {event.text}" for event in self.events],
        }


_SERIES = ("operator", "backend", "mode", "shape", "dtype", "hardware")


def find(
    session: Session,
    *,
    keys: Collection[int] | None = None,
    series: Collection[int] | None = None,
    states: Collection[str] | None = None,
    until: RunRow | None = None,  # only of changes seen by this run or before it
) -> list[AlertRow]:
    """Alerts by commit, operator and backend: those of one change stand together."""
    statement = select(Alert).order_by(Alert.id)
    if states is not None:
        statement = statement.where(Alert.state.in_(states))
    if until is not None:
        before = or_(Run.started < until.started, and_(Run.started == until.started, Run.id <= until.pk))
        statement = statement.join(Run, Alert.run_id == Run.id).where(before)
    # Few are asked for by key; of many, all are read and the others left out, since a statement holds only so many.
    if keys is not None and len(keys) <= _ASKED:
        statement = statement.where(Alert.id.in_(keys))
    if series is not None and len(series) <= _ASKED:
        statement = statement.where(Alert.series_id.in_(series))
    found = _rows(
        session,
        [
            row
            for row in session.scalars(statement)
            if (keys is None or row.id in keys) and (series is None or row.series_id in series)
        ],
    )
    return sorted(found, key=lambda alert: (alert.run.started, alert.run.pk, alert.series.operator,
                                            alert.series.backend, alert.pk))  # fmt: skip


def _rows(session: Session, rows: Sequence[Alert]) -> list[AlertRow]:
    of_series = query.series_rows(session, {row.series_id for row in rows})
    runs = query.run_rows(session, {row.run_id for row in rows} | {row.base_run_id for row in rows if row.base_run_id})
    events: dict[int, list[Event]] = {}
    compared: dict[int, Compared] = {}
    where: dict[tuple[int, int], str] = {}
    for chunk in query.chunks(row.id for row in rows):
        told = select(AlertEvent).where(AlertEvent.alert_id.in_(chunk)).order_by(AlertEvent.at, AlertEvent.id)
        for event in session.scalars(told):
            events.setdefault(event.alert_id, []).append(Event(event.at, event.who, event.state, event.reason))
        by = select(Comparison).join(Alert, Alert.comparison_id == Comparison.id).where(Alert.id.in_(chunk))
        compared.update((row.id, comparisons.from_row(row)) for row in session.scalars(by))
        at = (
            select(Alert.series_id, Alert.run_id, Environment.identity)
            .join(Point, and_(Point.series_id == Alert.series_id, Point.run_id == Alert.run_id))
            .join(Environment, Point.environment_id == Environment.id)
            .where(Alert.id.in_(chunk))
        )
        where.update(((series, run), identity) for series, run, identity in session.execute(at))
    wrote = authors(session, {runs[row.run_id].commit for row in rows})
    return [
        AlertRow(
            pk=row.id,
            series=of_series[row.series_id],
            metric=row.metric,
            state=row.state,
            cause=row.cause,
            base_run=None if row.base_run_id is None else runs[row.base_run_id],
            run=runs[row.run_id],
            environment=where.get((row.series_id, row.run_id)),
            opened=row.opened,
            until_time=row.until_time,
            until_commit=row.until_commit,
            author=wrote.get(runs[row.run_id].commit),
            compared=None if row.comparison_id is None else compared.get(row.comparison_id),
            events=tuple(events.get(row.id, ())),
            **{name: getattr(row, name) for name in _LEVELS},
        )
        for row in rows
    ]


def lapsed(session: Session, alert: AlertRow, run: RunRow) -> bool:
    """Whether an expectation is over when a run is judged: its date has come, or its commit is in."""
    if alert.state != "expected":
        return False
    if alert.until_time is not None and run.started >= alert.until_time:
        return True
    return alert.until_commit is not None and _contains(session, run.commit, alert.until_commit)


def _contains(session: Session, commit: str, wanted: str) -> bool:
    """Whether a commit is another or comes after it: by parents, by git, or else by the order of what is stored."""
    if commit == wanted or wanted in ancestors(session, commit):
        return True
    known = gitinfo.is_ancestor(wanted, commit)
    if known is not None:
        return known
    order = [node.hash for node in commit_order(session)]
    return wanted in order and commit in order and order.index(wanted) <= order.index(commit)


def same_change(alert: AlertRow, row: Judged) -> bool:
    """Whether a regression that the gate sees is the one of an alert.

    The date of a change moves by a night or two as results come in, so the levels decide as well: a change from the
    alert's level before is the same one, and one from its level after is another.
    """
    if alert.metric != row.what:
        return False
    if alert.metric in ("repeatability", "result"):
        return alert.state in OPEN
    before, after = levels(row)
    if before is None or after is None or alert.before is None or alert.effect is None:
        return alert.run == (row.span.head if row.span else row.point and row.point.run)
    far = math.log(before / alert.before)
    if alert.state in OPEN:
        return abs(far) < abs(far - alert.effect)
    back = math.log(after / alert.before) - alert.effect
    return abs(far) < abs(far - alert.effect) and abs(back) <= max(abs(alert.effect) / 2, math.log1p(MIN_EFFECT["gpu"]))


def levels(row: Judged) -> tuple[float | None, float | None]:
    """(before, after) of what a row says: ms or relative RMS error."""
    if row.what == "latency" and row.before_ms and row.change is not None:
        return row.before_ms, row.before_ms * (1 + row.change)
    if row.what == "accuracy" and row.before_rms is not None and row.point is not None and row.point.rms is not None:
        return row.before_rms + RMS_FLOOR, row.point.rms + RMS_FLOOR
    return None, None


def is_back(alert: AlertRow, row: Judged) -> bool:
    """Whether the newest results are on the level that an alert's series had before."""
    point = row.point
    if point is None or point.status != "ok":
        return False
    if alert.metric == "result":
        return True
    if alert.metric == "repeatability":
        return point.repeatable is True
    if alert.metric == "accuracy":
        return point.rms is not None and alert.before is not None and point.rms + RMS_FLOOR <= RMS_RATIO * alert.before
    if not point.timed or point.median_ms is None or alert.before is None or alert.effect is None:
        return False
    if alert.environment != point.environment.identity or point.timing is None:
        return False
    runs = [run for run, _ in row.latest]
    since = runs.index(alert.run.pk) + 1 if alert.run.pk in runs else 0
    return on_level(
        [log for _, log in row.latest[since:]], math.log(alert.before), alert.effect, row.sigma, point.timing
    )


def on_level(
    latest: Sequence[float],  # log latencies, the newest last
    before: float,  # log level
    effect: float,  # log distance of the other level
    sigma: float | None,
    timing: str,
) -> bool:
    """Whether the newest results lie on one level rather than on another.

    One result is enough where six sigma lie between; else so many together that their mean is as certain.
    """
    needed = max(1, math.ceil((2 * _SIGMAS * (sigma or 0.0) / effect) ** 2)) if effect else 1
    if not latest or needed > min(len(latest), LATEST):
        return False
    far = (math.fsum(latest[-needed:]) / needed - before) * math.copysign(1, effect)
    slack = max(math.log1p(MIN_EFFECT[timing]), _SIGMAS * (sigma or 0.0) / math.sqrt(needed))
    return far <= min(slack, abs(effect) / 2)


@dataclass(frozen=True)
class Updated:
    """What an update did, by keys of alerts."""

    opened: tuple[int, ...] = ()
    reopened: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        told = [
            f"{len(keys)} {name} ({', '.join(map(str, keys[:8]))}{', …' if len(keys) > 8 else ''})"
            for name, keys in (("opened", self.opened), ("reopened", self.reopened), ("fixed", self.fixed))
            if keys
        ]
        advice = "; `groupbench alerts` lists them, `ack`, `expect` and `close` deal with them"
        return "alerts: " + (", ".join(told) or "nothing new") + (advice if self.opened or self.reopened else "")


def update(session: Session, gate: Gate, now: datetime | None = None) -> Updated:
    """Write what the gate found: open what is new, reopen what is back or over, close what is fixed.

    The session must be one that writes. A second time changes nothing.
    """
    now = datetime.now(UTC) if now is None else now
    opened: list[int] = []
    reopened: list[int] = []
    fixed: list[int] = []
    seen: set[int] = set()
    at = f"run {gate.run.id[:12]} at {gate.run.state}"
    for row in gate.rows:
        if row.verdict not in ("regressed", "wrong"):
            continue
        if row.alert is None:
            opened.append(_open(session, row, now, at))
            continue
        seen.add(row.alert.pk)
        if row.alert.state == "fixed":
            _move(session, row.alert.pk, "new", ITSELF, f"it is back: {at}", now)
            reopened.append(row.alert.pk)
    points = {row.series.pk: row for row in gate.rows if row.point is not None}
    for alert in gate.alerts:
        judged = points.get(alert.series.pk)
        if alert.state not in OPEN or alert.pk in opened:
            continue
        if judged is not None and alert.pk not in seen and alert.run != gate.run and is_back(alert, judged):
            _move(session, alert.pk, "fixed", ITSELF, f"the level is back: {at}", now)
            fixed.append(alert.pk)
        elif alert.pk in gate.lapsed:
            _move(session, alert.pk, "new", ITSELF, f"expected until {alert.until}", now)
            reopened.append(alert.pk)
    return Updated(tuple(opened), tuple(reopened), tuple(fixed))


def _open(session: Session, row: Judged, now: datetime, at: str) -> int:
    assert row.point is not None and row.what is not None
    head = row.span.head if row.span else row.point.run
    base = row.span.base if row.span else None
    before, after = levels(row)
    interval = (row.low, row.high) if row.what == "latency" else (None, None)
    identity = select(Series.identity).where(Series.id == row.series.pk)
    said = [session.scalar(identity), row.what, None if base is None else base.id, head.id]
    known = session.scalar(select(Alert.id).where(Alert.identity == digest(said)))
    if known is not None:  # of a time before: it was closed, and levels moved on since
        _move(session, known, "new", ITSELF, f"it is back: {at}", now)
        return known
    alert = Alert(
        identity=digest(said),
        series_id=row.series.pk,
        metric=row.what,
        state="new",
        cause=row.cause,
        base_run_id=None if base is None else base.pk,
        run_id=head.pk,
        comparison_id=None if row.compared is None else row.compared.pk,
        before=before,
        after=after,
        effect=math.log(after / before) if before and after else None,
        low=None if interval[0] is None else math.log1p(interval[0]),
        high=None if interval[1] is None else math.log1p(interval[1]),
        opened=now,
    )
    session.add(alert)
    session.flush()
    _event(session, alert.id, "new", ITSELF, at, now)
    return alert.id


def acknowledge(session: Session, ids: Sequence[int], who: str, reason: str | None, now: datetime) -> list[AlertRow]:
    """Say that they are known and worked on."""
    for alert in _asked(session, ids):
        _must_be_open(alert, "acknowledged")
        _move(session, alert.pk, "acknowledged", who, reason, now)
    return find(session, keys=set(ids))


def expect(
    session: Session, ids: Sequence[int], until: str | None, who: str, reason: str, now: datetime
) -> list[AlertRow]:
    """Accept their new levels, until a date or a commit. Raises QueryError."""
    when, commit = _until(session, until, now)
    for alert in _asked(session, ids):
        if alert.metric == "result":
            raise QueryError(f"alert {alert.pk} is of a wrong result, which can be no expected level; mend the backend")
        _must_be_open(alert, "expected")
        _move(session, alert.pk, "expected", who, reason, now, when, commit)
    return find(session, keys=set(ids))


def close(session: Session, ids: Sequence[int], state: str, who: str, reason: str, now: datetime) -> list[AlertRow]:
    """Close them as fixed or as invalid. Raises QueryError."""
    for alert in _asked(session, ids):
        if alert.metric == "result" and state == "invalid":
            raise QueryError(f"alert {alert.pk} is of a wrong result, which is not accepted; mend backend or tolerance")
        if alert.state == state:
            raise QueryError(f"alert {alert.pk} is closed as {state} already; `groupbench alerts --all` lists them")
        _move(session, alert.pk, state, who, reason, now)
    return find(session, keys=set(ids))


def _asked(session: Session, ids: Iterable[int]) -> list[AlertRow]:
    wanted = list(dict.fromkeys(ids))
    found = {alert.pk: alert for alert in find(session, keys=set(wanted))}
    for key in wanted:
        if key not in found:
            raise QueryError(f"no alert {key}; `groupbench alerts --all` lists them")
    return [found[key] for key in wanted]


def _must_be_open(alert: AlertRow, state: str) -> None:
    if alert.state not in OPEN:
        then = "it reopens if the change returns" if alert.state == "fixed" else "its level is what is judged by now"
        raise QueryError(f"alert {alert.pk} is closed as {alert.state}; {then}")


def _until(session: Session, text: str | None, now: datetime) -> tuple[datetime | None, str | None]:
    """A date, how far ahead (30d), or a commit. Raises QueryError."""
    if text is None:
        return None, None
    if filters.looks_like_date(text) and not re.fullmatch(r"[0-9a-f]{7,40}", text):
        ahead = re.fullmatch(r"\d+\s*[mhdwy]", text.strip())
        when = now + (now - filters.instant(text, now=now)) if ahead else filters.instant(text, end=True)
        if when <= now:
            raise QueryError(f"{text!r} is over already; give a date to come, 30d, or a commit")
        return when, None
    hashes = list(session.scalars(select(Commit.hash).where(query.starts(Commit.hash, text)).limit(2))) if text else []
    hash_ = hashes[0] if len(hashes) == 1 else gitinfo.rev_parse(text)
    if hash_ is None:
        known = "is ambiguous" if hashes else "is neither a date nor a commit that the database or git knows"
        raise QueryError(f"{text!r} {known}; give 2026-01-31, 30d or a hash")
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
    alert = session.get_one(Alert, key)
    alert.state, alert.until_time, alert.until_commit = state, until_time, until_commit
    _event(session, key, state, who, reason, now)


def _event(session: Session, key: int, state: str, who: str, reason: str | None, now: datetime) -> None:
    session.add(AlertEvent(alert_id=key, at=now, who=who, state=state, reason=reason))
    session.flush()
