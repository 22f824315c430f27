"""The evidence about results: whether there is one, and whether it is right and repeatable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from sqlalchemy.orm import Session

from groupbench.tracker.facts.metrics import relative
from groupbench.tracker.facts.physics import floor_ms, too_fast
from groupbench.tracker.facts.record import Timing
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import members
from groupbench.tracker.judge.causes import find_cause
from groupbench.tracker.judge.evidence import Evidence
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.parts import Case
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.verdicts import Effect, Judged
from groupbench.tracker.query.rows import PointOutcome, PointRow
from groupbench.tracker.query.series import series_rows
from groupbench.tracker.store.decisions import Decisions
from groupbench.tracker.text.wording import joined


def of_status(data: GateData, point: PointRow) -> list[Case]:
    """Return the cases of a point whose status is not ok, and of the alerts that are still open."""
    expected = data.expected.get(point.series.pk)
    had = expected is not None and expected.status == "ok"
    evidence = Evidence("result", status=point.status, had=had)
    if point.status == "wrong":
        return [*_still_open(data, point), _wrong(data, point)]
    note = point.message
    if point.status == "unavailable" and had:
        note = f"available in the previous run: {note}"
    return [Case(evidence, Judged(point.series, Verdict.OK, point, point.status, note=note))]


def _wrong(data: GateData, point: PointRow) -> Case:
    """Return the case of a result outside tolerance. History only dates the first wrong run."""
    turn, seen = data.turns[point.series.pk], data.pasts.earlier_ok(point.series.pk)
    span = Span(None if turn.base is None else data.runs[turn.base], data.runs[turn.head])
    evidence = Evidence("result", status="wrong", n=seen)
    row = Judged(point.series, Verdict.OK, point, "result", note=point.message, span=span)
    if span.base is not None:
        cause = find_cause(*data.facts_of(point, span), result=True)
        effect = Effect(turn.ms, turn.rms)
        row = replace(row, effect=effect, cause=cause.word, note=joined(point.message, cause.note))
    return Case(evidence, _with_alert(data, row))


def _with_alert(data: GateData, row: Judged) -> Judged:
    """Return the row of a wrong result with its alert: the newest one that began at the same time."""
    assert row.span is not None
    of_result = [each for each in data.alerts.get(row.series.pk, ()) if each.metric == "result"]
    same = [each for each in of_result if each.span.overlaps(row.span) and each.state in members.OPEN]
    if not same:
        return row
    return replace(row, alert=same[-1], note=joined(row.note, data.alert_text(same[-1])))


def implausible(data: GateData, point: PointRow) -> list[Case]:
    """Return the cases of a latency below the limits of physics, stored before `ingest` refused such records."""
    if not point.timed or point.median_ms is None:
        return []
    series, where = point.series, point.environment.facts
    timing: Timing = "gpu" if point.timing == "gpu" else "cpu"
    amounts = (series.flops or 0, series.min_bytes or 0, series.dtype)
    reason = too_fast(point.median_ms, floor_ms(*amounts, timing, where.gpu, where.cpu_count))
    if reason is None:
        return []
    row = Judged(series, Verdict.OK, point, "result", note=reason)
    return [*_still_open(data, point), Case(Evidence("result", status="wrong"), row)]


def _still_open(data: GateData, point: PointRow) -> list[Case]:
    """Return a case for each open alert of a series whose result is wrong, with the numbers of its change.

    A wrong result's latency is not judged, so it shows neither that a slowdown is over nor that it remains.
    """
    cases = []
    for alert in data.alerts.get(point.series.pk, ()):
        if data.accepted(alert) or alert.state not in members.OPEN or alert.metric == "result":
            continue
        if alert.machine != point.environment.machine:
            continue
        change, low, high = map(relative, (alert.effect, alert.low, alert.high))
        ms = alert.before if alert.metric == "latency" else None
        rms = alert.before if alert.metric == "accuracy" else None
        row = Judged(
            point.series, Verdict.OK, point, alert.metric, alert.cause,
            joined("still open, not judged because the result is wrong", data.alert_text(alert)),
            Effect(ms, rms, alert.before, change, low, high), span=alert.span, alert=alert,
            compared=alert.compared,
        )  # fmt: skip
        cases.append(Case(Evidence("step", alert=alert.state, distance=abs(alert.effect or 1.0)), row))
    return cases


def untimed(data: GateData, point: PointRow) -> Case:
    """Return the case of a point without a latency, such as an interpreted one."""
    expected, seen = data.expected.get(point.series.pk), data.pasts.earlier_ok(point.series.pk)
    had = expected is not None and expected.timed
    row = Judged(point.series, Verdict.OK, point, "latency" if had else None)
    return Case(Evidence("result", timed=False, had=had, n=seen), row)


def absent(
    session: Session, points: Sequence[PointRow], expected: Mapping[int, PointOutcome], decisions: Decisions
) -> list[Case]:
    """Return a case for each series that the previous night measured on this hardware and this one lacks."""
    present = {point.series.pk for point in points}
    hardware = {point.series.hardware for point in points}
    missing_keys = [key for key, before in expected.items() if before.status == "ok" and key not in present]
    missing = sorted(series_rows(session, missing_keys).values(), key=lambda series: series.sort_key)
    note = "measured in the previous run of the plan, absent from this one"
    return [
        Case(
            Evidence("result", status="absent", had=True, removed=series.pk in decisions.removed),
            Judged(series, Verdict.OK, None, "absent", note=None if series.pk in decisions.removed else note),
        ).unless_muted(decisions.muted.get(series.pk))
        for series in missing
        if series.hardware in hardware
    ]
