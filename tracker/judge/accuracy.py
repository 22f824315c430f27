"""The rule for results: correct, as accurate as before, and bitwise repeatable."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from groupbench.tracker.facts.metrics import RMS
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.causes import find_cause
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.parts import Q, history, joined, moved
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.verdicts import Effect, Evidence, Judged
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.stats import scan as scans
from groupbench.tracker.stats.thresholds import YOUNG, worse_since
from groupbench.tracker.text.wording import change_in_words, rms_text

_STILL = 0.2
"""A range of log(rms) too small for any result in it to be worse than another."""


class AccuracyRule:
    """Judges results. Their errors hardly scatter: they are rounding errors of one kernel on fixed inputs."""

    def __init__(self, data: GateData) -> None:
        self.data = data
        self.findings = self._findings()

    def _findings(self) -> dict[int, tuple[Past, scans.SeriesFinding | None]]:
        """Return, for each point whose accuracy moved, its past and, if it moved far, the statistics' finding."""
        pasts: dict[int, Past] = {}
        moved_ever = self.data.pasts.inaccurate(_STILL)
        for point in self.data.points:
            if point.status == "ok" and point.rms is not None and point.series.pk in moved_ever:
                past = self.data.on_accepted_level(self.data.pasts.accuracy(point.series.pk), "accuracy")
                past = past.where(past.alike)
                if len(past) > 1 and np.ptp(past.log) > _STILL:
                    pasts[point.pk] = past
        least = math.log1p(RMS.least)
        far = [key for key, past in pasts.items() if np.ptp(past.log) > least]
        findings = scans.scan([history(pasts[key], RMS.floor, least, "rms") for key in far], q=Q)
        by_point = dict(zip(far, findings, strict=True))
        return {key: (past, by_point.get(key)) for key, past in pasts.items()}

    def places(self, point: PointRow) -> list[int]:
        """Return the runs whose facts are needed to find a cause."""
        runs: list[int] = []
        past, finding = self.findings.get(point.pk, (None, None))
        ends = None if past is None else _ends(past, finding)
        if past is not None and ends is not None:
            runs += past.run[list(ends)].tolist()
        agreed = self._agreed(point)
        if agreed is not None:
            runs += agreed[0].run[agreed[1] : agreed[1] + 2].tolist()
        return runs

    def not_ok(self, point: PointRow) -> Judged:
        """Judge a point whose status is not ok."""
        series, expected = point.series, self.data.expected.get(point.series.pk)
        if point.status == "wrong":
            return self._wrong(point)
        if point.status != "unavailable":
            return Judged(series, Verdict.MISSING, point, point.status, note=point.message)
        if expected is not None and expected.status == "ok":
            note = f"available in the previous run: {point.message}"
            return Judged(series, Verdict.MISSING, point, "unavailable", note=note)
        return Judged(series, Verdict.UNAVAILABLE, point, "unavailable", note=point.message)

    def _wrong(self, point: PointRow) -> Judged:
        """Judge a result outside tolerance: always `wrong`; history only dates the first wrong run."""
        turn, seen = self.data.turns[point.series.pk], self.data.pasts.earlier_ok(point.series.pk)
        runs = self.data.runs
        span = Span(None if turn.base is None else runs[turn.base], runs[turn.head])
        row = Judged(
            point.series, Verdict.WRONG, point, "result", note=point.message, evidence=Evidence(seen), span=span
        )
        if span.base is None:
            return row
        cause = find_cause(*self.data.facts_of(point, span), result=True)
        note = joined(point.message, cause.note)
        return replace(row, effect=Effect(turn.ms, turn.rms), cause=cause.word, note=note)

    def worse(self, point: PointRow, row: Judged) -> Judged | None:
        """Return a regression of accuracy or repeatability, or None. `row` is the latency's."""
        worse_row = self._less_accurate(point, row) or self._not_repeatable(point, row)
        return worse_row and replace(
            worse_row, evidence=replace(worse_row.evidence, p=None, q=None)
        )  # p and q are the latency's

    def _less_accurate(self, point: PointRow, row: Judged) -> Judged | None:
        """Return a regression within tolerance, or None. Its note also mentions a change of the latency."""
        past, finding = self.findings.get(point.pk, (None, None))
        ends = None if past is None else _ends(past, finding)
        if past is None or ends is None or point.rms is None:
            return None
        first, last = ends
        start, since = 0, len(past) - last
        if moved(finding):
            start = (first + 1 if finding.index is None else finding.index) - finding.n_before
            since = finding.n_after
        level = past.log[max(0, min(start, first)) : first + 1]
        before = float(np.median(_errors(level)))  # measured, whereas the effect is an estimate
        if not RMS.worse(before, point.rms):
            return None
        runs = self.data.runs
        span = Span(runs[int(past.run[first])], runs[int(past.run[last])])
        note = rms_text(before, point.rms)
        if row.what == "latency" and row.change is not None and row.verdict is not Verdict.OK:
            note += f", and {change_in_words(row.change)}"
        cause = find_cause(*self.data.facts_of(point, span), result=True)
        return replace(
            row, verdict=Verdict.REGRESSED, what="accuracy", cause=cause.word, note=joined(note, cause.note),
            effect=replace(row.effect, before_rms=before), evidence=replace(row.evidence, n=len(past) - 1),
            news=replace(row.news, since=since), span=span, ab_base=None, compared=None,
        )  # fmt: skip

    def _not_repeatable(self, point: PointRow, row: Judged) -> Judged | None:
        """Return a regression if two executions used to be bitwise equal and no longer do."""
        alerts = self.data.alerts.get(point.series.pk, ())
        accepted = any(each.metric == "repeatability" and self.data.accepted(each) for each in alerts)
        agreed = None if accepted else self._agreed(point)
        if agreed is None:
            return None
        past, last = agreed
        runs = self.data.runs
        span = Span(runs[int(past.run[last])], runs[int(past.run[last + 1])])
        cause = find_cause(*self.data.facts_of(point, span), result=True)
        note = joined("two executions now differ bitwise", cause.note)
        return replace(
            row, verdict=Verdict.REGRESSED, what="repeatability", cause=cause.word, note=note,
            evidence=replace(row.evidence, n=len(past) - 1), news=replace(row.news, since=len(past) - 1 - last),
            span=span, ab_base=None, compared=None,
        )  # fmt: skip

    def _agreed(self, point: PointRow) -> tuple[Past, int] | None:
        """Return the past in the same environment and the last place where two executions agreed.

        None if the point's executions agree, or never agreed.
        """
        if point.repeatable is not False:
            return None
        past = self.data.pasts.repeatable(point.series.pk)
        past = past.where(past.alike)
        agreed = np.flatnonzero(past.log)
        return (past, int(agreed[-1])) if len(agreed) else None


def _ends(past: Past, finding: scans.SeriesFinding | None) -> tuple[int, int] | None:
    """Return the places of the last result before a change of accuracy and of the first after it.

    Accuracy hardly scatters, so one earlier result is enough for a series too young for statistics.
    """
    if moved(finding):
        return finding.first or 0, finding.last or 0
    at = worse_since(_errors(past.log))
    return None if at is None or (finding is not None and at >= YOUNG) else (at - 1, at)


def _errors(log: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return relative RMS errors from their logarithms; 0 for an error at the floor."""
    errors = np.exp(log) - RMS.negligible
    return np.where(errors > 1e-9 * RMS.negligible, errors, 0.0)
