"""An operator's roofline, below the ceilings from the same run's canaries."""

from __future__ import annotations

from collections.abc import Sequence

from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.judge.verdicts import CANARY
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.rows import PointRow, RunRow
from groupbench.tracker.report.shown import CanaryCeilings, Roofline, RoofPoint, label_of


def find_roofline(
    points: Sequence[PointRow],  # of one operator, in any runs
    canaries: Sequence[PointRow],  # of the same runs
    run: RunRow,  # the run that the page is about
    line: CommitLine,  # of the runs
) -> Roofline | None:
    """Return the roofline from the newest run with results with known work and canaries in one environment.

    If there is no such run, the roofline has only the reason, in `missing`. Returns None for the canaries, and for an
    operator without a latency whose `flops` and `min_bytes` are known.
    """
    timed = [point for point in points if point.timed and point.series.flops and point.series.min_bytes]
    if not timed or all(point.series.operator == CANARY for point in points):
        return None
    places, measured = grouped(timed, _place), grouped((point for point in canaries if point.timed), _place)
    for place in sorted(places, key=lambda place: line.place(places[place][0].run), reverse=True):
        alike = places[place]
        held = alike[0].run
        ceilings = _ceilings(held, measured.get(place, ()))
        if ceilings is not None:
            return Roofline(tuple(map(_roof_point, alike)), ceilings, note=_roof_note(alike, ceilings, held, run))
    return Roofline(
        missing="No ceilings were measured: no run of this operator has canaries, a copy and a matrix product. "
        "Add the operator canary to the plan."
    )


def _place(point: PointRow) -> tuple[int, str]:
    """Return a point's run and environment."""
    return point.run.pk, point.environment.identity


def _ceilings(run: RunRow, canaries: Sequence[PointRow]) -> CanaryCeilings | None:
    products = [point for point in canaries if point.tflops]
    copies = [point for point in canaries if not point.series.flops and point.gbps]
    if not products or not copies:
        return None
    best = max(products, key=lambda point: point.tflops or 0.0)
    widest = max(point.gbps or 0.0 for point in copies)
    return CanaryCeilings(label_of(run), best.tflops or 0.0, widest, best.series.dtype)


def _roof_point(point: PointRow) -> RoofPoint:
    series = point.series
    assert series.flops and series.min_bytes and point.median_ms
    problem = f"{series.shape} {series.dtype} {series.mode}"
    return RoofPoint(series.backend, problem, series.dtype, series.flops, series.min_bytes, point.median_ms)


def _roof_note(alike: Sequence[PointRow], ceilings: CanaryCeilings, held: RunRow, run: RunRow) -> str | None:
    notes = []
    if held.pk != run.pk:
        notes.append(f"The ceilings are from the newest run with canaries: {ceilings.run.text}.")
    others = sorted({point.series.dtype for point in alike} - {ceilings.dtype})
    if others:
        notes.append(f"The ceiling was measured in {ceilings.dtype}; {', '.join(others)} may have another.")
    above = sum(_roof_point(point).share(ceilings) > 1 for point in alike)
    if above:
        notes.append(
            f"{above} of {len(alike)} results {'exceeds' if above == 1 else 'exceed'} the ceiling, which is the speed "
            "of one library call; the machine may do better."
        )
    return " ".join(notes) or None
