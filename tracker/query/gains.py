"""The possible gain of each problem of a run: the best backend's latency against the speed of light."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from groupbench.tracker.identity import SHOWN
from groupbench.tracker.query.rows import PointRow


@dataclass(frozen=True)
class Gain:
    """The possible gain of a problem with its fastest backend."""

    point: PointRow
    gap: float  # latency over the shortest time at the ceilings measured by the run's canaries
    gain_ms: float  # time saved per call at the speed of light
    share: float  # fraction of the listed problems' total possible gain
    time_share: float  # fraction of the listed problems' total time

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        return (*SHOWN, "latency_ms", "floor_ms", "gap", "time_share", "gain_ms", "share")

    def flat(self) -> dict[str, Any]:
        named = {name: getattr(self.point.series, name) for name in SHOWN}
        latency = self.point.median_ms or 0.0
        return named | {
            "latency_ms": latency,
            "floor_ms": latency - self.gain_ms,
            "gap": self.gap,
            "time_share": self.time_share,
            "gain_ms": self.gain_ms,
            "share": self.share,
        }


def gains(points: Iterable[PointRow]) -> list[Gain]:
    """Return the gain of each problem whose speed of light is known, largest first."""
    best: dict[tuple[str, ...], PointRow] = {}
    for point in points:
        if not point.timed or point.median_ms is None or not (point.metrics or {}).get("sol_gap"):
            continue
        other = best.get(point.series.problem)
        if other is None or other.median_ms is None or point.median_ms < other.median_ms:
            best[point.series.problem] = point
    remaining = {
        key: max(0.0, (p.median_ms or 0.0) * (1 - 1 / (p.metrics or {})["sol_gap"])) for key, p in best.items()
    }
    total, time = sum(remaining.values()), sum(point.median_ms or 0.0 for point in best.values())
    gain_list = [
        Gain(
            point,
            (point.metrics or {})["sol_gap"],
            remaining[key],
            remaining[key] / total if total else 0.0,
            (point.median_ms or 0.0) / time if time else 0.0,
        )
        for key, point in best.items()
    ]
    return sorted(gain_list, key=lambda gain: (-gain.gain_ms, gain.point.series.sort_key))
