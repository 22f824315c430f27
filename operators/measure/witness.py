"""Bound the times that a backend's process reports, from above and below, by the parent's clock."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from groupbench.operators.measure.wire import Burst, Failure, Paced, Witnessed

WINDOW_MS = 50.0
"""Minimum duration in ms of the consecutive calls that the parent times."""
FIRST_CALLS, MOST_CALLS = 64, 4000
"""Number of these calls, at first and at most."""
ATTEMPTS = 6
"""Number of attempts, each with twice the calls: on a busy machine a process may be descheduled for milliseconds."""
WINDOWS = 4
"""Number of bursts into which the calls that the parent times on a CPU are divided. The stalls of a busy machine are
rarely in all of them."""
AGREEMENT = 0.15
"""A burst counts if those without calls before and after it agree within this share of their time, or of a call's."""
HONEST, FORGED, CERTAIN = 0.5, 0.05, math.log(40)
"""Share of these bursts whose times are plausible on a busy machine, if they are honest and if they are not, and the
logarithm of the likelihood ratio that decides. Stalls make plausible times implausible, and rarely the reverse."""
SHARE, SLACK_MS = 0.25, 5.0
"""Time that may be missing from the samples: this share of their sum, but at least SLACK_MS, for the request itself."""
BURST_MS = 1.25
"""Time in ms of a burst on a CPU that none of its calls has: that of the request itself."""
FACTOR, LAUNCH_MS = 2.0, 0.05
"""A consecutive call may take FACTOR times as long as a timed one, plus LAUNCH_MS in ms."""
MOST_AUDITED, MOVE_MS = 400, 0.1
"""Maximum number of calls of a burst that the parent times on a CPU, and the expected time in ms to move inputs."""
PAUSE_S = 0.05
"""Pause in s before another attempt at such bursts, which doubles each time."""
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
GAUGE_VALUES = 1 << 17
"""Size of the tensors whose sums show whether a CPU is shared: large enough for all threads of torch."""

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


class Disturbed(Failure, frozen=True, tag=True):
    """The times of a cell cannot be checked, because other work keeps the device busy. The backend is not to blame."""


class Implausible(str):
    """A reason for which processor times are implausible. If it is seen once, other work may still be to blame."""


@dataclass
class Least:
    """The least times of a call among several bursts on a CPU, in ms, by the parent's clocks.

    Other work on the machine only lengthens times. A virtual machine that is stopped for a while charges the time to
    the process that it was running, so processor times are lengthened too. Hence the least time shows a call best.

    processor, thread   processor time of a call with all that surrounds it: of all processes, and of the thread
    rest, rest_thread   the same without the call, by the judging process
    second_rest_thread  the second least of the latter
    rests               all of them
    waiting             wall-clock time of what surrounds the call
    typical             median of the reported times of a burst
    elsewhere           time in which the thread worked or waited, less WAITED times the reported time
    parallel            processor time of a burst, less the most that it may have
    processors          number of processors that this burst used
    """

    threads: int = 1
    processor: float = math.inf
    thread: float = math.inf
    rest: float = math.inf
    rest_thread: float = math.inf
    second_rest_thread: float = math.inf
    waiting: float = math.inf
    typical: float = math.inf
    elsewhere: float = math.inf
    parallel: float = math.inf
    processors: float = 0.0
    rests: list[float] = field(default_factory=list)

    @property
    def noise_ms(self) -> float:
        """Return by how much a call's rest usually exceeds its least. A smaller excess of a call proves nothing."""
        return statistics.median(self.rests) - self.rest_thread if self.rests else 0.0

    def is_confirmed(self, median_ms: float) -> bool:
        """Return whether two bursts have the same least time without calls. If all had stalls, these hide calls."""
        return self.second_rest_thread - self.rest_thread <= AGREEMENT * max(self.rest_thread, median_ms)

    def take_rest(self, paced: Paced, calls: int) -> None:
        """Take the times of the judging process's burst without its calls, of this number and a warm-up."""
        calls += 1
        self.threads = paced.threads
        self.rest = min(self.rest, paced.processor_ms / calls)
        self.rest_thread, self.second_rest_thread, _ = sorted(
            (self.rest_thread, self.second_rest_thread, paced.run_ms / calls)
        )
        self.rests.append(paced.run_ms / calls)
        self.waiting = min(self.waiting, paced.wall_ms / calls)

    def take(self, timed: Timed) -> None:
        """Take the times of a burst, after those of the judging process's."""
        calls, typical = len(timed.burst.samples_ms) + 1, statistics.median(timed.burst.samples_ms)
        self.processor = min(self.processor, timed.processor_ms / calls)
        self.thread = min(self.thread, timed.run_ms / calls)
        self.typical = min(self.typical, typical)
        self.elsewhere = min(self.elsewhere, (timed.busy_ms - BURST_MS) / calls - WAITED * typical)
        parallel = timed.processor_ms - PAID * self.threads * timed.wall_ms - SLACK_MS
        if parallel < self.parallel:
            self.parallel, self.processors = parallel, timed.processor_ms / timed.wall_ms

    def problem(self, median_ms: float, stretched: float = 1.0, noise_ms: float = 0.0) -> str | None:
        """Return why the reported times are implausible on a device with this slowdown, or None.

        noise_ms  excess of processor time that is not counted
        """
        return self._unpaid(median_ms, stretched, noise_ms) or self._parallel() or self._elsewhere(median_ms, stretched)

    def _unpaid(self, median_ms: float, stretched: float, noise_ms: float) -> str | None:
        """Return why the processor time of a call exceeds its reported time, or None.

        That of the thread that makes the calls is at most their time. All threads together have more.
        """
        # Threads of torch that wait for the next call use their processors too.
        waiting_ms = (self.threads - 1) * self.waiting
        call_ms, thread_ms = self.processor / stretched - self.rest, self.thread / stretched - self.rest_thread
        extra_ms = PACE_SHARE * self.rest + CALL_MS + noise_ms
        if call_ms <= PAID * (self.threads * median_ms + waiting_ms) + extra_ms:
            if thread_ms <= PAID * median_ms + extra_ms:
                return None
            call_ms = thread_ms
        return (
            f"implausible: a call uses {call_ms:.4g} ms of processor time by the parent's clock, and {median_ms:.4g} "
            "ms is reported"
        )

    def _parallel(self) -> str | None:
        """Return why the cell uses more processors than it may, or None."""
        if self.parallel <= 0:
            return None
        return (
            f"its calls used {self.processors:.2g} processors by the parent's clock, and have {self.threads}; "
            "OMP_NUM_THREADS sets the number for all backends"
        )

    def _elsewhere(self, median_ms: float, stretched: float) -> str | None:
        """Return why the work of a burst must have been done elsewhere or at another time, or None."""
        paid_ms = WAITED * self.typical
        spent_ms = (self.elsewhere + paid_ms) / stretched - (1 + PACE_SHARE) * self.rest_thread
        if spent_ms > paid_ms:
            return (
                f"implausible: its process worked and waited for {spent_ms:.4g} ms a call by the parent's clock, "
                f"and one took {self.typical:.4g} ms"
            )
        if TINY_MS > self.typical > TINY_FACTOR * stretched * median_ms + CALL_MS:
            return (
                f"implausible: a timed call takes {self.typical:.4g} ms, and {median_ms:.4g} ms is reported for others"
            )
        return None


def audit(
    ask: Callable[[int], Timed | Failure | str],
    pace: Callable[[int], Paced | Failure],
    median_ms: float,
    gauge: Callable[[], float | Failure],
) -> str | Failure | None:
    """Measure bursts on a CPU by this process's clocks. Return why the reported times are implausible, or None.

    The judging process makes the same bursts without the calls, so that the rest is the time of the calls, wherever a
    backend does its work: in the call, before it, or when the harness copies the output. The processor time shows
    this best, because it does not grow when other processes keep the machine busy.

    Bursts are measured until a sequential probability ratio test decides that enough are plausible (Wald, "Sequential
    Tests of Statistical Hypotheses", 1945), at most WINDOWS * ATTEMPTS. If it is undecided by then, the least times of
    all bursts count.

    ask        measures a burst of this many calls; returns a text if something else is wrong with it
    pace       returns the time of a burst of this many calls without the calls
    median_ms  median of the bursts of the record
    gauge      returns the slowdown of work on the device compared with an idle device
    """
    most = max(1, min(MOST_AUDITED, int(WINDOW_MS / (median_ms + MOVE_MS))))
    bursts = min(WINDOWS, most)
    plausible, implausible = math.log(HONEST / FORGED), math.log((1 - HONEST) / (1 - FORGED))
    certain = min(CERTAIN, bursts * plausible)  # one long call is enough
    least, evidence, gauges = Least(), 0.0, list[float]()
    for attempt in range(ATTEMPTS):
        if attempt:
            rest(PAUSE_S * 2**attempt)
        calls = math.ceil(most / bursts)
        before = pace(calls)
        if isinstance(before, Failure):
            return before
        least.take_rest(before, calls)
        for _ in range(bursts):
            timed = ask(calls)
            if not isinstance(timed, Timed):
                return timed
            calls = len(timed.burst.samples_ms)
            after = pace(calls)
            if isinstance(after, Failure):
                return after
            least.take_rest(after, calls)
            least.take(timed)
            vote = _vote(timed, before, after, least, median_ms)
            if vote is not None:
                evidence += plausible if vote else implausible
            before = after
        if evidence >= certain:
            return None
        if attempt < ATTEMPTS - 1 and least.problem(median_ms) is None:
            continue  # a gauge takes as long as an attempt, and would explain times that may yet be found plausible
        gauged = gauge()
        if isinstance(gauged, Failure):
            return gauged
        gauges.append(gauged)
    problem, stretched = least.problem(median_ms), statistics.median(gauges)
    if evidence > -certain and problem is None and least.is_confirmed(median_ms):
        return None
    accused = least.problem(median_ms, noise_ms=least.noise_ms)
    if evidence < 0 and accused and (stretched < STRETCHED or least.problem(median_ms, UNEVEN * stretched)):
        return Implausible(accused)
    return _shared(stretched)


def _vote(timed: Timed, before: Paced, after: Paced, least: Least, median_ms: float) -> bool | None:
    """Return whether the times of a burst are plausible at the speed of the processor before and after it.

    Returns None if the two bursts without calls differ: a stall, or a neighbour on the same core, came between.
    """
    calls, now_least = len(timed.burst.samples_ms), Least()
    for paced in (before, after):
        now_least.take_rest(paced, calls)
    now_least.take(timed)
    if not now_least.is_confirmed(median_ms):
        return None
    slowdown = now_least.rest_thread / least.rest_thread if least.rest_thread else 1.0
    return now_least.problem(slowdown * median_ms) is None


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


def _shared(stretched: float) -> Disturbed:
    slower = f" and takes {stretched:.1f} times as long for the same work" if stretched >= STRETCHED else ""
    return Disturbed(
        "error", f"not checked: the device is shared with other work{slower}; measure again when it is idle"
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


def stretch(device: str, usual_ms: float = math.inf) -> float:
    """Return the slowdown of known work compared with an idle device: 1 if nothing else runs.

    On a GPU the work is kernels that spin for half a millisecond each. Processes that share a GPU alternate every few
    milliseconds: most spins fit into a time slice and give the undisturbed time, the others include the slices of other
    processes. On a CPU it is sums by all threads of torch, in as many parts as an audit has bursts, of which the least
    disturbed counts.

    usual_ms  undisturbed time of a sum, measured earlier: a neighbour on the same core slows down all of them
    """
    if device != "cuda":
        parts = [_timed_sums() for _ in range(WINDOWS)]
        return min(map(statistics.fmean, parts)) / min(usual_ms, *map(_undisturbed, parts))
    import torch

    torch.cuda._sleep(GAUGE_SPINS * GAUGE_CYCLES)  # brings the clock up
    events = [torch.cuda.Event(enable_timing=True) for _ in range(GAUGE_SPINS + 1)]
    for event in events[:-1]:
        event.record()
        torch.cuda._sleep(GAUGE_CYCLES)
    events[-1].record()
    torch.cuda.synchronize()
    spins = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return statistics.fmean(spins) / max(_undisturbed(spins), 1e-3)


def usual_ms() -> float:
    """Return the undisturbed time in ms of known work on a CPU."""
    return _undisturbed(_timed_sums())


def _timed_sums() -> list[float]:
    """Return the times in ms of known work on a CPU, which together take as long as a burst of an audit."""
    import torch

    terms = torch.ones(GAUGE_VALUES)
    total = torch.add(terms, terms)
    times: list[float] = []
    until = time.perf_counter() + 1e-3 * WINDOW_MS / WINDOWS
    while (begun := time.perf_counter()) < until:
        torch.add(terms, terms, out=total)
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def _undisturbed(times: Sequence[float]) -> float:
    """Return the time of the same work when nothing disturbs it."""
    return sorted(times)[len(times) // 10]
