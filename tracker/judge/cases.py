"""The cases of a point: for each metric tonight's value, the changes for the worse in force, and a recent gain.

Metrics differ by data: whether an A/B can decide, whether values scatter, and which facts show the cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from groupbench.tracker.facts.metrics import LATENCY, REPEATABLE, RMS
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import tonight, transitions
from groupbench.tracker.judge.causes import find_cause
from groupbench.tracker.judge.evidence import OLD, Evidence
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.incident_rows import MemberRow
from groupbench.tracker.judge.latency import LatencyFacts, is_noisy, of_history
from groupbench.tracker.judge.machine import Machines
from groupbench.tracker.judge.parts import Case, effect_on_latency, found_by, percent
from groupbench.tracker.judge.spans import Span, Transition
from groupbench.tracker.judge.tonight import Tonight
from groupbench.tracker.judge.toolchain_lines import of_one_toolchain
from groupbench.tracker.judge.verdicts import CANARY, Effect, Judged
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.stats.predict import Predicted
from groupbench.tracker.stats.screen import ask_of, worth
from groupbench.tracker.stats.thresholds import TOO_NOISY
from groupbench.tracker.stats.walk import OUT, TO_SUSPECT, Level
from groupbench.tracker.store import comparisons
from groupbench.tracker.text.wording import joined


class Cases:
    """The cases of a run's points."""

    def __init__(self, data: GateData) -> None:
        self.data = data
        self.ask = ask_of(sum(point.timed and point.timing is not None for point in data.points))
        self.others = tonight.others(data)  # first: the pasts that it drops and those that the latencies keep add up
        self.latencies = tonight.Latencies(data, self.ask)
        scores = {key: worth(one.walked, self.ask, one.followed.least) for key, one in self.latencies.eventful.items()
                  if one.point.series.operator != CANARY}  # fmt: skip
        self.scores = {key: score for key, score in scores.items() if score is not None}
        self.machines = Machines(self.latencies)
        self.facts = LatencyFacts(data, self.machines)

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield the (series, run) whose facts are needed to find causes."""
        for group in self.latencies.groups:
            for run in transitions.facts_needed(group.past):
                yield from ((point.series.pk, run) for point in group.points)
        for one in (*self.latencies.eventful.values(), *(each for ones in self.others.values() for each in ones)):
            spans = [self._span(one, level, at) for at, level in enumerate(one.steps, 1)]
            spans += [one.span(one.walked.stack[0].start)] if one.walked.stack[0].start > 0 else []
            spans += [self._span(one)] if one.walked.nights or self._score(one) is not None else []
            yield from ((one.point.series.pk, end.pk) for span in spans for end in span.ends)

    def _unmoved(self, point: PointRow) -> Case | None:
        """Return the single case of a point to which nothing may have happened, as to most in a night, or None."""
        group, at = self.latencies.calm.get(point.pk, (None, 0))
        if group is None or group.level is None or point.pk in self.others or (point.error or 0.0) > TOO_NOISY:
            return None
        level, used = group.level, group.here.toolchain
        if used[-2] != used[-1]:
            return None
        least, predicted = float(group.stack.least[at]), level.predicted(at)
        evidence = Evidence(
            n=level.results, counts=least, distance=float(level.distance[at]), decidable=True,
            sigma=predicted.deviation, reach=max(predicted.reach(OUT), least), canary=point.series.operator == CANARY,
        )  # fmt: skip
        return Case(evidence, Judged(point.series, Verdict.OK, point))

    def of(self, point: PointRow) -> list[Case]:
        """Return the cases of a point, the latency's first. Metrics explained by the latency are left out."""
        if (unmoved := self._unmoved(point)) is not None:
            return [unmoved]
        one = self.latencies.get(point.pk)
        cases, rest, texts = [] if one is None else self._of_latency(one), [], []
        for other in self.others.get(point.pk, ()):
            for case in self._of_other(other):
                if one is not None and _follows(other, case, one):
                    texts.append((case.row.note or "").partition("; ")[0])
                else:
                    rest.append(case)
        if texts:
            cases = [case.showing(note=joined(*texts, case.row.note)) for case in cases]
        return [*cases, *rest]

    def _of_latency(self, one: Tonight) -> list[Case]:
        young = len(one.own) <= transitions.YOUNG and len(one.own) < len(one.past)
        if young and not one.accepted_here:
            return [self.facts.on_another_machine(one, self._evidence(one))]
        changes = self._steps(one) or self._gain(one)
        if changes and one.steps and one.last in (one.steps[-1].start, one.steps[-1].moved):
            return changes
        here = self._tonight(one)
        by_ab = bool(one.steps) and here.evidence.ab is not None
        tells = here.evidence.nights or here.evidence.asked or here.judged().verdict is Verdict.UNDECIDED
        silent = not (tells or by_ab)
        return changes if changes and silent else [*changes, here]

    def _of_other(self, one: Tonight) -> list[Case]:
        changes = self._steps(one) or [gain for gain in self._gain(one) if gain.evidence.since <= OLD]
        tells = one.walked.nights or (one.accepted and not changes)
        return [*changes, self._tonight(one)] if tells else changes

    # ---- the cases of one metric

    def _evidence(self, one: Tonight, **facts: Any) -> Evidence:
        metric, top, is_latency = one.metric, one.walked.top, one.metric is LATENCY
        return Evidence(**{
            "n": len(one.own) - 1, "counts": one.followed.least, "distance": one.walked.distance,
            "canary": is_latency and one.point.series.operator == CANARY, "decidable": is_latency,
            "scatters": not one.exact, "is_error": metric is RMS, "hint": metric.hint,
            "sigma": None if top is None else top.deviation,
            "reach": None if top is None or not is_latency else max(top.reach(OUT), one.followed.least), **facts,
        })  # fmt: skip

    def _tonight(self, one: Tonight) -> Case:
        """Return the case for tonight's value on the expected level."""
        walked, score, about = one.walked, self._score(one), None
        if one.metric is LATENCY:
            facts = of_history(walked, one.point.timing or "cpu")
            facts |= {"back": walked.back == one.last, "noisy": is_noisy(one), "score": score}
            if walked.far:
                y = one.followed.y[: one.last + 1]
                facts["came_back"] = self.latencies.returns.share(float(y[-1] - y[:-1].min()))
        else:
            facts = {"nights": walked.nights, "beyond": walked.beyond, "since": abs(walked.nights)}
            facts |= {"p": walked.p} if walked.nights else {}
        evidence, since = self._evidence(one, **facts), one.since(one.begins)
        if one.point.series.pk in self.data.comparisons:
            about = self.facts.compared(one, one.on_level(one.begins) if one.bases else [], since)
        if not walked.results or evidence.back or not (walked.nights or score is not None or about is not None):
            return self._unchanged(one, evidence)
        note = one.undone(one.value) if walked.nights > 0 or walked.far else None
        if walked.inside is not None and walked.inside[1] == one.last:
            other = one.run_at(walked.inside[0]).state
            note = joined(note, f"the A/B with {other} does not tell: both may be off the level")
        row = Judged(
            one.point.series, Verdict.OK, one.point, one.metric.judged_as, transition=self._transition(one),
            span=self._span(one), since=max(abs(walked.nights), 1), note=note,
            effect=_effect(one, one.value - walked.distance, walked.distance, walked.top),
        )  # fmt: skip
        if one.metric is not LATENCY:
            return self._with_cause(one, Case(evidence, row))
        case = self.facts.with_causes(one, Case(evidence, row), one.on_level(one.begins), since)
        if case.evidence.excused is None and self.machines.moved(one):
            case = case.knowing(excused="together")
        if one.gradual and case.evidence.ab is None:
            case = case.showing(cause="drift")
        return self.facts.to_ask(one, case, one.bases, one.last)

    def _span(self, one: Tonight, level: Level | None = None, at: int = 0) -> Span:
        """Return the runs between which tonight's value left its level, or which a level in force began."""
        if level is None:
            limited = one.gradual or one.walked.inside is not None  # newer results may be off the level
            return one.span(one.begins, one.base) if limited else tonight.change(one, one.begins, one.bases)
        start = max(level.start, 0)
        if level.after is not None or level.gradual:
            return one.span(start, level.after)
        return tonight.change(one, start, one.on_level(start, one.walked.stack[at - 1]), level)

    def _unchanged(self, one: Tonight, evidence: Evidence) -> Case:
        note, is_latency = None, one.metric is LATENCY
        if evidence.back and one.left:
            note = f"back on the level before a change of {percent(one.left)}"
        if evidence.noisy and one.point.error is not None:
            note = f"standard error over bursts: ±{100 * one.point.error:.0f} %"
        accepted = None if evidence.back else one.accepted
        if accepted is not None:
            evidence = replace(evidence, accepted=True)
            note = joined(note, self.data.alert_text(accepted))
        row = Judged(
            one.point.series, Verdict.OK, one.point, None if is_latency else one.metric.judged_as, note=note,
            effect=Effect() if is_latency else _effect(one, one.walked.stack[0].centre, 0.0, None),
            alert=accepted, transition=self._transition(one),
        )  # fmt: skip
        return Case(evidence, row)

    def _transition(self, one: Tonight) -> Transition | None:
        if one.metric is not LATENCY:
            return None
        sigma = math.nan if one.walked.top is None else one.walked.top.deviation
        return transitions.newest(self.data, one.point, one.past, sigma)

    def _steps(self, one: Tonight) -> list[Case]:
        """Return the cases of the changes in force. An earlier change to a level better than before is over."""
        cases = [(self._step(one, level, at), level.start) for at, level in enumerate(one.steps, 1)]
        return [case for case, start in cases
                if start == one.last or not case.evidence.distance < -case.evidence.counts]  # fmt: skip

    def _step(self, one: Tonight, level: Level, at: int) -> Case:
        """Return the case of a change for the worse in force."""
        stack, newest = one.walked.stack, at == len(one.walked.stack) - 1
        was = stack[at - 1].centre if level.was is None else level.was
        nights = one.walked.nights  # tonight may have a row of its own
        apart = (nights > 0 and one.walked.beyond) or abs(nights) >= TO_SUSPECT
        now = one.value if newest and (level.gradual or not apart) else level.centre_without(one.begins)
        alert = self.data.alert(level.tag) or one.alert_in(level.start, None if newest else stack[at + 1].start)
        start = max(level.start, 0)
        since = len(one.own) - start
        evidence = self._evidence(
            one, kind="step", distance=now - was, since=since, drifts=level.gradual,
            alert=None if alert is None else alert.state,
        )  # fmt: skip
        span = self._span(one, level, at) if alert is None or level.start >= 0 else alert.span
        undone = one.undone(level.centre_without(one.begins))
        row = Judged(
            one.point.series, Verdict.OK, one.point, one.metric.judged_as, span=span, since=since,
            effect=_effect(one, was, now - was, one.walked.reference if at == 1 else one.walked.top),
            note=joined(
                undone, None if level.moved is None else f"partly taken back at {one.run_at(level.moved).state}"
            ),
        )  # fmt: skip
        case, before = Case(evidence, row), one.on_level(start, stack[at - 1])
        further = stack[at + 1].start if not newest else one.begins if apart and nights > 0 else len(one.own)
        here = range(start, max(further, start + 1))
        if one.metric is not LATENCY:
            case = self._with_cause(one, case)
        elif level.start >= 0:
            case = self.facts.with_causes(one, case, before, here)
        cause = "drift" if level.gradual and level.by != "slower" else "undone" if undone else None
        if cause is not None and case.evidence.ab != "worse" and case.row.cause in (None, "code"):
            case = case.showing(cause=cause)
        if one.metric is LATENCY and case.evidence.excused is None and level.by == "nights":
            case = case.knowing(excused="together" if self.machines.moved(one, now - was) else None)
        if alert is not None:
            case = replace(case, row=_with_alert(one, case.row, alert))
            case = case.knowing(cause=case.row.cause)
        elif level.by == "slower" and case.row.compared is None and one.metric is LATENCY:
            case = case.knowing(ab="worse")
        if one.metric is LATENCY and level.by == "nights" and (since <= OLD if alert is None else alert.state == "new"):
            case = self.facts.to_ask(one, case, before, here[-1])
        return case

    def _gain(self, one: Tonight) -> list[Case]:
        """Return the case of a recent change for the better."""
        reference = one.walked.stack[0]
        if reference.by not in ("nights", "faster") or reference.was is None or one.steps:
            return []
        since, change = len(one.own) - reference.start, one.value - reference.was
        if change > -one.followed.least or -change < abs(one.value - reference.centre):  # tonight does not show it
            return []
        evidence = self._evidence(one, kind="gain", distance=change, since=since)
        row = Judged(
            one.point.series, Verdict.OK, one.point, one.metric.judged_as, span=one.span(reference.start),
            effect=_effect(one, reference.was, change, one.walked.reference), since=since, note=tonight.taken_back(one),
        )  # fmt: skip
        if one.metric is not LATENCY:
            return [self._with_cause(one, Case(evidence, row))]
        return [self.facts.with_causes(one, Case(evidence, row), range(reference.start), one.since(reference.start))]

    # ---- facts besides the value

    def _score(self, one: Tonight) -> float | None:
        """Return the chance of tonight's latency and the nights before it, or None if it is not worth an A/B."""
        return self.scores.get(one.point.pk) if one.metric is LATENCY else None

    def _with_cause(self, one: Tonight, case: Case) -> Case:
        """Return the case of another metric than the latency with its cause."""
        metric, row = one.metric, case.row
        assert row.span is not None
        of_result = metric in (RMS, REPEATABLE)
        cause = find_cause(
            *self.data.facts_of(one.point, row.span), result=one.exact or of_result,
            metric=None if of_result else metric.name,
        )  # fmt: skip
        note = joined(_change_text(one, case), row.note, cause.note)
        same_code = row.span.same_code and cause.word == "infrastructure" and not of_result
        case = case.knowing(cause=cause.word, same_code=same_code).showing(cause=cause.word, note=note)
        return self._hinted(case) if metric.hint and case.evidence.distance > 0 else case

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
            case = case.knowing(ab=ab, asked=askable)
            return case.showing(ab_base=base if askable else None, compared=compared)
        effect = f" {percent(compared.effect)}" if compared.effect is not None else ""
        note = joined(row.note, f"A/B of the latency: {compared.verdict}{effect}")
        return case.knowing(ab="worse" if ab == "worse" else "same").showing(compared=compared, note=note)


def _follows(one: Tonight, case: Case, latency: Tonight) -> bool:
    """Return whether a metric follows the latency, which changed at the same time and no less."""
    if one.metric.follows != LATENCY.name or one.exact or (change := _newest_change(latency)) is None:
        return False
    (effect, span), distance = change, one.metric.sign * case.evidence.distance
    near = abs(distance) - abs(effect) < math.log1p(one.metric.least)
    return near and distance * effect > 0 and case.row.span is not None and case.row.span.overlaps(span)


def _newest_change(one: Tonight) -> tuple[float, Span] | None:
    """Return the newest change of a latency that is in force or may be, and its runs."""
    if not one.walked.results:
        return None
    if one.walked.nights:
        return one.walked.distance, one.span(one.begins)
    changed = [level for level in one.walked.stack if level.was is not None and level.by != "reference"]
    if not changed:
        return None
    return one.value - (changed[-1].was or 0.0), one.span(changed[-1].start)


def _effect(one: Tonight, was: float, distance: float, predicted: Predicted | None) -> Effect:
    """Return the effect on a metric of a change from a level."""
    if one.metric is LATENCY:
        return effect_on_latency(was, distance, predicted)
    if one.metric is REPEATABLE:
        return Effect()
    before, now = one.metric.level(one.metric.sign * was), one.point.value(one.metric)
    if one.metric is RMS:
        return Effect(before_rms=before)
    return Effect(before=before, change=now / before - 1 if before and now is not None else None)


def _change_text(one: Tonight, case: Case) -> str:
    if one.metric is REPEATABLE:
        return "two executions now differ bitwise"
    effect, metric = case.row.effect, one.metric
    before = effect.before_rms if metric is RMS else effect.before
    return f"{metric.name} {metric.text(before)} → {metric.text(one.point.value(metric))}"


def _with_alert(one: Tonight, row: Judged, alert: MemberRow) -> Judged:
    """Return the row of a step with its alert."""
    state, text = one.data.alert_text(alert), ""
    if one.metric is LATENCY and alert.run != one.data.run and alert.state != "fixed":
        seems_over = alert.before is not None and abs(one.value - math.log(alert.before)) <= one.followed.least
        text = "too few results to tell that it is over" if seems_over else "still there"
    return replace(
        row, alert=alert, compared=row.compared or alert.compared, cause=alert.cause or row.cause,
        note=joined(text, row.note, state), span=alert.span,
    )  # fmt: skip
