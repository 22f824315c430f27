"""The metrics: what is measured of a cell, each with its unit, its direction, and how it is stored, judged and shown.

A new metric is one line here, and the code that measures it: a record carries its value in `metrics`, by name, from
where it is stored, listed by `history --metrics`, judged by the gate, drawn and exported like all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["lower", "higher", "neither"]

Rule = Literal["scatter", "exact", "own"]
"""How a metric is judged:

scatter  by statistics of its history, since it varies from run to run
exact    by its last value, since the same code always gives the same: a count of registers, say
own      by a rule that it alone has: latency, and accuracy
"""


_TINY = 1e-30


@dataclass(frozen=True)
class Metric:
    """One number that a cell has, larger than or equal to zero."""

    name: str
    unit: str  # empty for a plain number
    meaning: str
    header: str = ""  # of a column; the name and the unit where it is empty
    column: str | None = None  # attribute of a point that holds it; None: it is one of the record's `metrics`
    derived: bool = False  # computed from others when it is asked for
    better: Better = "lower"
    rule: Rule | None = None  # None is not judged
    floor: float = 0.01  # relative scatter that is assumed at least
    least: float = 0.05  # least relative change that counts
    negligible: float = 0.0  # in the unit: a difference up to this never counts, and a level of it is as good as none
    cost: str = ""  # what `--costs` must name for it to be measured, where that is not measured anyway
    hint: bool = False  # a change for the worse is a suspect, which an A/B of the latency decides

    @property
    def title(self) -> str:
        return self.header or (f"{self.name} {self.unit}" if self.unit else self.name)

    def worse(self, before: Any, after: Any) -> Any:
        """Return whether `after` is worse than `before` by more than counts; of arrays, element by element."""
        if self.better == "neither":
            return False
        low, high = (before, after) if self.better == "lower" else (after, before)
        return (high > (1 + self.least) * low) & (high - low > self.negligible)

    def log(self, level: float) -> float:
        """Return the logarithm that levels are compared by: a negligible one is as good as none, which has no log."""
        return math.log(max(level + self.negligible, _TINY))

    def text(self, value: float | None) -> str:
        """Return a value with its unit, to three digits; empty where there is none."""
        if value is None:
            return ""
        number = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        return f"{number} {self.unit}".strip()


LATENCY = Metric("latency", "ms", "median over bursts of each burst's median", "ms", column="median_ms", rule="own")
RMS = Metric(
    "rms", "", "relative RMS error against a reference in higher precision", column="rms", rule="own",
    floor=0.01, least=0.5, negligible=1e-6,
)  # fmt: skip

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        LATENCY,
        Metric("tflops", "TFLOP/s", "floating-point operations of real rows", "tflops", "tflops", True, "higher"),
        Metric("gbps", "GB/s", "the least traffic possible over the latency", "GB/s", "gbps", True, "higher"),
        RMS,
        Metric("max_abs", "", "largest absolute error", "max error", "max_abs"),
        Metric("worst_block_rms", "", "largest relative RMS of a row or block", "worst block", "worst_block_rms"),
        Metric("mismatch", "", "share of elements outside the tolerance table", column="mismatch"),
        Metric("unwritten", "", "share of elements that were never written", column="unwritten"),
        Metric("repeatable", "", "two executions agree bit by bit", column="repeatable", better="higher"),
        Metric("prepare_ms", "ms", "packing, compiling and tuning before the clock starts", "prepare ms", "prepare_ms"),
        Metric(
            "enqueue_ms",
            "ms",
            "time the host takes to launch one call",
            "enqueue ms",
            "enqueue_ms",
            rule="scatter",
            floor=0.05,
            least=0.15,
            negligible=0.005,
        ),
        Metric(
            "dynamic_routing",
            "",
            "1: the callable follows new offsets in the same buffers, 0: they are built in",
            "dynamic",
            better="higher",
            rule="exact",
        ),
        # Of the compiled kernels of a call.
        Metric(
            "spills",
            "B",
            "local memory that registers are spilled to, a thread, of all kernels",
            rule="exact",
            least=0.0,
        ),
        Metric("local_ops", "", "instructions that read or write local memory", "local ops", rule="exact", least=0.0),
        Metric(
            "occupancy",
            "",
            "least share of an SM's warps that can be resident at once",
            better="higher",
            rule="exact",
            least=0.0,
            hint=True,
        ),
        Metric(
            "stages",
            "",
            "stages of the pipeline that has the fewest, of kernels that multiply matrices",
            better="higher",
            rule="exact",
            least=0.0,
            hint=True,
        ),
        Metric("registers", "", "most registers of a thread", better="neither"),
        Metric("shared_kib", "KiB", "most shared memory of a program", "shared KiB", better="neither"),
        Metric("matrix_ops", "", "instructions that multiply matrices (wgmma, mma, tcgen05)", better="neither"),
        Metric("tma_loads", "", "instructions that load by TMA", "TMA loads", better="neither"),
        # What `costs` measures of a call.
        Metric(
            "kernels",
            "",
            "kernels, copies and fills that one call puts on the GPU",
            rule="exact",
            least=0.0,
            cost="kernels",
        ),
        Metric(
            "workspace_mib",
            "MiB",
            "peak of device memory during a call beyond inputs and output",
            "workspace MiB",
            rule="exact",
            negligible=2.0,
            cost="memory",
        ),
        Metric(
            "kept_mib",
            "MiB",
            "device memory that `prepare` keeps beyond inputs",
            "kept MiB",
            rule="exact",
            negligible=2.0,
        ),
        Metric(
            "compile_ms",
            "ms",
            "compiling the kernels that no cache has",
            "compile ms",
            rule="scatter",
            floor=0.1,
            least=0.25,
            negligible=50.0,
            cost="cold",
        ),
        Metric(
            "tune_ms",
            "ms",
            "autotuning, compiling left out",
            "tune ms",
            rule="scatter",
            floor=0.1,
            least=0.25,
            negligible=100.0,
            cost="cold",
        ),
        Metric(
            "cold_prepare_ms", "ms", "preparing in a fresh process with empty caches", "cold prepare ms", cost="cold"
        ),
        Metric(
            "first_result_ms",
            "ms",
            "time to the first result of a fresh process with empty caches",
            "first result ms",
            rule="scatter",
            floor=0.1,
            least=0.25,
            negligible=100.0,
            cost="cold",
        ),
        Metric(
            "energy_j",
            "J",
            "energy of one call, in a row of calls that keeps the GPU busy",
            "energy J",
            rule="scatter",
            floor=0.005,
            least=0.03,
            cost="energy",
        ),
        Metric("power_w", "W", "power of the GPU during that row of calls", "power W", better="neither", cost="energy"),
        Metric("idle_w", "W", "power of the GPU at rest", "idle W", better="neither", cost="energy"),
        Metric(
            "tflops_w",
            "TFLOP/s/W",
            "floating-point operations of real rows over energy",
            "TFLOP/s/W",
            better="higher",
            cost="energy",
        ),
        Metric(
            "sol_gap", "", "latency over the least time at the ceilings that the run's canaries measured", "SOL gap"
        ),
        Metric("barriers", "", "instructions that wait at a barrier", better="neither"),
    )
}


def of_alert(name: str) -> Metric:
    """Return the metric that an alert's name stands for. Its levels are compared as the metric's are."""
    return RMS if name == "accuracy" else METRICS.get(name, LATENCY)


def register(metric: Metric) -> None:
    """Add a metric. Raises ValueError for a name that is taken."""
    if metric.name in METRICS:
        raise ValueError(f"there is a metric {metric.name!r} already")
    METRICS[metric.name] = metric


def carried() -> list[Metric]:
    """Return the metrics that a record carries by name, in the order in which they were registered."""
    return [metric for metric in METRICS.values() if metric.column is None]


def judged() -> list[Metric]:
    """Return the metrics that the gate judges by the rules that all share."""
    return [metric for metric in METRICS.values() if metric.rule in ("scatter", "exact")]
