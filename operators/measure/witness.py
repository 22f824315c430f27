"""Bound the times that a backend's process reports, from above and below, by the parent's clock."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence

from groupbench.operators.measure.cell import Burst, Failure, Kept, Witnessed

WINDOW_MS = 50.0
"""Minimum duration in ms of the consecutive calls that the parent times."""
FIRST_CALLS, MOST_CALLS = 64, 4000
"""Number of these calls, at first and at most."""
ATTEMPTS = 6
"""Number of attempts, each with twice the calls: on a busy machine a process may be descheduled for milliseconds."""
SHARE, SLACK_MS = 0.5, 5.0
"""Time that may be missing from the samples: this share of their sum, but at least SLACK_MS, for the request itself."""
FACTOR, LAUNCH_MS = 3.0, 0.05
"""A consecutive call may take FACTOR times as long as a timed one, plus LAUNCH_MS in ms."""
KEEP_MS = 0.02
"""Time in ms by which copying an output may be longer, besides FACTOR times that of the judge and SHARE of a call."""

STRETCHED, UNEVEN = 1.3, 2.0
"""Slowdown from which a device counts as shared, and the factor by which the slowdown may vary between calls."""
GAUGE_SPINS, GAUGE_CYCLES = 50, 1_000_000
"""Number and length, in SM cycles, of the spins that show whether a GPU is shared."""

now = time.monotonic


def too_long(samples_ms: Sequence[float], took_s: float) -> str | None:
    """Return why the samples of a burst are implausible, given that the whole burst took `took_s`, or None."""
    total = sum(samples_ms)
    if total <= 1e3 * took_s * 1.01 + 1:
        return None
    return f"implausible: {total:.4g} ms are reported for calls that took {1e3 * took_s:.4g} ms by the parent's clock"


def left_over(
    bursts: Sequence[Burst],
    again: Callable[[], Burst | Failure],
    keep: Callable[[], Kept | Failure],
    gauge: Callable[[], float | Failure],
) -> str | Failure | None:
    """Return why copying the outputs of timed calls takes implausibly long, or None.

    A backend may return at once and do its work when the harness reads the output: in a method of a tensor, a profile
    hook, a signal handler, or a thread that holds the interpreter.

    bursts  bursts of the record, of which the median one is looked at
    again   measures another burst
    keep    returns the time that the judging process takes to copy such an output
    gauge   returns the slowdown of work on the device compared with an idle device
    """
    by_time = sorted((burst for burst in bursts if burst.keep_ms is not None), key=lambda burst: burst.keep_ms or 0)
    if not by_time:
        return None
    burst = by_time[(len(by_time) - 1) // 2]
    typical_ms = statistics.median(burst.samples_ms)
    for _ in range(ATTEMPTS):
        judges = keep()
        if isinstance(judges, Failure):
            return judges
        kept_ms, now_ms = burst.keep_ms or 0.0, statistics.median(burst.samples_ms)
        allowed_ms = FACTOR * judges.keep_ms + SHARE * typical_ms + KEEP_MS
        is_late = kept_ms > allowed_ms
        if not is_late and now_ms <= FACTOR * typical_ms + LAUNCH_MS:
            return None
        another = again()
        if isinstance(another, Failure):
            return another
        burst = another
    stretched = gauge()
    if isinstance(stretched, Failure):
        return stretched
    if stretched >= STRETCHED and kept_ms <= UNEVEN * stretched * allowed_ms:
        return _shared(stretched)
    if not is_late:
        return f"implausible: a timed call takes {now_ms:.4g} ms, and {typical_ms:.4g} ms is reported for earlier ones"
    return f"implausible: reading an output takes {kept_ms:.4g} ms, after calls of {typical_ms:.4g} ms"


def watch(
    ask: Callable[[int], Witnessed | Failure],
    median_ms: float,
    enqueue_ms: float | None,
    gauge: Callable[[], float | Failure],
) -> str | Failure | None:
    """Time consecutive calls by this process's clock. Return why the reported times are implausible, or None.

    Returns a Failure if other work on the device can explain the times: processes that share a GPU by turns slow down
    consecutive calls but not single ones, which is not the backend's fault.

    ask         makes the process run this many calls and wait until the device is idle
    median_ms   median of the bursts
    enqueue_ms  host time to launch a call without waiting for it
    gauge       returns the slowdown of work on the device compared with an idle device
    """
    single_ms = max(median_ms, enqueue_ms or 0.0)
    most = max(2, min(MOST_CALLS, math.ceil(WINDOW_MS / max(single_ms, 1e-3))))
    calls = min(FIRST_CALLS, most)  # thousands of calls that take longer than reported would take minutes
    for _ in range(ATTEMPTS):
        while True:
            begun = now()
            reply = ask(calls)
            took_ms = 1e3 * (now() - begun)
            if isinstance(reply, Failure):
                return reply
            if took_ms >= WINDOW_MS or calls >= most:
                break
            calls = min(4 * calls, most)
        row = (reply.samples_ms, took_ms, calls, single_ms)
        problem = _problem(*row)
        if problem is None:
            return None
        calls = min(2 * calls, MOST_CALLS)
    stretched = gauge()
    if isinstance(stretched, Failure):
        return stretched
    if stretched < STRETCHED or _problem(*row, UNEVEN * stretched):
        return problem
    return _shared(stretched)


def _shared(stretched: float) -> Failure:
    return Failure(
        "error",
        f"not checked: the device is shared with other work and takes {stretched:.1f} times as long for calls in a "
        "row; measure again when it is idle",
    )


def _problem(
    samples_ms: Sequence[float], took_ms: float, calls: int, single_ms: float, stretched: float = 1.0
) -> str | None:
    """Return why the times of consecutive calls are implausible on a device with this slowdown, or None."""
    total = sum(samples_ms)
    if len(samples_ms) != calls:
        return f"implausible: {len(samples_ms)} times are reported for {calls} calls"
    if total > 1.01 * took_ms + 1 or took_ms - total > stretched * max(SHARE * total, SLACK_MS):
        return (
            f"implausible: {calls} calls took {took_ms:.4g} ms by the parent's clock, until the device was idle, and "
            f"{total:.4g} ms by the backend's process"
        )
    typical = statistics.median(samples_ms)
    if typical > stretched * FACTOR * single_ms + LAUNCH_MS:
        return f"implausible: a call in a row takes {typical:.4g} ms, and {single_ms:.4g} ms is reported for timed ones"
    return None


def stretch(device: str) -> float:
    """Return the slowdown of known work compared with an idle device: 1 if nothing else runs.

    On a GPU the work is kernels that spin for half a millisecond each. Processes that share a GPU alternate every few
    milliseconds: most spins fit into a time slice and give the undisturbed time, the others include the slices of other
    processes. On a CPU it is the wall-clock time over the processor time of a loop.
    """
    if device != "cuda":
        began, worked = time.perf_counter(), time.process_time()
        while time.process_time() - worked < WINDOW_MS / 1e3:
            pass
        return (time.perf_counter() - began) / (time.process_time() - worked)
    import torch

    torch.cuda._sleep(GAUGE_SPINS * GAUGE_CYCLES)  # brings the clock up
    events = [torch.cuda.Event(enable_timing=True) for _ in range(GAUGE_SPINS + 1)]
    for event in events[:-1]:
        event.record()
        torch.cuda._sleep(GAUGE_CYCLES)
    events[-1].record()
    torch.cuda.synchronize()
    spins = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return sum(spins) / (len(spins) * max(sorted(spins)[len(spins) // 10], 1e-3))
