"""How much time each problem of a run leaves to gain: the best backend's latency over the speed of light."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from groupbench.tracker.identity import SHOWN
from groupbench.tracker.query.rows import PointRow


@dataclass(frozen=True)
class Gain:
    """A problem, by its fastest backend."""

    point: PointRow
    gap: float  # latency over the least time at the ceilings that the run's canaries measured
    gain_ms: float  # of each call, at the speed of light
    share: float  # of all that the run's problems could gain

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        return (*SHOWN, "latency_ms", "floor_ms", "gap", "gain_ms", "share")

    def flat(self) -> dict[str, Any]:
        named = {name: getattr(self.point.series, name) for name in SHOWN}
        latency = self.point.median_ms or 0.0
        return named | {
            "latency_ms": latency,
            "floor_ms": latency - self.gain_ms,
            "gap": self.gap,
            "gain_ms": self.gain_ms,
            "share": self.share,
        }


def gains(points: Iterable[PointRow]) -> list[Gain]:
    """Return a gain for each problem whose speed of light is known, the largest first."""
    best: dict[tuple[str, ...], PointRow] = {}
    for point in points:
        if not point.timed or point.median_ms is None or not (point.metrics or {}).get("sol_gap"):
            continue
        other = best.get(point.series.problem)
        if other is None or other.median_ms is None or point.median_ms < other.median_ms:
            best[point.series.problem] = point
    left = {key: max(0.0, (p.median_ms or 0.0) * (1 - 1 / (p.metrics or {})["sol_gap"])) for key, p in best.items()}
    total = sum(left.values())
    found = [
        Gain(point, (point.metrics or {})["sol_gap"], left[key], left[key] / total if total else 0.0)
        for key, point in best.items()
    ]
    return sorted(found, key=lambda gain: (-gain.gain_ms, gain.point.series.sort_key))
