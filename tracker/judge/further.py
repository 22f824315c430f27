"""The evidence about every metric but the latency: accuracy, repeatability, costs.

Metrics differ by data. Some scatter from run to run and are followed like latencies; the others are the same whenever
the code is the same, so that each change of their value is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.facts.metrics import LATENCY, RMS, Metric
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.alerts import OPEN, AlertRow
from groupbench.tracker.judge.causes import find_cause
from groupbench.tracker.judge.evidence import OLD, Evidence
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.marks import marks_of
from groupbench.tracker.judge.parts import Case, found_by, joined, percent
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.toolchain_lines import of_one_toolchain
from groupbench.tracker.judge.verdicts import Effect, Judged, News
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.stats.predict import lower_median
from groupbench.tracker.stats.screen import Followed, follow
from groupbench.tracker.stats.walk import Walked
from groupbench.tracker.store import comparisons

FLIPS = 2
"""Number of recent changes of an exact value after which a return to an earlier value is not news.

A regression, its fix and the same regression again are three changes. An alert already covers the last one."""
RMS_PRIOR = 0.05
"""Scatter to assume of an error without results."""
ALWAYS = "repeatability"

REPEATABLE = Metric("repeatability", "", "two executions are bitwise equal", better="higher", rule="exact", least=0.0)


@dataclass(frozen=True)
class Changed:
    """A change in one metric at a point. Places are those of the past.

    Attributes:
        metric: The metric.
        past: Results on the point's machine.
        start: First place since the change.
        before: Level before, in the metric's unit.
        evidence: The known facts of the change but for its cause.
        alert: The alert of the change.
    """

    metric: Metric
    past: Past
    start: int
    before: float
    evidence: Evidence
    alert: AlertRow | None = None

    @property
    def effect(self) -> float:
        """The change in the metric's own direction, as a logarithm."""
        return -self.evidence.distance if self.metric.better == "higher" else self.evidence.distance


class Further:
    """The metrics of a run's points, but for their latencies."""

    def __init__(self, data: GateData) -> None:
        self.data = data
        self.changed: dict[int, list[Changed]] = {}
        self._accuracy()
        self._repeatability()
        for metric in data.metrics:
            exact = metric.rule == "exact"
            moved = data.pasts.moved(metric, 0.0 if exact else math.log1p(metric.least))
            pasts = [
                (point, data.pasts.further(metric, point.series.pk))
                for point in data.points
                if point.status == "ok" and point.value(metric) is not None
                and (point.series.pk in moved or point.series.pk in data.alerts)
            ]  # fmt: skip
            earlier = [(point, past) for point, past in pasts if len(past) > 1]
            self._add(metric, _exact(data, metric, earlier) if exact else _scattered(data, metric, earlier))

    def _add(self, metric: Metric, changes: Iterator[tuple[PointRow, Changed]]) -> None:
        for point, changed in changes:
            self.changed.setdefault(point.pk, []).append(changed)

    def _accuracy(self) -> None:
        moved = self.data.pasts.moved(RMS, math.log1p(RMS.least) / 2)
        pasts = []
        for point in self.data.points:
            alerted = any(each.metric == "accuracy" for each in self.data.alerts.get(point.series.pk, ()))
            if point.status == "ok" and point.rms is not None and (point.series.pk in moved or alerted):
                past = self.data.pasts.accuracy(point.series.pk)
                pasts.append((point, past.where(past.alike)))
        self._add(RMS, _scattered(self.data, RMS, pasts))

    def _repeatability(self) -> None:
        pasts = []
        for point in self.data.points:
            alerted = any(each.metric == "repeatability" for each in self.data.alerts.get(point.series.pk, ()))
            if point.status == "ok" and (point.repeatable is False or alerted):
                past = self.data.pasts.repeatable(point.series.pk)
                pasts.append((point, past.where(past.alike)))
        self._add(REPEATABLE, _exact(self.data, REPEATABLE, pasts))

    def places(self, point: PointRow) -> list[int]:
        """Return the runs whose facts are needed to find a cause."""
        return [
            int(one.past.run[at])
            for one in self.changed.get(point.pk, ())
            for at in (one.start - 1, one.start)
            if at >= 0
        ]

    def cases(self, point: PointRow, latency: tuple[float, Span] | None) -> list[Case]:
        """Return a case for each changed metric not explained by the latency's change."""
        changed = self.changed.get(point.pk, ())
        return [self._case(point, one) for one in changed if not self._explained(one, latency)]

    def explained(self, point: PointRow, latency: tuple[float, Span] | None) -> str | None:
        """Return the metrics which changed as much as the latency, as text for the latency's row."""
        changed = [one for one in self.changed.get(point.pk, ()) if self._explained(one, latency)]
        return joined(*(_change_text(point, one) for one in changed))

    def _explained(self, one: Changed, latency: tuple[float, Span] | None) -> bool:
        """Return whether a metric follows the latency, which changed at the same time and no less."""
        if latency is None or one.metric.follows != LATENCY.name or not one.evidence.scatters:
            return False
        effect, span = latency
        beyond = abs(one.effect) - abs(effect)
        return one.effect * effect > 0 and beyond < math.log1p(one.metric.least) and self._span(one).overlaps(span)

    def _span(self, one: Changed) -> Span:
        if one.alert is not None:
            return Span(one.alert.base_run, one.alert.run)
        run = one.past.run
        base = self.data.runs.get(int(run[one.start - 1])) if one.start > 0 else None
        return Span(base, self.data.runs[int(run[one.start])])

    def _case(self, point: PointRow, one: Changed) -> Case:
        metric, span = one.metric, self._span(one)
        what = "accuracy" if metric is RMS else metric.name
        now = point.value(metric) if metric is not REPEATABLE else None
        change = now / one.before - 1 if one.before and now is not None else None
        effect = (
            Effect(before_rms=one.before, change=None) if metric is RMS else Effect(before=one.before, change=change)
        )
        if metric is REPEATABLE:
            effect = Effect()
        cause = find_cause(*self.data.facts_of(point, span), result=not one.evidence.scatters or metric is RMS,
                           metric=None if metric in (RMS, REPEATABLE) else metric.name)  # fmt: skip
        row = Judged(
            point.series, Verdict.OK, point, what, cause.word,
            joined(_change_text(point, one), cause.note), effect, news=News(one.evidence.since), span=span,
        )  # fmt: skip
        evidence = replace(one.evidence, cause=cause.word, same_code=cause.note == "same commit before and after"
                           and metric not in (RMS, REPEATABLE))  # fmt: skip
        if one.alert is not None:
            row = replace(row, alert=one.alert, cause=one.alert.cause or row.cause,
                          note=joined(_change_text(point, one), self.data.alert_text(one.alert)))  # fmt: skip
        return self._hinted(Case(evidence, row)) if metric.hint and evidence.distance > 0 else Case(evidence, row)

    def _hinted(self, case: Case) -> Case:
        """Return the case of a hint of a slower kernel with the A/B of the latency, or the commits to compare."""
        row, run = case.row, self.data.run
        assert row.span is not None
        base = row.span.base
        ends = [{end.commit} if end is not None and end.state.clean else set() for end in (base, run)]
        stored = self.data.evidence(row.series.pk, [] if base is None else [base.pk], [run.pk])
        compared = comparisons.about(of_one_toolchain(stored), *ends)
        ab = found_by(compared, 0.0)
        if ab in (None, "undecided") or compared is None:
            askable = base is not None and all(ends) and base.commit != run.commit
            return Case(
                replace(case.evidence, ab=ab, asked=askable),
                replace(row, ab_base=base if askable else None, compared=compared),
            )
        effect = f" {percent(compared.effect)}" if compared.effect is not None else ""
        note = joined(row.note, f"A/B of the latency: {compared.verdict}{effect}")
        return Case(
            replace(case.evidence, ab="worse" if ab == "worse" else "same"), replace(row, compared=compared, note=note)
        )


def _change_text(point: PointRow, one: Changed) -> str:
    metric = one.metric
    if metric is REPEATABLE:
        return "two executions now differ bitwise"
    now = point.value(metric)
    assert now is not None
    return f"{metric.name} {metric.text(one.before)} → {metric.text(now)}"


def _levels(metric: Metric, log: NDArray[np.float64]) -> list[float]:
    """Return the values of logarithms, without rounding residue."""
    if metric is REPEATABLE:
        return log.tolist()
    residue = max(1e-9 * metric.negligible, 1e-29)
    return [0.0 if level < residue else float(f"{level:.9g}") for level in (np.exp(log) - metric.negligible).tolist()]


def _what(metric: Metric) -> str:
    return "accuracy" if metric is RMS else metric.name


# ---- values that scatter


def _scattered(
    data: GateData, metric: Metric, pasts: Sequence[tuple[PointRow, Past]]
) -> Iterator[tuple[PointRow, Changed]]:
    """Yield changes in scattering values."""
    counts, sign = math.log1p(metric.least), -1.0 if metric.better == "higher" else 1.0
    prior = RMS_PRIOR if metric is RMS else counts
    noteworthy = []
    for point, past in pasts:
        marks = marks_of(data, past, _what(metric))
        if len(past) > 1 and (marks or np.ptp(past.log) > counts):
            if sign < 0:
                marks = {}
            noteworthy.append((point, past, Followed(sign * past.log, counts, prior, metric.floor, None, marks)))
    for (point, past, _), walked in zip(noteworthy, follow([one for *_, one in noteworthy], 0.0), strict=True):
        for changed in _changes(data, metric, past, walked, counts):
            if changed.evidence.nights or changed.evidence.kind != "tonight" or changed.evidence.accepted:
                yield point, replace(changed, before=_levels(metric, np.array([sign * changed.before]))[0])


def _changes(data: GateData, metric: Metric, past: Past, walked: Walked, counts: float) -> Iterator[Changed]:
    """Yield a walk's changes. `before` is a logarithm, positive for the worse."""
    last = len(past) - 1
    common = Evidence(n=last, counts=counts, hint=metric.hint, is_error=metric is RMS,
                      sigma=None if walked.top is None else walked.top.deviation)  # fmt: skip
    for at, level in enumerate(walked.stack[1:], 1):
        was = walked.stack[at - 1].centre if level.was is None else level.was
        alert = data.alert(level.tag) or _alert_in(data, metric, past, level.start)
        evidence = replace(
            common, kind="step", distance=float(past.log[-1]) - was,
            since=last + 1 - max(level.start, 0), alert=None if alert is None else alert.state,
        )  # fmt: skip
        yield Changed(metric, past, max(level.start, 0), was, evidence, alert)
    reference = walked.stack[0]
    if len(walked.stack) == 1 and reference.by in ("nights", "faster") and reference.was is not None:
        since = last + 1 - reference.start
        if since <= OLD:
            evidence = replace(common, kind="gain", distance=reference.centre - reference.was, since=since)
            yield Changed(metric, past, reference.start, reference.was, evidence)
    if len(walked.stack) == 1 and reference.tag is not None and not walked.nights:
        alert = data.alert(reference.tag)
        if alert is not None and alert.state == "expected":
            yield Changed(metric, past, reference.start, reference.centre, replace(common, accepted=True), alert)
    if walked.nights:
        evidence = replace(common, distance=walked.distance, p=walked.p, nights=walked.nights, beyond=walked.beyond,
                           since=abs(walked.nights))  # fmt: skip
        centre = lower_median([walked.stack[-1].centre]) if walked.top is None else walked.top.centre
        yield Changed(metric, past, walked.begins, centre, evidence)


def _alert_in(data: GateData, metric: Metric, past: Past, start: int) -> AlertRow | None:
    """Return the newest alert about a metric whose first run is since a place."""
    inside = set(past.run[max(start, 0) :].tolist())
    of_metric_alerts = [
        each for each in data.alerts.get(past.series, ()) if each.metric == _what(metric) and each.run.pk in inside
    ]
    return next((each for each in reversed(of_metric_alerts) if not data.accepted(each)), None)


# ---- values that do not


def _exact(
    data: GateData, metric: Metric, pasts: Sequence[tuple[PointRow, Past]]
) -> Iterator[tuple[PointRow, Changed]]:
    """Yield the newest change of each history whose value still differs from the one before."""
    for point, past in pasts:
        alerts = [each for each in data.alerts.get(past.series, ()) if each.metric == metric.name]
        runs = past.run.tolist()
        accepted = [runs.index(each.run.pk) for each in alerts if data.accepted(each) and each.run.pk in runs]
        levels = _levels(metric, past.log)
        still = _still(data, metric, alerts, levels[-1]) if levels else None
        first = max(accepted, default=0)
        differs = [
            at for at in range(first + 1, len(levels))
            if metric.worse(levels[at - 1], levels[at]) or metric.worse(levels[at], levels[at - 1])
        ]  # fmt: skip
        if still is not None:
            start = runs.index(still.run.pk) if still.run.pk in runs else 0
            evidence = Evidence(
                "step", n=len(past) - 1, scatters=False, since=len(past) - start, alert=still.state, distance=1.0
            )
            yield (
                point,
                Changed(metric, past, start, still.before if still.before is not None else levels[0], evidence, still),
            )
            continue
        same = bool(differs) and metric is not REPEATABLE and past.state[differs[-1] - 1] == past.state[differs[-1]]
        if not differs or same or _flips(metric, levels, differs):
            if accepted and any(data.accepted(each) and each.state == "expected" for each in alerts):
                evidence = Evidence(n=len(past) - 1, scatters=False, accepted=True)
                yield (
                    point,
                    Changed(metric, past, first, levels[first], evidence, [e for e in alerts if data.accepted(e)][-1]),
                )
            continue
        at, since = differs[-1], len(levels) - differs[-1]
        worse = metric.worse(levels[at - 1], levels[-1])
        alert = _alert_in(data, metric, past, at) if worse else None
        if worse or since <= OLD:
            evidence = Evidence(
                "step" if worse else "gain", n=len(past) - 1, scatters=False, since=since, hint=metric.hint,
                distance=1.0 if worse else -1.0, alert=None if alert is None else alert.state,
            )  # fmt: skip
            yield point, Changed(metric, past, at, levels[at - 1], evidence, alert)


def _still(data: GateData, metric: Metric, alerts: Sequence[AlertRow], now: float) -> AlertRow | None:
    """Return the newest open alert whose value is not back."""
    for alert in reversed(alerts):
        if alert.state not in OPEN or data.accepted(alert):
            continue
        before = 1.0 if metric is REPEATABLE else alert.before
        if before is not None and metric.worse(before, now):
            return alert
    return None


def _flips(metric: Metric, levels: list[float], differs: list[int]) -> bool:
    """Return whether an exact value alternates, such as when a tuner picks a config on every run.

    It does if it changed before among the newest results, and an earlier value was as bad as the new one.
    """
    recent = [at for at in differs if at >= len(levels) - OLD]
    earlier = levels[max(0, len(levels) - OLD - 1) : differs[-1]]
    return len(recent) > FLIPS and any(not metric.worse(level, levels[-1]) for level in earlier)
