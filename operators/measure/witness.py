"""Bound the times that a backend's process reports, from above and below, by the parent's clock."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from groupbench.operators.measure.cell import Burst, Failure, Paced, Witnessed

WINDOW_MS = 50.0
"""Minimum duration in ms of the consecutive calls that the parent times."""
FIRST_CALLS, MOST_CALLS = 64, 4000
"""Number of these calls, at first and at most."""
ATTEMPTS = 6
"""Number of attempts, each with twice the calls: on a busy machine a process may be descheduled for milliseconds."""
SHARE, SLACK_MS = 0.25, 5.0
"""Time that may be missing from the samples: this share of their sum, but at least SLACK_MS, for the request itself."""
FACTOR, LAUNCH_MS = 2.0, 0.05
"""A consecutive call may take FACTOR times as long as a timed one, plus LAUNCH_MS in ms."""
MOST_AUDITED, MOVE_MS = 400, 0.1
"""Maximum number of calls of a burst that the parent times on a CPU, and the expected time in ms to move inputs."""
PAUSE_S = 0.05
"""Pause in s before another attempt at such a burst, which doubles each time."""
PAID, PACE_SHARE, CALL_MS = 1.5, 0.1, 0.003
"""Processor time of a call: at most PAID times its reported time, plus PACE_SHARE of a burst's rest and CALL_MS."""
WAITED = 2.5
"""Time of a call, in which its process works or waits for work elsewhere: at most WAITED times its reported time."""
TINY_MS, TINY_FACTOR = 0.2, 3.0
"""Time in ms of a call that is too short for its processor time to tell it from the rest of a burst. It is also short
enough for most such calls not to be descheduled on a busy machine. One may take TINY_FACTOR times as long as others."""

REST_SHARE, REST_S = 0.01, 0.02
"""Processor time that a cell may use between its bursts: this share of the break, and time in s for each thread.

A thread of OpenMP or OpenBLAS waits for further work for some milliseconds before it sleeps."""

STRETCHED, UNEVEN = 1.3, 2.0
"""Slowdown from which a device counts as shared, and the factor by which the slowdown may vary between calls."""
GAUGE_SPINS, GAUGE_CYCLES = 50, 1_000_000
"""Number and length, in SM cycles, of the spins that show whether a GPU is shared."""

now = time.monotonic
rest = time.sleep


def too_long(samples_ms: Sequence[float], took_s: float) -> str | None:
    """Return why the samples of a burst are implausible, given that the whole burst took `took_s`, or None."""
    total = sum(samples_ms)
    if total <= 1e3 * took_s * 1.01 + 1:
        return None
    return f"implausible: {total:.4g} ms are reported for calls that took {1e3 * took_s:.4g} ms by the parent's clock"


def restless(rested_s: float, spent_s: float, threads: int = 1) -> str | None:
    """Return why processes disturb others that used this processor time in a break of this length, or None.

    threads  number of threads on which a call may compute
    """
    if spent_s <= REST_SHARE * rested_s + REST_S * threads:
        return None
    return (
        f"its processes used {spent_s:.2g} s of processor time in the {rested_s:.2g} s between its bursts, in which "
        "others are measured"
    )


@dataclass(frozen=True)
class Timed:
    """A burst, and its times by the parent's clocks.

    wall_ms       wall-clock time
    processor_ms  processor time of all processes of the cell
    run_ms        of it, that of the thread that makes the calls
    queued_ms     time in which that thread waited for a free processor
    """

    burst: Burst
    wall_ms: float
    processor_ms: float
    run_ms: float = 0.0
    queued_ms: float = 0.0

    @property
    def busy_ms(self) -> float:
        """Return the time in which the thread ran, or waited for something other than a free processor."""
        return self.wall_ms - self.queued_ms


def audit(
    ask: Callable[[int], Timed | Failure],
    pace: Callable[[int], Paced | Failure],
    median_ms: float,
    gauge: Callable[[], float | Failure],
) -> str | Failure | None:
    """Measure a burst on a CPU by this process's clocks. Return why the reported times are implausible, or None.

    The judging process makes the same burst without the calls, so that the rest is the time of the calls, wherever a
    backend does its work: in the call, before it, or when the harness copies the output. The processor time shows
    this best, because it does not grow when other processes keep the machine busy.

    ask        measures a burst of this many calls
    pace       returns the time of a burst of this many calls without the calls
    median_ms  median of the bursts of the record
    gauge      returns the slowdown of work on the device compared with an idle device
    """
    calls = max(1, min(MOST_AUDITED, int(WINDOW_MS / (median_ms + MOVE_MS))))
    for attempt in range(ATTEMPTS):
        if attempt:
            rest(PAUSE_S * 2**attempt)
        timed = ask(calls)
        if isinstance(timed, Failure):
            return timed
        paced = pace(len(timed.burst.samples_ms))
        if isinstance(paced, Failure):
            return paced
        problem = _unpaid(timed, paced, median_ms) or _parallel(timed, paced) or _elsewhere(timed, paced, median_ms)
        if problem is None:
            return None
    assert not isinstance(timed, Failure) and not isinstance(paced, Failure)
    stretched = gauge()
    if isinstance(stretched, Failure):
        return stretched
    if stretched < STRETCHED or _parallel(timed, paced) or _unpaid(timed, paced, UNEVEN * median_ms):
        return problem
    return _shared(stretched)


def _unpaid(timed: Timed, paced: Paced, median_ms: float) -> str | None:
    """Return why the processor time of a burst exceeds the reported time of its calls, or None.

    That of the thread that makes the calls is at most their time. All threads together have more.
    """
    calls = len(timed.burst.samples_ms) + 1
    rest_ms = paced.processor_ms / calls
    # Threads of torch that wait for the next call use their processors too.
    waiting_ms = (paced.threads - 1) * paced.wall_ms / calls
    call_ms = timed.processor_ms / calls - rest_ms
    thread_ms = timed.run_ms / calls - paced.run_ms / calls
    extra_ms = PACE_SHARE * rest_ms + CALL_MS
    if call_ms <= PAID * (paced.threads * median_ms + waiting_ms) + extra_ms:
        if thread_ms <= PAID * median_ms + extra_ms:
            return None
        call_ms = thread_ms
    return (
        f"implausible: a call uses {call_ms:.4g} ms of processor time by the parent's clock, and {median_ms:.4g} ms is "
        "reported"
    )


def _parallel(timed: Timed, paced: Paced) -> str | None:
    """Return why the cell uses more processors than it may, or None."""
    if timed.processor_ms <= PAID * paced.threads * timed.wall_ms + SLACK_MS:
        return None
    return (
        f"its calls used {timed.processor_ms / timed.wall_ms:.2g} processors by the parent's clock, and have "
        f"{paced.threads}; OMP_NUM_THREADS sets the number for all backends"
    )


def _elsewhere(timed: Timed, paced: Paced, median_ms: float) -> str | None:
    """Return why the work of a burst must have been done elsewhere or at another time, or None."""
    samples_ms = timed.burst.samples_ms
    calls, typical_ms = len(samples_ms) + 1, statistics.median(samples_ms)
    busy_ms = timed.busy_ms - paced.run_ms
    if busy_ms > WAITED * calls * typical_ms + PACE_SHARE * paced.run_ms + SLACK_MS:
        return (
            f"implausible: its process worked and waited for {busy_ms:.4g} ms of a burst by the parent's clock, and "
            f"each of its {calls - 1} calls took {typical_ms:.4g} ms"
        )
    if TINY_MS > typical_ms > TINY_FACTOR * median_ms + CALL_MS:
        return f"implausible: a timed call takes {typical_ms:.4g} ms, and {median_ms:.4g} ms is reported for others"
    return None


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
    typical = max(statistics.median(samples_ms), (took_ms - SLACK_MS) / calls)
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
