"""The rules that metrics share: statistics for values that scatter, exact comparison for those that do not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from groupbench.tracker.facts.metrics import LATENCY, Metric, finite_or_none, judged, relative
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge import together
from groupbench.tracker.judge.causes import find_cause
from groupbench.tracker.judge.gate_data import GateData
from groupbench.tracker.judge.parts import OLD, Q, history, joined, loud_while_new, moved, percent
from groupbench.tracker.judge.pasts import Past, coded
from groupbench.tracker.judge.spans import Span
from groupbench.tracker.judge.toolchain_lines import of_one_toolchain
from groupbench.tracker.judge.verdicts import Effect, Evidence, Judged, News
from groupbench.tracker.query.points import environment_rows
from groupbench.tracker.query.rows import PointRow
from groupbench.tracker.query.runs import code_of_runs
from groupbench.tracker.stats import scan as scans
from groupbench.tracker.store import comparisons
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.comparisons import DIFFERENT, SAME
from groupbench.tracker.store.schema import Point, Run

GROSS = 5.0
"""Multiple of the smallest relevant change that makes a suspect in a series too young for statistics."""

FLIPS = 2
"""Number of recent changes of an exact value after which a return to an earlier value is not news.

A regression, its fix and the same regression again are three changes. An alert already covers the last one."""


@dataclass(frozen=True)
class _Step:
    """A change of one metric of a point. `first` and `last` are places in the past."""

    metric: Metric
    past: Past  # in the environment of the point
    first: int  # the last result that is certainly before
    last: int  # the first result that is certainly after
    since: int  # results after it
    before: float  # level, in the metric's unit
    verdict: Verdict
    finding: scans.SeriesFinding | None = None


@dataclass(frozen=True)
class Moved:
    """A change of the latency."""

    effect: float  # logarithm
    span: Span


class FurtherRule:
    """Judges the metrics without a rule of their own."""

    def __init__(self, data: GateData) -> None:
        self.data = data
        self.steps: dict[int, list[_Step]] = {}
        self._places = {run: number for number, run in enumerate(reversed(data.line.runs))}
        metrics = [metric for metric in judged() if any(point.value(metric) is not None for point in data.points)]
        shares = sum(metric.share for metric in metrics if metric.rule == "scatter")
        scattered: dict[str, list[tuple[PointRow, Past]]] = {
            metric.name: [] for metric in metrics if metric.rule == "scatter"
        }
        steps: dict[str, list[tuple[PointRow, _Step]]] = {metric.name: [] for metric in metrics}
        for metric, pasts in self._pasts(metrics):
            if metric.rule == "exact":
                steps[metric.name] += _exact_steps(metric, pasts)
            else:
                scattered[metric.name] += pasts
        for metric in metrics:
            if (of_all := scattered.pop(metric.name, None)) is not None:
                # The chance of a false suspect is that of the night, so the metrics share it.
                pasts_alone = together.alone(of_all) if metric.shared else of_all
                steps[metric.name] += _scattered_steps(metric, pasts_alone, Q * metric.share / shares)
            for point, step in steps[metric.name]:
                self.steps.setdefault(point.pk, []).append(step)

    def places(self, point: PointRow) -> list[int]:
        """Return the runs whose facts are needed to find a cause."""
        steps = self.steps.get(point.pk, ())
        return [int(step.past.run[at]) for step in steps for at in (step.first, step.last)]

    def rows(self, point: PointRow, latency: Moved | None) -> list[Judged]:
        """Return a row for each metric that changed, without those that the change of the latency explains."""
        steps = self.steps.get(point.pk, ())
        return [self._row(point, step) for step in steps if not self._explained(step, latency)]

    def explained(self, point: PointRow, latency: Moved | None) -> str | None:
        """Return the metrics that changed with the latency and as much, as text for its row."""
        steps = [step for step in self.steps.get(point.pk, ()) if self._explained(step, latency)]
        return joined(*(_change_text(point, step) for step in steps))

    def _explained(self, step: _Step, latency: Moved | None) -> bool:
        """Return whether a metric follows the latency, which changed at the same time and no less."""
        if latency is None or step.metric.follows != LATENCY.name or step.finding is None:
            return False
        effect = step.finding.effect or 0.0
        same_way = effect * latency.effect > 0
        beyond = abs(effect) - abs(latency.effect)
        return same_way and beyond < math.log1p(step.metric.least) and self._span(step).overlaps(latency.span)

    def _span(self, step: _Step) -> Span:
        run = step.past.run
        return Span(self.data.runs.get(int(run[step.first])), self.data.runs[int(run[step.last])])

    def _row(self, point: PointRow, step: _Step) -> Judged:
        metric, past, finding = step.metric, step.past, step.finding
        now, span = _now(point, step), self._span(step)
        cause = find_cause(*self.data.facts_of(point, span), result=True, metric=metric.name)
        apart = f"unlike the other cells of the run, and unlike its {metric.follows}" if metric.shared else None
        note = joined(_change_text(point, step), apart, cause.note)
        change = now / step.before - 1 if step.before else None
        effect, evidence = Effect(before=step.before, change=change), Evidence(len(past) - 1)
        if finding is not None:
            change = change if finding.effect is None else math.expm1(finding.effect)
            effect = replace(effect, change=change, low=relative(finding.low), high=relative(finding.high))
            evidence = replace(
                evidence, sigma=finite_or_none(finding.sigma), p=finite_or_none(finding.p), q=finite_or_none(finding.q)
            )
        row = Judged(
            point.series, step.verdict, point, metric.name, cause.word, note, effect, evidence, News(step.since), span
        )  # fmt: skip
        return self._hinted(row) if metric.hint and step.verdict is Verdict.SUSPECT else row

    def _hinted(self, row: Judged) -> Judged:
        """Judge a hint of a slower kernel by an A/B comparison of the latency, or request one."""
        assert row.span is not None
        run, base = self.data.run, row.span.base
        ends = [{end.commit} if end is not None and end.state.clean else set() for end in (base, run)]
        stored = self.data.evidence(row.series.pk, [] if base is None else [base.pk], [run.pk])
        compared = comparisons.about(of_one_toolchain(stored), *ends)
        if compared is None or not compared.decided or (compared.effect is None and compared.verdict != SAME):
            askable = base is not None and all(ends) and base.commit != run.commit
            return replace(row, ab_base=base if askable else None, compared=compared)
        slower = compared.verdict == DIFFERENT and (compared.effect or 0.0) > 0
        effect = f" {percent(compared.effect)}" if compared.effect is not None else ""
        note = joined(row.note, f"A/B of the latency: {compared.verdict}{effect}")
        verdict = Verdict.REGRESSED if slower else Verdict.OK
        return replace(row, verdict=verdict, compared=compared, note=note, news=loud_while_new(row.news))

    def _pasts(self, metrics: list[Metric]) -> Iterator[tuple[Metric, list[tuple[PointRow, Past]]]]:
        """Yield metrics with the pasts of some points, in their environment, on their accepted level.

        Rows are read and dropped in chunks of points, since those of a large night take more memory than all pasts.
        """
        measured = (
            point
            for point in self.data.points
            if point.status == "ok" and any(point.value(metric) is not None for metric in metrics)
        )
        for points in chunks(measured):
            rows = self._read(metrics, points)
            keys = {row.environment_id for each in rows.values() for row in each}
            environments = environment_rows(self.data.session, keys)
            machine = coded({key: row.machine for key, row in environments.items()})
            toolchain = coded({key: row.toolchain for key, row in environments.items()})
            for metric in metrics:
                pasts = (
                    (point, self._past(metric, point, rows[point.series.pk], machine, toolchain))
                    for point in points
                    if point.value(metric) is not None
                )
                yield metric, [(point, past) for point, past in pasts if len(past) > 1]

    def _read(self, metrics: list[Metric], points: Sequence[PointRow]) -> dict[int, list[Any]]:
        """Return the stored rows of the points' series by key, oldest first."""
        columns = [getattr(Point, metric.column) for metric in metrics if metric.column is not None]
        query = (
            select(
                Point.series_id,
                Point.run_id,
                Point.environment_id,
                code_of_runs().label("code"),
                Point.metrics,
                *columns,
            )
            .join(Run, Point.run_id == Run.id)
            .where(Point.status == "ok", Point.series_id.in_({point.series.pk for point in points}))
        )
        rows: dict[int, list[Any]] = {}
        for row in self.data.session.execute(query):
            if row.run_id in self._places:
                rows.setdefault(row.series_id, []).append(row)
        newest = slice(-self.data.window - 1, None)
        return {key: sorted(each, key=lambda row: self._places[row.run_id])[newest] for key, each in rows.items()}

    def _past(
        self,
        metric: Metric,
        point: PointRow,
        rows: list[Any],
        machine: NDArray[np.int64],
        toolchain: NDArray[np.int64],
    ) -> Past:
        """Return one point's past. `machine`, `toolchain`: codes by environment, as `coded` makes them."""
        of_metric = [(row, value) for row in rows if (value := _value(metric, row)) is not None]
        where = np.array([row.environment_id for row, _ in of_metric])
        code = np.array([row.code for row, _ in of_metric])
        values = Past(
            point.series.pk,
            run=np.array([row.run_id for row, _ in of_metric]),
            environment=machine[where],
            toolchain=toolchain[where],
            state=code * (len(toolchain) + 1) + toolchain[where],
            log=np.array([metric.log(value) for _, value in of_metric]),
            error=np.full(len(of_metric), np.nan),
        )
        past = self.data.on_accepted_level(self.data.pasts.of_its_toolchain(values), metric.name)
        if metric.follows:
            past = self.data.on_accepted_level(past, metric.follows)
        return past.where(past.alike)


def _now(point: PointRow, step: _Step) -> float:
    """Return the point's value, or the level since the change if the value includes what the run's series share."""
    now = point.value(step.metric)
    assert now is not None
    if step.metric.shared and step.finding is not None and step.finding.effect is not None:
        return step.before * math.exp(step.finding.effect)
    return now


def _change_text(point: PointRow, step: _Step) -> str:
    metric = step.metric
    return f"{metric.name} {metric.text(step.before)} → {metric.text(_now(point, step))}"


def _value(metric: Metric, row: Any) -> float | None:
    return getattr(row, metric.column) if metric.column is not None else (row.metrics or {}).get(metric.name)


def _levels(metric: Metric, log: NDArray[np.float64]) -> list[float]:
    """Return the values of logarithms, without rounding residue."""
    return [0.0 if level < 1e-29 else float(f"{level:.9g}") for level in (np.exp(log) - metric.negligible).tolist()]


def _exact_steps(metric: Metric, pasts: Iterable[tuple[PointRow, Past]]) -> Iterator[tuple[PointRow, _Step]]:
    """Yield the newest change of each history whose value still differs from the one before."""
    for point, past in pasts:
        levels = _levels(metric, past.log)
        differs = [
            at for at in range(1, len(levels))
            if metric.worse(levels[at - 1], levels[at]) or metric.worse(levels[at], levels[at - 1])
        ]  # fmt: skip
        if not differs:
            continue
        at, since = differs[-1], len(levels) - differs[-1]
        if past.state[at - 1] == past.state[at] or _flips(metric, levels, differs):
            continue
        if metric.worse(levels[at - 1], levels[-1]):
            verdict = Verdict.SUSPECT if metric.hint else Verdict.REGRESSED
            yield point, _Step(metric, past, at - 1, at, since, levels[at - 1], verdict)
        elif since <= OLD:
            yield point, _Step(metric, past, at - 1, at, since, levels[at - 1], Verdict.IMPROVED)


def _flips(metric: Metric, levels: list[float], differs: list[int]) -> bool:
    """Return whether an exact value alternates, such as when a tuner picks a config on every run.

    It does if it changed before among the newest results, and an earlier value was as bad as the new one.
    """
    recent = [at for at in differs if at >= len(levels) - OLD]
    earlier = levels[max(0, len(levels) - OLD - 1) : differs[-1]]
    return len(recent) > FLIPS and any(not metric.worse(level, levels[-1]) for level in earlier)


def _scattered_steps(
    metric: Metric, pasts: Iterable[tuple[PointRow, Past]], q: float
) -> Iterator[tuple[PointRow, _Step]]:
    """Yield the changes found by statistics. q: chance of any false suspect in a nightly run of 20 quiet series."""
    points_and_pasts = list(pasts)
    least, gross = math.log1p(metric.least), math.log1p(GROSS * metric.least)
    worse: Literal[1, -1] = -1 if metric.better == "higher" else 1
    histories = [
        history(
            past, metric.floor, least, (metric.name, point.series.hardware, point.series.host), gross=gross, worse=worse
        )
        for point, past in points_and_pasts
    ]
    for (point, past), finding in zip(points_and_pasts, scans.scan(histories, q=q), strict=True):
        step = _step_found(metric, past, finding) if moved(finding) else None
        if step is not None:
            yield point, step


def _step_found(metric: Metric, past: Past, finding: scans.SeriesFinding) -> _Step | None:
    """Return a finding as a step, or None for an old improvement or a change within the same code."""
    assert finding.effect is not None
    worse = (finding.effect > 0) == (metric.better == "lower")
    certain = finding.verdict == "changed"
    first, last, since = finding.first or 0, finding.last or 0, finding.n_after
    if not worse and (not certain or since > OLD):
        return None
    if past.state[first] == past.state[last]:  # the code is the same before and after
        return None
    if finding.before is None:
        before = _levels(metric, past.log[first : first + 1])[0]
    else:
        before = math.exp(finding.before) - metric.negligible
    verdict = (Verdict.REGRESSED if certain and not metric.hint else Verdict.SUSPECT) if worse else Verdict.IMPROVED
    return _Step(metric, past, first, last, since, before, verdict, finding)
