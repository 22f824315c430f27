"""Open, update and close incidents, from the gate's verdicts or by hand. Each state change is an event."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.environment import digest
from groupbench.tracker.facts.errors import QueryError
from groupbench.tracker.facts.metrics import LATENCY, METRICS, of_alert
from groupbench.tracker.facts.record import LONGEST_NAME, LONGEST_TEXT
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.incident_facts import causes_of
from groupbench.tracker.judge.incident_rows import ACTIVE, ITSELF, OPEN, MemberRow
from groupbench.tracker.judge.members import contains, find
from groupbench.tracker.judge.verdicts import PIN, Gate, Judged
from groupbench.tracker.query import filters
from groupbench.tracker.query.resolve import Lookup, commit_hash
from groupbench.tracker.query.rows import RunRow
from groupbench.tracker.stats.thresholds import SURE
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.comparisons import DIFFERENT
from groupbench.tracker.store.schema import Alert, Commit, Incident, IncidentEvent, Point, Run, Series
from groupbench.tracker.tools import git

OwnerOf = Callable[[Collection[str]], str | None]
"""Returns changed files' owner."""


@dataclass(frozen=True)
class Updated:
    """The keys of changed incidents. Uncommitted code changes none."""

    opened: tuple[int, ...] = ()
    reopened: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()
    dirty: bool = False

    @property
    def text(self) -> str:
        """`gate --update`'s line: how many incidents changed, and their first numbers."""
        if self.dirty:
            return "incidents: unchanged, since the run measured uncommitted code"
        parts = [
            f"{len(keys)} {name} ({', '.join(map(str, keys[:8]))}{', …' if len(keys) > 8 else ''})"
            for name, keys in (("opened", self.opened), ("reopened", self.reopened), ("fixed", self.fixed))
            if keys
        ]
        advice = "; list them with `groupbench incidents`, then run `groupbench incidents ack`, `expect` or `close`"
        return "incidents: " + (", ".join(parts) or "nothing new") + (advice if self.opened or self.reopened else "")


def update(session: Session, gate: Gate, now: datetime | None = None, owner: OwnerOf = lambda files: None) -> Updated:
    """Store the gate's verdicts: open new incidents, reopen returned and expired ones, close fixed ones.

    Needs a session that writes. Calling it again changes nothing. Nor does a dirty tree's run: the next edit replaces
    its code.
    """
    if gate.run.state.dirty:
        return Updated(dirty=True)
    # A pin needs no incident: it fails the gate until it is met or removed.
    failing = [row for row in gate.rows if row.verdict.fails and row.what != PIN]
    writer = _Writer(session, datetime.now(UTC) if now is None else now, ITSELF, gate, failing)
    reopened: set[int] = set()
    for row in failing:
        if (key := _reopened(writer, row, reopened)) is not None:
            reopened.add(key)
    opened = _join(writer, gate, failing, owner)
    fixed, lapsed = _settle(writer, gate)
    return Updated(tuple(sorted(opened)), tuple(sorted(reopened | lapsed)), tuple(sorted(fixed)))


class _Writer:
    """Writes incidents, members and events, all at one time and by one author.

    Args:
        gate: The verdicts to store, if any.
        rows: Its members, old and new.
    """

    def __init__(
        self, session: Session, now: datetime, who: str, gate: Gate | None = None, rows: Sequence[Judged] = ()
    ) -> None:
        self.session, self.now, self.who = session, now, who
        self.at = "" if gate is None else f"run {gate.run.id[:12]} at {gate.run.state}"
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

    def stored(self, row: Judged) -> Alert | None:
        """Return a row's member: the named one, or an earlier one about the same change."""
        return self._alerts.get(self.identity(row)) if row.alert is None else self.session.get_one(Alert, row.alert.pk)

    def incident(self, key: int) -> Incident:
        return self.session.get_one(Incident, key)

    def add(self, rows: Iterable[Judged], incident: int) -> None:
        """Store rows as members of an incident."""
        for row in rows:
            base, head = _ends(row)
            facts: dict[str, Any] = {"identity": self.identity(row), "series_id": row.series.pk, "metric": row.what}
            facts |= {"cause": row.cause, "base_run_id": None if base is None else base.pk, "run_id": head.pk}
            facts |= {"comparison_id": None if row.compared is None else row.compared.pk, **_size(row)}
            self.session.add(Alert(opened=self.now, incident_id=incident, **facts))
        self.session.flush()

    def open(self, first: Sequence[str], state: str, **facts: Any) -> int:
        """Store an incident without members, by identifying texts. Returns its key."""
        incident = Incident(identity=digest(["incident", *first]), state=state, **{"opened": self.now, **facts})
        self.session.add(incident)
        self.session.flush()
        return incident.id

    def move(
        self, key: int, state: str, reason: str | None, when: datetime | None = None, commit: str | None = None
    ) -> None:
        """Set an incident's state and store the event. Raises QueryError if a text is too long."""
        incident = self.incident(key)
        incident.state, incident.until_time, incident.until_commit = state, when, commit
        self.event(key, state, reason)

    def event(self, key: int, state: str, reason: str | None) -> None:
        """Store an event. Raises QueryError if a text is too long."""
        filters.refuse_longer("who", self.who, LONGEST_NAME)
        filters.refuse_longer("reason", reason, LONGEST_TEXT)
        self.session.add(IncidentEvent(incident_id=key, at=self.now, who=self.who, state=state, reason=reason))
        self.session.flush()

    def apart(self, members: Collection[int]) -> set[int]:
        """Return the incidents with exactly these members, as keys: they leave an incident that has others too."""
        keys = set()
        rows = [self.session.get_one(Alert, key) for key in sorted(members)]
        for key in {row.incident_id for row in rows}:
            moved = [row for row in rows if row.incident_id == key]
            number = select(func.count()).select_from(Alert).where(Alert.incident_id == key)
            if self.session.scalar(number) == len(moved):
                keys.add(key)
                continue
            old = self.incident(key)
            facts = {name: getattr(old, name) for name in ("state", "owner", "opened", "until_time", "until_commit")}
            new = self.open([moved[0].identity, old.identity], **facts)
            for event in self.session.scalars(select(IncidentEvent).where(IncidentEvent.incident_id == key)).all():
                copied = {name: getattr(event, name) for name in ("at", "who", "state", "reason")}
                self.session.add(IncidentEvent(incident_id=new, **copied))
            for row in moved:
                row.incident_id = new
            self.session.flush()
            keys.add(new)
        return keys


def _reopened(writer: _Writer, row: Judged, reopened: Collection[int]) -> int | None:
    """Return the incident's key that a row reopens: its member is back, or has grown since it was accepted.

    The other members that are back tonight stay in an incident that the first one has reopened.
    """
    stored = writer.stored(row) if row.alert is None or row.alert.state == "fixed" else None
    if stored is None:
        return None
    if row.alert is None:  # closed earlier, or the change has grown; levels have moved on since
        for name, value in _size(row).items():
            setattr(stored, name, value)
    stored.ended = None
    together = writer.incident(stored.incident_id).state == "fixed" or stored.incident_id in reopened
    key = stored.incident_id if together else writer.apart({stored.id}).pop()
    if writer.incident(key).state not in ACTIVE:
        writer.move(key, "new", f"regressed again: {writer.at}")
    return key


def _join(writer: _Writer, gate: Gate, failing: Sequence[Judged], owner: OwnerOf) -> list[int]:
    """Store each fresh row as a member of an incident, by cause, and return the new incidents' keys."""
    fresh = [row for row in failing if row.alert is None and writer.stored(row) is None]
    joined = [row for row in failing if row.alert is not None and row.alert.incident.state in ACTIVE]
    quiet = [row for row in gate.rows if not row.verdict.fails] if fresh else []
    opened = []
    for rows, files in causes_of(writer.session, [*fresh, *joined], quiet):
        new = [row for row in rows if row.alert is None]
        keys = Counter(row.alert.incident.pk for row in rows if row.alert is not None)
        if keys:
            key = keys.most_common(1)[0][0]
            if new:
                writer.event(key, writer.incident(key).state, f"{len(new)} more series: {writer.at}")
        else:
            key = writer.open([writer.identity(new[0]), writer.at], "new")
            opened.append(key)
        writer.add(new, key)
        incident = writer.incident(key)
        if incident.state == "new" and any(row.compared and row.compared.verdict == DIFFERENT for row in rows):
            writer.move(key, "confirmed", writer.at if key in opened else f"by an A/B: {writer.at}")
        elif key in opened:
            writer.event(key, "new", writer.at)
        incident.owner = owner(files) or incident.owner
    return opened


def _settle(writer: _Writer, gate: Gate) -> tuple[set[int], set[int]]:
    """End each member whose level is back, and return the keys (fixed incidents, expired ones)."""
    seen = {row.alert.pk for row in gate.rows if row.alert is not None}
    rows = {(row.series.pk, row.point.environment.machine): row for row in gate.rows if row.point is not None}
    fixed, lapsed = set(), set()
    for member in gate.alerts:
        key = member.incident.pk
        if member.state not in OPEN:
            continue
        row = rows.get((member.series.pk, member.machine or "")) if member.run != gate.run else None
        if row is not None and member.pk not in seen and _is_back(member, row, gate.lapsed):
            writer.session.get_one(Alert, member.pk).ended = writer.now
            writer.session.flush()
            if all(writer.session.scalars(select(Alert.ended).where(Alert.incident_id == key))):
                writer.move(key, "fixed", f"back on the earlier level: {writer.at}")
                fixed.add(key)
        elif member.pk in gate.lapsed and writer.incident(key).state == "expected":
            writer.move(key, "new", f"was expected until {member.incident.until}")
            lapsed.add(key)
    return fixed, lapsed - fixed


def _is_back(member: MemberRow, row: Judged, lapsed: Collection[int]) -> bool:
    """Return whether no row has a member because its level is over: tonight's value is not on it any more."""
    point = row.point
    assert point is not None
    if member.metric == "result":
        return True
    if point.status != "ok":
        return False
    metric = of_alert(member.metric)
    now = point.value(metric)
    if member.metric == "repeatability":
        return point.repeatable is True
    if now is None or (metric is LATENCY and not point.timed):
        return False
    if member.state != "expected" or member.pk in lapsed:
        return True
    if member.before is None or member.distance is None:  # accepted: compare with the level before
        return False
    sigma = row.evidence.sigma or 0.0
    slack = max(row.evidence.counts or math.log1p(metric.least), SURE * sigma)
    away = (metric.log(now) - metric.log(member.before)) * math.copysign(1, member.distance)
    return away <= min(slack, abs(member.distance) / 2)


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


def accept(session: Session, gate: Gate, who: str, reason: str | None, now: datetime, *, transition: bool) -> set[int]:
    """Accept levels, by which later runs are judged, and return the keys of their incidents.

    Args:
        transition: Those since the newest change of toolchain or machine: their incidents are closed as invalid, since
            the code did not cause them. Otherwise, those of series that improved. A wrong result is never accepted.
    """
    rows = [row for row in gate.rows if row.point and (_came_with_transition(row) if transition else _improved(row))]
    writer = _Writer(session, now, who, gate, rows)
    keys = set()
    for members, _ in causes_of(session, rows):
        of_cause = writer.apart({stored.id for row in members if (stored := writer.stored(row)) is not None})
        new = [row for row in members if writer.stored(row) is None]
        if new and not of_cause:
            of_cause = {writer.open([writer.identity(new[0]), writer.at], "new")}
        writer.add(new, min(of_cause))
        came_with = members[0].transition if transition else None
        because = "; ".join(came_with.differences) if came_with else str(Verdict.IMPROVED)
        for key in of_cause:
            writer.move(key, "invalid" if transition else "expected", reason or because)
        keys |= of_cause
    return keys


def _improved(row: Judged) -> bool:
    return row.verdict is Verdict.IMPROVED and row.what in METRICS


def _came_with_transition(row: Judged) -> bool:
    if row.transition is None or row.what not in {*METRICS, "accuracy", "repeatability"}:
        return False
    return row.verdict.changed or row.verdict is Verdict.INCOMPARABLE or row.transition.machine


def change(
    session: Session,
    ids: Sequence[int],
    state: str | None,
    who: str,
    reason: str,
    now: datetime,
    *,
    series: Collection[int] = (),
    until: str | None = None,
    lookup: Lookup = git.rev_parse,
) -> set[int]:
    """Set incidents' states, and return their keys.

    Args:
        state: acknowledged, expected, fixed or invalid; None to add a note alone.
        series: Only the members about these series, which become a separate incident.
        until: When expected incidents become new again: a date, a duration from now, or a commit.
        lookup: Resolves a commit that the database does not know.

    Raises QueryError for an unknown incident, an impossible state, or an `until` in the past, unknown or
    measured.
    """
    when, commit = _until(session, until, now, lookup)
    members = _chosen(session, ids, series)
    writer = _Writer(session, now, who)
    if state is None:
        for key, present in {member.incident.pk: member.incident.state for member in members}.items():
            writer.event(key, present, reason)
        return set(ids)
    for member in members:
        _refuse_measured(session, member, commit)
        _refuse(member, state)
    keys = writer.apart({member.pk for member in members})
    if state == "fixed":
        for stored in session.scalars(select(Alert).where(Alert.incident_id.in_(keys), Alert.ended.is_(None))):
            stored.ended = now
    for key in keys:
        writer.move(key, state, reason, when, commit)
    return keys


def _chosen(session: Session, ids: Sequence[int], series: Collection[int] = ()) -> list[MemberRow]:
    """Return incidents' members, of some series. Raises QueryError for an unknown incident, or without any member."""
    members = find(session, keys=set(ids))
    for key in ids:
        if not any(member.incident.pk == key for member in members):
            raise QueryError(f"no incident {key}; `groupbench incidents --all` lists all incidents")
    chosen = [member for member in members if not series or member.series.pk in series]
    if not chosen:
        raise QueryError("no member of these incidents is about these series; `groupbench incidents --each`")
    return chosen


def _refuse(member: MemberRow, state: str) -> None:
    """Raise QueryError if a member's incident cannot take a state."""
    now, incident = member.incident.state, f"incident {member.incident.pk}"
    if member.metric == "result" and state in ("expected", "invalid"):
        raise QueryError(f"{incident} is a wrong result and cannot be accepted; fix backend or tolerance")
    if state in OPEN and now not in OPEN:
        then = "it reopens if the regression returns" if now == "fixed" else "its level is already accepted"
        raise QueryError(f"{incident} is closed as {now}; {then}")
    if state not in OPEN and now == state:
        raise QueryError(f"{incident} is already closed as {state}; `groupbench incidents --all` lists it")


def _refuse_measured(session: Session, member: MemberRow, commit: str | None) -> None:
    """Raise QueryError if the commit until which a member is expected is measured."""
    newest = select(Commit.hash).join(Run).join(Point).where(Point.series_id == member.series.pk)
    measured = session.scalar(newest.order_by(Run.started.desc()).limit(1)) if commit is not None else None
    if commit is not None and measured is not None and contains(session, measured, commit):
        raise QueryError(
            f"commit {commit[:10]} is already measured for {member.series}, so nothing is left to expect; "
            "give a later commit, or a date"
        )


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
