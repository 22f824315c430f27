"""The gate's results: the verdict on one series, and on a whole run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.identity import SHOWN
from groupbench.tracker.facts.metrics import LATENCY, RMS, Metric, named
from groupbench.tracker.facts.record import MEASURED
from groupbench.tracker.facts.verdicts import NOT_JUDGED, OUTCOMES, UNDECIDED, RunOutcome, Verdict, most_severe
from groupbench.tracker.judge.evidence import Evidence
from groupbench.tracker.judge.incident_rows import MemberRow
from groupbench.tracker.judge.spans import Span, Transition
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.rows import PointRow, RunRow, SeriesRow
from groupbench.tracker.query.tables import Rows
from groupbench.tracker.store.comparisons import Compared
from groupbench.tracker.text import repro
from groupbench.tracker.text.wording import counted, latency, milliseconds, signed_change, signed_ends, times

FEW = 8
"""The largest number of incomparable series with one reason that a report lists one by one."""

PIN = "pin"
"""Value of `Judged.what` for a series that is slower than a pin allows."""

CANARY = "canary"
"""Operator whose series monitor the machine. They do not run the code under test."""


@dataclass(frozen=True)
class Shown:
    """The levels of one metric, in its unit, and the relative change between them: 0.03 is a 3 % increase."""

    metric: Metric
    before: float | None
    now: float | None
    change: float | None
    low: float | None = None  # interval of the change
    high: float | None = None
    timing: str | None = None

    @property
    def before_text(self) -> str:
        return self._text(self.before, milliseconds(self.before))

    @property
    def now_text(self) -> str:
        """The level now, or `interpreted`: the interpreter's time is not a latency."""
        return self._text(self.now, latency(self.now, self.timing))

    def _text(self, value: float | None, ms: str) -> str:
        """Return a value with its unit, or with the name of a metric without a unit."""
        if value is None:
            return ""
        if self.metric is LATENCY:
            return ms if ms.isalpha() else f"{ms} ms"
        return self.metric.text(value) if self.metric.unit else f"{self.metric.text(value)} {self.metric.name}"

    @property
    def change_text(self) -> str:
        return signed_change(self.change)

    @property
    def factor_text(self) -> str:
        """The change of an error as `rms 4.50×`, since errors grow by factors, and any other in percent."""
        if self.metric is RMS and self.change is not None:
            return f"rms {times(self.change + 1)}"
        return self.change_text

    def interval(self, between: str = " .. ") -> str:
        """Return the interval of the change: `+2.1% .. +3.9%`."""
        if self.low is None or self.high is None:
            return ""
        return signed_ends(self.low, self.high, between)


@dataclass(frozen=True)
class Effect:
    """The change of a row's metric and the level before it. Changes are relative: 0.03 is a 3 % increase."""

    before_ms: float | None = None  # latency before the change
    before_rms: float | None = None  # error before the change
    before: float | None = None  # level before the change, for every other metric
    change: float | None = None
    low: float | None = None  # interval of the change
    high: float | None = None


@dataclass(frozen=True)
class Judged:
    """The verdict on one series of the run, or on one of its metrics."""

    series: SeriesRow
    verdict: Verdict
    point: PointRow | None  # None if the run lacks the series
    what: str | None = None  # latency, accuracy, repeatability, result, another metric, or the status
    cause: str | None = None  # a word of causes.find_cause, or drift
    note: str | None = None
    effect: Effect = field(default=Effect())
    evidence: Evidence = field(default=Evidence("result"))
    since: int = 0  # results on the new level, including this one
    loud: bool = False  # always shown, whatever the verdict
    span: Span | None = None
    compared: Compared | None = None  # the A/B comparison that decided
    alert: MemberRow | None = None  # the stored alert of this change
    ab_base: RunRow | None = None  # run whose commit is the base of the A/B comparison that would decide
    ab_head: RunRow | None = None  # the head, if it is not tonight's run
    transition: Transition | None = None  # the transition at the change, or at the newest result
    rule: str = ""  # name of the rule that decided

    @property
    def change(self) -> float | None:
        """The relative change of the metric: 0.03 is a 3 % increase."""
        return self.effect.change

    @property
    def measured(self) -> bool:
        """Return whether the row has a result, right or wrong."""
        return self.point is not None and self.point.status in MEASURED

    @property
    def metric(self) -> Metric | None:
        """The metric that the row judges, if any."""
        return LATENCY if self.what == PIN else named(self.what)

    @property
    def repro(self) -> str | None:
        """The command that reproduces the row: an A/B comparison if it changed, else a measurement of the commit."""
        if self.point is None:
            return None
        run, base = self.point.run, None if self.span is None else self.span.base
        commit, environment = None if run.dirty else run.commit, self.point.environment.facts
        if self.further and self.metric is not None and not self.metric.hint:  # an A/B is of latency and accuracy
            return repro.measure(self.series, commit, environment, self.metric)
        if base is None or self.span is None or base.commit == run.commit or not (run.state.clean and base.state.clean):
            return repro.measure(self.series, commit, environment)
        first = self.span.named[0].parent if self.span.named else base.commit
        return repro.compare(self.series, first, self.span.commit, environment)

    @property
    def further(self) -> bool:
        """Return whether the row's metric is judged by the shared rules."""
        return self.metric is not None and not self.metric.has_own_rule

    @property
    def now(self) -> float | None:
        """The run's value of the metric, in the metric's unit."""
        return None if self.metric is None or self.point is None else self.point.value(self.metric)

    @property
    def shown(self) -> Shown:
        """The levels and the change to show; the latency's for a row without a metric.

        The level now is the earlier level times the effect, so that the numbers agree: the newest result alone may
        deviate in the other direction. If nothing changed, it is that result. A change has no level now without a
        correct result. The stored effect of a row about accuracy is that of the latency, so its change is that of the
        two errors.
        """
        metric, effect, point = self.metric or LATENCY, self.effect, self.point
        now = None if point is None else point.value(metric)
        if metric is RMS:
            before = effect.before_rms
            return Shown(metric, before, now, now / before - 1 if before and now is not None else None)
        before = effect.before_ms if metric is LATENCY else effect.before
        if before is not None and effect.change is not None:
            is_right = now is not None and point is not None and point.status == "ok"
            now = before * (1 + effect.change) if is_right else None
        timing = None if point is None else point.timing
        return Shown(metric, before, now, effect.change, effect.low, effect.high, timing)

    @property
    def details(self) -> str:
        """Since when, for how many results, the commits, the cause and the note, as one text."""
        since = ""
        if self.span is not None:
            results = f", {counted(self.since, 'result')}" if self.since else ""
            since = f"since {self.span.date}{results}: {self.span.in_words}"
        return "; ".join(filter(None, [since, self.cause and f"cause {self.cause}", self.note]))

    @property
    def latency_now(self) -> float | None:
        """The latency to show next to the effect, in ms: the level since a change of it, else the run's latency."""
        if self.metric in (None, LATENCY):
            return self.shown.now
        return None if self.point is None else self.point.median_ms

    @property
    def better(self) -> bool:
        """Return whether the change is an improvement."""
        if self.metric is None or self.change is None:
            return False
        return self.change > 0 if self.metric.better == "higher" else self.change < 0

    @property
    def judged_latency(self) -> bool:
        """Return whether the latency was compared with earlier ones, whatever the verdict."""
        compared = self.point is not None and self.point.timed and not self.verdict.unjudged
        return compared and not self.evidence.muted

    @property
    def acknowledged(self) -> bool:
        """Return whether the row is an acknowledged regression."""
        return self.verdict is Verdict.REGRESSED and self.alert is not None and self.alert.state == "acknowledged"

    def exit_code(self, strict: bool) -> ExitCode:
        """Return the exit code of a run with this row alone.

        Acknowledged regressions count only under `strict`. A suspect canary never counts, since it points at the
        machine; nor does a suspected improvement.
        """
        if (self.acknowledged and not strict) or (self.verdict is Verdict.SUSPECT and self.series.operator == CANARY):
            return ExitCode.OK
        if self.better and self.verdict in (Verdict.SUSPECT, Verdict.UNRESOLVED):
            return ExitCode.OK
        return self.verdict.strict if strict and self.verdict.exit is ExitCode.OK else self.verdict.exit

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Return the columns of CSV, which are keys of `flat`."""
        return (
            *("verdict", "metric", "cause", *SHOWN, "before_ms", "latency_ms", "change", "low", "high", "p", "n"),
            *("rule", "before_rms", "rms", "commits", "subject", "author", "ab", "incident", "note", "timing"),
            *("before", "now", "unit", "since", "transition"),
        )

    def flat(self) -> dict[str, Any]:
        """Return the row as one entry of JSON: latencies in ms, changes as ratios less one."""
        return {
            **{name: getattr(self, name) for name in ("verdict", "cause", "note")},
            "metric": self.what,
            **{name: getattr(self.effect, name) for name in ("before_ms", "change", "low", "high", "before_rms")},
            **{name: getattr(self.evidence, name) for name in ("p", "n")},
            "rule": self.rule or None,
            **{name: getattr(self.series, name) for name in SHOWN},
            "latency_ms": _of(self.point, "median_ms"),
            "timing": _of(self.point, "timing"),
            "rms": _of(self.point, "rms"),
            "commits": _of(self.span, "text"),
            "subject": None if self.span is None or self.span.remark.startswith("one of") else self.span.subject,
            "author": _of(self.span, "author"),
            "one_of": _of(self.span, "number"),
            "named": [asdict(each) for each in self.span.named] if self.span and self.span.named else None,
            "ab": _of(self.compared, "verdict"),
            "incident": None if self.alert is None else self.alert.incident.pk,
            "before": None if self.metric is None else self.shown.before,
            "now": self.now,
            "unit": _of(self.metric, "unit"),
            "since": self.since or None,
            "repro": self.repro,
            "transition": _of(self.transition, "text"),
        }


def _of(part: object, name: str) -> Any:
    """Return an attribute of a part of a row; None if the row lacks the part."""
    return None if part is None else getattr(part, name)


@dataclass(frozen=True)
class Gate:
    """The verdict on a run."""

    run: RunRow
    rows: tuple[Judged, ...]
    exit_code: ExitCode
    summary: str  # the first line
    alerts: tuple[MemberRow, ...] = field(default=())  # stored alerts of the run's series and toolchain
    lapsed: frozenset[int] = field(default=frozenset())  # keys of expected alerts that have expired
    line: CommitLine = field(default=CommitLine(()))  # the runs used as history
    notes: tuple[str, ...] = ()  # caveats about that history
    transitions: tuple[str, ...] = ()  # a line for each new transition
    asked: tuple[Judged, ...] = ()  # further results worth an A/B, of series whose rows are about something else

    @property
    def counts(self) -> dict[str, int]:
        return count(self.rows)

    @cached_property
    def by_series(self) -> dict[int, str]:
        """The most severe verdict on each series, by key."""
        return {row.series.pk: row.verdict for row in worst(self.rows)}

    @property
    def unmeasured(self) -> list[Judged]:
        """The rows of expected series without a result."""
        return [row for row in self.rows if not row.measured]

    @cached_property
    def outcome(self) -> RunOutcome:
        return outcome(self.rows, self.exit_code)

    @property
    def word(self) -> str:
        return self.outcome.word

    @property
    def blind(self) -> bool:
        """Return whether the run passed although none of its latencies could be judged."""
        return self.outcome is NOT_JUDGED

    @property
    def notable(self) -> tuple[Judged, ...]:
        """The rows worth showing, most severe first, acknowledged last: changes, failures to judge, and news."""
        rows = [row for row in self.rows if row.loud or not row.verdict.quiet]
        return tuple(sorted(rows, key=lambda row: (*_severity(row), row.series.sort_key)))

    @property
    def suspects(self) -> tuple[Judged, ...]:
        """The rows that an A/B comparison would decide, the least likely of the level first."""
        suspects = [row for row in (*self.rows, *self.asked) if row.ab_base is not None]
        return tuple(sorted(suspects, key=_rank))

    @property
    def folded(self) -> tuple[list[str], list[Judged]]:
        """(one line for each transition and shared reason to be incomparable, the `notable` rows to list).

        Up to `FEW` incomparable rows that share a reason are listed too.
        """
        incomparable = [row for row in self.notable if row.verdict is Verdict.INCOMPARABLE and row.note]
        counts = Counter(row.note for row in incomparable)
        measurable = {row.note for row in incomparable if row.ab_base is not None}
        repeated = {note: number for note, number in counts.items() if number > 1}
        lines = list(self.transitions)
        for note, number in repeated.items():
            then = "; run `groupbench confirm` to measure both commits on this GPU" if note in measurable else ""
            lines.append(f"{number} series incomparable: {note}{then}")
        many = {note for note, number in repeated.items() if number > FEW}
        return lines, [row for row in self.notable if not (row.verdict is Verdict.INCOMPARABLE and row.note in many)]

    def table(self) -> Rows[Judged]:
        """Return every row as a table with `to_pandas()`."""
        return Rows(Judged, self.rows)


def _rank(row: Judged) -> tuple[object, ...]:
    """Return a key that sorts rows to compare: those for the worse first, by chance, then by size.

    Those that fail already come before all others, and noisy ones after.
    """
    score = 0.0 if row.verdict.fails else row.evidence.score
    noisy = row.evidence.noisy and not row.verdict.fails  # an A/B of these seldom decides
    return row.better, noisy, 1.0 if score is None else score, -abs(row.change or 0.0), row.series.sort_key


def _severity(row: Judged) -> tuple[int, bool, float]:
    return row.verdict.severity, row.acknowledged, -(row.change or 0.0)


def worst(rows: Sequence[Judged]) -> list[Judged]:
    """Return each series' row for all counts: the most severe one, of those with an exit code if any."""
    rows_of = grouped(rows, lambda row: row.series.pk).values()
    return [min(of, key=lambda row: (row.exit_code(False) is ExitCode.OK, *_severity(row))) for of in rows_of]


def count(rows: Sequence[Judged]) -> dict[str, int]:
    """Return how many series have each verdict, most severe first."""
    counts = Counter(row.verdict for row in worst(rows))
    return {str(verdict): counts[verdict] for verdict in Verdict if counts[verdict]}


def exit_code(rows: Sequence[Judged], strict: bool) -> ExitCode:
    """Return the run's exit code. Codes that only `strict` sets apply if no other code does."""
    codes = {row.exit_code(strict) for row in rows if row.verdict.exit is not ExitCode.OK}
    if not measured(rows):
        codes.add(ExitCode.INCOMPLETE)
    code = most_severe(codes)
    return most_severe(row.exit_code(strict) for row in rows) if code is ExitCode.OK else code


def measured(rows: Sequence[Judged]) -> bool:
    """Return whether any row has a result, right or wrong."""
    return any(row.measured for row in rows)


def latencies(rows: Sequence[Judged]) -> tuple[int, int]:
    """Return (series whose latency was judged, series that have one)."""
    timed = [row for row in worst(rows) if row.point is not None and row.point.timed]
    return sum(row.judged_latency for row in timed), len(timed)


def outcome(rows: Sequence[Judged], code: ExitCode) -> RunOutcome:
    judged, timed = latencies(rows)
    if code is ExitCode.OK and any(row.verdict is Verdict.UNDECIDED for row in rows):
        return UNDECIDED
    return NOT_JUDGED if code is ExitCode.OK and timed and not judged else OUTCOMES[code]
