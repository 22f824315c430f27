"""The possible gain per problem in a run: the best backend's latency against the speed of light."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from groupbench.tracker.facts.identity import SHOWN
from groupbench.tracker.query.rows import PointRow, SeriesRow
from groupbench.tracker.query.tables import FlatRow, of_part


@dataclass(frozen=True)
class Gain(FlatRow):
    """A problem's possible gain with the fastest backend."""

    point: PointRow
    gap: float  # latency over the shortest time at the ceilings measured by the run's canaries
    gain_ms: float  # time saved per call at the speed of light
    share: float  # fraction of the listed problems' total possible gain
    time_share: float  # fraction of the listed problems' total time
    us: float | None = None  # time saved per step of the traffic; None without one

    COLUMNS: ClassVar[Mapping[str, str]] = {
        **of_part("point.series", SHOWN),
        "latency_ms": "point.median_ms",
        "floor_ms": "floor_ms",
        "sol_gap": "gap",
        "time_share": "time_share",
        "gain_ms": "gain_ms",
        "gain_share": "share",
        "gain_us": "us",
    }

    @property
    def floor_ms(self) -> float:
        return (self.point.median_ms or 0.0) - self.gain_ms


CANARY = "canary"
RATES = {"bf16": 1.0, "fp16": 1.0, "fp8": 2.0}
"""Rate of products relative to 16-bit ones. The canaries' problems of other dtypes set no ceiling."""


def floors(points: Iterable[PointRow]) -> Callable[[PointRow], float | None]:
    """Return a function that gives the shortest time in ms of a problem at the ceilings of these points' canaries."""
    rates: dict[str | None, float] = {}
    bandwidths: dict[str | None, float] = {}
    for point in points:
        series, card = point.series, point.environment.facts.gpu_uuid
        if series.operator == CANARY and point.timed and point.timing == "gpu" and point.median_ms:
            if series.flops and series.dtype in RATES:
                rates[card] = max(rates.get(card, 0.0), series.flops / point.median_ms / RATES[series.dtype])
            if series.min_bytes:
                bandwidths[card] = max(bandwidths.get(card, 0.0), series.min_bytes / point.median_ms)

    def floor(point: PointRow) -> float | None:
        series, card = point.series, point.environment.facts.gpu_uuid
        rate, bandwidth = rates.get(card), bandwidths.get(card)
        if not rate or not bandwidth or series.dtype not in RATES or not series.flops or not series.min_bytes:
            return None
        return max(series.flops / (rate * RATES[series.dtype]), series.min_bytes / bandwidth)

    return floor


def gains(
    points: Iterable[PointRow],
    others: Iterable[PointRow] = (),
    calls: Callable[[SeriesRow], float | None] | None = None,
) -> list[Gain]:
    """Return the gain for each problem with a known speed of light, largest first.

    Args:
        points: The points of a run.
        others: Points of other runs of the same commit, whose canaries are used if the run lacks one.
        calls: Returns how often a step of the traffic calls a problem. The gains are then sorted by step.
    """
    best = _fastest(points, floors(others))
    saved = [max(0.0, ms * (1 - 1 / gap)) for _, ms, gap in best]
    total, time = sum(saved), sum(ms for _, ms, _ in best)
    gain_list = [
        Gain(
            point,
            gap,
            gain_ms,
            gain_ms / total if total else 0.0,
            ms / time if time else 0.0,
            None if calls is None else 1000 * gain_ms * (calls(point.series) or 0.0),
        )
        for (point, ms, gap), gain_ms in zip(best, saved, strict=True)
    ]
    return sorted(gain_list, key=lambda gain: (-(gain.us or 0.0), -gain.gain_ms, gain.point.series.sort_key))


def _fastest(
    points: Iterable[PointRow], floor: Callable[[PointRow], float | None]
) -> list[tuple[PointRow, float, float]]:
    """Return (point, latency in ms, gap) for the fastest backend on each problem with a known speed of light."""
    best: dict[tuple[str, ...], tuple[PointRow, float, float]] = {}
    for point in points:
        ms, gap = point.median_ms, (point.metrics or {}).get("sol_gap")
        if not gap and ms is not None and point.timed and point.timing == "gpu" and point.series.operator != CANARY:
            least = floor(point)
            gap = ms / least if least else None
        if not point.timed or ms is None or not gap:
            continue
        known = best.get(point.series.problem)
        if known is None or ms < known[1]:
            best[point.series.problem] = point, ms, gap
    return list(best.values())
