"""Thresholds that the gate, comparisons and A/Bs share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

FLOOR = {"gpu": 0.0003, "cpu": 0.02}
"""Smallest relative scatter to assume for a history."""
POOL_FLOOR = {"gpu": 0.001, "cpu": 0.02}
"""Smallest relative scatter to assume for a few runs, which do not show how much processes differ."""
GROSS = {"gpu": 0.05, "cpu": 0.30}
"""Relative change so large that young series need less evidence of it."""
BLIND = 1.0
"""Relative change that an `ok` must exclude: without that, a factor of two would not show."""

SURE = 3.0
"""Standard errors from a level at which results are not on it."""
MAD_SD = 1.4826
"""Standard deviation of a normal distribution whose median absolute deviation is 1."""


def step_scatter(log: NDArray[np.float64]) -> float:
    """Return the scatter from differences of successive results, which drifts and steps do not affect; 0 for one."""
    return 0.0 if len(log) < 2 else MAD_SD * float(np.median(np.abs(np.diff(log)))) / math.sqrt(2)


TOO_NOISY = 0.2
"""Standard error of a latency over its bursts beyond which it is too noisy to judge: ±20 %."""


def burst_error(burst_medians: Sequence[float]) -> float:
    """Return the standard error of the log of the median over bursts; NaN for fewer than two."""
    n = len(burst_medians)
    if n < 2:
        return math.nan
    logs = [math.log(ms) for ms in burst_medians]  # arrays take four times as long for a few bursts
    return 1.2533 * math.dist(logs, [sum(logs) / n] * n) / math.sqrt(n * (n - 1))


def least_effect(timing: str, latency_ms: float) -> float:
    """Return the smallest relative change that counts for the gate, `compare` and A/B comparisons.

    On an H100, processes differ by 0.1 % above 90 us and by ten times as much at 13 us.

    Args:
        timing: Gpu or cpu.
    """
    if timing != "gpu":
        return 0.10
    return 0.02 if latency_ms < 0.04 else 0.01 if latency_ms < 0.09 else 0.003


CPU_PRIOR = 0.08
"""Scatter to assume of a latency on a CPU without results."""


def prior_scatter(timing: str, latency_ms: float) -> float:
    """Return the scatter to assume of a latency without results: on a GPU, half of what counts."""
    return least_effect(timing, latency_ms) / 2 if timing == "gpu" else CPU_PRIOR


def typical(errors: ArrayLike) -> float:
    """Return the median of the known errors, or 0 if none is known."""
    finite = np.asarray(errors, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    return float(np.median(finite)) if len(finite) else 0.0
