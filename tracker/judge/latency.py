"""The rule for latencies: statistics of their history, A/B comparisons, and the cause of a change."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from groupbench.tracker.facts.metrics import finite_or_none
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import transitions
from groupbench.tracker.judge.causes import DRIFT, Cause, Facts, find_cause, some
from groupbench.tracker.judge.further import Moved
from groupbench.tracker.judge.gate_data import GateData, point_facts
from groupbench.tracker.judge.latency_findings import LatencyFinding, latency_findings
from groupbench.tracker.judge.parts import (
    OLD,
    changes,
    confirmed,
    joined,
    loud_while_new,
    percent,
)
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.toolchain_lines import software_changes
from groupbench.tracker.judge.verdicts import CANARY, Effect, Evidence, Judged, News
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.stats.thresholds import GROSS, LATEST, TOO_NOISY, least_effect, on_level
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import DIFFERENT, SAME, Compared
from groupbench.tracker.text.wording import date

ENOUGH = 3
"""Number of earlier results needed to accept a noisy result that agrees with them."""


class LatencyRule:
    """Judges all latencies of a run together, to bound the false-positive rate of the whole night."""

    def __init__(self, data: GateData) -> None:
        self.data = data
        self.latencies = latency_findings(data)
        # By machine, since a run may use several, and by direction: slower or not.
        self.machines_moved: dict[tuple[str, bool], list[Span]] = {}
        for point in data.points:
            latency = self.latencies.get(point.pk)
            if point.series.operator == CANARY and latency is not None and latency.moved:
                if latency.with_toolchain:  # a canary runs torch's kernels, so the toolchain may explain its change
                    continue
                key = point.environment.machine, latency.slower
                self.machines_moved.setdefault(key, []).append(self._span(latency))

    def places(self, point: PointRow) -> list[int]:
        """Return the runs whose facts are needed to find a cause."""
        latency = self.latencies.get(point.pk)
        if latency is None:
            return []
        runs = transitions.facts_needed(latency.past)
        if (base := self._base_of_young(latency)) is not None:
            return [*runs, base.pk, self.data.run.pk]
        if not latency.moved or latency.finding.index is None:
            return runs
        return [*runs, *latency.before()[-1:], *latency.after()[:1]]

    def moved(self, point: PointRow) -> Moved | None:
        """Return the change of a point's latency, whatever its verdict, or None."""
        latency = self.latencies.get(point.pk)
        if latency is None or not latency.moved or latency.finding.effect is None:
            return None
        return Moved(latency.finding.effect, self._span(latency))

    # ---- one point

    def row(self, point: PointRow) -> Judged:
        """Judge the latency of a point with a correct result."""
        if not point.timed:
            return _untimed(self.data, point)
        latency = self.latencies[point.pk]
        if len(latency.past.alike) <= transitions.YOUNG and len(latency.past.alike) < len(latency.past):
            return self._elsewhere(point, latency)
        row = self._judged(point, latency)
        if row.transition is None:
            row = replace(row, transition=transitions.newest(self.data, point, latency.past, latency.finding.sigma))
        return row

    def _judged(self, point: PointRow, latency: LatencyFinding) -> Judged:
        """Judge a latency on a machine that has a history of the series."""
        series, finding, past = point.series, latency.finding, latency.past
        n = len(past.alike) - 1
        row = Judged(series, Verdict.OK, point, evidence=self._evidence(latency))
        if not latency.moved and _is_too_noisy(point, latency):
            assert point.error is not None
            note = f"standard error over bursts: ±{100 * point.error:.0f} %"
            return self._young(replace(row, verdict=Verdict.NOISY, note=note), latency)
        if finding.verdict in (Verdict.NEW, Verdict.INSUFFICIENT):
            return self._young(replace(row, verdict=Verdict.NEW if n == 0 else Verdict.INSUFFICIENT), latency)
        if finding.verdict == "drift":
            return self._drift(row, point, latency)
        if not latency.moved:
            return row
        assert finding.effect is not None and finding.before is not None and point.timing is not None
        newer = [log for _, log in row.evidence.latest][1 - finding.n_after :] if finding.n_after > 1 else []
        least = math.log1p(least_effect(point.timing, math.exp(finding.before)))
        if on_level(newer, finding.before, finding.effect, row.evidence.sigma, least):
            return replace(
                row, note=f"back on the level before a change of {percent(finding.effect)}", news=News(loud=True)
            )
        row = replace(row, what="latency", news=News(finding.n_after), effect=changes(point, finding))
        return self._moved(row, latency)

    def remaining(self, point: PointRow) -> Judged | None:
        """Return a row for the rest of an earlier slowdown, if the newest change took back only a part of it."""
        latency = self.latencies.get(point.pk)
        left = None if latency is None else latency.finding.left
        if latency is None or left is None or point.series.operator == CANARY:
            return None
        latency = replace(latency, finding=left)
        row = Judged(point.series, Verdict.OK, point, "latency", evidence=self._evidence(latency))
        row = self._moved(replace(row, news=News(left.n_after), effect=changes(point, left)), latency)
        row = replace(row, note=joined(left.reason, None if row.note == left.reason else row.note))
        return row if row.verdict.fails or row.verdict in (Verdict.SUSPECT, Verdict.UNRESOLVED) else None

    def _evidence(self, latency: LatencyFinding) -> Evidence:
        """Return the statistics behind a finding, with the newest results if a rule needs them."""
        past, finding = latency.past, latency.finding
        latest: tuple[tuple[int, float], ...] = ()
        if latency.moved or past.series in self.data.alerts:
            log = latency.measured.log
            latest = tuple((int(past.run[at]), float(log[at])) for at in past.alike[-LATEST:])
        numbers = {name: finite_or_none(getattr(finding, name)) for name in ("sigma", "p", "q")}
        return Evidence(len(past.alike) - 1, **numbers, latest=latest)

    def _base_of_young(self, latency: LatencyFinding) -> RunRow | None:
        """Return the newest earlier run of another commit, if the history is too short to judge."""
        if latency.finding.verdict != Verdict.INSUFFICIENT:
            return None
        earlier = (self.data.runs[int(latency.past.run[at])] for at in reversed(latency.past.alike[:-1]))
        return next((run for run in earlier if not run.state.has_commit or run.commit != self.data.run.commit), None)

    def _young(self, row: Judged, latency: LatencyFinding) -> Judged:
        """Judge a series with few results by an A/B comparison with the commit before, if its level moved."""
        base, point = self._base_of_young(latency), row.point
        if base is None or point is None or row.series.operator == CANARY:
            return row
        before = float(latency.past.log[latency.past.run == base.pk][-1])
        moved = float(latency.past.log[-1]) - before
        compared = self._compared(row, [base.pk], [self.data.run.pk])
        if self._is_accepted(latency.past, base, compared):
            return replace(row, verdict=Verdict.OK, what="latency")
        if compared is not None and compared.verdict == SAME:
            return replace(row, verdict=Verdict.OK, what="latency", compared=compared, note="A/B: no difference")
        effect = Effect(before_ms=math.exp(before), change=math.expm1(moved))
        shown = replace(row, what="latency", span=Span(base, self.data.run), news=News(1), effect=effect)
        if compared is not None and compared.verdict == DIFFERENT and compared.effect is not None:
            cause = _cause_by_ab(compared, *self.data.facts_of(point, Span(base, self.data.run)))
            shown = replace(shown, cause=cause.word, note=cause.note, compared=compared)
            if moved * compared.effect <= 0:  # noise hides in two results what the A/B found
                own = f"before is computed from the A/B; the runs' own results show {percent(moved)}"
                shown = replace(shown, effect=row.effect, note=joined(own, _scatter(latency.past), cause.note))
            return confirmed(shown)
        if abs(moved) <= latency.least:
            return row
        if compared is not None:
            note = joined(_why_undecided(compared), row.note)
            return self._to_confirm(replace(shown, verdict=Verdict.UNRESOLVED, compared=compared, note=note), base)
        row = self._to_confirm(row, base)
        if row.ab_base is not None or abs(moved) <= math.log1p(GROSS[point.timing or "gpu"]):
            return row
        note = joined("too few results to judge, and no A/B of these commits is possible", row.note)
        return replace(shown, news=News(1, loud=True), note=note)

    def _is_accepted(self, past: Past, base: RunRow, compared: Compared | None) -> bool:
        """Return whether the change that an A/B found is accepted: the level before it is shifted by as much."""
        if compared is None or compared.verdict != DIFFERENT or not compared.effect:
            return False
        measured = self.data.pasts.latency(past.series)
        shift = float(past.log[past.run == base.pk][-1] - measured.log[measured.run == base.pk][-1])
        return shift / compared.effect >= 0.5

    def _drift(self, row: Judged, point: PointRow, latency: LatencyFinding) -> Judged:
        """Return the row of a latency that moved without a step, or without a change of the code."""
        finding = latency.finding
        span = None if finding.effect is None else self._span(latency)
        inside = span is not None and span.same_code
        row = replace(row, what="latency", cause="infrastructure" if inside else DRIFT, span=span)
        row = replace(row, news=News(finding.n_after, loud=finding.n_after <= OLD or not inside))
        total = None if inside else _total(self.data, latency)
        return replace(row, note=joined(finding.reason, total), effect=changes(point, finding))

    def _moved(self, row: Judged, latency: LatencyFinding) -> Judged:
        """Judge a latency that has moved, or may have: by A/B comparison, cause and history."""
        point, span = row.point, self._span(latency)
        assert point is not None
        row = replace(row, span=span, transition=transitions.across(self.data, point, span, row))
        if row.series.operator == CANARY:
            if row.transition is not None:
                note = f"{row.transition.text}: the canary runs torch's kernels"
                return replace(row, verdict=Verdict.SUSPECT, cause="toolchain", note=note)
            note = "machine suspect: the canary moved"
            return replace(row, verdict=Verdict.SUSPECT, cause="machine", note=note)
        if row.transition is not None and not self._machine_moved(row, span, latency.slower):
            return self._with_toolchain(row, latency)
        if span.same_code and row.transition is None:
            note = "changed with no code change: same commit before and after"
            return replace(row, cause="infrastructure", note=note, news=loud_while_new(row.news))
        compared = self._compared(row, latency.before(), latency.after())
        facts = self.data.facts_of(point, span)
        if compared is not None and compared.verdict == DIFFERENT and compared.effect is not None:
            cause = _cause_by_ab(compared, *facts)
            return confirmed(replace(row, cause=cause.word, note=cause.note, compared=compared))
        cause = find_cause(*facts, canaries_moved=self._machine_moved(row, span, latency.slower))
        row = replace(row, cause=cause.word, note=cause.note, compared=compared)
        if compared is not None and compared.verdict == SAME:
            row = replace(row, note=joined("A/B: no difference", cause.note))
            return replace(row, verdict=Verdict.OK, news=loud_while_new(row.news))
        return self._undecided(row, latency, cause)

    def _with_toolchain(self, row: Judged, latency: LatencyFinding) -> Judged:
        """Judge a latency that moved when the toolchain changed, with or without a code change."""
        parts = transitions.parts(self.data, row, latency.before(), latency.after())
        row, cause = transitions.separated(row, parts)
        if cause is None:
            return replace(row, news=loud_while_new(row.news))
        row = self._undecided(replace(row, cause=cause.word), latency, cause)
        assert row.transition is not None
        if row.verdict is Verdict.IMPROVED or row.ab_base is not None or row.transition.replaceable:
            return row
        return replace(row, note=joined(row.note, transitions.ACCEPT))

    def _undecided(self, row: Judged, latency: LatencyFinding, cause: Cause) -> Judged:
        """Judge by history alone, because no A/B comparison decided."""
        certain = latency.finding.verdict == "changed" or transitions.is_certain(row, cause)
        undecided = "" if row.compared is None else _why_undecided(row.compared)
        note = joined(undecided, cause.note)
        doubt = Verdict.UNRESOLVED if undecided else Verdict.SUSPECT
        # Only slowdowns raise an alarm. An improvement just names its cause.
        if latency.slower and cause.word == "machine":
            verdict = Verdict.UNRESOLVED
        elif latency.slower and cause.word in ("infrastructure", "environment"):  # history does not point at the code
            verdict = doubt
        elif certain:  # an inconclusive A/B comparison does not make it less certain
            row = replace(row, verdict=Verdict.REGRESSED if latency.slower else Verdict.IMPROVED, note=note)
            young = latency.finding.verdict != "changed" and row.span is not None
            return self._to_confirm(row, row.span.base) if young and row.span else row
        else:
            verdict = doubt
            note = note if undecided else joined(latency.finding.reason, cause.note)
        assert row.span is not None
        return self._to_confirm(replace(row, verdict=verdict, note=note), row.span.base)

    def _machine_moved(self, row: Judged, span: Span, slower: bool) -> bool:
        """Return whether a canary of the same machine moved in the same direction at the same time."""
        assert row.point is not None
        spans = self.machines_moved.get((row.point.environment.machine, slower), ())
        return any(span.overlaps(canary) for canary in spans)

    def _span(self, latency: LatencyFinding) -> Span:
        before, after, runs = latency.before(), latency.after(), self.data.runs
        return Span(runs[before[-1]] if before else None, runs[after[0]] if after else self.data.run)

    def _compared(self, row: Judged, before: list[int], after: list[int]) -> Compared | None:
        """Return the A/B comparison of a commit before with one after, if any."""
        stored = self.data.evidence(row.series.pk, before, after)
        return comparisons.about(stored, self.data.clean_commits(before), self.data.clean_commits(after))

    def _elsewhere(self, point: PointRow, latency: LatencyFinding) -> Judged:
        """Judge one of the first results on a machine, when the series has a history on another."""
        row, before = transitions.elsewhere(self.data, point, latency.past, latency.least)
        assert row.transition is not None
        if [text.split(" ")[0] for text in row.transition.differences] != ["gpu_uuid"]:
            return row
        compared = self._compared(row, [before.pk], [self.data.run.pk])
        row = replace(row, compared=compared)
        if compared is not None and compared.verdict == SAME:
            note = joined("another GPU; A/B on one GPU: no difference", row.note)
            return replace(row, verdict=Verdict.OK, news=replace(row.news, loud=True), note=note)
        if compared is not None and compared.verdict == DIFFERENT and compared.effect is not None:
            old = self.data.facts.get((point.series.pk, before.pk))
            cause = _cause_by_ab(compared, old, point_facts(point))
            return confirmed(replace(row, cause=cause.word, effect=replace(row.effect, change=None, before_ms=None)))
        return self._to_confirm(row, before) if row.verdict is Verdict.INCOMPARABLE else row

    def _to_confirm(self, row: Judged, base: RunRow | None) -> Judged:
        """Set the base of the A/B comparison that would decide, or note why there can be none."""
        run = self.data.run
        replaceable = row.transition is not None and row.transition.replaceable
        if base is None or (base.commit == run.commit and not replaceable):
            return row
        if base.state.clean and run.state.clean:
            return replace(row, ab_base=base)
        dirty = next((each for each in (base, run) if each.dirty), None)
        if dirty is None:  # an unknown commit, which the note of the row mentions
            return row
        return replace(row, note=joined(row.note, f"{dirty.state} is a dirty tree, which cannot be measured again"))


def _untimed(data: GateData, point: PointRow) -> Judged:
    """Judge a point without a latency, such as an interpreted one: missing if the previous run had a latency."""
    expected = data.expected.get(point.series.pk)
    if expected is not None and expected.timed:
        note = "the previous run has a latency, but this run does not"
        return Judged(point.series, Verdict.MISSING, point, "latency", note=note)
    seen = data.pasts.earlier_ok(point.series.pk)
    return Judged(point.series, Verdict.OK if seen else Verdict.NEW, point, evidence=Evidence(seen))


def _total(data: GateData, latency: LatencyFinding) -> str | None:
    """Return the total change of a drift, which no single night shows."""
    log, run = latency.past.log[latency.past.alike], latency.past.run[latency.past.alike]
    ends = len(log) // 4
    if ends < 1:
        return None
    moved = float(np.median(log[-ends:]) - np.median(log[:ends]))
    return f"{percent(moved)} since {date(data.runs[int(run[0])].started)}"


def _why_undecided(compared: Compared) -> str:
    """Return why an A/B comparison did not decide."""
    return f"A/B {compared.verdict}" + (f": {compared.message}" if compared.message else "")


def _cause_by_ab(compared: Compared, before: Facts | None, after: Facts) -> Cause:
    """Return the cause of a change that an A/B of two commits found."""
    changes_of_software = software_changes(compared)
    if changes_of_software:
        return Cause("code and toolchain", f"the A/B measured base with another toolchain: {some(changes_of_software)}")
    return find_cause(before, after, confirmed=True)


def _scatter(past: Past) -> str | None:
    """Return how far the bursts of the last results scatter, or None if unknown."""
    errors = past.error[past.alike][-2:]
    return f"their bursts scatter by ±{100 * np.max(errors):.0f} %" if np.isfinite(errors).all() else None


def _is_too_noisy(point: PointRow, latency: LatencyFinding) -> bool:
    """Return whether a latency's bursts vary too much to judge it.

    Disturbances only make bursts slower. So a median close to the fastest burst is good enough even if a stall of the
    host slowed down another burst. So is a median that agrees with earlier results.
    """
    if point.error is None or point.error <= TOO_NOISY or not point.low_ms or not point.median_ms:
        return False
    if 1 - point.low_ms / point.median_ms <= TOO_NOISY:
        return False
    earlier = latency.past.log[latency.past.alike[:-1]]
    if len(earlier) < ENOUGH:
        return True
    return bool(abs(latency.past.log[-1] - np.median(earlier[-OLD:])) > latency.least)
