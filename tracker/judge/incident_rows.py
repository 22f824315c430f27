"""Incidents and their members: certain changes for the worse, tracked until they are resolved.

    new           not yet reviewed; the gate fails
    confirmed     the same, and an A/B confirmed a member
    acknowledged  known and being worked on; the gate lists it and passes unless --strict
    expected      the new levels are accepted, optionally until a date or a commit; the gate judges by them
    fixed         back on the earlier levels, seen by the gate or declared by a person
    invalid       not caused by the code; the new levels are accepted for good

A member is one series' change in a metric, however many runs see it. Changes with one likely cause are one incident
(`incidents`), which has the state, the owner and the events. In incident_moves, `update` opens, closes and reopens
incidents by the gate's verdicts, and `change` sets their state by hand. A wrong result always fails the gate, whatever
the state of its incident, and can never be expected.

The author of a commit is the owner only if the commit is certain: a search named it alone, or A/Bs of it and its parent
found the change. History alone places a change in a range, of which noise can move the ends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar

from groupbench.tracker.facts.identity import SHOWN
from groupbench.tracker.facts.metrics import LATENCY, METRICS, named, of_alert, relative
from groupbench.tracker.facts.verdicts import BESIDES_CODE, INCIDENT_STATES
from groupbench.tracker.judge.spans import Span, agreed
from groupbench.tracker.query.rows import EnvironmentRow, RunRow, SeriesRow
from groupbench.tracker.query.tables import FlatRow, of_part, of_row
from groupbench.tracker.store.comparisons import DIFFERENT, Compared
from groupbench.tracker.text import repro
from groupbench.tracker.text.terminal import shortened
from groupbench.tracker.text.wording import chance, counted, date, signed_ends

STATES = tuple(INCIDENT_STATES)
FAILING = ("new", "confirmed")
ACTIVE = (*FAILING, "acknowledged")
"""The states with work for somebody."""
OPEN = (*ACTIVE, "expected")
FIX = "the gate fails until the result is correct: fix the backend"
NOTE = "note"
"""The word for an event that leaves the state as it is. Such a row has the state of the row before."""
ITSELF = "groupbench"
"""The author of automatic changes."""
MOVED = 0.8
"""Share of the cost that is found elsewhere as a gain, from which the incident is time that moved."""
BY_CODE = ("code", "tuning", "undone")

_AT_RUN = re.compile(r"(: )?run \S+ at \S+$")
"""The end of a reason naming the run, as `incident_moves` writes it."""
_NOTE = 120
"""Longest note on the first screen."""
_NAMES = 3
"""Most names of backends or reasons in a line."""


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
class IncidentRow(FlatRow):
    """An incident, with its members and its cost if `triage.of` has read it.

    Attributes:
        fallback: The owner unless the commit is certain: a code owner, or the plan's owner.
        link: Address of its issue.
        posted: State of its issue when last posted.
        us: Cost per step in µs, without fixed members; None if unknown.
        share: The same as a part of the night's latencies.
        moved_us: The part gained by other problems of the same layers in the same runs.
    """

    pk: int
    identity: str
    state: str
    fallback: str | None
    opened: datetime
    until_time: datetime | None = None
    until_commit: str | None = None
    link: str | None = None
    posted: str | None = None
    events: tuple[StateChange, ...] = ()
    members: tuple[MemberRow, ...] = ()
    us: float | None = None
    share: float | None = None
    moved_us: float = 0.0

    COLUMNS: ClassVar[Mapping[str, str]] = {
        "incident": "pk",
        **of_row("state", "title"),
        "since": "span.head.started",
        "commits": "span.text",
        **of_part("span", ("commit", "subject")),
        **of_row("owner", "cause", "sure", "us", "share", "moved_us", "next"),
        "repro": "lead.repro",
        **of_row("link", "series", "fixed"),
    }

    def flat(self) -> dict[str, Any]:
        """Return the incident as one row of JSON or CSV. JSON also has the members."""
        members = [
            {"series": each.series.pk, "metric": each.metric, "change": each.change, "state": each.state}
            for each in self.members
        ]
        return {**super().flat(), **{name: getattr(self, name) for name in ("until", "last")}, "members": members}

    @property
    def until(self) -> str | None:
        """When an expected incident becomes new again."""
        if self.until_time is not None:
            return f"{date(self.until_time)} UTC"
        return None if self.until_commit is None else f"commit {self.until_commit[:10]}"

    @property
    def last(self) -> str | None:
        """The newest event."""
        return self.events[-1].text if self.events else None

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

    @cached_property
    def lead(self) -> MemberRow:
        """The member that shows the incident: one with a named commit, in force, with an A/B, of the largest change."""

        def order(each: MemberRow) -> tuple[Any, ...]:
            return bool(each.span.named), each.ended is None, each.compared is not None, abs(each.effect or 0)

        return max(self.members, key=order)

    @property
    def is_wrong(self) -> bool:
        """Whether results are wrong."""
        return self.lead.metric == "result"

    @property
    def series(self) -> int:
        """The series count."""
        return len({each.series.pk for each in self.members})

    @property
    def fixed(self) -> int:
        """The count whose level is back."""
        return sum(each.ended is not None for each in self.members)

    @property
    def title(self) -> str:
        """The metric, the changes and the series in force: `latency +4.9% to +12.1% in 67 series of helion, triton`."""
        members = tuple(each for each in self.members if each.ended is None) or self.members
        changes = [each.change for each in members if each.change is not None]
        reach = signed_ends(min(changes), max(changes)) if changes else ""
        what = [names(dict.fromkeys(each.metric for each in members)), " to ".join(dict.fromkeys(reach.split(" to ")))]
        backends = names(sorted({f"{each.series.operator} {each.series.backend}" for each in members}))
        number = len({each.series.pk for each in members})
        where = f"{backends} {members[0].series.shape}" if number == 1 else f"{number} series of {backends}"
        words = ["moved:" if self.has_moved else "", *(["wrong result"] if self.is_wrong else what), "in", where]
        return " ".join(filter(None, words))

    @property
    def has_moved(self) -> bool:
        """Whether other kernels of the layers gained most of the time."""
        return bool(self.us and self.moved_us >= MOVED * self.us)

    @cached_property
    def span(self) -> Span:
        """The commits with the cause: those named by a search, else the narrowest measured range."""
        if self.lead.span.named:
            return self.lead.span
        ranges = self._measured or agreed([each.span for each in self.members])
        return min(ranges, key=lambda span: span.number or 10**9)

    @cached_property
    def _measured(self) -> list[Span]:
        """The ranges safe from noise."""
        return [each.measured for each in self.members if each.measured is not None]

    @property
    def is_certain(self) -> bool:
        """Whether the span is the one commit with the cause."""
        span, named = self.span, self.span.named
        if named:
            return len(named) == 1 and len(named[0].commits) == 1
        by_code = all(each.cause in BY_CODE for each in self.members)
        return by_code and bool(self._measured) and span.number == 1 and all(map(span.overlaps, self._measured))

    @property
    def owner(self) -> str | None:
        """The author of the commit if it is certain, else the code owner or the plan's owner."""
        return (self.span.author if self.members and self.is_certain else None) or self.fallback

    @property
    def sure(self) -> str:
        """The evidence: a search, A/Bs, or history alone."""
        compared = [each.compared for each in self.members if each.compared is not None]
        measured = [one for one in compared if not one.details.get("inherits")]
        differ = sum(one.verdict == DIFFERENT for one in measured)
        if self.lead.span.named:
            return f"bisect named the commit ({chance(self.lead.span.named[0].confidence)})"
        parts = [f"A/B of {counted(len(measured), 'series', 'series')}"] if measured else []
        parts += [f"{differ} different"] if differ < len(measured) else []
        parts += [f"{len(compared) - len(measured)} more fit"] if len(measured) < len(compared) else []
        parts += [f"bisect named no commit: {each.tried}" for each in self.members if each.tried][:1]
        return ", ".join(parts) or ("wrong by the reference" if self.is_wrong else "by history alone, no A/B")

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
        span, search = self.span, _search(self)
        if self.is_wrong and self.state != "fixed":
            return f"fix the backend: {self.lead.repro or 'it fails the gate until the result is correct'}"
        if self.state not in FAILING:
            last = self.changed.text if self.changed else self.state
            return f"nothing: {last}" + (f", until {self.until}" if self.until else "")
        accept = f"`groupbench incidents expect {self.pk} --reason TEXT`"
        if search and span.number != 1:
            return search
        if self.has_moved:
            return f"{accept} if {span.label} was meant to move the time"
        if all(each.cause == "undone" for each in self.members):
            return f"{accept} if {span.label} was meant to undo an improvement; fix it otherwise"
        if all(each.cause in BESIDES_CODE for each in self.members):
            return f"find what changed besides the code, or {accept}"
        return search or f"fix or revert {span.label}, or {accept}"

    @property
    def lines(self) -> list[str]:
        """The incident on the first screen."""
        span = self.span
        since = f"since {span.date} at {span.text}" + (f" ({span.remark})" if span.remark else "")
        subject = f" {span.subject!r}" if span.subject else ""
        cause = f"cause {self.cause}" if self.cause else ""
        cost = f"costs {self.cost}" if self.cost else ""
        owner, evidence = f"owner {self.owner or 'unknown'}", f"evidence: {self.sure}"
        facts = [f"{since}{subject}", owner, cause, evidence, cost, self.link, _note(self.events)]
        texts = f"{self.pk} {self.state}: {self.title}", "; ".join(filter(None, facts)), f"next: {self.next}"
        notes = (event.text for event in self.events if event.state == NOTE)
        first, *rest = (" ".join(text.split()) for text in (*texts, *notes))
        return [first, *(f"  {line}" for line in rest)]

    @property
    def cause(self) -> str | None:
        """The members' causes."""
        return names(dict.fromkeys(each.cause for each in self.members if each.cause)) or None


@dataclass(frozen=True)
class MemberRow(FlatRow):
    """A member of an incident. Levels are in the metric's unit; effects log(after / before), None if one is 0."""

    pk: int
    series: SeriesRow
    metric: str
    incident: IncidentRow
    cause: str | None
    span: Span  # the runs between which the series changed, with the commits that a search named
    environment: EnvironmentRow | None  # in which the change was measured
    before: float | None
    after: float | None
    effect: float | None
    low: float | None
    high: float | None
    opened: datetime
    ended: datetime | None  # when the level was back
    compared: Compared | None
    ab_span: Span | None = None  # the runs of the commits in `own_ab`
    tried: str = ""  # why a search named no commit

    COLUMNS: ClassVar[Mapping[str, str]] = {
        "incident": "incident.pk",
        **of_row("state", "metric", "cause"),
        **of_part("series", SHOWN),
        "commits": "span.text",
        **of_row("commit"),
        **of_part("span", ("subject", "author")),
        **of_row("before", "after", "change"),
        "low": "change_low",
        "high": "change_high",
        **of_row("ab", "opened"),
        **of_part("incident", ("until", "last")),
        **of_row("repro"),
        **of_part("incident", ("owner", "link")),
        "events": "event_texts",
    }

    def flat(self) -> dict[str, Any]:
        """Return the member as one row of JSON or CSV. JSON also has the named commits."""
        return {**super().flat(), "named": [asdict(each) for each in self.span.named] or None}

    @property
    def place(self) -> tuple[Any, ...]:
        """The place in a list, where members of one change are adjacent."""
        return self.run.when, self.series.operator, self.series.backend, self.pk

    @property
    def machine(self) -> str | None:
        """The identity of the machine with the change."""
        return None if self.environment is None else self.environment.machine

    @property
    def repro(self) -> str | None:
        """The command that measures the metric again at the first commit after the change, if groupbench can."""
        environment = None if self.environment is None else self.environment.facts
        metric = METRICS.get(self.metric)
        further = None if metric is None or metric.has_own_rule else metric
        return repro.measure(self.series, None if self.run.dirty else self.run.commit, environment, further)

    @property
    def run(self) -> RunRow:
        """The first run after the change."""
        return self.span.head

    @property
    def own_ab(self) -> Compared | None:
        """The A/B by which this series was measured, if it found the change."""
        one = self.compared
        is_own = one is not None and one.verdict == DIFFERENT and not one.toolchains and not one.details.get("inherits")
        return one if is_own else None

    @property
    def measured(self) -> Span | None:
        """The span if no noise can have moved it: the A/B's, or the history's of an exact metric."""
        metric = named(self.metric)
        exact = metric is None or (metric is not LATENCY and metric.rule != "scatter")
        return self.span if exact else self.ab_span

    @property
    def commit(self) -> str:
        return self.span.commit if self.span.named else self.run.commit_text

    @property
    def size(self) -> MemberRow | Compared:
        """The effect with its interval: an A/B's if one found the change, since it measured both levels alternately."""
        one = self.compared if self.metric == LATENCY.name else None
        return self if one is None or one.verdict != DIFFERENT else one

    @property
    def change(self) -> float | None:
        """The relative change: 0.03 is a 3 % increase."""
        return relative(self.size.effect)

    @property
    def change_low(self) -> float | None:
        return relative(self.size.low)

    @property
    def change_high(self) -> float | None:
        return relative(self.size.high)

    @property
    def distance(self) -> float | None:
        """The log distance between the levels, with the metric's floor, as the gate compares them."""
        if self.before is None or self.after is None:
            return None
        metric = of_alert(self.metric)
        return metric.log(self.after) - metric.log(self.before)

    @property
    def ab(self) -> str | None:
        return None if self.compared is None else self.compared.verdict

    @property
    def state(self) -> str:
        """The incident's state; `fixed` for a member whose level is back."""
        return "fixed" if self.ended is not None else self.incident.state

    @property
    def event_texts(self) -> list[str]:
        return [f"{event.at:%Y-%m-%d %H:%M} {event.text}" for event in self.incident.events]

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


def _note(events: Iterable[StateChange]) -> str:
    """Return the newest note by a person, shortened, or ""."""
    notes = [event.text for event in events if event.state == NOTE and event.who != ITSELF]
    return shortened(notes[-1], _NOTE) if notes else ""


def _search(one: IncidentRow) -> str | None:
    """Return the command to make the commit certain, if a search can and none has tried."""
    span = one.span
    can = [each for each in one.members if each.metric in repro.SEARCH_OF and each.series.host in repro.HOSTS]
    tried = one.is_certain or bool(span.named) or any(each.tried for each in one.members)
    if tried or not span.number or span.base is None or not can:
        return None
    metric = repro.SEARCH_OF[can[0].metric]
    words = f"groupbench bisect {span.base.commit[:10]} {span.head.commit[:10]} --series {can[0].series.pk}"
    return words + (f" --metric {metric}" if metric != "latency" else "")


def names(words: Iterable[str]) -> str:
    """Return the first few words, and count the others."""
    listed = list(words)
    more = len(listed) - _NAMES
    return ", ".join(listed[:_NAMES]) + (f" and {more} more" if more > 0 else "")
