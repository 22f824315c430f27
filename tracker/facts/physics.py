"""The shortest time that a problem can take on a device. A lower latency is a measurement error.

A card cannot compute faster than its peak, nor read faster than its memory. Peaks are dense peaks at the highest clock
from the vendors' datasheets; an unknown card gets the peaks of the fastest one. Traffic that fits the L2 cache does not
count, because it may already be there. Sources: NVIDIA's datasheets of V100, T4, A10, A100, L4, L40S, H100, H200,
B200, GB200 and GeForce RTX 4090 and 5090; AMD's of MI300X and MI325X.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import lru_cache

from groupbench.tracker.facts.record import Record, Timing

TOLERANCE = 0.05
"""Relative tolerance, because clocks may briefly exceed the datasheet and events have a finite resolution."""


@dataclass(frozen=True)
class CardSpec:
    """The peaks of a card: TFLOP/s for fp16 and bf16, fp8 and fp32 products, memory in TB/s, L2 cache in MiB."""

    tflops: float
    fp8: float
    fp32: float
    terabytes: float
    l2_mib: int


# By part of the driver's name of the card; the first match counts.
CARDS: dict[str, CardSpec] = {
    "GB200": CardSpec(2500, 5000, 80, 8.0, 126),
    "GB300": CardSpec(2500, 5000, 80, 8.0, 126),
    "B200": CardSpec(2250, 4500, 80, 8.0, 126),
    "B300": CardSpec(2250, 4500, 80, 8.0, 126),
    "H200": CardSpec(989, 1979, 67, 4.9, 60),
    "GH200": CardSpec(989, 1979, 67, 4.9, 60),
    "H100 NVL": CardSpec(835, 1671, 60, 3.9, 60),
    "H100 PCIe": CardSpec(756, 1513, 51, 2.1, 50),
    "H100": CardSpec(989, 1979, 67, 3.4, 50),
    "H800": CardSpec(989, 1979, 67, 3.4, 50),
    "A100": CardSpec(312, 312, 19.5, 2.1, 40),
    "L40S": CardSpec(362, 733, 91.6, 0.9, 96),
    "L40": CardSpec(181, 362, 90.5, 0.9, 96),
    "L4": CardSpec(121, 242, 30.3, 0.3, 48),
    "A10": CardSpec(125, 125, 31.2, 0.6, 6),
    "V100": CardSpec(125, 125, 15.7, 0.9, 6),
    "T4": CardSpec(65, 65, 8.1, 0.32, 4),
    "RTX 5090": CardSpec(420, 840, 105, 1.8, 96),
    "RTX 4090": CardSpec(330, 661, 82.6, 1.01, 72),
    "MI300X": CardSpec(1307, 2615, 163, 5.3, 256),
    "MI325X": CardSpec(1307, 2615, 163, 6.0, 256),
}
FASTEST = CardSpec(2500, 5000, 163, 8.0, 256)
EMULATED = 6
"""Number of bf16 products that can emulate an fp32 product."""

CPU_FLOPS = {"fp32": 0.7e12, "fp64": 0.35e12}
"""Peak per second of a core at 5.5 GHz with two 512-bit vector units."""
CPU_NARROW_FLOPS = 12e12
"""Peak per second of a core with matrix units, in 8 and 16 bits."""
CPU_CORES = 1024
"""Number of cores to assume if a record does not have it."""
CPU_CALL_MS = 5e-5
"""Time of an empty call."""


def floor_ms(
    flops: int, min_bytes: int, dtype: str, timing: Timing, gpu: str | None, cpu_count: int | None
) -> tuple[float, str]:
    """Return (shortest time of a problem in ms, its limiting factor); 0 if unknown.

    gpu  the driver's name of the card
    """
    if timing == "interpreted":
        return 0.0, ""
    if timing == "cpu":
        rate = CPU_FLOPS.get(dtype, CPU_NARROW_FLOPS) * (cpu_count or CPU_CORES)
        # Imported benchmarks without a number of operations may be only a few instructions.
        call_ms = CPU_CALL_MS if flops else 0.0
        return max((1e3 * flops / rate, "arithmetic at this processor's peak"), (call_ms, "an empty call"))
    card = _card(gpu or "")
    peaks = {"fp16": card.tflops, "bf16": card.tflops, "fp32": max(card.fp32, card.tflops / EMULATED)}
    peak = peaks.get(dtype, card.fp8)
    beyond_cache = max(0, min_bytes - (card.l2_mib << 20))
    return max(
        (flops / peak / 1e9, f"arithmetic at {peak:g} TFLOP/s"),
        (beyond_cache / card.terabytes / 1e9, f"traffic at {card.terabytes:g} TB/s"),
    )


@lru_cache(maxsize=64)
def _card(gpu: str) -> CardSpec:
    return next((card for part, card in CARDS.items() if part in gpu), FASTEST)


def too_fast(ms: float, floor: tuple[float, str]) -> str | None:
    """Return why a latency is implausible, or None; `floor` is the result of `floor_ms`."""
    least, what = floor
    if ms >= least * (1 - TOLERANCE):
        return None
    return f"implausible: {ms:.4g} ms is less than the {least:.4g} ms of {what}"


def implausible(record: Record) -> str | None:
    """Return why a record's latency is implausible, or None."""
    if record.latency is None or not record.latency.bursts_ms or not all(record.latency.bursts_ms):
        return None
    cell, where, bursts = record.cell, record.environment, record.latency.bursts_ms
    amounts = (cell.flops or 0, cell.min_bytes or 0, cell.dtype)
    floor = floor_ms(*amounts, record.latency.timing, where.gpu, where.cpu_count)
    if too_fast(min(map(min, bursts)), floor) is None:  # the usual case: no median can be less
        return None
    return too_fast(statistics.median(map(statistics.median, bursts)), floor)
