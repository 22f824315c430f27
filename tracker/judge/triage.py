"""Summarise incidents for the morning: title, date, owner, evidence, cost, and the next step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.judge.alerts import FAILING, STATES, AlertRow, IncidentRow
from groupbench.tracker.judge.nights import keys_of_night
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.rows import RunRow, SeriesRow
from groupbench.tracker.query.series import series_rows
from groupbench.tracker.store.schema import NEWEST_FIRST, TIMED_POINT, Point, Run, Series
from groupbench.tracker.text import repro
from groupbench.tracker.text.wording import chance, counted, date, signed_change

MOST = 6
"""Most incidents on the first screen, at three lines each."""
GAINED = 0.02
"""Least relative gain of another problem that counts as time moved to the incident."""
MOVED = 0.8
"""Share of the cost that is found elsewhere as a gain, from which the incident is time that moved."""
_NAMES = 3
"""Most names of backends or reasons in a line."""


@dataclass(frozen=True)
class IncidentView:
    """An incident with its members.

    Attributes:
        us: Cost per step in µs, without fixed members; None if unknown.
        share: The same as a part of the night's latencies.
        moved_us: The part that the backends' other problems gained in the same runs.
    """

    incident: IncidentRow
    members: tuple[AlertRow, ...]
    us: float | None = None
    share: float | None = None
    moved_us: float = 0.0

    @cached_property
    def lead(self) -> AlertRow:
        """The member that shows the incident: one with a named commit or an A/B, then the largest change."""
        return max(self.members, key=lambda each: (bool(each.named), each.compared is not None, abs(each.effect or 0)))

    @property
    def title(self) -> str:
        """The metric, the changes and the series: `latency +4.9% to +12.1% in 67 series of helion, triton`."""
        metrics = some(dict.fromkeys(each.metric for each in self.members))
        changes = [each.change for each in self.members if each.change is not None]
        ends = dict.fromkeys(signed_change(end) for end in (min(changes), max(changes))) if changes else ()
        if self.lead.metric == "result":
            metrics, ends = "wrong result", ()
        backends = some(sorted({f"{each.series.operator} {each.series.backend}" for each in self.members}))
        number = len({each.series.pk for each in self.members})
        where = f"{backends} {self.lead.series.shape}" if number == 1 else f"{number} series of {backends}"
        moved = ["moved:"] if self.us and self.moved_us >= MOVED * self.us else []
        return " ".join([*moved, metrics, *([" to ".join(ends)] if ends else []), "in", where])

    @property
    def span(self) -> Span:
        """The commits between which all members changed: the narrowest range, or the commit that a search named."""
        if self.lead.named:
            return self.lead.span
        return min((each.span for each in self.members), key=lambda span: span.number or 10**9)

    @property
    def sure(self) -> str:
        """The evidence: a search, A/Bs, or history alone."""
        compared = [each.compared for each in self.members if each.compared is not None]
        inherited = sum(bool(one.details.get("inherits")) for one in compared)
        measured = len(compared) - inherited
        if self.lead.named:
            return f"bisect named the commit ({chance(self.lead.named[0].confidence)})"
        if compared:
            return f"A/B of {counted(measured, 'series', 'series')}" + (f", {inherited} more fit" if inherited else "")
        return "wrong by the reference" if self.lead.metric == "result" else "by history alone, no A/B"

    @property
    def cost(self) -> str:
        """The cost: µs per step, or a night's share."""
        if self.us is None:
            return "" if self.share is None else f"{100 * self.share:.2g} % of the night's time"
        moved = f", {self.moved_us:.3g} µs of it moved from other kernels" if self.moved_us else ""
        return f"{self.us:.3g} µs per step{moved}"

    @property
    def next(self) -> str:
        """The next step."""
        key, state, span = self.incident.pk, self.incident.state, self.span
        if self.lead.metric == "result":
            return f"fix the backend: {self.lead.repro or 'it fails the gate until the result is correct'}"
        if state not in FAILING:
            last = self.incident.changed.text if self.incident.changed else state
            return f"nothing: {last}" + (f", until {self.incident.until}" if self.incident.until else "")
        if not span.named and (span.number or 0) > 1 and span.base is not None and self.lead.series.host in repro.HOSTS:
            return f"groupbench bisect {span.base.commit[:10]} {span.head.commit[:10]} --series {self.lead.series.pk}"
        accept = f"`groupbench incidents expect {key} --reason TEXT`"
        if all(each.cause == "undone" for each in self.members):
            return f"{accept} if {span.label} was meant to undo an improvement; fix it otherwise"
        return f"fix or revert {span.label}, or {accept}"

    @property
    def lines(self) -> list[str]:
        """The incident on the first screen."""
        span = self.span
        since = f"since {date(span.head.started)} at {span.text}" + (f" ({span.remark})" if span.remark else "")
        subject = f" {span.subject!r}" if span.subject and (span.named or span.number in (None, 1)) else ""
        whose = f"owner {self.incident.owner or 'unknown'}"
        facts = [f"{since}{subject}", whose, self.cause, self.sure, f"costs {self.cost}" if self.cost else ""]
        link = f"; {self.incident.link}" if self.incident.link else ""
        return [
            f"{self.incident.pk} {self.incident.state}: {self.title}",
            f"  {'; '.join(filter(None, facts))}{link}",
            f"  next: {self.next}",
        ]

    @property
    def cause(self) -> str:
        """The members' causes."""
        causes = some(dict.fromkeys(each.cause for each in self.members if each.cause))
        return f"cause {causes}" if causes else ""

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Return the keys of `flat` for CSV."""
        return (
            *("incident", "state", "title", "since", "commits", "commit", "subject", "owner", "cause", "sure"),
            *("us", "share", "moved_us", "next", "repro", "link", "series", "fixed"),
        )

    def flat(self) -> dict[str, Any]:
        """Return the incident as one row of JSON or CSV. JSON also has the members."""
        span = self.span
        return {
            "incident": self.incident.pk,
            **{name: getattr(self.incident, name) for name in ("state", "owner", "link", "until")},
            **{name: getattr(self, name) for name in ("title", "sure", "us", "share", "moved_us", "next")},
            "since": span.head.started,
            "commits": span.text,
            "commit": span.commit,
            "subject": span.subject,
            "last": self.incident.events[-1].text if self.incident.events else None,
            "repro": self.lead.repro,
            "cause": self.cause.removeprefix("cause ") or None,
            "series": len({each.series.pk for each in self.members}),
            "fixed": sum(each.ended is not None for each in self.members),
            "members": [
                {"series": each.series.pk, "metric": each.metric, "change": each.change, "state": each.state}
                for each in self.members
            ],
        }


def some(words: Iterable[str]) -> str:
    """Return the first few words, and count the others."""
    listed = list(words)
    more = len(listed) - _NAMES
    return ", ".join(listed[:_NAMES]) + (f" and {more} more" if more > 0 else "")


def of(session: Session, alerts: Sequence[AlertRow], calls: Mapping[str, float] | None = None) -> list[IncidentView]:
    """Return alerts' incidents, the most expensive first.

    Args:
        calls: Calls per step by `OPERATOR SHAPE`, which may have wildcards. Without it, all count.
    """
    members: dict[int, list[AlertRow]] = {}
    for alert in alerts:
        members.setdefault(alert.incident.pk, []).append(alert)
    views = [IncidentView(rows[0].incident, tuple(rows)) for rows in members.values()]
    runs = {} if calls else {view.lead.run.pk: view.lead.run for view in views}
    night = {key: _night_ms(session, run) for key, run in runs.items()}
    views = [_with_cost(session, view, calls or {}, night.get(view.lead.run.pk)) for view in views]

    def order(view: IncidentView) -> tuple[Any, ...]:
        cost = view.us if view.us is not None else view.share or 0.0
        wrong = view.lead.metric == "result"
        return max(STATES.index(view.incident.state), 1), not wrong, -cost, view.incident.pk

    return sorted(views, key=order)


def calls_of(series: SeriesRow, calls: Mapping[str, float]) -> float | None:
    """Return how often a step calls a problem, or None if the traffic does not have it."""
    name = f"{series.operator} {series.shape}"
    exact = calls.get(name)
    return exact if exact is not None else next((n for text, n in calls.items() if fnmatchcase(name, text)), None)


def _with_cost(
    session: Session, view: IncidentView, calls: Mapping[str, float], night_ms: float | None
) -> IncidentView:
    lost = [
        (each, (each.after or 0.0) - (each.before or 0.0))
        for each in view.members
        if each.metric == "latency" and each.ended is None and each.before and each.after
    ]
    if not lost:
        return view
    if calls:
        us = sum(1000 * ms * (calls_of(each.series, calls) or 0.0) for each, ms in lost)
        return replace(view, us=us, moved_us=min(us, _gained_us(session, view, calls)))
    return replace(view, share=sum(ms for _, ms in lost) / night_ms if night_ms else None)


def _gained_us(session: Session, view: IncidentView, calls: Mapping[str, float]) -> float:
    """Return the time per step that the backends' other problems gained in the same runs."""
    lead = view.lead
    if lead.base_run is None:
        return 0.0
    backends = {each.series.backend for each in view.members}
    query = (
        select(Point.series_id, Point.run_id, Point.median_ms)
        .join(Series, Point.series_id == Series.id)
        .where(Point.run_id.in_((lead.base_run.pk, lead.run.pk)), Series.backend.in_(backends), TIMED_POINT)
    )
    of_series: dict[int, dict[int, float]] = {}
    for series, run, ms in session.execute(query):
        of_series.setdefault(series, {})[run] = ms or 0.0
    members = {each.series.pk for each in view.members}
    both = {key: ms for key, ms in of_series.items() if len(ms) == 2 and key not in members}
    gained = {key: ms[lead.base_run.pk] - ms[lead.run.pk] for key, ms in both.items()}
    large = {key: ms for key, ms in gained.items() if ms > GAINED * both[key][lead.run.pk]}
    rows = series_rows(session, large)
    return sum(1000 * ms * (calls_of(rows[key], calls) or 0.0) for key, ms in large.items())


def _night_ms(session: Session, run: RunRow) -> float | None:
    """Return the summed latencies of a run's night."""
    keys = keys_of_night(session, run)
    return session.scalar(select(func.sum(Point.median_ms)).where(Point.run_id.in_(keys)))


def unmeasured(session: Session) -> str:
    """Return the cells that the newest run did not measure: `not measured: 3 error, 1 oom`; empty if nothing."""
    run = session.scalar(select(Run.id).order_by(*NEWEST_FIRST).limit(1))
    query = select(Point.status, func.count()).where(Point.run_id == run, Point.status.not_in(("ok", "wrong")))
    counts = [f"{number} {status}" for status, number in session.execute(query.group_by(Point.status))]
    return f"not measured: {', '.join(counts)}" if counts else ""


def screen(views: Sequence[IncidentView], unmeasured: str, most: int | None = MOST) -> list[str]:
    """Return the first screen's lines: at most `most` incidents, then the cells that were not measured."""
    shown = list(views[:most])
    lines = [line for view in shown for line in view.lines]
    if len(views) > len(shown):
        lines.append(f"and {counted(len(views) - len(shown), 'more incident')}; `groupbench incidents --format csv`")
    return [*lines, *filter(None, [unmeasured])]


def week(views: Sequence[IncidentView], since: datetime, unmeasured: str) -> str:
    """Summarise the incidents since a time, in Markdown."""
    last = {view.incident.pk: max((each.at for each in view.incident.events), default=since) for view in views}
    parts = {
        "Open": [view for view in views if view.incident.state in (*FAILING, "acknowledged")],
        "Accepted": [v for v in views if v.incident.state in ("expected", "invalid") and last[v.incident.pk] >= since],
        "Fixed": [view for view in views if view.incident.state == "fixed" and last[view.incident.pk] >= since],
    }
    new = sum(view.incident.opened >= since for view in views)
    lines = [f"# Performance triage since {since:%Y-%m-%d}", ""]
    lines += [f"{counted(new, 'new incident')}, " + ", ".join(f"{len(of)} {n.lower()}" for n, of in parts.items()), ""]
    for name, of_part in parts.items():
        if of_part:
            lines += [f"## {name}", ""]
            for view in of_part:
                first, *rest = (line.strip() for line in view.lines)
                lines += [f"- **{first}**", *(f"  {line}" for line in rest)]
            lines.append("")
    return "\n".join([*lines, *([unmeasured, ""] if unmeasured else [])])
