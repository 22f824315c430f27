"""The verdict on a run: read the store, apply the statistics, and decide the exit code of a CI job.

All series of the run are judged together to bound the false-positive rate of the whole night. A change that history
alone cannot decide is a suspect until an A/B comparison of the two commits finds "same" or "different". Stored alerts
count too: an accepted level replaces the earlier one, and a regression stays a regression while its alert is open,
even when it has become the series' normal level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from sqlalchemy.orm import Session

from groupbench.tracker.facts.metrics import METRICS
from groupbench.tracker.facts.physics import floor_ms, too_fast
from groupbench.tracker.facts.record import Timing
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import alerts, transitions
from groupbench.tracker.judge.accuracy import AccuracyRule
from groupbench.tracker.judge.alert_rules import AlertRules
from groupbench.tracker.judge.further import FurtherRule, Moved
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.headline import summary
from groupbench.tracker.judge.latency import LatencyRule
from groupbench.tracker.judge.named import named_in, number_of_commits
from groupbench.tracker.judge.parts import joined
from groupbench.tracker.judge.pasts import authors
from groupbench.tracker.judge.pins import PinRule
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.verdicts import Evidence, Gate, Judged, exit_code
from groupbench.tracker.query.lines import CommitLine, CommitsBetween, FirstParents, line_of
from groupbench.tracker.query.points import outcomes_of_run, points_of_run
from groupbench.tracker.query.rows import PointOutcome, PointRow, RunRow
from groupbench.tracker.query.runs import previous_of_plan
from groupbench.tracker.query.series import series_rows
from groupbench.tracker.stats.thresholds import least_effect
from groupbench.tracker.text.unchecked import unchecked_lines
from groupbench.tracker.text.wording import counted

__all__ = ["WINDOW", "Gate", "Judged", "judge_run"]

WINDOW = 100
"""Number of earlier results of a series that count: about three months of nightly runs."""

_OF_THE_CELL = ("latency", "accuracy", "repeatability", "result")
"""Metrics of alerts that the latency and accuracy rules produce."""


def judge_run(
    session: Session,
    run: RunRow,
    *,
    window: int = WINDOW,
    min_effect: float | None = None,  # relative; None for the timing's default
    strict: bool = False,
    first_parents: FirstParents | None = None,  # ancestry beyond the database, such as git's
    between: CommitsBetween = lambda first, last: None,
) -> Gate:
    """Return the verdict on each series that a run contains or should contain. Only reads."""
    points = points_of_run(session, run)
    line = line_of(session, run, first_parents)
    previous = previous_of_plan(session, run, {point.series.hardware for point in points}, line)
    expected = {} if previous is None else outcomes_of_run(session, previous)
    stored_alerts = alerts.find(session, series={point.series.pk for point in points}, runs=set(line.runs))
    data = GateData.read(session, run, line, points, expected, stored_alerts, window, min_effect)
    judge = _Judge(data, between)
    rows = [*judge.rows(), *_absent(session, points, expected)]
    code = exit_code(rows, strict)
    same_commit = previous is not None and run.state.same_code(previous.state)
    first_line = summary(rows, code, strict=strict, same_commit=same_commit)
    notes = (*_notes(line, data.pasts.copies), *_limits(rows, min_effect), *judge.pins.notes())
    transition_lines = (*transitions.lines(rows, run), *transitions.baselines(rows))
    return Gate(
        run, tuple(rows), code, first_line, tuple(stored_alerts), data.lapsed, data.elsewhere, line, notes,
        transition_lines,
    )  # fmt: skip


def _notes(line: CommitLine, copies: int) -> tuple[str, ...]:
    left_out = ""
    if copies:
        left_out = f"{counted(copies, 'result')} ignored: same samples as in another run of the same commit"
    return tuple(note for note in (line.note, left_out) if note)


def _limits(rows: Sequence[Judged], min_effect: float | None) -> tuple[str, ...]:
    """Return a note on the smallest change that counts, if it is as large as on a CPU."""
    on_cpu = any(row.judged_latency and row.point is not None and row.point.timing == "cpu" for row in rows)
    if min_effect is not None or not on_cpu:
        return ()
    least = 100 * least_effect("cpu", 1.0)
    return (f"on a CPU, changes of less than {least:.0f} % do not count; `gate --min-effect` sets another limit",)


class _Judge:
    """Applies every rule to every point."""

    def __init__(self, data: GateData, between: CommitsBetween) -> None:
        self.data, self.between = data, cache(between)
        self.further = FurtherRule(data)  # first: the pasts that it drops and those that the others keep do not add up
        self.latency, self.accuracy = LatencyRule(data), AccuracyRule(data)
        self.alerts, self.pins = AlertRules(data), PinRule(data)
        rules = (self.latency, self.accuracy, self.further)
        places = {(point.series.pk, run) for point in data.points for rule in rules for run in rule.places(point)}
        for series, turn in data.turns.items():
            places |= {(series, run) for run in (turn.base, turn.head) if run is not None}
        data.load_facts(places)

    def rows(self) -> list[Judged]:
        """Return the rows of all points, in order."""
        rows = [row for point in self.data.points for row in self._rows(point)]
        rows = [replace(row, note=joined(row.note, _unknown(row), _unchecked(row))) for row in rows]
        author_of = authors(self.data.session, {row.span.head.commit for row in rows if row.span})
        return [
            replace(row, span=self._described(row, row.span, author_of.get(row.span.head.commit))) if row.span else row
            for row in rows
        ]

    def _described(self, row: Judged, span: Span, author: str | None) -> Span:
        """Return a row's span with the facts about its commits."""
        data = self.data
        stored = data.named.get(row.series.pk, ())
        named = named_in(data.session, stored, span, row.what, row.change, data.line)
        counts = row.verdict.changed or row.verdict is Verdict.WRONG
        return replace(
            span, head_author=author, named=named, number=number_of_commits(span, self.between) if counts else None
        )

    def _rows(self, point: PointRow) -> list[Judged]:
        """Return the row of a point, or several rows if the series changed in several ways at different times."""
        if point.status != "ok":
            row = self.alerts.apply(self.accuracy.not_ok(point), *_OF_THE_CELL)
            return [*(self.alerts.of_wrong_result(point) if row.verdict is Verdict.WRONG else ()), row]
        reason = _implausible(point)
        if reason is not None:  # stored before `ingest` refused such records
            row = Judged(point.series, Verdict.WRONG, point, "result", note=reason)
            return [*self.alerts.of_wrong_result(point), row]
        rows = self._of_the_cell(point)
        moved = self.latency.moved(point)
        with_it = self.further.explained(point, moved)
        rows = [
            replace(row, note=joined(with_it, row.note)) if row.what == "latency" and row.change is not None else row
            for row in rows
        ]
        further = [row for row in self._further(point, moved) if not row.verdict.quiet or row.alert or row.news.loud]
        further += self.pins.rows(point, rows[0])
        kept = [row for row in rows if not row.verdict.quiet or row.alert or row.news.loud]
        return [*(kept if further else rows), *further]

    def _of_the_cell(self, point: PointRow) -> list[Judged]:
        """Return a row for latency and result, or several rows if they changed at different times."""
        rows = self._newest_of_the_cell(point)
        left = self.latency.remaining(point)
        if left is None or any(row.what == "latency" and row.verdict.fails for row in rows):
            return rows  # such as the row of an open alert of the earlier slowdown
        return [*rows, self.alerts.apply(left, "latency")]

    def _newest_of_the_cell(self, point: PointRow) -> list[Judged]:
        """Return a row for the newest change of latency and result, or two rows."""
        row = self.latency.row(point)
        worse = self.accuracy.worse(point, row)
        if worse is None:
            return self.alerts.rows(row, *_OF_THE_CELL)
        if row.verdict.changed and row.span and worse.span and row.span.overlaps(worse.span):
            return self.alerts.rows(worse, *_OF_THE_CELL)
        evidence = Evidence(sigma=row.evidence.sigma, latest=row.evidence.latest)
        unchanged = Judged(row.series, Verdict.OK, point, evidence=evidence)
        worse = self.accuracy.worse(point, unchanged) or worse
        # Each row has its own alerts, so that neither hides the other's open ones.
        both = [*self.alerts.rows(row, "latency"), *self.alerts.rows(worse, worse.what)]
        return [one for one in both if not one.verdict.quiet or one.alert] or both[1:]

    def _further(self, point: PointRow, moved: Moved | None) -> list[Judged]:
        """Return a row for each other metric that changed or has an alert."""
        rows = self.further.rows(point, moved)
        covered = {row.what for row in rows} | {"latency"}
        alerted_metrics = {each.metric for each in self.data.alerts.get(point.series.pk, ())}
        for name in sorted((alerted_metrics - covered) & set(METRICS)):
            rows.append(Judged(point.series, Verdict.OK, point, name))
        return [each for row in rows for each in self.alerts.rows(row, row.what)]


def _unknown(row: Judged) -> str | None:
    """Return that a change cannot be traced to commits, because one of them is not known; else None."""
    if row.span is None or row.verdict.quiet or all(end.state.has_commit for end in row.span.ends):
        return None
    return "the commit is not known, and cannot be measured again; `tritonbench --commit HASH` names the next one"


def _unchecked(row: Judged) -> str | None:
    """Return the checks that the A/B of a row could not make, or None."""
    lines = () if row.compared is None else unchecked_lines(row.compared.unchecked)
    return f"A/B {'; '.join(lines)}" if lines else None


def _implausible(point: PointRow) -> str | None:
    """Return why a point's latency is implausible, or None."""
    if not point.timed or point.median_ms is None:
        return None
    series, where = point.series, point.environment.facts
    timing: Timing = "gpu" if point.timing == "gpu" else "cpu"
    amounts = (series.flops or 0, series.min_bytes or 0, series.dtype)
    return too_fast(point.median_ms, floor_ms(*amounts, timing, where.gpu, where.cpu_count))


def _absent(session: Session, points: Sequence[PointRow], expected: Mapping[int, PointOutcome]) -> list[Judged]:
    """Return a row for each series that the plan's previous run measured on this hardware and this run lacks."""
    present = {point.series.pk for point in points}
    hardware = {point.series.hardware for point in points}
    missing_keys = [key for key, before in expected.items() if before.status == "ok" and key not in present]
    missing = sorted(series_rows(session, missing_keys).values(), key=lambda series: series.sort_key)
    note = "measured in the previous run of the plan, absent from this one"
    return [
        Judged(series, Verdict.MISSING, None, "absent", note=note) for series in missing if series.hardware in hardware
    ]
