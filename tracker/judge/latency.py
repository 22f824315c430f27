"""The evidence about latencies: the level of each series tonight, its A/Bs and alerts, and the machine."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import transitions
from groupbench.tracker.judge.alerts import AlertRow
from groupbench.tracker.judge.causes import find_cause, some
from groupbench.tracker.judge.evidence import Evidence
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.machine import Machines
from groupbench.tracker.judge.marks import marks_of
from groupbench.tracker.judge.parts import (
    Case,
    ab_text,
    effect_on_latency,
    found_by,
    joined,
    percent,
    why_undecided,
)
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.rules import AT_ONCE, TO_SUSPECT
from groupbench.tracker.judge.spans import Span, Transition
from groupbench.tracker.judge.tonight import Tonight
from groupbench.tracker.judge.toolchain_lines import software_changes
from groupbench.tracker.judge.verdicts import CANARY, Effect, Judged, News
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.stats.predict import ENOUGH, FIRST, LAST, mad
from groupbench.tracker.stats.screen import Followed, follow
from groupbench.tracker.stats.thresholds import FLOOR, GROSS, TOO_NOISY, least_effect, prior_scatter
from groupbench.tracker.stats.walk import NIGHTS, OUT, Level, Walked
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import Compared

ASKED = 3.0
"""Number of A/Bs in a quiet night by chance, in each direction."""
LEAST_ASKED, MOST_ASKED = 0.01, 0.3
"""Bounds of the chance below which a result is worth an A/B."""
BETTER = 5.0
"""A result for the better is worth an A/B at a chance this much smaller."""
YOUNG = 2
"""Number of earlier results up to which every slowdown that counts is worth an A/B."""
CANARY_MOVED = "machine suspect: the canary moved"
POOL = 6
"""Number of series with similar noise from which their scatter is the prior of the young ones."""


def ask_of(series: int) -> float:
    """Return the chance of a result below which it is worth an A/B, in a night of this many latencies."""
    return min(max(ASKED / max(series, 1), LEAST_ASKED), MOST_ASKED)


def worth(walked: Walked, ask: float, least: float) -> float | None:
    """Return the chance of tonight's result and the nights before it, or None if it is not worth an A/B."""
    if not walked.results:
        return None
    ask = ask if walked.distance > 0 else ask / BETTER
    if walked.far or (walked.results <= YOUNG and walked.distance > least):
        ask = 1.0
    runs = range(1, len(walked.ps) + 1)
    return min((max(walked.ps[:k]) ** k for k in runs if max(walked.ps[:k]) <= ask ** (1 / k)), default=None)


class Latencies:
    """The latencies of a run's points."""

    def __init__(self, data: GateData) -> None:
        self.data = data
        timed = [point for point in data.points if point.timed and point.timing is not None]
        self.ask = ask_of(len(timed))
        pasts = [data.pasts.latency(point.series.pk) for point in timed]
        own = [past.where(past.alike) for past in pasts]
        followed = [self._followed(point, past) for point, past in zip(timed, own, strict=True)]
        followed = _with_priors(timed, followed)
        self.tonight = {
            point.pk: Tonight(data, point, past, alike, one, walked)
            for point, past, alike, one, walked in zip(
                timed, pasts, own, followed, follow(followed, self.ask), strict=True
            )
        }
        self.machines = Machines(list(self.tonight.values()))

    def _followed(self, point: PointRow, own: Past) -> Followed:
        assert point.timing is not None
        ms = math.exp(float(np.median(own.log)))
        by_option = self.data.min_effect
        by_plan = self.data.decisions.limits.get(point.series.pk)
        least = by_option if by_option is not None else least_effect(point.timing, ms) if by_plan is None else by_plan
        counts = math.log1p(least)
        marks = marks_of(self.data, own, "latency", counts)
        return Followed(own.log, counts, prior_scatter(point.timing, ms), FLOOR[point.timing], own.error, marks)

    # ---- one point

    def places(self, point: PointRow) -> list[int]:
        """Return the runs whose facts are needed to find causes."""
        one = self.tonight.get(point.pk)
        if one is None:
            return []
        runs = transitions.facts_needed(one.past)
        starts = [level.start for level in one.walked.stack if level.start > 0]
        if one.walked.nights or self._score(one) is not None:
            starts.append(one.begins)
            if (base := one.base) is not None:
                runs += [int(one.own.run[base]), self.data.run.pk]
        for start in starts:
            runs += [int(one.own.run[start - 1]), int(one.own.run[start])] if start else []
        return runs

    def moved(self, point: PointRow) -> tuple[float, Span] | None:
        """Return the newest change of a point's latency that is in force or may be, and its runs."""
        one = self.tonight.get(point.pk)
        if one is None or not one.walked.results:
            return None
        if one.walked.nights:
            return one.walked.distance, one.span(one.begins)
        changed = [level for level in one.walked.stack if level.was is not None and level.by != "reference"]
        if not changed:
            return None
        return one.value - (changed[-1].was or 0.0), one.span(changed[-1].start)

    def cases(self, point: PointRow) -> list[Case]:
        """Return the evidence about the latency of a point: tonight's, and each change in force."""
        one = self.tonight[point.pk]
        young = len(one.own) <= transitions.YOUNG and len(one.own) < len(one.past)
        if young and not one.accepted_here:
            return [self._on_another_machine(one)]
        standing = one.walked.stack[1:]
        steps = [self._step(one, level, at) for at, level in enumerate(standing, 1)]
        if steps and one.last in (one.walked.stack[-1].start, one.walked.stack[-1].moved):
            return steps
        tonight = self._tonight(one)
        if steps and not tonight.evidence.nights and tonight.evidence.ab is None and not tonight.evidence.asked:
            return steps
        gains = [] if steps else self._gain(one)
        if gains and not tonight.evidence.nights and not tonight.evidence.asked:
            return gains
        return [*steps, *gains, tonight]

    def _evidence(self, one: Tonight) -> Evidence:
        point, walked = one.point, one.walked
        expected = self.data.expected.get(point.series.pk)
        return Evidence(
            "tonight", had=expected is not None and expected.timed, n=len(one.own) - 1, counts=one.followed.least,
            distance=walked.distance, canary=point.series.operator == CANARY, decidable=True,
            sigma=None if walked.top is None else walked.top.deviation,
            reach=None if walked.top is None else max(walked.top.reach(OUT), one.followed.least),
        )  # fmt: skip

    def _tonight(self, one: Tonight) -> Case:
        """Return the case for tonight's value on the expected level."""
        walked, evidence = one.walked, self._evidence(one)
        score, here = self._score(one), walked.back == one.last
        evidence = replace(
            evidence, back=here, noisy=_is_noisy(one), score=score, **of_history(walked, one.point.timing or "cpu"),
        )  # fmt: skip
        row = Judged(one.point.series, Verdict.OK, one.point, transition=self._newest_transition(one))
        start, base = one.begins, one.base
        about = self._compared(one, [] if base is None else one.on_level(start), start)
        if not walked.results or here or not (walked.nights or score is not None or about is not None):
            note = f"back on the level before a change of {percent(one.left)}" if here and one.left else None
            if evidence.noisy and one.point.error is not None:
                note = f"standard error over bursts: ±{100 * one.point.error:.0f} %"
            accepted = self._accepted(one)
            if accepted is not None and not here:
                row = replace(row, alert=accepted)
                note = joined(note, self.data.alert_text(accepted))
            return Case(replace(evidence, accepted=row.alert is not None), replace(row, note=note))
        if one.gradual and base is not None:
            base = one.walked.stack[-1].places[:FIRST][-1]
        span = one.span(start, base if one.gradual else None)
        effect = effect_on_latency(one.value - walked.distance, walked.distance, walked.top)
        row = replace(row, what="latency", span=span, effect=effect, news=News(max(abs(walked.nights), 1)))
        case = self._with_causes(one, Case(evidence, row), one.on_level(start), start)
        if case.evidence.excused is None and self.machines.moved_tonight(one):
            case = case.knowing(excused="together")
        if one.gradual and case.evidence.ab is None:
            case = replace(case, row=replace(case.row, cause="drift"))
        return self._to_ask(one, case, base)

    def _step(self, one: Tonight, level: Level, at: int) -> Case:
        """Return the case of a change for the worse in force."""
        stack, newest = one.walked.stack, at == len(one.walked.stack) - 1
        was = stack[at - 1].centre if level.was is None else level.was
        nights = one.walked.nights  # tonight may have a row of its own
        apart = (nights > 0 and one.walked.beyond) or abs(nights) >= TO_SUSPECT
        now = one.value if newest and (level.gradual or not apart) else level.centre_without(one.begins)
        alert = self.data.alert(level.tag) or one.alert_in(level, stack[at + 1].start if not newest else None)
        since = sum(place >= level.start for place in range(len(one.own)))
        evidence = replace(
            self._evidence(one), kind="step", distance=now - was, since=since, drifts=level.gradual,
            alert=None if alert is None else alert.state,
        )  # fmt: skip
        row = Judged(one.point.series, Verdict.OK, one.point, "latency")
        span = one.span(max(level.start, 0))
        if alert is not None and level.start < 0:
            span = Span(alert.base_run, alert.run)
        reference = one.walked.reference if at == 1 else one.walked.top
        row = replace(
            row, span=span, effect=effect_on_latency(was, now - was, reference), news=News(since),
            note=None if level.moved is None else f"partly taken back at {one.run_at(level.moved).state}",
        )  # fmt: skip
        case = Case(evidence, row)
        start = max(level.start, 0)
        if level.start >= 0:
            case = self._with_causes(one, case, one.on_level(start, stack[at - 1]), start)
        if level.gradual and level.by != "slower" and case.evidence.ab != "worse" and case.row.cause in (None, "code"):
            case = replace(case, row=replace(case.row, cause="drift"))
        if level.by == "nights" and self.machines.stepped_together(one, start) and case.evidence.excused is None:
            case = case.knowing(excused="together")
        if alert is not None:
            case = replace(case, row=_with_alert(self.data, case.row, alert, one))
            case = case.knowing(cause=case.row.cause)
        elif level.by == "slower" and case.row.compared is None:
            case = case.knowing(ab="worse")
        if case.evidence.cause == "infrastructure" and level.by == "nights":
            case = self._to_ask(one, case, max(one.on_level(start, stack[at - 1]), default=None))
        return case

    def _gain(self, one: Tonight) -> list[Case]:
        """Return the case of a recent change for the better."""
        reference = one.walked.stack[0]
        if reference.by not in ("nights", "faster") or reference.was is None:
            return []
        since = sum(place >= reference.start for place in range(len(one.own)))
        change = one.value - reference.was
        evidence = replace(self._evidence(one), kind="gain", distance=change, since=since)
        row = Judged(
            one.point.series, Verdict.OK, one.point, "latency", span=one.span(reference.start),
            effect=effect_on_latency(reference.was, change, one.walked.reference), news=News(since),
        )  # fmt: skip
        return [self._with_causes(one, Case(evidence, row), range(reference.start), reference.start)]

    # ---- facts besides the value

    def _with_causes(self, one: Tonight, case: Case, before: Sequence[int], start: int) -> Case:
        """Return a case with its cause, by A/Bs and else by the facts around it."""
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
            return transitions.with_parts(
                self.data, Case(evidence, row), one.keys(before), one.keys(range(start, len(one.own)))
            )
        compared = self._compared(one, before, start)
        ab = found_by(compared, evidence.counts)
        facts = self.data.facts_of(one.point, span)
        if ab in ("worse", "better") and compared is not None and (ab == "worse") == slower:
            changes = software_changes(compared)
            cause = find_cause(*facts, confirmed=True)
            word, text = (
                ("code and toolchain", f"the A/B measured base with another toolchain: {some(changes)}")
                if changes else (cause.word, cause.note)
            )  # fmt: skip
            row = replace(
                row,
                cause=word,
                compared=compared,
                note=joined(ab_text(compared), _apart(row, compared), row.note, text),
            )
            return Case(replace(evidence, ab=ab, cause=word), row)
        if ab == "better" and slower and (evidence.nights > 0 or evidence.kind == "step"):
            note = joined(transitions.CONTRADICT, row.note)
            return Case(replace(evidence, ab="undecided"), replace(row, compared=compared, note=note))
        if ab in ("worse", "better") and compared is not None:  # the results alone show the opposite
            row = _by_ab_alone(row, compared)
            return Case(replace(evidence, ab=ab, cause="code"), replace(row, compared=compared, cause="code"))
        cause = find_cause(*facts, canaries_moved=excused == "canary")
        note = joined(why_undecided(compared) if ab == "undecided" and compared else None, row.note, cause.note)
        outside = ab == "same" and compared is not None and self._is_outside(one, compared)
        evidence = replace(
            evidence, cause=cause.word, ab=ab, ab_outside=outside, same_code=span.same_code, excused=excused
        )
        return Case(evidence, replace(row, cause=cause.word, note=note, compared=compared))

    def _is_outside(self, one: Tonight, compared: Compared) -> bool:
        """Return whether an A/B without a difference measured both sides off the level, as far as tonight's result."""
        top = one.walked.top
        if top is None or compared.head_ms is None or not one.walked.beyond or self.machines.explains(one):
            return False
        level = math.log(compared.head_ms)
        return level - top.centre > one.followed.least and top.p(level) <= AT_ONCE

    def _compared(self, one: Tonight, before: Sequence[int], start: int) -> Compared | None:
        """Return the A/B of a commit before with one since, if any."""
        if one.point.series.pk not in self.data.comparisons or one.point.series.operator == CANARY:
            return None
        old, new = one.keys(before), one.keys(range(start, len(one.own)))
        stored = self.data.evidence(one.point.series.pk, old, new)
        return comparisons.about(stored, self.data.clean_commits(old), self.data.clean_commits(new))

    def _accepted(self, one: Tonight) -> AlertRow | None:
        """Return the alert whose level is expected and tonight's."""
        alert = self.data.alert(one.walked.stack[0].tag)
        return alert if len(one.walked.stack) == 1 and alert is not None and alert.state == "expected" else None

    def _newest_transition(self, one: Tonight) -> Transition | None:
        sigma = math.nan if one.walked.top is None else one.walked.top.deviation
        return transitions.newest(self.data, one.point, one.past, sigma)

    # ---- the A/B to make

    def _score(self, one: Tonight) -> float | None:
        """Return the chance of tonight's result and the nights before it, or None if it is not worth an A/B."""
        walked = one.walked
        if one.point.series.operator == CANARY:
            return None
        return worth(walked, self.ask, one.followed.least)

    def _to_ask(self, one: Tonight, case: Case, base: int | None) -> Case:
        """Set the base of the A/B that would decide, or note why there can be none."""
        evidence, row, run = case.evidence, case.row, self.data.run
        if evidence.canary or evidence.same_code or evidence.ab in ("same", "worse", "better"):
            return case
        if evidence.score is None and not evidence.nights and evidence.kind == "tonight":
            return case
        replaceable = row.transition is not None and row.transition.replaceable
        if row.span is not None and row.span.same_code and not replaceable:
            return case
        places = range(-1 if base is None else base, -1, -1)
        earlier = (one.run_at(place) for place in places)
        chosen = next((each for each in earlier if each.commit != run.commit or each.dirty or replaceable), None)
        if chosen is None:
            return case
        if chosen.state.clean and run.state.clean:
            return Case(replace(evidence, asked=True), replace(row, ab_base=chosen))
        dirty = next((each for each in (chosen, run) if each.dirty), None)
        if dirty is None:  # an unknown commit, which the note of the row mentions
            return case
        note = joined(row.note, f"{dirty.state} is a dirty tree, which cannot be measured again")
        return replace(case, row=replace(row, note=note))

    def _on_another_machine(self, one: Tonight) -> Case:
        """Return the case for one of a machine's first results, when the series has a history on another."""
        row, before, reach = transitions.elsewhere(self.data, one.point, one.past, one.followed.least)
        transition = row.transition
        assert transition is not None and row.change is not None
        evidence = replace(self._evidence(one), kind="machine", distance=math.log1p(row.change), counts=reach)
        evidence = replace(evidence, n=row.evidence.n, decidable=True)
        row = replace(row, note=transition.text if abs(evidence.distance) <= reach else row.note)
        if [text.split(" ")[0] for text in transition.differences] != ["gpu_uuid"]:
            return Case(evidence, row)
        stored = self.data.evidence(one.point.series.pk, [before.pk], [self.data.run.pk])
        compared = comparisons.about(
            stored, self.data.clean_commits([before.pk]), self.data.clean_commits([self.data.run.pk])
        )
        ab = found_by(compared, one.followed.least)
        row = replace(row, compared=compared)
        if ab == "same":
            row = replace(row, note=joined("another GPU; A/B on one GPU: no difference", row.note))
        elif ab in ("worse", "better") and compared is not None:
            row = _by_ab_alone(replace(row, note=None), compared)
            row = replace(row, cause="code", note=ab_text(compared))
        elif abs(evidence.distance) > reach and _can_compare(before, self.data.run):
            row = replace(row, ab_base=before)
        return Case(replace(evidence, ab=ab if ab != "undecided" else None), row)


def _apart(row: Judged, compared: Compared) -> str | None:
    """Return the results' change if it is outside an A/B's interval."""
    low = -math.inf if compared.low is None else compared.low
    high = math.inf if compared.high is None else compared.high
    if row.change is None or low <= math.log1p(row.change) <= high:
        return None
    return f"estimated from the history: {percent(math.log1p(row.change))}"


def _can_compare(base: RunRow, head: RunRow) -> bool:
    """Return whether an A/B can measure the commits of two runs, which differ."""
    return base.state.clean and head.state.clean and base.commit != head.commit


def _with_alert(data: GateData, row: Judged, alert: AlertRow, one: Tonight) -> Judged:
    """Return the row of a step with its alert."""
    state = data.alert_text(alert)
    seems_over = alert.before is not None and abs(one.value - math.log(alert.before)) <= one.followed.least
    text = "too few results to tell that it is over" if seems_over else "still there"
    if alert.run == data.run or alert.state == "fixed":
        text = ""
    return replace(
        row, alert=alert, compared=row.compared or alert.compared, cause=alert.cause or row.cause,
        note=joined(text, row.note, state), span=Span(alert.base_run, alert.run),
    )  # fmt: skip


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


def _with_priors(points: Sequence[PointRow], followed: Sequence[Followed]) -> list[Followed]:
    """Return series with the prior scatter that the others of their pool show, if there are enough."""
    pools: dict[tuple[object, ...], list[float]] = defaultdict(list)
    keys = []
    for point, one in zip(points, followed, strict=True):
        series = point.series
        keys.append((point.timing, series.hardware, series.host, series.protocol, one.least))
        if len(one.y) > ENOUGH:
            pools[keys[-1]].append(mad(one.y[-LAST - 1 : -1].tolist()))
    scatter = {key: max(median(each), 1e-9) for key, each in pools.items() if len(each) >= POOL}
    return [
        one if key not in scatter else replace(one, prior=max(scatter[key], one.floor))
        for key, one in zip(keys, followed, strict=True)
    ]


def of_history(walked: Walked, timing: str) -> dict[str, Any]:
    """Return the fields of Evidence that earlier results alone give, of a latency with this timing."""
    few = walked.top is not None and walked.top.few
    return {
        "p": walked.p if walked.ps else None,
        "nights": walked.nights,
        "beyond": walked.beyond,
        "far": walked.far,
        "rank": walked.rank,
        "since": abs(walked.nights),
        "few": few,
        "slight": few and abs(walked.distance) <= math.log1p(GROSS[timing]),
    }


def _is_noisy(one: Tonight) -> bool:
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
