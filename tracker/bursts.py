"""A latency from its bursts: the one place that says what the median over bursts is, and how far they are apart.

Samples count as the float32 that the database keeps, and the median to the seven digits that those hold, so that a
record, a row of the database and a table of a measurement have the same latency.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

_LARGEST = 3.4e38


@dataclass(frozen=True)
class Bursts:
    """Medians of bursts, in ms."""

    medians: tuple[float, ...]  # in the order in which they were measured
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, bursts_ms: Sequence[Sequence[float]]) -> Bursts:
        """Return what bursts of samples in ms say. Raises ValueError where there is none, or an empty one."""
        if not bursts_ms or not all(bursts_ms):
            raise ValueError("no burst, or an empty one")
        return cls.of_singles([_single(burst) for burst in bursts_ms])

    @classmethod
    def of_singles(cls, bursts_ms: Sequence[Sequence[float]]) -> Bursts:
        """Return the same of samples that were rounded to float32 before."""
        medians = tuple(median(sorted(burst)) for burst in bursts_ms)
        ordered = sorted(medians)
        return cls(medians, float(f"{median(ordered):.7g}"), ordered[0], ordered[-1])

    @property
    def half_spread(self) -> float:
        """Half the range of the bursts' medians, relative to the median."""
        return (self.high - self.low) / 2 / self.median


def median(ordered: Sequence[float]) -> float:
    """Return the median of numbers that are sorted."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _single(burst: Sequence[float]) -> tuple[float, ...]:
    """Samples as float32."""
    packed = f"{len(burst)}f"
    return struct.unpack(packed, struct.pack(packed, *(min(sample, _LARGEST) for sample in burst)))
