"""Choose the series for a report to show in full, and index all series if some are left out.

A nightly run with 20,000 series would make a page of 100 MB. Above `FULL` series the page shows the changed and the
slowest ones, and lists all in a searchable index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from groupbench.tracker.facts.grouping import grouped
from groupbench.tracker.facts.verdicts import Verdict
from groupbench.tracker.judge.verdicts import CANARY, Gate, Judged, worst
from groupbench.tracker.query.rows import PointRow, SeriesRow
from groupbench.tracker.report.shown import shown_speedup

FULL = 500
"""Maximum number of series that a report shows in full: 500 series of 100 runs take about 5 MB of the file."""

INDEXED = 50_000
"""Maximum number of series in the index, the most severe verdicts first. Each takes about 60 bytes of the file."""

_NAMES = ("operator", "backend", "shape", "dtype", "mode")


@dataclass(frozen=True)
class Coverage:
    """The series shown in full."""

    total: int  # series of the run and earlier ones
    full: frozenset[int] | None = None  # keys of the series shown in full; None is all of them

    @property
    def complete(self) -> bool:
        return self.full is None

    @property
    def shown(self) -> int:
        return self.total if self.full is None else len(self.full)

    def __contains__(self, series: int) -> bool:
        return self.full is None or series in self.full


def choose(judged: Gate, limit: int = FULL) -> list[int]:
    """Return at most `limit` series keys from the run, the most important ones first.

    First come canaries, since the roofline needs them, then changed series, the most severe first. Next are the other
    backends on changed problems, and then the problems with the slowest backends, each operator in turn.
    """
    rows = sorted(worst(judged.rows), key=lambda row: row.verdict.severity)
    changed = [row.series for row in judged.notable]
    problems = grouped(rows, lambda row: row.series.problem)
    beside = [row.series for series in changed for row in problems[series.problem]]
    canaries = [row.series for row in rows if row.series.operator == CANARY]
    ordered = chain(canaries, changed, beside, _slowest_first(problems.values()))
    return list(dict.fromkeys(series.pk for series in ordered))[:limit]


def _slowest_first(problems: Iterable[Sequence[Judged]]) -> Iterator[SeriesRow]:
    """Yield series by problem, the slowest problems first and operators in turn, so none hides the others."""
    ordered = sorted(
        problems, key=lambda rows: -_slowness([row.point for row in rows if row.point is not None and row.point.timed])
    )
    queues = grouped(ordered, lambda rows: rows[0].series.operator)
    for turn in zip_longest(*(queues[name] for name in sorted(queues)), fillvalue=()):
        yield from (row.series for rows in turn for row in rows)


def _slowness(points: Sequence[PointRow]) -> float:
    """Return the slowest backend's latency over the baseline's, or over the fastest backend's without a baseline."""
    latencies = [point.median_ms for point in points if point.median_ms]
    if len(latencies) < 2:
        return 0.0
    baseline = next((point.median_ms for point in points if point.baseline and point.median_ms), min(latencies))
    return max(latencies) / baseline


def index(judged: Gate, coverage: Coverage) -> dict[str, Any]:
    """Return every series in the run for `index.js`, the most severe verdicts first.

    Names are stored once: each entry in `rows` holds positions in `names`, the verdict's position in `verdicts`,
    latency in ms, speed-up over the baseline, the series key, and 1 if the page shows the series in full.
    """
    rows = sorted(worst(judged.rows), key=lambda row: row.verdict.severity)
    names: dict[str, dict[str, int]] = {name: {} for name in _NAMES}
    verdicts: dict[Verdict, int] = {}
    baselines = {row.series.problem: row.point for row in rows if row.point and row.point.baseline and row.point.timed}
    lines = [
        [
            *(names[name].setdefault(getattr(row.series, name), len(names[name])) for name in _NAMES),
            verdicts.setdefault(row.verdict, len(verdicts)),
            *_shortened(row.point, baselines.get(row.series.problem)),
            row.series.pk,
            int(row.series.pk in coverage),
        ]
        for row in rows[:INDEXED]
    ]
    return {
        "names": [list(names[name]) for name in _NAMES],
        "verdicts": [[str(verdict), verdict.tone.name] for verdict in verdicts],
        "rows": lines,
        "total": len(rows),
    }


def _shortened(point: PointRow | None, baseline: PointRow | None) -> tuple[float | None, float | None]:
    """Return latency and speed-up with a few digits; None if unknown, and if noise hides the speed-up."""
    if point is None:
        return None, None
    latency = point.median_ms if point.timed else None
    speedup, noisy = shown_speedup(point, baseline)
    return (
        None if latency is None else float(f"{latency:.4g}"),
        None if speedup is None or noisy else float(f"{speedup:.3g}"),
    )
