"""The parent's own clock: it bounds what a backend's process says of its times, from above and from below."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

from groupbench.operators.measure.cell import Failure, Witnessed

WINDOW_MS = 50.0
"""How long the calls take together that are timed from outside."""
MOST_CALLS = 4000
ATTEMPTS = 4
"""Windows, each twice as long as the one before: on a busy machine a process may wait for milliseconds to go on."""
SHARE, SLACK_MS = 0.5, 5.0
"""What may be missing in the samples: that share of their sum, or as much as asking takes."""
FACTOR, LAUNCH_MS = 3.0, 0.05
"""How far the calls of a window may be above those of the bursts, whose inputs are colder, and by how much at least."""

now = time.monotonic


def too_long(samples_ms: Sequence[float], took_s: float) -> str | None:
    """What is wrong with samples of a burst that took so long in all, or None."""
    total = sum(samples_ms)
    if total <= 1e3 * took_s * 1.01 + 1:
        return None
    return f"implausible: {total:.4g} ms are reported for calls that took {1e3 * took_s:.4g} ms by the parent's clock"


def watch(
    ask: Callable[[int], Witnessed | Failure], median_ms: float, enqueue_ms: float | None
) -> str | Failure | None:
    """Have calls made in a row, and time them from outside. Returns what is wrong, or None.

    ask         makes so many calls, and waits until the device is idle
    median_ms   of the bursts
    enqueue_ms  what the host takes to launch a call, where it does not wait for it
    """
    calls = max(2, min(MOST_CALLS, math.ceil(WINDOW_MS / max(median_ms, enqueue_ms or 0.0, 1e-3))))
    problem: str | None = None
    for _ in range(ATTEMPTS):
        begun = now()
        answer = ask(calls)
        took_ms = 1e3 * (now() - begun)
        if isinstance(answer, Failure):
            return answer
        problem = _problem(answer.samples_ms, took_ms, calls, median_ms, enqueue_ms)
        if problem is None:
            return None
        calls = min(2 * calls, MOST_CALLS)
    return problem


def _problem(
    samples_ms: Sequence[float], took_ms: float, calls: int, median_ms: float, enqueue_ms: float | None
) -> str | None:
    total = sum(samples_ms)
    if len(samples_ms) != calls:
        return f"implausible: {len(samples_ms)} times are reported for {calls} calls"
    if total > 1.01 * took_ms + 1 or took_ms - total > max(SHARE * total, SLACK_MS):
        return (
            f"implausible: {calls} calls took {took_ms:.4g} ms by the parent's clock, until the device was idle, and "
            f"{total:.4g} ms by the backend's process"
        )
    typical = statistics.median(samples_ms)
    if typical > FACTOR * max(median_ms, enqueue_ms or 0.0) + LAUNCH_MS:
        return f"implausible: a call in a row takes {typical:.4g} ms, and {median_ms:.4g} ms is reported for timed ones"
    return None
