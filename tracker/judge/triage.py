"""Summarise incidents for the morning: title, date, owner, evidence, cost, and the next step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from groupbench.tracker.facts.record import MEASURED
from groupbench.tracker.judge.alerts import FAILING, STATES, AlertRow, IncidentRow
from groupbench.tracker.judge.nights import keys_of_night
from groupbench.tracker.judge.owners import agreed
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.resolve import latest_run
from groupbench.tracker.query.rows import RunRow, SeriesRow
from groupbench.tracker.query.series import series_rows
from groupbench.tracker.query.traffic import CallsOf
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import DIFFERENT, Compared
from groupbench.tracker.store.schema import TIMED_POINT, Point, Series
from groupbench.tracker.text import repro
from groupbench.tracker.text.wording import chance, counted, signed_ends

NO_CALLS = CallsOf()
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
        moved_us: The part gained by other problems of the same layers in the same runs.
        unnamed: Why a search found no commit; "" without such a search.
    """

    incident: IncidentRow
    members: tuple[AlertRow, ...]
    us: float | None = None
    share: float | None = None
    moved_us: float = 0.0
    unnamed: str = ""

    @cached_property
    def lead(self) -> AlertRow:
        """The member that shows the incident: one with a named commit, in force, with an A/B, of the largest change."""

        def order(each: AlertRow) -> tuple[Any, ...]:
            return bool(each.named), each.ended is None, each.compared is not None, abs(each.effect or 0)

        return max(self.members, key=order)

    @property
    def in_force(self) -> tuple[AlertRow, ...]:
        """The members whose level is not back; all of a fixed incident."""
        return tuple(each for each in self.members if each.ended is None) or self.members

    @property
    def title(self) -> str:
        """The metric, the changes and the series in force: `latency +4.9% to +12.1% in 67 series of helion, triton`."""
        members = self.in_force
        metrics = some(dict.fromkeys(each.metric for each in members))
        changes = [each.change for each in members if each.change is not None]
        reach = signed_ends(min(changes), max(changes)) if changes else ""
        reach = " to ".join(dict.fromkeys(reach.split(" to ")))
        if members[0].metric == "result":
            metrics, reach = "wrong result", ""
        backends = some(sorted({f"{each.series.operator} {each.series.backend}" for each in members}))
        number = len({each.series.pk for each in members})
        where = f"{backends} {members[0].series.shape}" if number == 1 else f"{number} series of {backends}"
        moved = ["moved:"] if self.has_moved else []
        return " ".join([*moved, metrics, *([reach] if reach else []), "in", where])

    @property
    def has_moved(self) -> bool:
        """Whether other kernels of the layers gained most of the time."""
        return bool(self.us and self.moved_us >= MOVED * self.us)

    @property
    def span(self) -> Span:
        """The commits between which all members changed: the narrowest range, or the commit that a search named."""
        if self.lead.named:
            return self.lead.span
        return min(agreed([each.span for each in self.members]), key=lambda span: span.number or 10**9)

    @property
    def owner(self) -> str | None:
        """The author of the commit named by a search, or else the incident's owner."""
        named = self.span.named
        return self.span.author if len(named) == 1 and len(named[0].commits) == 1 else self.incident.owner

    @property
    def sure(self) -> str:
        """The evidence: a search, A/Bs, or history alone."""
        compared = [each.compared for each in self.members if each.compared is not None]
        measured = [one for one in compared if not one.details.get("inherits")]
        differ = sum(one.verdict == DIFFERENT for one in measured)
        if self.lead.named:
            return f"bisect named the commit ({chance(self.lead.named[0].confidence)})"
        parts = [f"A/B of {counted(len(measured), 'series', 'series')}"] if measured else []
        parts += [f"{differ} different"] if differ < len(measured) else []
        parts += [f"{len(compared) - len(measured)} more fit"] if len(measured) < len(compared) else []
        parts += [f"bisect named no commit: {self.unnamed}"] if self.unnamed else []
        if parts:
            return ", ".join(parts)
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
        several = not span.named and not self.unnamed and (span.number or 0) > 1 and span.base is not None
        can = [each for each in self.members if each.metric in repro.SEARCH_OF and each.series.host in repro.HOSTS]
        if several and can and span.base is not None:
            series, metric = can[0].series.pk, repro.SEARCH_OF[can[0].metric]
            words = f"groupbench bisect {span.base.commit[:10]} {span.head.commit[:10]} --series {series}"
            return words + (f" --metric {metric}" if metric != "latency" else "")
        accept = f"`groupbench incidents expect {key} --reason TEXT`"
        if self.has_moved:
            return f"{accept} if {span.label} was meant to move the time"
        if all(each.cause == "undone" for each in self.members):
            return f"{accept} if {span.label} was meant to undo an improvement; fix it otherwise"
        if all(each.cause in ("infrastructure", "machine", "environment") for each in self.members):
            return f"find what changed besides the code, or {accept}"
        return f"fix or revert {span.label}, or {accept}"

    @property
    def lines(self) -> list[str]:
        """The incident on the first screen."""
        span = self.span
        since = f"since {span.date} at {span.text}" + (f" ({span.remark})" if span.remark else "")
        subject = f" {span.subject!r}" if span.subject and (span.named or span.number in (None, 1)) else ""
        whose = f"owner {self.owner or 'unknown'}"
        facts = [f"{since}{subject}", whose, self.cause, self.sure, f"costs {self.cost}" if self.cost else ""]
        link = f"; {self.incident.link}" if self.incident.link else ""
        texts = f"{self.incident.pk} {self.incident.state}: {self.title}", "; ".join(filter(None, facts)) + link
        first, second, third = (" ".join(text.split()) for text in (*texts, f"next: {self.next}"))
        return [first, f"  {second}", f"  {third}"]

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
            **{name: getattr(self.incident, name) for name in ("state", "link", "until")},
            **{name: getattr(self, name) for name in ("owner", "title", "sure", "us", "share", "moved_us", "next")},
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


def of(session: Session, alerts: Sequence[AlertRow], calls: CallsOf = NO_CALLS) -> list[IncidentView]:
    """Return alerts' incidents, the most expensive first.

    Args:
        calls: Calls in a model's step. Without any, the cost is a share of the night's latencies.
    """
    compared, tried = _ab(session, alerts)
    members: dict[int, list[AlertRow]] = {}
    for alert in alerts:
        members.setdefault(alert.incident.pk, []).append(replace(alert, compared=compared.get(alert.pk)))
    views = [
        IncidentView(
            rows[0].incident, tuple(rows), unnamed=next((tried[each.pk] for each in rows if each.pk in tried), "")
        )
        for rows in members.values()
    ]
    runs = {} if calls else {view.lead.run.pk: view.lead.run for view in views}
    night = {key: _night_ms(session, run) for key, run in runs.items()}
    views = [_with_cost(session, view, calls, night.get(view.lead.run.pk)) for view in views]

    def order(view: IncidentView) -> tuple[Any, ...]:
        cost = view.us - view.moved_us if view.us is not None else view.share or 0.0
        wrong = view.lead.metric == "result"
        return max(STATES.index(view.incident.state), 1), not wrong, -cost, view.incident.pk

    return sorted(views, key=order)


def _ab(session: Session, alerts: Sequence[AlertRow]) -> tuple[dict[int, Compared], dict[int, str]]:
    """Return, by alert key, the A/Bs of alerts, and why searches of them named no commit.

    An A/B may be newer than the alert, as those of a search are.
    """
    keys = {alert.series.pk for alert in alerts}
    stored, searches = comparisons.of_series(session, keys), comparisons.named_of_series(session, keys)
    compared = {alert.pk: alert.compared for alert in alerts if alert.compared is not None}
    tried: dict[int, str] = {}
    for alert in alerts:
        if alert.base_run is None:
            continue
        series, base, head = alert.series.pk, alert.base_run.commit, alert.run.commit
        about = comparisons.about(stored.get(series, ()), {base}, {head})
        if about is not None and about.decided:
            compared[alert.pk] = about
        for one in searches.get(series, ()):
            if one.named is None and (one.base, one.head) == (base, head):
                tried.setdefault(alert.pk, one.message or "undecided")
    return compared, tried


def _with_cost(session: Session, view: IncidentView, calls: CallsOf, night_ms: float | None) -> IncidentView:
    lost = [
        (each, each.before * each.change)
        for each in view.members
        if each.metric == "latency" and each.ended is None and each.before and each.change is not None
    ]
    if not lost:
        return view
    if calls:
        of_layer = _us_by_layer(calls, ((each.series, ms) for each, ms in lost))
        gained = _gained_us(session, view, calls, {layer for layer in of_layer if layer})
        moved = sum(max(0.0, min(us, gained.get(layer, 0.0))) for layer, us in of_layer.items())
        return replace(view, us=sum(of_layer.values()), moved_us=moved)
    return replace(view, share=sum(ms for _, ms in lost) / night_ms if night_ms else None)


def _gained_us(session: Session, view: IncidentView, calls: CallsOf, layers: Collection[str]) -> dict[str, float]:
    """Return the time per step gained by other problems of each layer in the same runs, backends and modes."""
    lead = view.lead
    if lead.base_run is None or not layers:
        return {}
    base, head = lead.base_run.pk, lead.run.pk
    query = (
        select(Point.series_id, Point.run_id, Point.median_ms)
        .join(Series, Point.series_id == Series.id)
        .where(
            Point.run_id.in_((base, head)), TIMED_POINT,
            Series.backend.in_({each.series.backend for each in view.members}),
            Series.mode.in_({each.series.mode for each in view.members}),
        )
    )  # fmt: skip
    of_series: dict[int, dict[int, float]] = {}
    for series, run, ms in session.execute(query):
        of_series.setdefault(series, {})[run] = ms or 0.0
    members = {each.series.pk for each in view.members}
    gained = {
        key: ms[base] - ms[head]
        for key, ms in of_series.items()
        if key not in members and len(ms) == 2 and ms[base] > (1 + GAINED) * ms[head]
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
    """Return the cells without a result in the newest night: `not measured: 3 error, 1 oom`; empty if none."""
    run = latest_run(session)
    if run is None:
        return ""
    query = select(Point.series_id, Point.status).where(Point.run_id.in_(keys_of_night(session, run)))
    measured = query.where(Point.status.in_(MEASURED)).with_only_columns(Point.series_id)
    rest = query.where(Point.status.not_in(MEASURED), Point.series_id.not_in(measured)).order_by(Point.id)
    counts = Counter({series: status for series, status in session.execute(rest)}.values())  # noqa: C416 # rows
    return f"not measured: {', '.join(f'{number} {status}' for status, number in counts.items())}" if counts else ""


def screen(views: Sequence[IncidentView], notes: Sequence[str], most: int | None = MOST) -> list[str]:
    """Return the first screen's lines: at most `most` incidents, then the notes."""
    shown = list(views[:most])
    lines = [line for view in shown for line in view.lines]
    if len(views) > len(shown):
        lines.append(f"and {counted(len(views) - len(shown), 'more incident')}; `groupbench incidents --format csv`")
    return [*lines, *notes]


def week(views: Sequence[IncidentView], since: datetime, notes: Sequence[str]) -> str:
    """Summarise the incidents since a time, in Markdown."""
    last = {view.incident.pk: view.incident.changed.at if view.incident.changed else since for view in views}
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
    return "\n".join([*lines, *notes])
