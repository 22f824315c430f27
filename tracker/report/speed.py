"""Compare backends by problem, each problem with the newest results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.query.lines import CommitLine
from groupbench.tracker.query.rows import PointRow, RunRow, SeriesRow, measured_alike
from groupbench.tracker.report.shown import SpeedMap, SpeedRow, label_of

LABEL = 52
"""Maximum number of characters of a shape on an axis."""

_WHERE = ("hardware", "host", "protocol")
_FACTS = ("dtype", "mode", "seed")


def backends_of(points: Iterable[PointRow]) -> tuple[str, ...]:
    """Return the points' backends: baselines first, then the others, each sorted by name."""
    base: dict[str, bool] = {}
    for point in points:
        base[point.series.backend] = base.get(point.series.backend, False) or point.baseline
    return tuple(sorted(base, key=lambda name: (not base[name], name)))


def speed_maps(
    points: Sequence[PointRow],  # of one operator, in any runs
    run: RunRow,  # the run that the page is about
    line: CommitLine,  # of the runs
) -> list[SpeedMap]:
    """Return a map with problems by backends for each hardware, host and protocol, since these are not compared."""
    by_place = grouped(points, lambda point: tuple(getattr(point.series, name) for name in _WHERE))
    maps = [
        SpeedMap(" · ".join(place), backends_of(group), tuple(_speed_rows(group, run, line)))
        for place, group in by_place.items()
    ]
    return sorted((one for one in maps if one.rows), key=lambda one: (-len(one.rows), one.title))


def _speed_rows(points: Sequence[PointRow], run: RunRow, line: CommitLine) -> list[SpeedRow]:
    """Return a row for each problem, from the newest run with a timed backend.

    A problem left out by an interrupted run keeps the older results. A row compares only results with one run,
    environment and timing.
    """
    by_problem = grouped(points, lambda point: point.series.problem)
    differing = _differing(point.series for point in points)
    keyed_rows: list[tuple[tuple[tuple[str, ...], tuple[int, ...], str], SpeedRow]] = []
    for group in by_problem.values():
        timed = [point for point in group if point.timed]
        if timed:
            newest = max((point.run for point in timed), key=line.place)
            series = timed[0].series
            facts = tuple(str(getattr(series, name)) for name in differing)
            here = [point for point in group if point.run.pk == newest.pk]
            row = _speed_row(here, problem_label(series, differing), facts, older=newest.pk != run.pk)
            keyed_rows.append(((facts, _sizes(series), series.shape), row))
    return [row for _, row in sorted(keyed_rows, key=lambda pair: pair[0])]


def _speed_row(points: Sequence[PointRow], label: str, facts: Sequence[str], older: bool) -> SpeedRow:
    """Return a problem's row from one run's points, at least one timed."""
    like = max((point for point in points if point.timed), key=lambda point: point.baseline)
    ms: dict[str, float] = {}
    why: dict[str, str] = {}
    spread: dict[str, float] = {}
    for point in points:
        if point.timed and measured_alike(point, like) and point.median_ms is not None:
            ms[point.series.backend] = point.median_ms
            spread[point.series.backend] = point.half_spread or 0.0
        else:
            why[point.series.backend] = _why_no_speed(point)
    return SpeedRow(label, " ".join([like.series.shape, *facts]), label_of(like.run), older, ms, why, spread)


def problem_label(series: SeriesRow, differing: Sequence[str] = ()) -> str:
    """Return the shape, shortened in the middle if long, and the facts to distinguish the problems."""
    shape = series.shape
    if len(shape) > LABEL:
        shape = f"{shape[: LABEL - 16]}…{shape[-15:]}"
    return " ".join([shape, *(str(getattr(series, name))[:24] for name in differing)])


def _why_no_speed(point: PointRow) -> str:
    if point.status != "ok":
        return f"{point.status}: {point.message}" if point.message else point.status
    if point.timing == "interpreted":
        return "interpreted: no speed"
    return "no latency" if point.median_ms is None else "elsewhere: measured in another environment"


def _differing(series: Iterable[SeriesRow]) -> list[str]:
    """Return the facts with differences among problems: only these appear in labels."""
    rows = list(series)
    return [name for name in _FACTS if len({getattr(row, name) for row in rows}) > 1]


def _sizes(series: SeriesRow) -> tuple[int, ...]:
    order = {"G": 0, "M": 1, "N": 2, "K": 3}
    return tuple(series.dims[name] for name in sorted(series.dims, key=lambda name: (order.get(name, 9), name)))
