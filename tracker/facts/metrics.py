"""The metrics of a cell: unit, direction, and how each one is stored, judged and displayed.

To add a metric, add one entry here and the code that measures it. A record carries the value by name in `metrics`. The
tracker then stores, lists (`history --metrics`), judges, plots and exports it like every other metric.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Better = Literal["lower", "higher", "neither"]

Rule = Literal["scatter", "exact", "own"]
"""How a metric is judged:

scatter  by statistics of its history, because it varies from run to run
exact    by its last value, because the same code always gives the same value, such as a count of registers
own      by a rule of its own: latency and accuracy
"""


NCU = "ncu"
"""The profiler of a call, and the `cost` of the metrics that it counts."""

TINY = 1e-30


@dataclass(frozen=True)
class Metric:
    """A non-negative number that is measured of a cell."""

    name: str
    unit: str  # empty for a plain number
    meaning: str
    header: str = ""  # column header; if empty, name and unit
    column: str | None = None  # attribute of a point; None if the value is in the record's `metrics`
    derived: bool = False  # computed from other values on demand
    better: Better = "lower"
    rule: Rule | None = None  # None if it is not judged
    floor: float = 0.01  # smallest relative scatter to assume
    least: float = 0.05  # smallest relative change that counts
    negligible: float = 0.0  # in the unit; smaller differences never count, and such a level is as good as zero
    share: float = 1.0  # weight of its part in the chance of a false suspect, which a night's scattering metrics share
    cost: str = ""  # the `--costs` name that measures it; empty if it is always measured
    hint: bool = False  # a change for the worse is a suspect, which an A/B comparison of the latency decides
    shared: bool = False  # all series of a run err together, by a measurement of the run; the gate removes this
    follows: str = ""  # metric that explains a change of this one of the same size, which then has no row of its own

    @property
    def has_own_rule(self) -> bool:
        """Return whether the gate judges the metric by rules made for it, not by those that others share."""
        return self.rule == "own"

    @property
    def sign(self) -> int:
        """1 if larger is worse, else -1."""
        return -1 if self.better == "higher" else 1

    @property
    def judged_as(self) -> str:
        """The name in verdicts and alerts."""
        return "accuracy" if self is RMS else self.name

    @property
    def title(self) -> str:
        return self.header or (f"{self.name} {self.unit}" if self.unit else self.name)

    def worse(self, before: Any, after: Any) -> Any:
        """Return whether `after` is relevantly worse than `before`, elementwise for arrays."""
        if self.better == "neither":
            return False
        low, high = (before, after) if self.better == "lower" else (after, before)
        return (high > (1 + self.least) * low) & (high - low > self.negligible)

    def log(self, level: float) -> float:
        """Return the logarithm by which levels are compared, offset so that zero and negligible levels are close."""
        return math.log(max(level + self.negligible, TINY))

    def level(self, log: float) -> float:
        """Return the level of a logarithm by `log`, without rounding residue."""
        level = math.exp(log) - self.negligible
        return 0.0 if level < max(1e-9 * self.negligible, 10 * TINY) else float(f"{level:.9g}")

    def text(self, value: float | None) -> str:
        """Return a value with the unit, to three digits; empty for None."""
        if value is None:
            return ""
        number = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        return f"{number} {self.unit}".strip()


TFLOPS, GBPS = 1e9, 1e6
"""Units of `rate`: FLOP and bytes in a millisecond at 1 TFLOP/s and 1 GB/s."""


def rate(amount: int | None, ms: float | None, unit: float) -> float | None:
    """Return the work done per time, in TFLOPS or GBPS; None if the amount or the latency is unknown."""
    return amount / ms / unit if amount and ms else None


LATENCY = Metric("latency", "ms", "median over bursts of each burst's median", "ms", column="median_ms", rule="own")
RMS = Metric(
    "rms", "", "relative RMS error against a reference in higher precision", column="rms", rule="own",
    floor=0.01, least=0.5, negligible=1e-6,
)  # fmt: skip

REPEATABLE = Metric(
    "repeatability", "", "two executions are bitwise equal", column="repeatable", better="higher", rule="own", least=0.0
)
"""The metric `repeatable` as the gate judges it."""

QUANTITIES = (
    Metric("memory_mib", "MiB", "imported bytes", "memory MiB", rule="scatter"),
    Metric("bandwidth", "GB/s", "imported bytes per time", better="higher", rule="scatter"),
    Metric("per_second", "1/s", "imported rate, such as tokens", better="higher", rule="scatter"),
    Metric("score", "", "imported number that should rise", better="higher", rule="scatter"),
    Metric("cost", "", "imported number that should fall", rule="scatter"),
    Metric("value", "", "imported number of unknown direction", better="neither"),
)
"""Values of imported benchmarks that are not times. Such a cell has one of them, and no latency."""

_exact = partial(Metric, rule="exact", least=0.0)
"""A number decided by the compiler or the code: any change counts."""

_cold = partial(Metric, rule="scatter", floor=0.05, least=0.25, negligible=100.0, cost="cold")
"""A time of a fresh process, which varies by several percent and matters only in larger steps."""

_close = partial(Metric, rule="scatter", floor=0.005, least=0.03, follows="latency")
"""A quotient or product of a latency with little scatter of its own."""

_memory = partial(Metric, rule="exact", negligible=2.0)
"""Device memory: 2 MiB is one block of torch's allocator."""

_rate = partial(Metric, derived=True, better="higher")
_share = partial(Metric, better="higher", cost=NCU)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        LATENCY,
        _rate(
            "tflops", "TFLOP/s", "floating-point operations of the rows in use, over the latency", "tflops", "tflops"
        ),
        _rate("gbps", "GB/s", "smallest possible traffic over the latency", "GB/s", "gbps"),
        RMS,
        Metric("max_abs", "", "largest absolute error", "max error", "max_abs"),
        Metric("worst_block_rms", "", "largest relative RMS of a row or block", "worst block", "worst_block_rms"),
        Metric("mismatch", "", "share of elements outside the tolerance table", column="mismatch"),
        Metric("unwritten", "", "share of elements that were never written", column="unwritten"),
        Metric("repeatable", "", "two executions are bitwise equal", column="repeatable", better="higher"),
        Metric("prepare_ms", "ms", "packing, compiling and tuning before the clock starts", "prepare ms", "prepare_ms"),
        Metric(
            "enqueue_ms",
            "ms",
            "host time to launch one call",
            "enqueue ms",
            "enqueue_ms",
            rule="scatter",
            floor=0.05,
            least=0.15,
            negligible=0.005,
        ),
        Metric(
            "eager_ms",
            "ms",
            "time per call in a loop without waits, as a model that captures no graph sees it",
            "eager ms",
            rule="scatter",
            floor=0.03,
            least=0.1,
            negligible=0.005,
            cost="eager",
            follows="latency",
        ),
        Metric(
            "dynamic_routing",
            "",
            "1: the callable follows new offsets in the same buffers, 0: they are built in",
            "dynamic",
            better="higher",
            rule="exact",
        ),
        _exact(
            "batch_invariant",
            "",
            "1: a row's bits do not depend on the rest of its batch, 0: they do",
            "batch invariant",
            better="higher",
            cost="invariance",
        ),
        _exact(
            "fresh_output",
            "",
            "1: each call returns memory of its own, 0: a buffer is handed out again",
            "fresh output",
            better="higher",
        ),
        _exact(
            "special_values",
            "",
            "1: right on NaN, infinity, zeros and other magnitudes too, 0: fragile",
            "special values",
            better="higher",
        ),
        # Metrics of the compiled kernels of a call.
        _exact("spills", "B", "local memory per thread for spilled registers, over all kernels"),
        _exact("local_ops", "", "instructions that read or write local memory", "local ops"),
        _exact(
            "occupancy", "", "smallest share of an SM's warps that can be resident at once", better="higher", hint=True
        ),
        _exact(
            "stages", "", "pipeline stages, the fewest over kernels that multiply matrices", better="higher", hint=True
        ),
        Metric("registers", "", "registers per thread, the most over all kernels", better="neither"),
        Metric(
            "shared_kib", "KiB", "shared memory per program, the most over all kernels", "shared KiB", better="neither"
        ),
        Metric("matrix_ops", "", "instructions that multiply matrices (wgmma, mma, tcgen05)", better="neither"),
        Metric("tma_loads", "", "instructions that load by TMA", "TMA loads", better="neither"),
        # Metrics of a call that `--costs` measures.
        _exact("kernels", "", "kernels, copies and fills that one call launches on the GPU", cost="kernels"),
        _memory(
            "workspace_mib",
            "MiB",
            "peak device memory of a call beyond inputs and output",
            "workspace MiB",
            cost="memory",
        ),
        _memory("kept_mib", "MiB", "device memory that `prepare` keeps beyond inputs", "kept MiB"),
        Metric(
            "kept_outside_mib",
            "MiB",
            "device memory that `prepare` keeps outside torch's allocator, with the code of loaded kernels",
            "kept outside MiB",
            rule="exact",
            least=0.25,
            negligible=128.0,
        ),
        _cold("compile_ms", "ms", "time to compile the kernels that are not cached", "compile ms", negligible=50.0),
        _cold("tune_ms", "ms", "time for autotuning, without compilation", "tune ms"),
        Metric(
            "cold_prepare_ms", "ms", "preparing in a fresh process with empty caches", "cold prepare ms", cost="cold"
        ),
        _cold(
            "first_result_ms", "ms", "time to the first result of a fresh process with empty caches", "first result ms"
        ),
        # its relevant changes are a few times its scatter, those of compile times many times
        _close(
            "energy_j",
            "J",
            "energy of one call, in a series of calls that keeps the GPU busy",
            "energy J",
            share=4.0,
            cost="energy",
        ),
        Metric(
            "power_w", "W", "power of the GPU during that series of calls", "power W", better="neither", cost="energy"
        ),
        Metric("idle_w", "W", "power of the GPU at rest", "idle W", better="neither", cost="energy"),
        Metric(
            "tflops_w",
            "TFLOP/s/W",
            "floating-point operations of the rows in use, over the energy",
            "TFLOP/s/W",
            better="higher",
            cost="energy",
        ),
        _close(
            "sol_gap",
            "",
            "latency over the shortest time at the ceilings measured by the run's canaries",
            "SOL gap",
            hint=True,
            shared=True,
        ),
        # Metrics of a profiled call, which the profiler slows down: they explain a latency and are not judged.
        Metric(
            "ncu_ms", "ms", "time of one call's kernels under ncu, not a latency", "ncu ms", better="neither", cost=NCU
        ),
        Metric("dram_mib", "MiB", "bytes that one call reads from and writes to DRAM", "DRAM MiB", cost=NCU),
        _share("dram_share", "", "DRAM throughput over its peak, averaged over a call's kernels by time", "DRAM share"),
        _share("l2_share", "", "L2 throughput over its peak, averaged over a call's kernels by time", "L2 share"),
        _share("l2_hit_share", "", "share of L2 accesses that hit, averaged over a call's kernels by time", "L2 hits"),
        _share(
            "tensor_share",
            "",
            "share of time in which tensor cores are busy, averaged over a call's kernels by time",
            "tensor share",
        ),
        _share(
            "achieved_occupancy",
            "",
            "share of an SM's warps that are resident, averaged over a call's kernels by time",
            "achieved occupancy",
        ),
        Metric("barriers", "", "instructions that wait at a barrier", better="neither"),
        *QUANTITIES,
    )
}


def finite_or_none(value: float | None) -> float | None:
    """Return a number as JSON and the database store it: None if it is infinite or NaN."""
    return None if value is None or not math.isfinite(value) else float(value)


def relative(effect: float | None) -> float | None:
    """Return a log ratio as a relative change: 0.03 is 3 % more. None if it is unknown."""
    return None if effect is None or math.isnan(effect) else math.expm1(effect)


def named(name: str | None) -> Metric | None:
    """Return the metric of a name, where `accuracy` means the relative error; None for names such as `result`."""
    return RMS if name == "accuracy" else METRICS.get(name or "")


def of_alert(name: str) -> Metric:
    """Return the metric by which the levels of an alert are compared."""
    return named(name) or LATENCY


def register(metric: Metric) -> None:
    """Add a metric. Raises ValueError if the name is taken."""
    if metric.name in METRICS:
        raise ValueError(f"metric {metric.name!r} already exists")
    METRICS[metric.name] = metric


def carried() -> list[Metric]:
    """Return the metrics that records carry by name, in order of registration."""
    return [metric for metric in METRICS.values() if metric.column is None]


def judged() -> list[Metric]:
    """Return the metrics that the gate judges by the shared rules."""
    return [metric for metric in METRICS.values() if metric.rule in ("scatter", "exact")]
