"""The rule for latencies: the statistics of their history, what an A/B decided, and whose fault a change is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from groupbench.tracker.environment import environment_differences
from groupbench.tracker.judge.alert_levels import LATEST, on_level
from groupbench.tracker.judge.causes import DRIFT, Cause, find_cause
from groupbench.tracker.judge.known import Known, own_facts
from groupbench.tracker.judge.levels import latency_history
from groupbench.tracker.judge.parts import (
    OLD,
    Q,
    changes,
    confirmed,
    joined,
    known,
    percent,
)
from groupbench.tracker.judge.pasts import Past, facts_at
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.verdicts import CANARY, Judged
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.stats import scan as scans
from groupbench.tracker.stats.thresholds import TOO_NOISY
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import DIFFERENT, SAME, Compared
from groupbench.tracker.text.wording import date
from groupbench.tracker.verdicts import Verdict

ENOUGH = 3
"""Earlier results that a noisy one can agree with."""


@dataclass(frozen=True)
class Latency:
    """What history says of a point's latency."""

    past: Past  # in any environment, on the level that was accepted
    finding: scans.Finding
    least: float  # smallest change that counts, a logarithm

    @property
    def moved(self) -> bool:
        return self.finding.verdict in ("changed", "suspect")

    @property
    def slower(self) -> bool:
        return self.finding.effect is not None and self.finding.effect > 0

    def before(self) -> list[int]:
        """Return the runs that are certainly on the level before the change, the newest last."""
        if self.finding.index is None or self.finding.first is None:
            return []
        alike = self.past.alike
        start = int(np.searchsorted(alike, self.finding.index)) - self.finding.n_before
        return self.past.run[alike[max(start, 0) :][alike[max(start, 0) :] <= self.finding.first]].tolist()

    def after(self) -> list[int]:
        """Return the runs that are certainly after it, the oldest first."""
        alike = self.past.alike
        return self.past.run[alike[alike >= (self.finding.last or 0)]].tolist()


class LatencyRule:
    """Judges the latencies of a run, all of them together: the share of false alarms is held over the night."""

    def __init__(self, facts: Known) -> None:
        self.known = facts
        self.latencies = self._latencies()
        # By environment, of which a run may hold several, and whether it became slower.
        self.machines_moved: dict[tuple[str, bool], list[Span]] = {}
        for point in facts.points:
            latency = self.latencies.get(point.pk)
            if point.series.operator == CANARY and latency is not None and latency.moved:
                key = point.environment.identity, latency.slower
                self.machines_moved.setdefault(key, []).append(self._span(latency))

    def places(self, point: PointRow) -> list[int]:
        """Return the runs at which facts of the point's series tell a cause."""
        latency = self.latencies.get(point.pk)
        if latency is None or not latency.moved or latency.finding.index is None:
            return []
        return [*latency.before()[-1:], *latency.after()[:1]]

    # ---- what is asked of the statistics

    def _latencies(self) -> dict[int, Latency]:
        pasts: dict[int, Past] = {}
        histories: list[scans.History] = []
        for point in self.known.points:
            if point.timed and point.timing is not None:
                past = self.known.on_accepted_level(self.known.pasts.latency(point.series.pk), "latency")
                pasts[point.pk] = past
                canary, least = point.series.operator == CANARY, self.known.min_effect
                histories.append(
                    latency_history(past, point.timing, canary=canary, min_effect=least, pool=_pool(point))
                )
        findings = scans.scan(histories, q=Q)
        return {
            key: Latency(past, finding, made.min_effect)
            for (key, past), finding, made in zip(pasts.items(), findings, histories, strict=True)
        }

    # ---- one point

    def row(self, point: PointRow) -> Judged:
        """Judge the latency of a point whose result is right."""
        if not point.timed:
            return self._untimed(point)
        series, latency = point.series, self.latencies[point.pk]
        finding, past = latency.finding, latency.past
        n = len(past.alike) - 1
        if n == 0 and len(past) > 1:
            return self._elsewhere(point, self.known.runs[int(past.run[-2])])
        row = Judged(
            series, Verdict.OK, point, n=n, sigma=known(finding.sigma), p=known(finding.p), q=known(finding.q)
        )  # fmt: skip
        if latency.moved or series.pk in self.known.alerts:
            newest = past.alike[-LATEST:]
            row = replace(row, latest=tuple((int(past.run[at]), float(past.log[at])) for at in newest))
        if not latency.moved and _is_too_noisy(point, latency):
            assert point.error is not None
            return replace(row, verdict=Verdict.NOISY, note=f"its bursts leave an error of ±{100 * point.error:.0f} %")
        if finding.verdict in (Verdict.NEW, Verdict.INSUFFICIENT):
            return replace(row, verdict=Verdict.NEW if n == 0 else Verdict.INSUFFICIENT)
        if finding.verdict == "drift":
            return self._drift(row, point, latency)
        if not latency.moved:
            return row
        assert finding.effect is not None and finding.before is not None and point.timing is not None
        newer = [log for _, log in row.latest][1 - finding.n_after :] if finding.n_after > 1 else []
        if on_level(newer, finding.before, finding.effect, row.sigma, point.timing):
            return replace(row, note=f"back on the level before a change of {percent(finding.effect)}", loud=True)
        row = replace(row, what="latency", since=finding.n_after, **changes(point, finding))
        return self._moved(row, latency)

    def _untimed(self, point: PointRow) -> Judged:
        expected = self.known.expected.get(point.series.pk)
        if expected is not None and expected.timed:
            note = "the previous run has a latency, this one has none"
            return Judged(point.series, Verdict.MISSING, point, "latency", note=note)
        seen = self.known.pasts.earlier_ok(point.series.pk)
        return Judged(point.series, Verdict.OK if seen else Verdict.NEW, point, n=seen)

    def _drift(self, row: Judged, point: PointRow, latency: Latency) -> Judged:
        finding = latency.finding
        span = None if finding.effect is None else self._span(latency)
        inside = span is not None and span.same_code
        row = replace(row, what="latency", cause="infrastructure" if inside else DRIFT, span=span)
        row = replace(row, loud=finding.n_after <= OLD or not inside, since=finding.n_after)
        total = None if inside else self._total(latency)
        return replace(row, note=joined(finding.reason, total), **changes(point, finding))

    def _total(self, latency: Latency) -> str | None:
        """Return how far a drift has come in all: no single night shows it."""
        log, run = latency.past.log[latency.past.alike], latency.past.run[latency.past.alike]
        ends = len(log) // 4
        if ends < 1:
            return None
        moved = float(np.median(log[-ends:]) - np.median(log[:ends]))
        return f"{percent(moved)} since {date(self.known.runs[int(run[0])].started)}"

    def _moved(self, row: Judged, latency: Latency) -> Judged:
        """Judge a latency that history says has moved, or may have: what an A/B found, whose fault it is."""
        point, span = row.point, self._span(latency)
        assert point is not None
        row = replace(row, span=span)
        if row.series.operator == CANARY:
            note = "machine suspect: the canary moved"
            return replace(row, verdict=Verdict.SUSPECT, cause="machine", note=note)
        if span.same_code:
            note = "moved without a change of code: the same commit before and after"
            return replace(row, cause="infrastructure", note=note, loud=row.since <= OLD)
        compared = self._compared(row, latency.before(), latency.after())
        different = compared is not None and compared.verdict == DIFFERENT and compared.effect is not None
        cause = find_cause(
            *self.known.facts_of(point, span),
            canaries_moved=self._machine_moved(row, span, latency.slower),
            confirmed=different,
        )
        row = replace(row, cause=cause.word, note=cause.note, compared=compared)
        if compared is not None and compared.verdict == SAME:
            row = replace(row, note=joined("A/B: the same", cause.note))
            return replace(row, verdict=Verdict.OK, loud=row.since <= OLD)
        return confirmed(row) if different else self._undecided(row, latency, cause)

    def _undecided(self, row: Judged, latency: Latency, cause: Cause) -> Judged:
        """Judge by history alone, since no A/B decided."""
        certain = latency.finding.verdict == "changed"
        undecided = ""
        if row.compared is not None:
            undecided = f"A/B {row.compared.verdict}" + (f": {row.compared.message}" if row.compared.message else "")
        note = joined(undecided, cause.note)
        doubt = Verdict.UNRESOLVED if undecided else Verdict.SUSPECT
        # Nobody is alarmed by what got faster, whatever its cause, which the row names.
        if latency.slower and cause.word == "machine":
            verdict = Verdict.UNRESOLVED
        elif latency.slower and cause.word in ("infrastructure", "environment"):  # history points not at the code
            verdict = doubt
        elif certain:  # what is certain stays so when an A/B could not tell
            verdict = Verdict.REGRESSED if latency.slower else Verdict.IMPROVED
            return replace(row, verdict=verdict, note=note)
        else:
            verdict = doubt
            note = note if undecided else joined(latency.finding.reason, cause.note)
        assert row.span is not None
        return self._to_confirm(replace(row, verdict=verdict, note=note), row.span.base)

    def _machine_moved(self, row: Judged, span: Span, slower: bool) -> bool:
        """Whether a canary of the same machine moved the same way when the row changed, and not some other night."""
        assert row.point is not None
        spans = self.machines_moved.get((row.point.environment.identity, slower), ())
        return any(span.overlaps(canary) for canary in spans)

    def _span(self, latency: Latency) -> Span:
        before, after, runs = latency.before(), latency.after(), self.known.runs
        return Span(runs[before[-1]] if before else None, runs[after[0]] if after else self.known.run)

    def _compared(self, row: Judged, before: list[int], after: list[int]) -> Compared | None:
        """The A/B of a commit before with one after, if there is one."""
        made = self.known.comparisons.get(row.series.pk, ())
        return comparisons.about(made, self.known.clean(before), self.known.clean(after))

    def _elsewhere(self, point: PointRow, before: RunRow) -> Judged:
        """Judge a first result in its environment, of a series that has some in another."""
        old = facts_at(self.known.session, {(point.series.pk, before.pk)})[point.series.pk, before.pk]
        assert old.environment is not None
        changed = environment_differences(old.environment, point.environment.facts)
        row = Judged(point.series, Verdict.INCOMPARABLE, point, "environment", "environment")
        row = replace(row, note="; ".join(changed) or "other timing", span=Span(before, self.known.run))
        if [text.split(" ")[0] for text in changed] != ["gpu_uuid"]:
            return row
        compared = self._compared(row, [before.pk], [self.known.run.pk])
        row = replace(row, compared=compared)
        if compared is not None and compared.verdict == SAME:
            note = joined("another card; A/B on one: the same", row.note)
            return replace(row, verdict=Verdict.OK, loud=True, note=note)
        if compared is not None and compared.verdict == DIFFERENT and compared.effect is not None:
            cause = find_cause(old, own_facts(point), confirmed=True)
            return confirmed(replace(row, what="latency", cause=cause.word))
        return self._to_confirm(row, before)

    def _to_confirm(self, row: Judged, base: RunRow | None) -> Judged:
        """Name the base of the A/B that would decide, or say why there can be none."""
        run = self.known.run
        if base is None or base.commit == run.commit:
            return row
        dirty = next((each for each in (base, run) if each.dirty), None)
        if dirty is None:
            return replace(row, ab_base=base)
        return replace(row, note=joined(row.note, f"{dirty.state} is a dirty tree, which cannot be measured again"))


def _is_too_noisy(point: PointRow, latency: Latency) -> bool:
    """Return whether a latency's bursts scatter so far that it cannot be judged.

    What disturbs a burst makes it slower. So a median close to the fastest burst says enough, whatever a stall of the
    host made of one of the others; and so does one that agrees with the results before it.
    """
    if point.error is None or point.error <= TOO_NOISY or not point.low_ms or not point.median_ms:
        return False
    if 1 - point.low_ms / point.median_ms <= TOO_NOISY:
        return False
    earlier = latency.past.log[latency.past.alike[:-1]]
    if len(earlier) < ENOUGH:
        return True
    return bool(abs(latency.past.log[-1] - np.median(earlier[-OLD:])) > latency.least)


def _pool(point: PointRow) -> tuple[object, ...]:
    """Series whose noise is alike: taken in the same way on the same hardware, within a factor of ten."""
    series = point.series
    assert point.median_ms is not None
    return (point.timing, series.hardware, series.host, series.protocol, math.floor(math.log10(point.median_ms)))
