"""From the store to what pages show: the only part of the report that asks the database.

`gather` reads for a whole report. What it is made of takes points in hand, so that a page of one operator, or of a few
series, can be made of fewer: `places`, `histories`, `speed_maps`, `find_roofline`, `operator_page`, `operator_pages`.
Only `gather` and `newest_bursts` take a session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate, groupby

import numpy as np
from sqlalchemy import select
from sqlalchemy.orm import Session

from groupbench.tracker.environment import environment_differences
from groupbench.tracker.judge import alerts, gate
from groupbench.tracker.judge.alerts import AlertRow
from groupbench.tracker.judge.verdicts import CANARY, Gate, Judged
from groupbench.tracker.query import points as query
from groupbench.tracker.query.rows import Filter, PointRow, RunRow, RunSummary, SeriesRow
from groupbench.tracker.report.shown import (
    Bursts,
    Ceilings,
    Level,
    Mark,
    OperatorPage,
    Roofline,
    RoofPoint,
    RunLabel,
    SeriesHistory,
    SpeedMap,
    SpeedRow,
)
from groupbench.tracker.stats import scan
from groupbench.tracker.stats.thresholds import FLOOR, GROSS, MIN_EFFECT, YOUNG
from groupbench.tracker.store.chunks import chunks
from groupbench.tracker.store.packing import unpack_samples
from groupbench.tracker.store.schema import Point

POINTS = 100_000
"""Results that one page holds: of more series it holds fewer runs."""
LABEL = 52
"""Characters of a problem that an axis has room for."""
_WHERE = ("hardware", "host", "protocol")
_FACTS = ("dtype", "mode", "seed")


@dataclass(frozen=True)
class Report:
    """What the report is made of."""

    gate: Gate
    newest: RunSummary  # the run that is judged
    runs: tuple[RunRow, ...]  # those that the plots hold, the oldest first; the judged one is the last
    labels: tuple[RunLabel, ...]  # of the same
    points: tuple[PointRow, ...]  # of the judged run
    pages: tuple[OperatorPage, ...]  # of every operator that the plots hold; canaries last


def gather(session: Session, *, run: RunRow | None = None, limit: int = 200, min_effect: float | None = None) -> Report:
    """A report on a run, the newest if none is named, with the history of the `limit` runs up to it.

    Raises QueryError where the database holds no run.
    """
    run = run or query.find_run(session)
    judged = gate.judge_run(session, run, min_effect=min_effect)
    shown = _runs_up_to(session, run, limit)
    runs = tuple(summary.run for summary in shown)
    points = query.points_of_runs(session, [row.pk for row in runs])
    stored = alerts.find(session, until=run)
    bursts = newest_bursts(session, points, places(runs))
    return Report(
        gate=judged,
        newest=shown[-1],
        runs=runs,
        labels=run_labels(runs),
        points=tuple(point for point in points if point.run.pk == run.pk),
        pages=tuple(operator_pages(points, runs, stored=stored, judged=judged.rows, bursts=bursts)),
    )


def _runs_up_to(session: Session, run: RunRow, limit: int) -> list[RunSummary]:
    """The `limit` runs up to and with `run`, the oldest first; fewer where they hold more than `POINTS`."""
    instant = timedelta(microseconds=1)  # several runs may have begun at the same
    beside = query.runs(session, where=Filter(since=run.started, until=run.started + instant))
    before = query.runs(session, limit, Filter(until=run.started))
    newest = [*(each for each in beside if each.run.pk <= run.pk), *before][:limit]
    held = list(accumulate(sum(each.counts.values()) for each in newest))
    return [each for each, points in zip(newest, held, strict=True) if points <= max(POINTS, held[0])][::-1]


def run_labels(runs: Iterable[RunRow]) -> tuple[RunLabel, ...]:
    return tuple(label_of(run) for run in runs)


def label_of(run: RunRow) -> RunLabel:
    return RunLabel(run.id, str(run.state), f"{run.started:%Y-%m-%d %H:%M}", run.subject or "")


def places(runs: Sequence[RunRow]) -> dict[int, int]:
    """Where each run stands, by its key; runs are given the oldest first."""
    return {run.pk: place for place, run in enumerate(runs)}


def operator_pages(
    points: Sequence[PointRow],  # by series, then time: as query.points_of_runs gives them
    runs: Sequence[RunRow],  # the oldest first; the last is the one that the pages are about
    *,
    stored: Sequence[AlertRow] = (),
    judged: Sequence[Judged] = (),
    bursts: Mapping[int, tuple[Bursts, ...]] | None = None,  # by series
) -> list[OperatorPage]:
    """A page for each operator, canaries last."""
    where = places(runs)
    told = histories(points, where, stored=stored, judged=judged, bursts=bursts)
    names = sorted({point.series.operator for point in points}, key=lambda name: (name == CANARY, name))
    canaries = [point for point in points if point.series.operator == CANARY]
    pages = []
    for name in names:
        own = [point for point in points if point.series.operator == name]
        mine = [history for history in told if history.series.operator == name]
        pages.append(operator_page(name, own, canaries, mine, runs[-1]))
    return pages


def operator_page(
    name: str,
    points: Sequence[PointRow],  # of the operator, in any runs
    canaries: Sequence[PointRow],  # of the same runs
    told: Sequence[SeriesHistory],  # of the operator
    run: RunRow,  # the run that the page is about
) -> OperatorPage:
    return OperatorPage(
        name=name,
        speeds=tuple(speed_maps(points, run)),
        roofline=find_roofline(points, canaries, run),
        histories=tuple(told),
    )


def backends_of(points: Iterable[PointRow]) -> tuple[str, ...]:
    """Those that were to be measured: baselines first, the others by name."""
    base: dict[str, bool] = {}
    for point in points:
        base[point.series.backend] = base.get(point.series.backend, False) or point.baseline
    return tuple(sorted(base, key=lambda name: (not base[name], name)))


# ---- histories


def histories(
    points: Sequence[PointRow],  # by series, then time
    where: Mapping[int, int],  # place of each run by its key: see `places`
    *,
    stored: Sequence[AlertRow] = (),
    judged: Sequence[Judged] = (),
    bursts: Mapping[int, tuple[Bursts, ...]] | None = None,  # by series
) -> list[SeriesHistory]:
    """Each series over the runs, with what happened to it. Changes are looked for in all at once."""
    by_series = [list(own) for _, own in groupby(points, key=lambda point: point.series.pk)]
    changes = _changes(by_series)
    of_alerts: dict[int, list[AlertRow]] = {}
    for alert in stored:
        of_alerts.setdefault(alert.series.pk, []).append(alert)
    verdicts = {row.series.pk: row for row in judged}
    answer = []
    for own, found in zip(by_series, changes, strict=True):
        series = own[0].series
        at = [where[point.run.pk] for point in own]
        marks = _environment_marks(own, at)
        marks += [Mark("change", where[own[change.index].run.pk], _change_text(change)) for change in found]
        marks += _alert_marks(of_alerts.get(series.pk, ()), where)
        marks += _verdict_marks(verdicts.get(series.pk), marks, where)
        answer.append(SeriesHistory(
            series=series,
            runs=tuple(at),
            ms=tuple(point.median_ms for point in own),
            low=tuple(point.low_ms for point in own),
            high=tuple(point.high_ms for point in own),
            rms=tuple(point.rms for point in own),
            status={i: point.status for i, point in enumerate(own) if point.status != "ok"},
            message={i: point.message for i, point in enumerate(own) if point.status != "ok" and point.message},
            interpreted=own[-1].timing == "interpreted",
            marks=tuple(sorted(marks, key=lambda mark: mark.at)),
            levels=tuple(_levels(own, at, {change.index for change in found})),
            bursts=(bursts or {}).get(series.pk, ()),
        ))  # fmt: skip
    return answer


def newest_bursts(
    session: Session,
    points: Sequence[PointRow],  # by series, then time
    where: Mapping[int, int],
    count: int = 2,
) -> dict[int, tuple[Bursts, ...]]:
    """Samples of the newest timed results of each series, the newest last. Reads the samples of no other."""
    wanted: dict[int, PointRow] = {}
    for _, own in groupby(points, key=lambda point: point.series.pk):
        timed = [point for point in own if point.timed]
        wanted.update((point.pk, point) for point in timed[-count:])
    packed: dict[int, bytes | None] = {}
    for chunk in chunks(wanted):
        packed.update(
            (key, blob) for key, blob in session.execute(select(Point.id, Point.samples).where(Point.id.in_(chunk)))
        )
    found: dict[int, tuple[Bursts, ...]] = {}
    for key, point in wanted.items():
        samples = packed.get(key)
        if samples is not None:
            bursts = Bursts(where[point.run.pk], unpack_samples(samples))
            found[point.series.pk] = (*found.get(point.series.pk, ()), bursts)
    return found


def _changes(by_series: Sequence[Sequence[PointRow]]) -> list[list[scan.Change]]:
    """Of each series; indices are those of its points."""
    chosen = [[i for i, point in enumerate(own) if point.timed] for own in by_series]
    given = [_history([own[i] for i in keep]) for own, keep in zip(by_series, chosen, strict=True)]
    return [
        [_moved(change, keep) for change in found]
        for found, keep in zip(scan.find_all_changes(given), chosen, strict=True)
    ]


def _history(points: Sequence[PointRow]) -> scan.History:
    environments: dict[tuple[str, str | None], int] = {}
    states: dict[object, int] = {}
    environment = [environments.setdefault((p.environment.identity, p.timing), len(environments)) for p in points]
    # A dirty tree is like no other, and a canary does not depend on the code.
    alone = [p.run.dirty or p.series.operator == CANARY for p in points]
    state = [
        states.setdefault(p.run.pk if one else p.run.state, len(states)) for p, one in zip(points, alone, strict=True)
    ]
    timing = (points[-1].timing if points else None) or "gpu"
    return scan.History(
        log_ms=np.log(np.array([p.median_ms for p in points], dtype=np.float64)),
        error=np.array([np.nan if p.error is None else p.error for p in points], dtype=np.float64),
        environment=np.array(environment, dtype=np.int64),
        state=np.array(state, dtype=np.int64),
        floor=FLOOR[timing],
        min_effect=float(np.log1p(MIN_EFFECT[timing])),
    )


def _moved(change: scan.Change, keep: Sequence[int]) -> scan.Change:
    return replace(change, index=keep[change.index], first=keep[change.first], last=keep[change.last])


def _change_text(change: scan.Change) -> str:
    low, effect, high = (100 * float(np.expm1(value)) for value in (change.low, change.effect, change.high))
    return f"{effect:+.1f}% ({low:+.1f} to {high:+.1f}%)"


def _environment_marks(own: Sequence[PointRow], at: Sequence[int]) -> list[Mark]:
    marks = []
    for before, point, place in zip(own, own[1:], at[1:], strict=False):
        if before.environment.identity != point.environment.identity:
            changed = environment_differences(before.environment.facts, point.environment.facts)
            marks.append(Mark("environment", place, "; ".join(changed)))
    return marks


def _alert_marks(stored: Iterable[AlertRow], where: Mapping[int, int]) -> list[Mark]:
    marks = []
    for alert in stored:
        if alert.run.pk in where:
            change = "" if alert.change is None else f", {alert.metric} {100 * alert.change:+.1f}%"
            marks.append(Mark("alert", where[alert.run.pk], alert.text + change))
    return marks


def _verdict_marks(row: Judged | None, marks: Sequence[Mark], where: Mapping[int, int]) -> list[Mark]:
    """What the gate says of the newest change, unless history says the same."""
    if row is None or not row.verdict.changed or row.span is None or row.what != "latency" or row.change is None:
        return []
    at = where.get(row.span.head.pk)
    if at is None or any(mark.kind == "change" and mark.at == at for mark in marks):
        return []
    return [Mark("verdict", at, f"{row.verdict} {100 * row.change:+.1f}%")]


def _levels(own: Sequence[PointRow], at: Sequence[int], changed: set[int]) -> list[Level]:
    levels: list[Level | None] = []
    stretch: list[int] = []
    for i, point in enumerate(own):
        if not point.timed:
            continue
        if stretch and (i in changed or own[stretch[-1]].environment.identity != point.environment.identity):
            levels.append(_level(own, at, stretch))
            stretch = []
        stretch.append(i)
    if stretch:
        levels.append(_level(own, at, stretch))
    return [level for level in levels if level is not None]


def _level(own: Sequence[PointRow], at: Sequence[int], stretch: Sequence[int]) -> Level | None:
    """None where too few results stand far apart: a change among them could not be found, and they are no level."""
    ordered = sorted(own[i].median_ms or 0.0 for i in stretch)
    n = len(ordered)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    far = GROSS[own[stretch[-1]].timing or "gpu"] * middle
    if n < YOUNG and max(middle - ordered[0], ordered[-1] - middle) > far:
        return None
    return Level(at[stretch[0]], at[stretch[-1]], middle)


# ---- backends against each other


def speed_maps(
    points: Sequence[PointRow],  # of one operator, in any runs
    run: RunRow,  # the run that the page is about
) -> list[SpeedMap]:
    """Problems by backends, a map for each hardware, host and protocol: across these nothing is compared."""
    by_place: dict[tuple[str, ...], list[PointRow]] = {}
    for point in points:
        by_place.setdefault(tuple(getattr(point.series, name) for name in _WHERE), []).append(point)
    maps = [
        SpeedMap(" · ".join(place), backends_of(own), tuple(_speed_rows(own, run))) for place, own in by_place.items()
    ]
    return sorted((one for one in maps if one.rows), key=lambda one: (-len(one.rows), one.title))


def _speed_rows(points: Sequence[PointRow], run: RunRow) -> list[SpeedRow]:
    """Each problem as the newest run has it that timed any backend: a night cut short hides no older result.

    Only results of one run, one environment and one kind of timing stand beside each other.
    """
    by_problem: dict[tuple[str, ...], list[PointRow]] = {}
    for point in points:
        by_problem.setdefault(point.series.problem, []).append(point)
    told = _telling(point.series for point in points)
    answer: list[tuple[tuple[tuple[str, ...], tuple[int, ...], str], SpeedRow]] = []
    for own in by_problem.values():
        timed = [point for point in own if point.timed]
        if not timed:
            continue
        newest = max(timed, key=lambda point: (point.run.started, point.run.pk)).run
        here = [point for point in own if point.run.pk == newest.pk]
        like = max((point for point in here if point.timed), key=lambda point: point.baseline)
        ms: dict[str, float] = {}
        why: dict[str, str] = {}
        for point in here:
            alike = (point.timing, point.environment.identity) == (like.timing, like.environment.identity)
            if point.timed and alike and point.median_ms is not None:
                ms[point.series.backend] = point.median_ms
            else:
                why[point.series.backend] = _why_no_speed(point)
        series = like.series
        facts = tuple(str(getattr(series, name)) for name in told)
        row = SpeedRow(
            label=problem_label(series, told),
            problem=" ".join([series.shape, *facts]),
            run=label_of(newest),
            older=newest.pk != run.pk,
            ms=ms,
            why=why,
        )
        answer.append(((facts, _sizes(series), series.shape), row))
    return [row for _, row in sorted(answer, key=lambda pair: pair[0])]


def problem_label(series: SeriesRow, told: Sequence[str] = ()) -> str:
    """The shape, cut in the middle where it is long, and what else tells problems apart."""
    shape = series.shape
    if len(shape) > LABEL:
        shape = f"{shape[: LABEL - 16]}…{shape[-15:]}"
    return " ".join([shape, *(str(getattr(series, name))[:24] for name in told)])


def find_roofline(
    points: Sequence[PointRow],  # of one operator, in any runs
    canaries: Sequence[PointRow],  # of the same runs
    run: RunRow,  # the run that the page is about
) -> Roofline:
    """The newest run that holds both results of known work and canaries in the same environment."""
    if all(point.series.operator == CANARY for point in points):
        return Roofline(missing="Canaries are what ceilings are measured by.")
    timed = [point for point in points if point.timed and point.series.flops and point.series.min_bytes]
    if not timed:
        return Roofline(missing="No result has a speed and known work: FLOP, and bytes that must be moved.")
    by_run: dict[int, list[PointRow]] = {}
    for point in timed:
        by_run.setdefault(point.run.pk, []).append(point)
    for own in sorted(by_run.values(), key=lambda own: (own[0].run.started, own[0].run.pk), reverse=True):
        held = own[0].run
        for identity in dict.fromkeys(point.environment.identity for point in own):
            beside = [p for p in canaries if p.run.pk == held.pk and p.environment.identity == identity and p.timed]
            ceilings = _ceilings(held, beside)
            if ceilings is None:
                continue
            alike = [point for point in own if point.environment.identity == identity]
            return Roofline(tuple(map(_roof_point, alike)), ceilings, note=_roof_note(alike, ceilings, held, run))
    return Roofline(
        missing="No ceilings were measured: no run of this operator holds canaries, a copy and a matrix product. "
        "Add the operator canary to the plan."
    )


def _ceilings(run: RunRow, canaries: Sequence[PointRow]) -> Ceilings | None:
    products = [point for point in canaries if point.tflops]
    copies = [point for point in canaries if not point.series.flops and point.gbps]
    if not products or not copies:
        return None
    best = max(products, key=lambda point: point.tflops or 0.0)
    widest = max(point.gbps or 0.0 for point in copies)
    return Ceilings(label_of(run), best.tflops or 0.0, widest, best.series.dtype)


def _roof_point(point: PointRow) -> RoofPoint:
    series = point.series
    assert series.flops and series.min_bytes and point.median_ms
    problem = f"{series.shape} {series.dtype} {series.mode}"
    return RoofPoint(series.backend, problem, series.dtype, series.flops, series.min_bytes, point.median_ms)


def _roof_note(alike: Sequence[PointRow], ceilings: Ceilings, held: RunRow, run: RunRow) -> str | None:
    notes = []
    if held.pk != run.pk:
        notes.append(f"Of the newest run that holds canaries too: {ceilings.run.text}.")
    others = sorted({point.series.dtype for point in alike} - {ceilings.dtype})
    if others:
        notes.append(f"The ceiling was measured in {ceilings.dtype}; that of {', '.join(others)} is another.")
    above = sum(_roof_point(point).share(ceilings) > 1 for point in alike)
    if above:
        notes.append(
            f"{above} of {len(alike)} results {'lies' if above == 1 else 'lie'} above the ceiling: it is what one "
            "library call reached, and no bound of the machine."
        )
    return " ".join(notes) or None


def _why_no_speed(point: PointRow) -> str:
    if point.status != "ok":
        return f"{point.status}: {point.message}" if point.message else point.status
    if point.timing == "interpreted":
        return "interpreted: no speed"
    return "no latency" if point.median_ms is None else "elsewhere: measured in another environment"


def _telling(series: Iterable[SeriesRow]) -> list[str]:
    """Facts that differ among an operator's problems: the others need not be said of each."""
    rows = list(series)
    return [name for name in _FACTS if len({getattr(row, name) for row in rows}) > 1]


def _sizes(series: SeriesRow) -> tuple[int, ...]:
    order = {"G": 0, "M": 1, "N": 2, "K": 3}
    return tuple(series.dims[name] for name in sorted(series.dims, key=lambda name: (order.get(name, 9), name)))
