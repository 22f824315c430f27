"""The verdict on a run: reads the store, asks the statistics, and says what a CI job should do about it.

All series of the run are judged together, so that the share of false alarms is held over the whole night. What history
alone cannot decide is a suspect, and stays one until an A/B of the two commits has said same or different. Alerts that
are stored speak as well: a level that was accepted is the one to judge by, and a regression that nobody dealt with
stays one when history has grown used to it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from sqlalchemy.orm import Session

from groupbench.tracker.environment import environment_differences
from groupbench.tracker.judge import alerts
from groupbench.tracker.judge.alerts import AlertRow
from groupbench.tracker.judge.causes import DRIFT, Facts, find_cause
from groupbench.tracker.judge.levels import latency_history
from groupbench.tracker.judge.pasts import Past, Pasts, authors, facts_at, turns_wrong
from groupbench.tracker.judge.verdicts import CANARY, Gate, Judged, Span, exit_code, summary
from groupbench.tracker.query import points as query
from groupbench.tracker.query.rows import Outcome, PointRow, RunRow
from groupbench.tracker.stats import scan as scans
from groupbench.tracker.stats.thresholds import (
    ALONE,
    MANY,
    RMS_FLOOR,
    RMS_RATIO,
    YOUNG,
    far_off,
    worse_since,
)
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import DIFFERENT, SAME
from groupbench.tracker.text.wording import counted
from groupbench.tracker.verdicts import Verdict

__all__ = ["WINDOW", "Gate", "Judged", "judge_run"]

WINDOW = 100
"""How many earlier results of a series are looked at: three months of nights."""

Q = 0.05
"""Share of false ones among the changes that history reports."""

OLD = scans.RECENT
"""After so many results on a new level its change is no news: it counts where an alert of it is stored, and else is
only told. So a regression that was opened stays one until it is dealt with, and what happened long before anybody
asked, or was for the better, fails and fills no report for good."""

SETTLED = 6
"""Results on an accepted level that make a history of their own."""

_RMS_SCATTER = 0.01
"""Scatter of log(rms) that is assumed at least: rounding of one kernel on the same inputs hardly has any."""

_RMS_STILL = 0.2
"""Range of log(rms) within which nothing is worse."""

_MOVED = ("changed", "suspect")


def judge_run(
    session: Session,
    run: RunRow,
    *,
    window: int = WINDOW,
    min_effect: float | None = None,  # relative; None takes that of the timing
    strict: bool = False,
) -> Gate:
    """Judge each series that a run holds or should hold. Only reads."""
    points = query.points_of_run(session, run)
    previous = query.previous_of_plan(session, run, {point.series.hardware for point in points})
    expected = {} if previous is None else query.outcomes_of_run(session, previous)
    stored = alerts.find(session, series={point.series.pk for point in points}, until=run)
    judge = _Judge(session, run, points, expected, stored, window, min_effect)
    rows = [*judge.rows(), *_absent(session, points, expected)]
    code = exit_code(rows, strict)
    same_commit = previous is not None and previous.state == run.state and not run.dirty
    said = summary(rows, code, strict=strict, same_commit=same_commit)
    return Gate(run, tuple(rows), code, said, tuple(stored), frozenset(judge.lapsed))


@dataclass(frozen=True)
class _Latency:
    """What is known of a point's latency."""

    past: Past  # in any environment, on the level that was accepted
    found: scans.Finding

    @property
    def moved(self) -> bool:
        return self.found.verdict in _MOVED

    @property
    def slower(self) -> bool:
        return self.found.effect is not None and self.found.effect > 0

    def before(self) -> list[int]:
        """Runs that are certainly on the level before the change, the newest last."""
        if self.found.index is None or self.found.first is None:
            return []
        alike = self.past.alike
        start = int(np.searchsorted(alike, self.found.index)) - self.found.n_before
        return self.past.run[alike[max(start, 0) :][alike[max(start, 0) :] <= self.found.first]].tolist()

    def after(self) -> list[int]:
        """Runs that are certainly after it, the oldest first."""
        alike = self.past.alike
        return self.past.run[alike[alike >= (self.found.last or 0)]].tolist()


class _Judge:
    """Judges the points of one run: what they need is read for all at once."""

    def __init__(
        self,
        session: Session,
        run: RunRow,
        points: Sequence[PointRow],
        expected: Mapping[int, Outcome],  # by series, of the previous run of the plan
        stored: Sequence[AlertRow],
        window: int,
        min_effect: float | None,
    ) -> None:
        self.session, self.run, self.points, self.expected = session, run, points, expected
        self.min_effect = min_effect
        self.pasts = Pasts(session, run, [point.series.pk for point in points], window)
        self.comparisons = comparisons.of_series(session, [point.series.pk for point in points])
        wrong = [point.series.pk for point in points if point.status == "wrong"]
        self.turns = turns_wrong(session, run, wrong)
        ends = {end for turn in self.turns.values() for end in (turn.base, turn.head) if end is not None}
        self.runs = query.run_rows(session, ends.union(self.pasts.runs))
        self.alerts: dict[int, list[AlertRow]] = {}
        for alert in stored:
            self.alerts.setdefault(alert.series.pk, []).append(alert)
        self.lapsed = {alert.pk for alert in stored if alerts.lapsed(session, alert, run)}

    def rows(self) -> list[Judged]:
        """The verdict on each point, in their order."""
        self.latency = self._latencies()
        self.accuracy = self._accuracies()
        self.facts = facts_at(self.session, self._places())
        # By environment, of which a run may hold several, and whether it became slower.
        self.machines_moved: dict[tuple[str, bool], list[Span]] = {}
        for point in self.points:
            if point.series.operator == CANARY and point.pk in self.latency and self.latency[point.pk].moved:
                latency = self.latency[point.pk]
                key = point.environment.identity, latency.slower
                self.machines_moved.setdefault(key, []).append(self._span(latency))
        rows = [row for point in self.points for row in self._judged(point)]
        known = authors(self.session, {row.span.head.commit for row in rows if row.span})
        return [
            replace(row, span=replace(row.span, author=known.get(row.span.head.commit))) if row.span else row
            for row in rows
        ]

    # ---- what is asked of the statistics

    def _latencies(self) -> dict[int, _Latency]:
        """Of each point that has one."""
        pasts: dict[int, Past] = {}
        histories: list[scans.History] = []
        for point in self.points:
            if point.timed and point.timing is not None:
                past = self._on_accepted_level(self.pasts.latency(point.series.pk), "latency")
                pasts[point.pk] = past
                canary = point.series.operator == CANARY
                histories.append(
                    latency_history(past, point.timing, canary=canary, min_effect=self.min_effect, pool=_pool(point))
                )
        found = dict(zip(pasts, scans.scan(histories, q=Q), strict=True))
        sizes = Counter(history.pool for history in histories)
        for point in self.points:
            if point.pk in found and found[point.pk].verdict == "ok":
                alone = sizes[_pool(point)] < MANY
                found[point.pk] = self._young(point, pasts[point.pk], found[point.pk], alone)
        return {key: _Latency(past, found[key]) for key, past in pasts.items()}

    def _young(self, point: PointRow, past: Past, found: scans.Finding, alone: bool) -> scans.Finding:
        """Few results prove nothing, but a newest one that is far off the others is worth an A/B."""
        assert point.timing is not None
        alike = past.alike
        if len(alike) > ALONE:
            return found
        log, errors = past.log[alike], past.error[alike]
        off = far_off(log, errors, timing=point.timing, alone=alone, min_effect=self.min_effect)
        if off is None or off.change is None or off.threshold is None:
            return found
        before, after = float(np.median(log[:-1])), 1
        far = (log - before) * np.sign(off.change) > off.threshold / 2
        while after < len(log) - 2 and far[-after - 1]:
            after += 1  # the nights before were off already
        noise = off.threshold / 4  # two of its sigmas, at least
        return replace(
            found, verdict="suspect", p=None, q=None,
            index=int(alike[-after]), first=int(alike[-after - 1]), last=int(alike[-after]),
            effect=off.change, low=off.change - noise, high=off.change + noise, before=before,
            n_before=len(log) - after, n_after=after,
            reason=f"far off the {counted(len(log) - after, 'result')} before",
        )  # fmt: skip

    def _accuracies(self) -> dict[int, tuple[Past, scans.Finding | None]]:
        """Where it moved at all: its past in the same environment, and what the statistics say where it moved far."""
        pasts: dict[int, Past] = {}
        moved_ever = self.pasts.inaccurate(_RMS_STILL)
        for point in self.points:
            if point.status == "ok" and point.rms is not None and point.series.pk in moved_ever:
                past = self._on_accepted_level(self.pasts.accuracy(point.series.pk), "accuracy")
                past = past.where(past.alike)
                if len(past) > 1 and np.ptp(past.log) > _RMS_STILL:
                    pasts[point.pk] = past
        least = math.log(RMS_RATIO)
        moved = [key for key, past in pasts.items() if np.ptp(past.log) > least]
        found = scans.scan([_history(pasts[key], _RMS_SCATTER, least, "rms") for key in moved], q=Q)
        by_point = dict(zip(moved, found, strict=True))
        return {key: (past, by_point.get(key)) for key, past in pasts.items()}

    def _on_accepted_level(self, past: Past, metric: str) -> Past:
        """From the newest accepted change on where that is a history; or else with all before it moved there."""
        for alert in self.alerts.get(past.series, ()):
            place = np.flatnonzero(past.run == alert.run.pk)
            if alert.metric != metric or alert.distance is None or not self._accepted(alert) or not len(place):
                continue
            at = np.arange(len(past))
            since = at >= place[0]
            if since.sum() >= SETTLED:
                past = past.where(since)
                continue
            base = np.flatnonzero(past.run == (-1 if alert.base_run is None else alert.base_run.pk))
            earlier = at <= base[0] if len(base) else ~since
            # Which level those stand on that lie between the ends of the change, nobody knows.
            past = past.shifted(np.flatnonzero(earlier), alert.distance).where(earlier | since)
        return past

    def _accepted(self, alert: AlertRow) -> bool:
        return alert.state == "invalid" or (alert.state == "expected" and alert.pk not in self.lapsed)

    def _places(self) -> set[tuple[int, int]]:
        """(series, run) of the points whose facts tell a cause."""
        places: set[tuple[int, int]] = set()
        for point in self.points:
            latency = self.latency.get(point.pk)
            runs: list[int] = []
            if latency is not None and latency.moved and latency.found.index is not None:
                runs = [*latency.before()[-1:], *latency.after()[:1]]
            past, found = self.accuracy.get(point.pk, (None, None))
            ends = None if past is None else _accuracy_ends(past, found)
            if past is not None and ends is not None:
                runs += past.run[list(ends)].tolist()
            agreed = self._repeatable(point)
            if agreed is not None:
                runs += agreed[0].run[agreed[1] : agreed[1] + 2].tolist()
            places |= {(point.series.pk, run) for run in runs}
        for series, turn in self.turns.items():
            places |= {(series, run) for run in (turn.base, turn.head) if run is not None}
        return places

    # ---- one point

    def _judged(self, point: PointRow) -> list[Judged]:
        """One row, or two where a series changed in two ways at two times: one at a time is one change."""
        if point.status != "ok":
            return [self._with_alert(self._not_ok(point))]
        row = self._latency_row(point)
        worse = self._worse(point, row)
        if worse is None:
            return [self._with_alert(row)]
        if row.verdict.changed and row.span and worse.span and row.span.overlaps(worse.span):
            return [self._with_alert(worse)]
        still = Judged(row.series, Verdict.OK, point, sigma=row.sigma, latest=row.latest)
        worse = self._worse(point, still) or worse
        # Each with its own alerts: what nobody dealt with in the one is not hidden by the other.
        both = [self._with_alert(row, "latency"), self._with_alert(worse, worse.what)]
        return [one for one in both if not one.verdict.quiet or one.alert] or both[1:]

    def _not_ok(self, point: PointRow) -> Judged:
        series, expected = point.series, self.expected.get(point.series.pk)
        if point.status == "wrong":
            return self._wrong(point)
        if point.status == "unavailable":
            if expected is not None and expected.status == "ok":
                note = f"ran in the previous run: {point.message}"
                return Judged(series, Verdict.MISSING, point, "unavailable", note=note)
            return Judged(series, Verdict.UNAVAILABLE, point, "unavailable", note=point.message)
        return Judged(series, Verdict.MISSING, point, point.status, note=point.message)

    def _wrong(self, point: PointRow) -> Judged:
        """A result outside the tolerance table: wrong whatever was before; since when, its past tells."""
        turn, seen = self.turns[point.series.pk], self.pasts.earlier_ok(point.series.pk)
        span = Span(None if turn.base is None else self.runs[turn.base], self.runs[turn.head])
        row = Judged(point.series, Verdict.WRONG, point, "result", note=point.message, n=seen, span=span)
        if span.base is None:
            return row
        cause = find_cause(*self._facts(row, span), result=True)
        note = _joined(point.message, cause.note)
        return replace(row, before_ms=turn.ms, before_rms=turn.rms, cause=cause.word, note=note)

    def _worse(self, point: PointRow, row: Judged) -> Judged | None:
        """What got worse besides the latency, which is `row`'s and is told in the same row."""
        found = self._accuracy_row(point, row) or self._repeatability_row(point, row)
        return found and replace(found, p=None, q=None)  # those are the latency's

    def _latency_row(self, point: PointRow) -> Judged:
        series, expected = point.series, self.expected.get(point.series.pk)
        if not point.timed:
            if expected is not None and expected.timed:
                note = "the previous run has a latency, this one has none"
                return Judged(series, Verdict.MISSING, point, "latency", note=note)
            seen = self.pasts.earlier_ok(series.pk)
            return Judged(series, Verdict.OK if seen else Verdict.NEW, point, n=seen)
        latency = self.latency[point.pk]
        found, past = latency.found, latency.past
        n = len(past.alike) - 1
        if n == 0 and len(past) > 1:
            return self._elsewhere(point, self.runs[int(past.run[-2])])
        row = Judged(series, Verdict.OK, point, n=n, sigma=_known(found.sigma), p=_known(found.p), q=_known(found.q))
        if latency.moved or series.pk in self.alerts:
            newest = past.alike[-alerts.LATEST :]
            row = replace(row, latest=tuple((int(past.run[at]), float(past.log[at])) for at in newest))
        if found.verdict in (Verdict.NEW, Verdict.INSUFFICIENT):
            return replace(row, verdict=Verdict.NEW if n == 0 else Verdict.INSUFFICIENT)
        if found.verdict == "drift":
            span = None if found.effect is None else self._span(latency)
            inside = span is not None and span.same_code
            row = replace(row, what="latency", cause="infrastructure" if inside else DRIFT, span=span)
            row = replace(row, loud=found.n_after <= OLD, since=found.n_after)
            return replace(row, note=found.reason, **_changes(point, found))
        if not latency.moved:
            return row
        assert found.effect is not None and found.before is not None and point.timing is not None
        newer = [log for _, log in row.latest][1 - found.n_after :] if found.n_after > 1 else []
        if alerts.on_level(newer, found.before, found.effect, row.sigma, point.timing):
            return replace(row, note=f"back on the level before a change of {_percent(found.effect)}", loud=True)
        row = replace(row, what="latency", since=found.n_after, **_changes(point, found))
        return self._moved(row, latency)

    def _moved(self, row: Judged, latency: _Latency) -> Judged:
        """A latency that history says has moved, or may have: what an A/B said, whose fault it is."""
        before, after = latency.before(), latency.after()
        span = self._span(latency)
        row = replace(row, span=span)
        if row.series.operator == CANARY:
            note = "machine suspect: the canary moved"
            return replace(row, verdict=Verdict.SUSPECT, cause="machine", note=note)
        if span.same_code:
            note = "moved without a change of code: the same commit before and after"
            return replace(row, cause="infrastructure", note=note, loud=row.since <= OLD)
        compared = comparisons.about(self.comparisons.get(row.series.pk, ()), self._clean(before), self._clean(after))
        facts = self._facts(row, span)
        confirmed = compared is not None and compared.verdict == DIFFERENT and compared.effect is not None
        moved = self._machine_moved(row, span, latency.slower)
        cause = find_cause(*facts, canaries_moved=moved, confirmed=confirmed)
        row = replace(row, cause=cause.word, note=cause.note, compared=compared)
        if compared is not None and compared.verdict == SAME:
            return replace(row, verdict=Verdict.OK, loud=row.since <= OLD, note=_joined("A/B: the same", cause.note))
        if compared is not None and confirmed:
            return _confirmed(row)
        undecided = ""
        if compared is not None:
            undecided = f"A/B {compared.verdict}" + (f": {compared.message}" if compared.message else "")
        # Nobody is to be alarmed by what got faster, whatever its cause, which is told.
        if latency.slower and cause.word == "machine":
            row = replace(row, verdict=Verdict.UNRESOLVED, note=_joined(undecided, cause.note))
        elif latency.slower and cause.word in ("infrastructure", "environment"):  # history points not at the code
            row = replace(
                row, verdict=Verdict.UNRESOLVED if undecided else Verdict.SUSPECT, note=_joined(undecided, cause.note)
            )
        elif latency.found.verdict == "changed":  # what is certain stays so when an A/B could not tell
            return replace(
                row,
                verdict=Verdict.REGRESSED if latency.slower else Verdict.IMPROVED,
                note=_joined(undecided, cause.note),
            )
        elif undecided:
            row = replace(row, verdict=Verdict.UNRESOLVED, note=_joined(undecided, cause.note))
        else:
            row = replace(row, verdict=Verdict.SUSPECT, note=_joined(latency.found.reason, cause.note))
        return self._to_confirm(row, span.base)

    def _machine_moved(self, row: Judged, span: Span, slower: bool) -> bool:
        """Whether a canary of the same machine moved the same way when the row changed, and not some other night."""
        assert row.point is not None
        spans = self.machines_moved.get((row.point.environment.identity, slower), ())
        return any(span.overlaps(canary) for canary in spans)

    def _span(self, latency: _Latency) -> Span:
        before, after = latency.before(), latency.after()
        return Span(self.runs[before[-1]] if before else None, self.runs[after[0]] if after else self.run)

    def _elsewhere(self, point: PointRow, before: RunRow) -> Judged:
        """A first result in its environment, of a series that has some in another."""
        old = facts_at(self.session, {(point.series.pk, before.pk)})[point.series.pk, before.pk]
        assert old.environment is not None
        changed = environment_differences(old.environment, point.environment.facts)
        row = Judged(point.series, Verdict.INCOMPARABLE, point, "environment", "environment")
        row = replace(row, note="; ".join(changed) or "other timing", span=Span(before, self.run))
        if [text.split(" ")[0] for text in changed] != ["gpu_uuid"]:
            return row
        compared = comparisons.about(
            self.comparisons.get(point.series.pk, ()), self._clean([before.pk]), self._clean([self.run.pk])
        )
        row = replace(row, compared=compared)
        if compared is not None and compared.verdict == SAME:
            return replace(
                row, verdict=Verdict.OK, loud=True, note=_joined("another card; A/B on one: the same", row.note)
            )
        if compared is not None and compared.verdict == DIFFERENT and compared.effect is not None:
            cause = find_cause(old, self._own_facts(point), confirmed=True)
            return _confirmed(replace(row, what="latency", cause=cause.word))
        return self._to_confirm(row, before)

    def _to_confirm(self, row: Judged, base: RunRow | None) -> Judged:
        """With the base of the A/B that would decide, or why there can be none."""
        if base is None or base.commit == self.run.commit:
            return row
        dirty = next((run for run in (base, self.run) if run.dirty), None)
        if dirty is not None:
            return replace(
                row, note=_joined(row.note, f"{dirty.state} is a dirty tree, which cannot be measured again")
            )
        return replace(row, ab_base=base)

    def _accuracy_row(self, point: PointRow, row: Judged) -> Judged | None:
        """A result that is within tolerance, yet worse than it was; with what the latency did in the same row."""
        if point.pk not in self.accuracy or point.rms is None:
            return None
        past, found = self.accuracy[point.pk]
        ends = _accuracy_ends(past, found)
        if ends is None:
            return None
        first, last = ends
        start, since = 0, len(past) - last
        if _moved(found):
            start, since = (first + 1 if found.index is None else found.index) - found.n_before, found.n_after
        level = past.log[max(0, min(start, first)) : first + 1]
        before = float(np.median(_errors(level)))  # what was measured; the effect is an estimate
        if point.rms <= RMS_RATIO * before or point.rms - before <= RMS_FLOOR:
            return None
        span = Span(self.runs[int(past.run[first])], self.runs[int(past.run[last])])
        note = f"rms {before:.3g} → {point.rms:.3g}"
        if row.what == "latency" and row.change is not None and row.verdict is not Verdict.OK:
            note += f", and {_percent_of(row.change)}"
        cause = find_cause(*self._facts(row, span), result=True)
        return replace(
            row, verdict=Verdict.REGRESSED, what="accuracy", cause=cause.word, note=_joined(note, cause.note),
            before_rms=before, n=len(past) - 1, span=span, since=since, ab_base=None, compared=None,
        )  # fmt: skip

    def _repeatability_row(self, point: PointRow, row: Judged) -> Judged | None:
        """Two executions that agreed bit by bit, and no longer do."""
        accepted = any(a.metric == "repeatability" and self._accepted(a) for a in self.alerts.get(point.series.pk, ()))
        found = None if accepted else self._repeatable(point)
        if found is None:
            return None
        past, last = found
        span = Span(self.runs[int(past.run[last])], self.runs[int(past.run[last + 1])])
        cause = find_cause(*self._facts(row, span), result=True)
        note = _joined("two executions no longer agree bit by bit", cause.note)
        return replace(
            row, verdict=Verdict.REGRESSED, what="repeatability", cause=cause.word, note=note,
            n=len(past) - 1, span=span, since=len(past) - 1 - last, ab_base=None, compared=None,
        )  # fmt: skip

    def _repeatable(self, point: PointRow) -> tuple[Past, int] | None:
        """Of a point whose two executions do not agree, where they did before in the same environment: that past, and
        the last place in it where they did."""
        if point.repeatable is not False:
            return None
        past = self.pasts.repeatable(point.series.pk)
        past = past.where(past.alike)
        agreed = np.flatnonzero(past.log)
        return (past, int(agreed[-1])) if len(agreed) else None

    # ---- what is stored

    def _with_alert(self, row: Judged, metric: str | None = None) -> Judged:
        """The row with the alert of its change; a quiet one, too, where the alert has not been dealt with.

        metric  whose alerts are looked at; those of all, if None
        """
        of_series = [a for a in self.alerts.get(row.series.pk, []) if metric in (None, a.metric)]
        if row.verdict.fails:
            mine = [a for a in of_series if not self._accepted(a) and alerts.same_change(a, row)]
            if mine:
                return replace(row, alert=mine[-1], note=_joined(row.note, self._told(mine[-1])))
            if row.since <= OLD:
                return row
        if row.since > OLD and row.verdict.changed:
            note = _joined(f"long ago: {row.since} results on this level", row.note)
            row = replace(row, verdict=Verdict.OK, old=True, note=note, ab_base=None)
        if row.point is None or row.point.status != "ok":
            return row
        if row.verdict in (Verdict.SUSPECT, Verdict.UNRESOLVED) and row.series.operator != CANARY:
            opened = [a for a in of_series if a.state in alerts.OPEN]
            same = [a for a in opened if alerts.same_change(a, row)]
            if same:
                return self._still(row, same[-1])
            back = [a for a in opened if a.metric == "latency" and alerts.is_back(a, row)]
            if not back or row.change is None or row.change > 0:
                return row
            note = _joined(f"back on the level before alert {back[-1].pk}", row.note)
            return replace(row, verdict=Verdict.OK, loud=True, note=note, ab_base=None)
        for alert in reversed(of_series):
            if alert.state not in alerts.OPEN or alert.metric == "result":
                continue
            if alert.environment != row.point.environment.identity or alerts.is_back(alert, row):
                continue
            if self._accepted(alert):
                return replace(row, alert=alert, loud=True, note=_joined(row.note, self._told(alert)))
            if row.verdict.quiet and row.verdict is not Verdict.NEW:
                return self._still(row, alert)
        return row

    def _still(self, row: Judged, alert: AlertRow) -> Judged:
        """A regression that history has grown used to, and nobody has dealt with."""
        told: dict[str, Any] = {
            "what": alert.metric,
            "cause": alert.cause,
            "span": Span(alert.base_run, alert.run, alert.author),
        }
        if alert.metric == "latency" and row.point is not None and row.point.median_ms and alert.before:
            change = row.point.median_ms / alert.before - 1
            interval = [None if end is None else math.expm1(end) for end in (alert.low, alert.high)]
            told |= {"before_ms": alert.before, "change": change, "low": interval[0], "high": interval[1]}
        if alert.metric == "accuracy" and alert.before is not None:
            told["before_rms"] = alert.before
        note = _joined("still there", self._told(alert))
        return replace(
            row, verdict=Verdict.REGRESSED, alert=alert, note=note, ab_base=None, compared=alert.compared, **told
        )

    def _told(self, alert: AlertRow) -> str:
        return alert.text + ("; that time is over" if alert.pk in self.lapsed else "")

    def _clean(self, runs: Sequence[int]) -> set[str]:
        """The commits that runs measured, as far as they measured no dirty tree."""
        return {self.runs[key].commit for key in runs if not self.runs[key].dirty}

    def _facts(self, row: Judged, span: Span) -> tuple[Facts | None, Facts]:
        before = None if span.base is None else self.facts.get((row.series.pk, span.base.pk))
        after = self.facts.get((row.series.pk, span.head.pk))
        assert row.point is not None
        return before, after or self._own_facts(row.point)

    def _own_facts(self, point: PointRow) -> Facts:
        return Facts(point.run.state, point.environment.facts, point.kernel_hash)


def _pool(point: PointRow) -> tuple[object, ...]:
    """Series whose noise is alike: taken in the same way on the same hardware, within a factor of ten."""
    series = point.series
    assert point.median_ms is not None
    return (point.timing, series.hardware, series.host, series.protocol, math.floor(math.log10(point.median_ms)))


def _history(past: Past, floor: float, least: float, pool: Hashable) -> scans.History:
    return scans.History(
        log_ms=past.log, error=past.error, environment=past.environment, state=past.state,
        floor=floor, min_effect=least, pool=pool,
    )  # fmt: skip


def _changes(point: PointRow, found: scans.Finding) -> dict[str, Any]:
    """What a finding says of the change, relative."""
    if found.effect is None or point.median_ms is None:
        return {}
    change = math.expm1(found.effect)
    ends = [None if end is None or math.isnan(end) else math.expm1(end) for end in (found.low, found.high)]
    before = math.exp(found.before) if found.before is not None else point.median_ms / (1 + change)
    return {"before_ms": before, "change": change, "low": ends[0], "high": ends[1]}


def _moved(found: scans.Finding | None) -> TypeGuard[scans.Finding]:
    return found is not None and found.verdict in _MOVED and found.effect is not None


def _accuracy_ends(past: Past, found: scans.Finding | None) -> tuple[int, int] | None:
    """Places of the last result before an accuracy changed and of the first after it.

    It hardly scatters: where a series is too young for statistics, one result before is enough.
    """
    if _moved(found):
        return found.first or 0, found.last or 0
    at = worse_since(_errors(past.log))
    return None if at is None or (found is not None and at >= YOUNG) else (at - 1, at)


def _errors(log: NDArray[np.float64]) -> NDArray[np.float64]:
    """Relative RMS errors from the logarithms that they are judged by, where none is the floor's, but for rounding."""
    found = np.exp(log) - RMS_FLOOR
    return np.where(found > 1e-9 * RMS_FLOOR, found, 0.0)


def _known(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _confirmed(row: Judged) -> Judged:
    """By an A/B that said different: its effect and interval are the row's."""
    compared = row.compared
    assert compared is not None and compared.effect is not None
    opposite = row.change is not None and row.change * compared.effect < 0
    pairs = f" in {counted(compared.pairs, 'pair')}" if compared.pairs else ""
    note = _joined(f"A/B: {_percent(compared.effect)}{pairs}", row.note)
    if opposite:
        return replace(row, verdict=Verdict.UNRESOLVED, note=_joined("history and A/B contradict each other", note))
    change = math.expm1(compared.effect)
    assert row.point is not None
    before = row.before_ms if row.before_ms is not None else (row.point.median_ms or math.nan) / (1 + change)
    ends = [None if end is None else math.expm1(end) for end in (compared.low, compared.high)]
    verdict = Verdict.REGRESSED if compared.effect > 0 else Verdict.IMPROVED
    return replace(
        row, verdict=verdict, before_ms=before, change=change, low=ends[0], high=ends[1], note=note, ab_base=None
    )


def _absent(session: Session, points: Sequence[PointRow], expected: Mapping[int, Outcome]) -> list[Judged]:
    """Series that the previous run of the plan measured on this hardware, and this one does not hold."""
    here = {point.series.pk for point in points}
    hardware = {point.series.hardware for point in points}
    gone = [key for key, before in expected.items() if before.status == "ok" and key not in here]
    lost = sorted(query.series_rows(session, gone).values(), key=lambda series: series.sort_key)
    note = "measured in the previous run of the plan, absent from this one"
    return [
        Judged(series, Verdict.MISSING, None, "absent", note=note) for series in lost if series.hardware in hardware
    ]


def _joined(*texts: str | None) -> str | None:
    return "; ".join(text for text in texts if text) or None


def _percent(effect: float) -> str:
    """Of a logarithm: `+5.0%`."""
    return f"{100 * math.expm1(effect):+.1f}%"


def _percent_of(change: float) -> str:
    return f"{100 * abs(change):.1f}% {'slower' if change > 0 else 'faster'}"
