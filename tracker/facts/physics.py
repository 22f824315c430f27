"""The shortest time that a problem can take on a device. A lower latency is a measurement error.

A card cannot compute faster than its peak, nor read faster than its memory. Peaks are dense peaks at the highest clock
from the vendors' datasheets. Traffic that fits the L2 cache does not count, because it may already be there. An unknown
card may be faster than any of these, so its results are never refused; `unusual` gives a warning. Sources: NVIDIA's
datasheets of V100, T4, A10, A100, L4, L40, L40S, H100, H200, B200, B300, GB200, GB300 and GeForce RTX 4090 and 5090;
AMD's of MI300X, MI325X, MI350X and MI355X.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from functools import lru_cache

from groupbench.tracker.facts.record import Record, Timing

TOLERANCE = 0.05
"""Relative tolerance, because clocks may briefly exceed the datasheet and events have a finite resolution."""


@dataclass(frozen=True)
class CardSpec:
    """The peaks of a card.

    Attributes:
        tflops: TFLOP/s of products in fp16 and bf16.
        narrow: TFLOP/s of products in 8 bits, fp8 or int8, whichever is higher.
        narrowest: TFLOP/s of products in 4 bits, fp4 or int4. A card without them computes these in 8 bits.
        fp32: TFLOP/s of products in fp32.
        terabytes: Memory traffic in TB/s.
        l2_mib: L2 cache in MiB.
    """

    tflops: float
    narrow: float
    narrowest: float
    fp32: float
    terabytes: float
    l2_mib: int


# By part of the driver's name of the card; the first match counts.
CARDS: dict[str, CardSpec] = {
    "GB200": CardSpec(2500, 5000, 10000, 80, 8.0, 126),
    "GB300": CardSpec(2500, 5000, 15000, 80, 8.0, 126),
    "B200": CardSpec(2250, 4500, 9000, 80, 8.0, 126),
    "B300": CardSpec(2250, 4500, 15000, 80, 8.0, 126),
    "H200": CardSpec(989, 1979, 1979, 67, 4.9, 60),
    "GH200": CardSpec(989, 1979, 1979, 67, 4.9, 60),
    "H100 NVL": CardSpec(835, 1671, 1671, 60, 3.9, 60),
    "H100 PCIe": CardSpec(756, 1513, 1513, 51, 2.1, 50),
    "H100": CardSpec(989, 1979, 1979, 67, 3.4, 50),
    "H800": CardSpec(989, 1979, 1979, 67, 3.4, 50),
    "A100": CardSpec(312, 624, 1248, 19.5, 2.1, 40),
    "A10": CardSpec(125, 250, 500, 31.2, 0.6, 6),
    "L40S": CardSpec(362, 733, 1466, 91.6, 0.9, 96),
    "L40": CardSpec(181, 362, 724, 90.5, 0.9, 96),
    "L4": CardSpec(121, 242, 485, 30.3, 0.3, 48),
    "V100": CardSpec(125, 125, 125, 15.7, 0.9, 6),
    "T4": CardSpec(65, 130, 260, 8.1, 0.32, 4),
    "RTX 5090": CardSpec(420, 840, 1676, 105, 1.8, 96),
    "RTX 4090": CardSpec(330, 661, 1321, 82.6, 1.01, 72),
    "MI300X": CardSpec(1307, 2615, 2615, 163, 5.3, 256),
    "MI325X": CardSpec(1307, 2615, 2615, 163, 6.0, 256),
    "MI350X": CardSpec(2307, 4614, 9227, 144, 8.0, 256),
    "MI355X": CardSpec(2517, 5033, 10066, 157, 8.0, 256),
}
FASTEST = CardSpec(2517, 5033, 15000, 163, 8.0, 256)
"""The best of all these cards."""
IN_8_BITS = re.compile(r"^(?!.*(fp|int|float|w|a|u)[1-7](?!\d)).*(8|e4m3|e5m2)")
"""Matches names of dtypes of 8 bits, such as fp8, e4m3fn and int8, but none with a narrower part, such as w4a8."""
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
GPU_LAUNCH_MS = 1e-4
"""Time of an empty kernel: less than any GPU needs between two launches of a graph."""
_LAUNCH = GPU_LAUNCH_MS, "an empty kernel"


def floor_ms(
    flops: int, min_bytes: int, dtype: str, timing: Timing, gpu: str | None, cpu_count: int | None
) -> tuple[float, str]:
    """Return (a problem's shortest time in ms, the limiting factor); 0 if unknown.

    Args:
        gpu: The driver's name of the card.
    """
    if timing == "interpreted":
        return 0.0, ""
    if timing == "cpu":
        rate = CPU_FLOPS.get(dtype, CPU_NARROW_FLOPS) * (cpu_count or CPU_CORES)
        # Imported benchmarks without a number of operations may be only a few instructions.
        call_ms = CPU_CALL_MS if flops else 0.0
        return max((1e3 * flops / rate, "arithmetic at this processor's peak"), (call_ms, "an empty call"))
    card = card_of(gpu)
    return _LAUNCH if card is None else _floor_ms(flops, min_bytes, dtype, card)


def _floor_ms(flops: int, min_bytes: int, dtype: str, card: CardSpec) -> tuple[float, str]:
    peak = _peak(dtype, card)
    beyond_cache = max(0, min_bytes - (card.l2_mib << 20))
    return max(
        (flops / peak / 1e9, f"arithmetic at {peak:g} TFLOP/s"),
        (beyond_cache / card.terabytes / 1e9, f"traffic at {card.terabytes:g} TB/s"),
        _LAUNCH,
    )


def _peak(dtype: str, card: CardSpec) -> float:
    """Return the peak in TFLOP/s for a dtype; for an unknown one, the card's highest."""
    peaks = {"fp16": card.tflops, "bf16": card.tflops, "fp32": max(card.fp32, card.tflops / EMULATED)}
    if dtype in peaks:
        return peaks[dtype]
    return card.narrow if IN_8_BITS.match(dtype) else card.narrowest


@lru_cache(maxsize=64)
def card_of(gpu: str | None) -> CardSpec | None:
    """Return the peaks of a card by the driver's name, or None for an unknown one."""
    return next((card for part, card in CARDS.items() if part in (gpu or "")), None)


def too_fast(ms: float, floor: tuple[float, str]) -> str | None:
    """Return why a latency is implausible, or None; `floor` is the result of `floor_ms`."""
    least, what = floor
    if ms >= least * (1 - TOLERANCE):
        return None
    return f"implausible: {ms:.4g} ms is less than the {least:.4g} ms of {what}"


def unusual(
    ms: float | None, flops: int | None, min_bytes: int | None, dtype: str, timing: str | None, gpu: str | None
) -> str | None:
    """Return a warning if an unknown card was faster than any known one could be, or None."""
    if ms is None or timing != "gpu" or card_of(gpu) is not None:
        return None
    reason = too_fast(ms, _floor_ms(flops or 0, min_bytes or 0, dtype, FASTEST))
    if reason is None:
        return None
    return f"{gpu or 'a GPU without a name'} is not a known card, and was faster than any known one: {reason}"


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
