"""Apply stored alerts to a verdict: accepted levels, and regressions that are still open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from groupbench.tracker.facts.metrics import METRICS, RMS, of_alert, relative
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import alerts
from groupbench.tracker.judge.alert_levels import is_back, same_change, smallest_change
from groupbench.tracker.judge.alerts import AlertRow
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.parts import OLD, joined
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.verdicts import CANARY, Effect, Judged
from groupbench.tracker.query.rows import PointRow


class AlertRules:
    """Applies the alerts of a series to its verdict. The first rule that matches decides."""

    def __init__(self, data: GateData) -> None:
        self.data = data

    def apply(self, row: Judged, *names: str | None) -> Judged:
        """Return a row with the alert of its change; a quiet row becomes a regression while its alert is open.

        Args:
            names: Metrics of the alerts to consider.
        """
        of_series = [each for each in self.data.alerts.get(row.series.pk, ()) if each.metric in names]
        if (regression := self._own_regression(row, of_series)) is not None:
            return regression
        row = _long_ago(row)
        if row.point is None or row.point.status != "ok":
            return row
        if row.verdict in (Verdict.SUSPECT, Verdict.UNRESOLVED) and row.series.operator != CANARY:
            return self._in_doubt(row, of_series)
        return self._with_open_alert(row, of_series)

    def rows(self, row: Judged, *names: str | None) -> list[Judged]:
        """Return a row with the alert of its change, and a row for each other open alert of the series.

        A new change, even for the better, does not hide an earlier regression that has not been handled.

        Args:
            names: Metrics of the alerts to consider.
        """
        applied = self.apply(row, *names)
        if row.point is None or row.point.status != "ok" or row.verdict is Verdict.NEW:
            return [applied]
        of_series = [each for each in self.data.alerts.get(row.series.pk, ()) if each.metric in names]
        others = [each for each in of_series if each != applied.alert and self._holds(each, row)]
        evidence = replace(row.evidence, p=None, q=None)  # those of the new change
        unchanged = Judged(row.series, Verdict.OK, row.point, evidence=evidence)
        return [applied, *(self._still(unchanged, each) for each in others if not self.data.accepted(each))]

    def of_wrong_result(self, point: PointRow) -> list[Judged]:
        """Return a row for each open alert of a series whose result is wrong, with the numbers of its change.

        A wrong result's latency is not judged, so it shows neither that a slowdown is over nor that it remains.
        """
        rows = []
        for alert in self.data.alerts.get(point.series.pk, ()):
            row = Judged(point.series, Verdict.OK, point)
            if not self.data.accepted(alert) and self._holds(alert, row):
                change, low, high = map(relative, (alert.effect, alert.low, alert.high))
                effect = replace(_levels(row, alert), change=change, low=low, high=high)
                note = joined("still open, not judged because the result is wrong", self._text(alert))
                rows.append(replace(self._still(row, alert), effect=effect, note=note))
        return rows

    def _own_regression(self, row: Judged, of_series: Sequence[AlertRow]) -> Judged | None:
        """Return a regression with its alert, or unchanged if it is news; None for every other row."""
        if not row.verdict.fails:
            return None
        same = [each for each in of_series if not self.data.accepted(each) and same_change(each, row)]
        if same:
            return replace(row, alert=same[-1], note=joined(row.note, self._text(same[-1])))
        return row if row.news.since <= OLD else None

    def _in_doubt(self, row: Judged, of_series: Sequence[AlertRow]) -> Judged:
        """Judge a suspect: the regression of an open alert, back on the level before one, or unchanged."""
        opened = [each for each in of_series if each.state in alerts.OPEN]
        same = [each for each in opened if same_change(each, row)]
        if same:
            return self._still(row, same[-1])
        back = [each for each in opened if each.metric == "latency" and is_back(each, row)]
        if not back or row.change is None or row.change > 0:
            return row
        note = joined(f"back on the level before alert {back[-1].pk}", row.note)
        return replace(row, verdict=Verdict.OK, news=replace(row.news, loud=True), note=note, ab_base=None)

    def _with_open_alert(self, row: Judged, of_series: Sequence[AlertRow]) -> Judged:
        """Return the row with an open alert whose level persists, whatever the statistics find."""
        for alert in reversed(of_series):
            if not self._holds(alert, row):
                continue
            if self.data.accepted(alert):
                news = replace(row.news, loud=True)
                return replace(row, alert=alert, news=news, note=joined(row.note, self._text(alert)))
            if row.verdict.quiet and row.verdict is not Verdict.NEW:
                return self._still(row, alert)
        return row

    def _holds(self, alert: AlertRow, row: Judged) -> bool:
        """Return whether an alert is open and its level persists on the same machine."""
        if alert.state not in alerts.OPEN or alert.metric == "result" or row.point is None:
            return False
        return alert.machine == row.point.environment.machine and not is_back(alert, row)

    def _still(self, row: Judged, alert: AlertRow) -> Judged:
        """Return a regression that has become the series' normal level while its alert is open."""
        effect = _levels(row, alert)
        note = joined(
            "too few results to tell that it is over" if _seems_over(row, alert) else "still there",
            self._text(alert),
        )
        row = replace(row, verdict=Verdict.REGRESSED, alert=alert, note=note, ab_base=None, compared=alert.compared)
        return replace(row, what=alert.metric, cause=alert.cause, span=Span(alert.base_run, alert.run), effect=effect)

    def _text(self, alert: AlertRow) -> str:
        """Return the state of a row's alert. An alert closed as fixed is about to reopen, since its change is back."""
        if alert.state == "fixed":
            return f"regressed again after alert {alert.pk} was fixed"
        return "; ".join(filter(None, [alert.text, "expired" if alert.pk in self.data.lapsed else None, alert.advice]))


def _long_ago(row: Judged) -> Judged:
    """Return the row of an old change as `ok` with a note, any other row unchanged."""
    if row.news.since <= OLD or not row.verdict.changed:
        return row
    note = joined(f"old change: {row.news.since} results on this level", row.note)
    return replace(row, verdict=Verdict.OK, news=replace(row.news, old=True), note=note, ab_base=None)


def _seems_over(row: Judged, alert: AlertRow) -> bool:
    """Return whether the newest latency alone is on the level before an alert."""
    point = row.point
    if alert.metric != "latency" or point is None or not point.median_ms or point.timing is None or not alert.before:
        return False
    return abs(math.log(point.median_ms / alert.before)) <= smallest_change(alert, row)


def _levels(row: Judged, alert: AlertRow) -> Effect:
    """Return a row's effect, relative to the level before its alert."""
    if alert.before is None:
        return row.effect
    if of_alert(alert.metric) is RMS:
        return replace(row.effect, before_rms=alert.before)
    if alert.metric not in METRICS or row.point is None:
        return row.effect
    now = row.point.value(METRICS[alert.metric])
    change = now / alert.before - 1 if now and alert.before else alert.change
    low, high = map(relative, (alert.low, alert.high))
    if change is None or low is None or high is None or not low <= change <= high:
        low = high = None  # the interval is that of the change when it was found, not of today's result
    if alert.metric != "latency":
        return replace(row.effect, before=alert.before, change=change, low=low, high=high)
    return replace(row.effect, before_ms=alert.before, change=change, low=low, high=high)
