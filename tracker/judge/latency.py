"""The facts about a change of a latency besides its values: A/Bs, transitions, and moves of the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from groupbench.tracker.facts.metrics import LATENCY
from groupbench.tracker.judge import tonight, transitions
from groupbench.tracker.judge.causes import find_cause, same_code, some
from groupbench.tracker.judge.evidence import Evidence
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.machine import Machines
from groupbench.tracker.judge.parts import Case, ab_text, found_by, percent, why_undecided
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.tonight import Tonight
from groupbench.tracker.judge.toolchain_lines import software_changes
from groupbench.tracker.judge.verdicts import CANARY, Effect, Judged
from groupbench.tracker.stats.thresholds import GROSS, TOO_NOISY
from groupbench.tracker.stats.walk import AT_ONCE, NIGHTS, Walked
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import Compared
from groupbench.tracker.text import repro
from groupbench.tracker.text.wording import joined

CANARY_MOVED = "machine suspect: the canary moved"


def measured_span(
    one: Tonight, row: Judged, compared: Compared, before: Sequence[int], since: Sequence[int], same_files: bool
) -> Span:
    """Return the runs between which an A/B found a change: those of its commits, unless the results tell more.

    The first result far from the level before is certainly after the change.
    """
    span, top = row.span, one.walked.top
    assert span is not None
    bases = [place for place in before if one.run_at(place).commit == compared.base]
    heads = [place for place in since if one.run_at(place).commit == compared.head]
    if not bases or not heads:
        return span
    if same_files:
        return Span(one.run_at(bases[-1]), one.run_at(heads[0]))
    was = one.value if row.effect.before_ms is None else math.log(row.effect.before_ms)
    far = math.inf if top is None else max(top.reach(AT_ONCE), one.followed.least)
    after = next(place for place in since if place == heads[0] or abs(float(one.followed.y[place]) - was) >= far)
    base = one.run_at(bases[-1])
    return Span(
        base if span.base is None or base.order > span.base.order else span.base,
        span.head if after == since[0] else one.run_at(after),
    )


class LatencyFacts:
    """The facts about a change of a latency besides its values: A/Bs, transitions, and the machine."""

    def __init__(self, data: GateData, machines: Machines) -> None:
        self.data, self.machines = data, machines

    def with_causes(self, one: Tonight, case: Case, before: Sequence[int], since: Sequence[int]) -> Case:
        """Return a case with its cause, by A/Bs and else by the facts around it.

        Args:
            before: Places of the results before the change.
            since: Places of the results since, before any further change: an A/B with a later one measures both.
        """
        row, evidence = case.row, case.evidence
        span = row.span
        assert span is not None
        row = replace(row, transition=transitions.across(self.data, one.point, span, row))
        slower = evidence.distance > 0
        if evidence.canary:
            new = row.transition is not None
            canary = f"{row.transition.text}: the canary runs torch's kernels" if row.transition else CANARY_MOVED
            return Case(evidence, replace(row, cause="toolchain" if new else "machine", note=canary))
        excused = self.machines.canary(one, span, evidence.distance)
        if row.transition is not None and excused is None:
            return transitions.with_parts(self.data, Case(evidence, row), one.keys(before), one.keys(since))
        compared = self.compared(one, before, since)
        ab = found_by(compared, evidence.counts)
        facts = self.data.facts_of(one.point, span)
        if ab in ("worse", "better") and compared is not None and (ab == "worse") == slower:
            changes, (earlier, later) = software_changes(compared), facts
            same_files = earlier is not None and not changes and same_code(earlier, later)
            if (narrow := measured_span(one, row, compared, before, since, same_files)) != span:
                span = narrow
                self.data.load_facts([(one.point.series.pk, end.pk) for end in span.ends])
                row, facts = replace(row, span=span), self.data.facts_of(one.point, span)
            cause = find_cause(*facts, confirmed=True)
            word, text = (
                ("code and toolchain", f"the A/B measured base with another toolchain: {some(changes)}")
                if changes else (cause.word, cause.note)
            )  # fmt: skip
            note = joined(ab_text(compared), _apart(row, compared), row.note, text)
            return Case(replace(evidence, ab=ab, cause=word), replace(row, cause=word, compared=compared, note=note))
        opposite = compared is not None and ab in ("worse", "better")
        certain = ab == "better" and (evidence.nights > 0 or evidence.kind == "step")
        if opposite and compared and (certain or compared.head != self.data.run.commit):
            note = joined(transitions.CONTRADICT, row.note)
            return Case(replace(evidence, ab="undecided"), replace(row, compared=compared, note=note))
        if opposite and compared:  # tonight's A/B, though the results show the opposite
            row = _by_ab_alone(row, compared)
            return Case(replace(evidence, ab=ab, cause="code"), replace(row, compared=compared, cause="code"))
        cause = find_cause(*facts, canaries_moved=excused == "canary")
        note = joined(why_undecided(compared) if ab == "undecided" and compared else None, row.note, cause.note)
        excluded = any(tonight.excluded(one, before, place) for place in {*since[:1], one.last})
        measured = one.value
        if ab == "same" and compared is not None:
            measured = math.log(compared.head_ms) if compared.head_ms else -math.inf
        outside = (excluded or ab == "same") and self._is_outside(one, measured)
        if evidence.kind == "step":
            outside = excluded and ab is None and evidence.since <= NIGHTS
        evidence = replace(
            evidence, cause=cause.word, ab=ab, excused=excused, same_code=excluded, outside=outside
        )  # fmt: skip
        return Case(evidence, replace(row, cause=cause.word, note=note, compared=compared))

    def _is_outside(self, one: Tonight, measured: float) -> bool:
        """Return whether the same code is off the level, as far as tonight's result: by an A/B, or by that result."""
        top = one.walked.top
        if top is None or not one.walked.beyond or self.machines.explains(one):
            return False
        return measured - top.centre > one.followed.least and top.p(measured) <= AT_ONCE

    def compared(self, one: Tonight, before: Sequence[int], since: Sequence[int]) -> Compared | None:
        """Return the A/B of a commit before with one since, if any.

        One whose base has tonight's code tells nothing about tonight: its change is taken back.
        """
        series = one.point.series
        if one.metric is not LATENCY or series.pk not in self.data.comparisons or series.operator == CANARY:
            return None
        stored = self.data.evidence(series.pk, one.keys(before), one.keys(since))
        bases = one.keys(place for place in before if not tonight.same_code(one, place, one.last))
        return comparisons.about(stored, self.data.clean_commits(bases), self.data.clean_commits(one.keys(since)))

    def to_ask(self, one: Tonight, case: Case, bases: Sequence[int], head: int) -> Case:
        """Set the ends of the A/B that would decide, or note why there can be none.

        The base is the newest result on the level before with other code.
        """
        evidence, row, run = case.evidence, case.row, one.run_at(head)
        if evidence.canary or evidence.ab in ("same", "worse", "better"):
            return case
        if evidence.score is None and not evidence.nights and evidence.kind == "tonight":
            return case
        replaceable = row.transition is not None and row.transition.replaceable
        decided = row.cause == "toolchain" or (row.span is not None and row.span.same_code)  # about the commits
        if decided and not replaceable:
            return case
        base = next(
            (place for place in reversed(bases) if replaceable or not tonight.same_code(one, place, head)), None
        )
        if base is None:
            return case
        if row.series.host not in repro.HOSTS:
            text = "groupbench cannot measure this benchmark: import further results of these commits"
            return case.showing(note=joined(row.note, text))
        chosen = one.run_at(base)
        if chosen.state.clean and run.state.clean:
            return case.knowing(asked=True).showing(ab_base=chosen, ab_head=run)
        dirty = next((each for each in (chosen, run) if each.dirty), None)
        if dirty is None:  # an unknown commit, which the note of the row mentions
            return case
        return case.showing(note=joined(row.note, f"{dirty.state} is a dirty tree, which cannot be measured again"))

    def on_another_machine(self, one: Tonight, evidence: Evidence) -> Case:
        """Return the case for one of a machine's first results, when the series has a history on another."""
        row, before, reach = transitions.elsewhere(self.data, one.point, one.past, one.followed.least)
        run, transition = self.data.run, row.transition
        assert transition is not None and row.change is not None
        evidence = replace(evidence, kind="machine", distance=math.log1p(row.change), counts=reach)
        evidence = replace(evidence, n=row.evidence.n, decidable=True)
        row = replace(row, note=transition.text if abs(evidence.distance) <= reach else row.note)
        if [text.split(" ")[0] for text in transition.differences] != ["gpu_uuid"]:
            return Case(evidence, row)
        stored = self.data.evidence(one.point.series.pk, [before.pk], [run.pk])
        compared = comparisons.about(stored, self.data.clean_commits([before.pk]), self.data.clean_commits([run.pk]))
        ab = found_by(compared, one.followed.least)
        row = replace(row, compared=compared)
        if ab == "same":
            row = replace(row, note=joined("another GPU; A/B on one GPU: no difference", row.note))
        elif ab in ("worse", "better") and compared is not None:
            row = _by_ab_alone(replace(row, note=None), compared)
            row = replace(row, cause="code", note=ab_text(compared))
        elif abs(evidence.distance) > reach and before.commit != run.commit and before.state.clean and run.state.clean:
            row = replace(row, ab_base=before)
        return Case(replace(evidence, ab=ab if ab != "undecided" else None), row)


def _apart(row: Judged, compared: Compared) -> str | None:
    """Return the results' change if it is outside an A/B's interval."""
    low = -math.inf if compared.low is None else compared.low
    high = math.inf if compared.high is None else compared.high
    if row.change is None or low <= math.log1p(row.change) <= high:
        return None
    return f"estimated from the history: {percent(math.log1p(row.change))}"


def _by_ab_alone(row: Judged, compared: Compared) -> Judged:
    """Return a row whose effect is that of an A/B, because the results do not show it."""
    assert compared.effect is not None and row.point is not None
    shown = (
        ""
        if row.change is None
        else f"before is computed from the A/B; the results show {percent(math.log1p(row.change))}"
    )
    change = math.expm1(compared.effect)
    low, high = (None if end is None else math.expm1(end) for end in (compared.low, compared.high))
    effect = Effect((row.point.median_ms or math.nan) / (1 + change), change=change, low=low, high=high)
    return replace(row, effect=effect, note=joined(ab_text(compared), shown, row.note))


def of_history(walked: Walked, timing: str) -> dict[str, Any]:
    """Return the fields of Evidence that earlier results alone give, of a latency with this timing."""
    nights = abs(walked.nights)
    few = walked.top is not None and walked.top.few
    return {
        "p": walked.p if walked.ps else None,
        "nights": walked.nights,
        "beyond": walked.beyond,
        "far": walked.far,
        "rank": walked.rank,
        "since": nights,
        "few": few,
        "slight": few and abs(walked.distance) <= math.log1p(GROSS[timing]),
    }


def is_noisy(one: Tonight) -> bool:
    """Return whether a latency's bursts vary too much to judge it.

    Disturbances only make bursts slower. So a median close to the fastest burst is good enough even if a stall of the
    host slowed down another burst. So is a median that agrees with three earlier results.
    """
    point = one.point
    if point.error is None or point.error <= TOO_NOISY or not point.low_ms or not point.median_ms:
        return False
    if 1 - point.low_ms / point.median_ms <= TOO_NOISY:
        return False
    return one.walked.results < NIGHTS or abs(one.walked.distance) > one.followed.least
