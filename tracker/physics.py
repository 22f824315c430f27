"""The least time that a problem can take on a device: a latency below it was not measured, whatever says so.

A card cannot compute faster than its peak, nor read faster than its memory. Peaks are of the makers' datasheets, dense,
at the highest clock, and of a card that is not in the table those of the fastest that is. What fits the L2 cache is not
counted as traffic: it may be there already, or still. Sources: NVIDIA's datasheets of V100, T4, A10, A100, L4, L40S,
H100, H200, B200, GB200 and GeForce RTX 4090 and 5090; AMD's of MI300X and MI325X.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import lru_cache

from groupbench.tracker.record import Record, Timing

TOLERANCE = 0.05
"""A clock may be above the datasheet's for a moment, and events tick in steps."""


@dataclass(frozen=True)
class Card:
    """tflops of fp16 and bf16 products; fp8 and fp32 ones; memory in TB/s; L2 in MiB."""

    tflops: float
    fp8: float
    fp32: float
    terabytes: float
    l2_mib: int


# By a part of the name that the driver gives; the first that fits.
CARDS: dict[str, Card] = {
    "GB200": Card(2500, 5000, 80, 8.0, 126),
    "GB300": Card(2500, 5000, 80, 8.0, 126),
    "B200": Card(2250, 4500, 80, 8.0, 126),
    "B300": Card(2250, 4500, 80, 8.0, 126),
    "H200": Card(989, 1979, 67, 4.9, 60),
    "GH200": Card(989, 1979, 67, 4.9, 60),
    "H100 NVL": Card(835, 1671, 60, 3.9, 60),
    "H100 PCIe": Card(756, 1513, 51, 2.1, 50),
    "H100": Card(989, 1979, 67, 3.4, 50),
    "H800": Card(989, 1979, 67, 3.4, 50),
    "A100": Card(312, 312, 19.5, 2.1, 40),
    "L40S": Card(362, 733, 91.6, 0.9, 96),
    "L40": Card(181, 362, 90.5, 0.9, 96),
    "L4": Card(121, 242, 30.3, 0.3, 48),
    "A10": Card(125, 125, 31.2, 0.6, 6),
    "V100": Card(125, 125, 15.7, 0.9, 6),
    "T4": Card(65, 65, 8.1, 0.32, 4),
    "RTX 5090": Card(420, 840, 105, 1.8, 96),
    "RTX 4090": Card(330, 661, 82.6, 1.01, 72),
    "MI300X": Card(1307, 2615, 163, 5.3, 256),
    "MI325X": Card(1307, 2615, 163, 6.0, 256),
}
FASTEST = Card(2500, 5000, 163, 8.0, 256)
EMULATED = 6
"""Products in bf16 that a product in fp32 can be made of."""

CPU_FLOPS = {"fp32": 0.7e12, "fp64": 0.35e12}
"""A second, of a core at 5.5 GHz with two vector units of 512 bits."""
CPU_NARROW_FLOPS = 12e12
"""Of a core with matrix units, in 8 and 16 bits."""
CPU_CORES = 1024
"""Where a record does not say."""
CPU_CALL_MS = 5e-5
"""What a call of nothing takes."""


def floor_ms(
    flops: int, min_bytes: int, dtype: str, timing: Timing, gpu: str | None, cpu_count: int | None
) -> tuple[float, str]:
    """(the least time of a problem in ms, what takes it); 0 where nothing is known.

    gpu  text that contains the card's name, as the driver has it
    """
    if timing == "interpreted":
        return 0.0, ""
    if timing == "cpu":
        rate = CPU_FLOPS.get(dtype, CPU_NARROW_FLOPS) * (cpu_count or CPU_CORES)
        # What has no number of operations may be another's benchmark of a few instructions.
        call_ms = CPU_CALL_MS if flops else 0.0
        return max((1e3 * flops / rate, "arithmetic at this processor's peak"), (call_ms, "a call of nothing"))
    card = _card(gpu or "")
    peaks = {"fp16": card.tflops, "bf16": card.tflops, "fp32": max(card.fp32, card.tflops / EMULATED)}
    peak = peaks.get(dtype, card.fp8)
    beyond_cache = max(0, min_bytes - (card.l2_mib << 20))
    return max(
        (flops / peak / 1e9, f"arithmetic at {peak:g} TFLOP/s"),
        (beyond_cache / card.terabytes / 1e9, f"traffic at {card.terabytes:g} TB/s"),
    )


@lru_cache(maxsize=64)
def _card(gpu: str) -> Card:
    return next((card for part, card in CARDS.items() if part in gpu), FASTEST)


def too_fast(ms: float, floor: tuple[float, str]) -> str | None:
    """Why a latency cannot be one, or None; `floor` is what `floor_ms` gives."""
    least, what = floor
    if ms >= least * (1 - TOLERANCE):
        return None
    return f"implausible: {ms:.4g} ms is less than the {least:.4g} ms of {what}"


def implausible(record: Record) -> str | None:
    """Why a record's latency cannot be one, or None."""
    if record.latency is None or not record.latency.bursts_ms or not all(record.latency.bursts_ms):
        return None
    cell, where, bursts = record.cell, record.environment, record.latency.bursts_ms
    amounts = (cell.flops or 0, cell.min_bytes or 0, cell.dtype)
    floor = floor_ms(*amounts, record.latency.timing, where.gpu, where.cpu_count)
    if too_fast(min(map(min, bursts)), floor) is None:  # nearly always: no median is less
        return None
    return too_fast(statistics.median(map(statistics.median, bursts)), floor)
