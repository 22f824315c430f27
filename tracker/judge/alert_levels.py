"""Match the gate's rows with stored alerts: the same change, or a return to the level before it."""

from __future__ import annotations

import math
import statistics

from groupbench.tracker.facts.metrics import LATENCY, METRICS, RMS, of_alert
from groupbench.tracker.judge.alerts import OPEN, AlertRow
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.stats.thresholds import SURE, least_effect, on_level

_SHOW_SCATTER = 4
"""Number of results since a change that show how far its level scatters."""


def same_change(alert: AlertRow, row: Judged) -> bool:
    """Return whether a regression is the one that an alert records.

    The estimated date of a change shifts by a night or two as results come in, so levels decide too. A change that
    starts from the alert's earlier level is the same one, unless it is clearly larger; a change from the alert's later
    level is another.
    """
    if alert.metric != row.what:
        return False
    if alert.metric in ("repeatability", "result"):
        return alert.state in OPEN and not _over_since(alert, row)
    before, after = levels(row)
    distance = alert.distance
    if before is None or after is None or alert.before is None or distance is None:
        return alert.run == (row.span.head if row.span else row.point and row.point.run)
    metric = of_alert(alert.metric)
    start = metric.log(alert.before)
    far = metric.log(before) - start
    if abs(far) >= abs(far - distance):
        return False
    elsewhere = row.span is not None and not Span(alert.base_run, alert.run).overlaps(row.span)
    if elsewhere and row.what == "latency" and abs(far) > _uncertainty(alert, row):
        return False  # from another level
    slack = max(abs(distance) / 2, smallest_change(alert, row))
    if alert.state in OPEN:
        return _no_larger(row, distance + slack)
    if row.compared is not None and elsewhere:
        return False  # an A/B found it between other commits
    return abs(metric.log(after) - start - distance) <= slack


def _no_larger(row: Judged, distance: float) -> bool:
    """Return whether a row's change may be as small as a log distance: a latency's is at least its interval's end."""
    least = row.effect.low if row.what == "latency" else None
    return least is None or math.log1p(least) <= distance


def smallest_change(alert: AlertRow, row: Judged) -> float:
    """Return the smallest log change that counts from the known level before an alert, with the row's timing."""
    metric = of_alert(alert.metric)
    if metric is not LATENCY:
        return math.log1p(metric.least)
    assert alert.before is not None
    timing = row.point.timing if row.point is not None else None
    return math.log1p(least_effect(timing or "gpu", alert.before))


def _uncertainty(alert: AlertRow, row: Judged) -> float:
    """Return the log distance up to which the level before a row's change may be the one before an alert."""
    return max(smallest_change(alert, row), SURE * (row.evidence.sigma or 0.0))


def levels(row: Judged) -> tuple[float | None, float | None]:
    """Return a row's (level before, level after), in the unit of its metric."""
    if row.what == "latency" and row.effect.before_ms and row.change is not None:
        return row.effect.before_ms, row.effect.before_ms * (1 + row.change)
    if row.metric is RMS and row.effect.before_rms is not None and row.point is not None and row.point.rms is not None:
        return row.effect.before_rms, row.point.rms
    if row.what in METRICS and row.effect.before is not None and row.now is not None:
        return row.effect.before, row.now
    return None, None


def _over_since(alert: AlertRow, row: Judged) -> bool:
    """Return whether a row's problem is a new one: the result was correct, or repeatable, after the alert's change."""
    if row.span is None or alert.metric not in ("repeatability", "result") or alert.metric != row.what:
        return False
    return not Span(alert.base_run, alert.run).overlaps(row.span)


def is_back(alert: AlertRow, row: Judged) -> bool:
    """Return whether the newest results are back on the alert's earlier level, or have been since."""
    if _over_since(alert, row):
        return True
    point = row.point
    if point is None or point.status != "ok":
        return False
    if alert.metric == "result":
        return True
    if alert.metric == "repeatability":
        return point.repeatable is True
    metric = of_alert(alert.metric)
    if metric is LATENCY:
        return _latency_is_back(alert, point, row)
    now = point.value(metric)
    return now is not None and alert.before is not None and not metric.worse(alert.before, now)


def _latency_is_back(alert: AlertRow, point: PointRow, row: Judged) -> bool:
    """Return whether the results since an alert are at its earlier level, on the alert's machine."""
    if not point.timed or point.median_ms is None or alert.before is None or alert.effect is None:
        return False
    if alert.machine != point.environment.machine or point.timing is None:
        return False
    runs = [run for run, _ in row.evidence.latest]
    since = runs.index(alert.run.pk) + 1 if alert.run.pk in runs else 0
    latest = [log for _, log in row.evidence.latest[since:]]
    least = smallest_change(alert, row)
    sigma = row.evidence.sigma
    if sigma is not None and len(latest) >= _SHOW_SCATTER:
        sigma = min(sigma, statistics.stdev(latest))  # that of a short history counts the alert's own step as scatter
    return on_level(latest, math.log(alert.before), alert.effect, sigma, least) > 0
