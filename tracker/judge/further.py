"""The rules that metrics share: by the statistics of a history, or exactly where a value does not scatter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from groupbench.tracker.judge.causes import find_cause
from groupbench.tracker.judge.known import Known
from groupbench.tracker.judge.parts import OLD, Q, history, joined, known, moved, relative
from groupbench.tracker.judge.pasts import Past
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.verdicts import Judged
from groupbench.tracker.metrics import Metric, judged
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.stats import scan as scans
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.schema import Environment, Point, Run
from groupbench.tracker.verdicts import Verdict

GROSS = 5.0
"""Where a series is too young for statistics, a change of so many times the least that counts is a suspect."""


@dataclass(frozen=True)
class _Step:
    """A change of one metric of a point: places are those of the past."""

    metric: Metric
    past: Past  # in the environment of the point
    first: int  # the last result that is certainly before
    last: int  # the first that is certainly after
    since: int  # results after it
    before: float  # level, in the unit
    verdict: Verdict
    finding: scans.Finding | None = None


class FurtherRule:
    """Judges the metrics that have no rule of their own."""

    def __init__(self, facts: Known) -> None:
        self.known = facts
        self.steps: dict[int, list[_Step]] = {}
        held = [metric for metric in judged() if any(point.value(metric) is not None for point in facts.points)]
        rows = self._read(held)
        for metric in held:
            pasts = self._pasts(metric, rows)
            find = _exact_steps if metric.rule == "exact" else _scattered_steps
            for point, step in find(metric, pasts):
                self.steps.setdefault(point.pk, []).append(step)

    def places(self, point: PointRow) -> list[int]:
        """Return the runs at which facts of the point's series tell a cause."""
        steps = self.steps.get(point.pk, ())
        return [int(step.past.run[at]) for step in steps for at in (step.first, step.last)]

    def rows(self, point: PointRow) -> list[Judged]:
        """Return a row for each metric that changed."""
        return [self._row(point, step) for step in self.steps.get(point.pk, ())]

    def _row(self, point: PointRow, step: _Step) -> Judged:
        metric, past, finding = step.metric, step.past, step.finding
        now = point.value(metric)
        assert now is not None
        span = Span(self.known.runs.get(int(past.run[step.first])), self.known.runs[int(past.run[step.last])])
        cause = find_cause(*self.known.facts_of(point, span), result=True)
        note = joined(f"{metric.name} {metric.text(step.before)} → {metric.text(now)}", cause.note)
        row = Judged(
            point.series, step.verdict, point, metric.name, cause.word, note, before=step.before, span=span,
            change=now / step.before - 1 if step.before else None, n=len(past) - 1, since=step.since,
        )  # fmt: skip
        if finding is None:
            return row
        return replace(
            row, low=relative(finding.low), high=relative(finding.high), p=known(finding.p), q=known(finding.q),
            sigma=known(finding.sigma), change=row.change if finding.effect is None else math.expm1(finding.effect),
        )  # fmt: skip

    def _read(self, held: list[Metric]) -> dict[int, list[Any]]:
        """What is stored of the series of the points, by series, the oldest first."""
        if not held:
            return {}
        series = {point.series.pk for point in self.known.points if any(point.value(m) is not None for m in held)}
        columns = [getattr(Point, metric.column) for metric in held if metric.column is not None]
        query = (
            select(
                Point.series_id, Point.run_id, Environment.identity, Run.commit_id, Run.dirty, Point.metrics, *columns
            )
            .join(Run, Point.run_id == Run.id)
            .join(Environment, Point.environment_id == Environment.id)
            .where(Point.status == "ok")
        )
        place = {run: number for number, run in enumerate(reversed(self.known.line.runs))}
        rows: dict[int, list[Any]] = {}
        for chunk in chunks(series):
            for row in self.known.session.execute(query.where(Point.series_id.in_(chunk))):
                if row.run_id in place:
                    rows.setdefault(row.series_id, []).append(row)
        newest = slice(-self.known.window - 1, None)
        return {key: sorted(each, key=lambda row: place[row.run_id])[newest] for key, each in rows.items()}

    def _pasts(self, metric: Metric, rows: dict[int, list[Any]]) -> Iterator[tuple[PointRow, Past]]:
        """The past of each point in its environment, on the level that was accepted, where there is one."""
        for point in self.known.points:
            if point.status != "ok" or point.value(metric) is None:
                continue
            of_metric = [(row, value) for row in rows[point.series.pk] if (value := _value(metric, row)) is not None]
            identities: dict[str, int] = {}
            past = Past(
                point.series.pk,
                np.array([row.run_id for row, _ in of_metric]),
                np.array([identities.setdefault(row.identity, len(identities)) for row, _ in of_metric]),
                np.array([-row.run_id - 1 if row.dirty else row.commit_id for row, _ in of_metric]),
                np.array([metric.log(value) for _, value in of_metric]),
                np.full(len(of_metric), np.nan),
            )
            past = self.known.on_accepted_level(past.where(past.alike), metric.name)
            if len(past) > 1:
                yield point, past


def _value(metric: Metric, row: Any) -> float | None:
    return getattr(row, metric.column) if metric.column is not None else (row.metrics or {}).get(metric.name)


def _levels(metric: Metric, log: NDArray[np.float64]) -> list[float]:
    """The values themselves, without what rounding leaves of the logarithm."""
    return [0.0 if level < 1e-29 else float(f"{level:.9g}") for level in (np.exp(log) - metric.negligible).tolist()]


def _exact_steps(metric: Metric, pasts: Iterable[tuple[PointRow, Past]]) -> Iterator[tuple[PointRow, _Step]]:
    """The newest change of each history, where what it came to is still another value than the one before."""
    for point, past in pasts:
        levels = _levels(metric, past.log)
        differs = [
            at for at in range(1, len(levels))
            if metric.worse(levels[at - 1], levels[at]) or metric.worse(levels[at], levels[at - 1])
        ]  # fmt: skip
        if not differs:
            continue
        at, since = differs[-1], len(levels) - differs[-1]
        if metric.worse(levels[at - 1], levels[-1]):
            yield point, _Step(metric, past, at - 1, at, since, levels[at - 1], Verdict.REGRESSED)
        elif since <= OLD:
            yield point, _Step(metric, past, at - 1, at, since, levels[at - 1], Verdict.IMPROVED)


def _scattered_steps(metric: Metric, pasts: Iterable[tuple[PointRow, Past]]) -> Iterator[tuple[PointRow, _Step]]:
    """The changes that statistics find."""
    held = list(pasts)
    least, gross = math.log1p(metric.least), math.log1p(GROSS * metric.least)
    histories = [
        history(past, metric.floor, least, (metric.name, point.series.hardware, point.series.host), gross=gross)
        for point, past in held
    ]
    for (point, past), finding in zip(held, scans.scan(histories, q=Q), strict=True):
        step = _step_found(metric, past, finding) if moved(finding) else None
        if step is not None:
            yield point, step


def _step_found(metric: Metric, past: Past, finding: scans.Finding) -> _Step | None:
    """Return the step that the statistics found, or None where it is old good news or between runs of the same code."""
    assert finding.effect is not None
    worse = (finding.effect > 0) == (metric.better == "lower")
    certain = finding.verdict == "changed"
    first, last, since = finding.first or 0, finding.last or 0, finding.n_after
    if not worse and (not certain or since > OLD):
        return None
    if past.state[first] == past.state[last]:  # the same code before and after is no change of it
        return None
    if finding.before is None:
        before = _levels(metric, past.log[first : first + 1])[0]
    else:
        before = math.exp(finding.before) - metric.negligible
    verdict = (Verdict.REGRESSED if certain else Verdict.SUSPECT) if worse else Verdict.IMPROVED
    return _Step(metric, past, first, last, since, before, verdict, finding)
