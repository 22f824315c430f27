"""The data behind a verdict, read from the store for all points of a run at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from sqlalchemy.orm import Session

from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.metrics import judged
from groupbench.tracker.judge import members
from groupbench.tracker.judge.causes import Facts
from groupbench.tracker.judge.incident_rows import MemberRow
from groupbench.tracker.judge.pasts import Pasts, facts_at, turns_wrong
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.rows import PointOutcome, PointRow, RunRow
from groupbench.tracker.query.runs import run_rows
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.comparisons import Compared
from groupbench.tracker.store.decisions import in_force


class GateData:
    """The data that the gate's rules use. `load_facts` adds the facts that show causes.

    Args:
        session: The database.
        run: The run to judge.
        line: The runs of the history, up to `run`.
        points: The run's points.
        expected: Outcomes in the plan's previous run, by series.
        stored: Alerts of the series.
        window: Number of earlier results of a series to use.
        min_effect: Smallest relative change that counts; None for the timing's default.

    Attributes:
        metrics: Further metrics of the points.
        comparisons: A/Bs by series.
        named: Answers of searches, by series.
        turns: For wrong results, by series.
        elsewhere: Keys of alerts of other toolchains, measured alternately with the run's.
        alerts: Alerts of the run's toolchain, by series.
        lapsed: Keys of expected alerts that have expired.
        runs: Runs by key.
        decisions: Decisions of people about series.
        facts: Facts by series and run.
    """

    def __init__(
        self, session: Session, run: RunRow, line: CommitLine, points: Sequence[PointRow],
        expected: Mapping[int, PointOutcome], stored: Sequence[MemberRow], window: int, min_effect: float | None,
    ) -> None:  # fmt: skip
        self.session, self.run, self.line, self.points = session, run, line, points
        self.expected, self.min_effect = expected, min_effect
        series = [point.series.pk for point in points]
        named = {name for point in points for name in point.metrics or ()}
        self.metrics = [
            metric for metric in judged()
            if metric.name in named or (metric.column and any(point.value(metric) is not None for point in points))
        ]  # fmt: skip
        self.pasts = Pasts(session, line, series, window, self.metrics)
        self.comparisons = comparisons.of_series(session, series)
        self.named = comparisons.named_of_series(session, series)
        self.turns = turns_wrong(session, line, [point.series.pk for point in points if point.status == "wrong"])
        self.elsewhere = frozenset(
            alert.pk for alert in stored if alert.run.pk in self.pasts.elsewhere(alert.series.pk)
        )
        here = (alert for alert in stored if alert.pk not in self.elsewhere)
        self.alerts = grouped(here, lambda alert: alert.series.pk)
        self.lapsed = frozenset(alert.pk for alert in stored if members.lapsed(session, alert, run))
        ends = {end for turn in self.turns.values() for end in (turn.base, turn.head) if end is not None}
        self.runs = run_rows(session, ends.union(self.pasts.runs))
        self.decisions = in_force(session, run.started)
        self.facts: dict[tuple[int, int], Facts] = {}

    def load_facts(self, places: Iterable[tuple[int, int]]) -> None:
        """Read the facts at these (series, run)."""
        self.facts |= facts_at(self.session, places)

    def facts_of(self, point: PointRow, span: Span) -> tuple[Facts | None, Facts]:
        """Return the facts before and after a change of a point's series."""
        series = point.series.pk
        before = None if span.base is None else self.facts.get((series, span.base.pk))
        after = self.facts.get((series, span.head.pk))
        return before, after or Facts(
            point.run.state, point.environment.facts, point.kernel_hash, code_hash=point.code_hash
        )

    def clean_commits(self, runs: Iterable[int]) -> set[str]:
        """Return the known commits of runs, without those of dirty trees."""
        return {self.runs[key].commit for key in runs if self.runs[key].state.clean}

    def evidence(self, series: int, before: Sequence[int], after: Sequence[int]) -> list[Compared]:
        """Return the A/Bs of a series that are evidence for a change, newest first.

        `before` and `after` are the runs certainly before the change and since, oldest first. An A/B counts if the
        toolchain of the last one before or of one since measured it.
        """
        stored = self.comparisons.get(series, ())
        if not stored:
            return []
        line = self.pasts.software_of(series, [*before[-1:], *after])
        return [one for one in stored if line.includes(one)]

    def accepted(self, alert: MemberRow) -> bool:
        """Return whether the level after an alert's change is accepted."""
        return alert.state == "invalid" or (alert.state == "expected" and alert.pk not in self.lapsed)

    def alert(self, key: int | None) -> MemberRow | None:
        """Return an alert by its key."""
        return None if key is None else self._alerts_by_key.get(key)

    @cached_property
    def _alerts_by_key(self) -> dict[int, MemberRow]:
        return {alert.pk: alert for of_series in self.alerts.values() for alert in of_series}

    def alert_text(self, alert: MemberRow) -> str:
        """Return the state of a row's alert. An alert closed as fixed is about to reopen, since its change is back."""
        if alert.state == "fixed":
            return f"regressed again after incident {alert.incident.pk} was fixed"
        return "; ".join(filter(None, [alert.text, "expired" if alert.pk in self.lapsed else None, alert.advice]))
