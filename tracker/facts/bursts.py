"""Compute a latency from bursts: the median over bursts, and the spread.

Samples are rounded to float32, as the database stores them, and the median to seven digits, the precision of float32.
So a record, a database row and a printed table have the same latency.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

_LARGEST_FLOAT = 3.4e38


@dataclass(frozen=True)
class Bursts:
    """Medians of bursts, in ms."""

    medians: tuple[float, ...]  # in order of measurement
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, bursts_ms: Sequence[Sequence[float]]) -> Bursts:
        """Return the statistics of bursts of samples in ms. Raises ValueError without bursts or for an empty burst."""
        if not bursts_ms or not all(bursts_ms):
            raise ValueError("no burst, or an empty one")
        return cls.of_singles([_single(burst) for burst in bursts_ms])

    @classmethod
    def of_singles(cls, bursts_ms: Sequence[Sequence[float]]) -> Bursts:
        """Return the statistics of samples that are already rounded to float32."""
        medians = tuple(median(sorted(burst)) for burst in bursts_ms)
        ordered = sorted(medians)
        return cls(medians, float(f"{median(ordered):.7g}"), ordered[0], ordered[-1])

    @property
    def half_spread(self) -> float:
        """Half the range of the bursts' medians, relative to the median."""
        return (self.high - self.low) / 2 / self.median


def median(ordered: Sequence[float]) -> float:
    """Return the median of sorted numbers."""
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _single(burst: Sequence[float]) -> tuple[float, ...]:
    """Return samples rounded to float32."""
    packed = f"{len(burst)}f"
    return struct.unpack(packed, struct.pack(packed, *(min(sample, _LARGEST_FLOAT) for sample in burst)))
