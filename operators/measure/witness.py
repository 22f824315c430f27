"""Bound the times that a backend's process reports, from above and below, by the parent's clock."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from groupbench.operators.measure.deferred import torch
from groupbench.operators.measure.wire import Burst, Failure, Paced
from groupbench.tracker.facts.record import NOT_CHECKED

log = logging.getLogger(__name__)

T = TypeVar("T")

now = time.monotonic
rest = time.sleep


@dataclass(frozen=True)
class Limits:
    """The tuned numbers of this module, and where each comes from.

    A bound without a reason given is a choice between the two sides: honest backends stayed below it on busy virtual
    machines (up to 28 runnable processes), and the self-test's cheats exceed it.
    """

    # Calls in a row. Earlier bounds, which together left a factor of 4.5, let forged bursts pass on an H100.
    window_ms: float = 50.0  # least duration of the calls that the parent times
    first_calls: int = 64
    most_calls: int = 4000
    attempts: int = 6  # each with twice the calls: a busy machine deschedules a process for milliseconds
    share: float = 0.25  # of the samples' sum that may be missing from it, but at least `slack_ms`
    slack_ms: float = 5.0  # for the request itself
    factor: float = 2.0  # a call in a row takes at most so many times a timed one, and `launch_ms`
    launch_ms: float = 0.05

    # Bursts on a CPU. Four short ones replaced one of 50 ms, which stalls of a virtual machine made implausible.
    bursts: int = 4
    most_audited: int = 400  # calls
    move_ms: float = 0.1  # expected time to move inputs
    pause_s: float = 0.05  # before another attempt; doubles each time
    audit_s: float = 3.0  # after which no further attempt begins
    burst_ms: float = 1.25  # time of a burst that none of its calls has: that of the request itself
    agreement: float = 0.15  # bursts without calls agree within this share of their time, or of a call's

    # Processor time of a call.
    paid: float = 1.5  # times its reported time, plus the next two
    pace_share: float = 0.1  # of a burst's time without its calls
    call_ms: float = 0.003
    waited: float = 2.5  # times its reported time, in which its process works or waits for work elsewhere
    tiny_ms: float = 0.2  # too short to tell its processor time from the rest, and to be descheduled often
    tiny_factor: float = 3.0  # a tiny call takes at most so many times as long as others

    # Processor time between bursts: GNU's OpenMP and OpenBLAS spin for some milliseconds before a thread sleeps.
    rest_share: float = 0.01  # of the break
    rest_s: float = 0.02  # for each thread

    # A shared device.
    stretched: float = 1.3  # slowdown from which it counts as shared
    uneven: float = 2.0  # the slowdown, and a wait for a processor, vary between calls by so much
    gauge_spins: int = 50  # spins on a GPU, of half a millisecond each: most fit into a time slice
    gauge_cycles: int = 1_000_000
    gauge_values: int = 1 << 17  # size of the tensors that are summed on a CPU: enough for all threads of torch


LIMITS = Limits()


HONEST, FORGED, CERTAIN = 0.5, 0.05, 40.0
"""For the sequential probability ratio test of bursts (Wald, "Sequential Tests of Statistical Hypotheses", 1945): the
share of plausible bursts of an honest backend on a busy machine, that of a forged one, and the likelihood ratio that
decides. Stalls make plausible times implausible, and rarely the reverse, so half of an honest backend's bursts suffice.
A fixed share of a quarter acquitted two of 84 cheats on a machine that stalls."""
VOTES = {True: math.log(HONEST / FORGED), False: math.log((1 - HONEST) / (1 - FORGED))}
"""The votes of a plausible and an implausible burst: terms of the logarithm of the likelihood ratio."""


def too_long(samples_ms: Sequence[float], took_s: float) -> str | None:
    """Return why the samples of a burst are implausible, given that the whole burst took `took_s`, or None."""
    total = sum(samples_ms)
    if total <= 1e3 * took_s * 1.01 + 1:
        return None
    return f"implausible: {total:.4g} ms are reported for calls that took {1e3 * took_s:.4g} ms by the parent's clock"


def restless(rested_s: float, spent_s: float, threads: int = 1, spins: bool = False) -> str | None:
    """Return why processes disturb others that used this processor time in a break of this length, or None.

    Args:
        threads: Number of threads on which a call may compute.
        spins: Whether all but the first wait for the next call without sleeping.
    """
    waiting_s = (threads - 1) * rested_s if spins else 0.0
    if spent_s <= LIMITS.rest_share * rested_s + LIMITS.rest_s * threads + waiting_s:
        return None
    return (
        f"its processes used {spent_s:.2g} s of processor time in the {rested_s:.2g} s between its bursts, in which "
        "others are measured"
    )


@dataclass(frozen=True)
class Timed:
    """A burst, with times by the parent's clocks.

    Attributes:
        wall_ms: Wall-clock time.
        processor_ms: Processor time of all processes of the cell.
        run_ms: Of it, that of the thread that makes the calls.
        queued_ms: Time in which that thread waited for a free processor.
    """

    burst: Burst
    wall_ms: float
    processor_ms: float
    run_ms: float = 0.0
    queued_ms: float = 0.0

    def busy_ms(self, waits: float) -> float:
        """Return the time in which the thread ran, or waited for something other than a free processor.

        Args:
            waits: How long other work lets a thread wait for each ms that it runs. A longer wait is for another
                process in the cell, which may have ended before its processor time was read.
        """
        other_ms = LIMITS.uneven * waits * self.run_ms + self.processor_ms - self.run_ms
        return self.wall_ms - min(self.queued_ms, other_ms)


class Disturbed(Failure, frozen=True, tag=True):
    """The times of a cell cannot be checked, because other work keeps the device busy. The backend is not to blame."""


class Implausible(str):
    """A reason for which processor times are implausible. If it is seen once, other work may still be to blame."""


@dataclass
class Least:
    """The least times of a call among several bursts on a CPU, in ms, by the parent's clocks.

    Other work on the machine only lengthens times. A virtual machine that is stopped for a while charges the time to
    the process that it was running, so processor times are lengthened too. Hence the least time shows a call best.

    Attributes:
        processor, thread: Processor time of a call with all that surrounds it: of all processes, and of the thread.
        rest: The same of all processes without the call, by the judging process.
        rests: The same of the thread, by burst.
        waiting: Wall-clock time of what surrounds the call.
        waits: The judging process's longest wait for a free processor, for each ms that it runs.
        typical: Median of the reported times of a burst.
        elsewhere: Time in which the thread worked or waited, less `Limits.waited` times the reported time.
    """

    threads: int = 1
    processor: float = math.inf
    thread: float = math.inf
    rest: float = math.inf
    waiting: float = math.inf
    waits: float = 0.0
    typical: float = math.inf
    elsewhere: float = math.inf
    rests: list[float] = field(default_factory=list)

    @property
    def rest_thread(self) -> float:
        return min(self.rests, default=math.inf)

    @property
    def noise_ms(self) -> float:
        """Return by how much a call's rest usually exceeds the least. A smaller excess of a call proves nothing."""
        return statistics.median(self.rests) - self.rest_thread if self.rests else 0.0

    def is_confirmed(self, median_ms: float) -> bool:
        """Return whether two bursts have the same least time without calls. If all had stalls, these hide calls."""
        least, second = sorted((*self.rests, math.inf, math.inf))[:2]
        return second - least <= LIMITS.agreement * max(least, median_ms)

    def take_rest(self, paced: Paced, calls: int) -> None:
        """Take the times for the judging process's burst without calls, with this number and a warm-up."""
        calls += 1
        self.threads = paced.threads
        self.rest = min(self.rest, paced.processor_ms / calls)
        self.rests.append(paced.run_ms / calls)
        self.waiting = min(self.waiting, paced.wall_ms / calls)
        self.waits = max(self.waits, paced.wall_ms / max(paced.run_ms, 1e-6) - 1)

    def take(self, timed: Timed) -> None:
        """Take the times of a burst, after those of the judging process's."""
        calls, typical = len(timed.burst.samples_ms) + 1, statistics.median(timed.burst.samples_ms)
        self.processor = min(self.processor, timed.processor_ms / calls)
        self.thread = min(self.thread, timed.run_ms / calls)
        self.typical = min(self.typical, typical)
        busy_ms = timed.busy_ms(self.waits) - LIMITS.burst_ms
        self.elsewhere = min(self.elsewhere, busy_ms / calls - LIMITS.waited * typical)

    def problem(self, median_ms: float, stretched: float = 1.0, noise_ms: float = 0.0) -> str | None:
        """Return why the reported times are implausible on a device with this slowdown, or None.

        Args:
            noise_ms: Excess of processor time that is not counted.
        """
        return self._unpaid(median_ms, stretched, noise_ms) or self._elsewhere(median_ms, stretched)

    def _unpaid(self, median_ms: float, stretched: float, noise_ms: float) -> str | None:
        """Return why a call's processor time exceeds the reported time, or None.

        That of the thread that makes the calls is at most their time. All threads together have more.
        """
        # Threads of torch that wait for the next call use their processors too.
        waiting_ms = (self.threads - 1) * self.waiting
        call_ms, thread_ms = self.processor / stretched - self.rest, self.thread / stretched - self.rest_thread
        extra_ms = LIMITS.pace_share * self.rest + LIMITS.call_ms + noise_ms
        if call_ms <= LIMITS.paid * (self.threads * median_ms + waiting_ms) + extra_ms:
            if thread_ms <= LIMITS.paid * median_ms + extra_ms:
                return None
            call_ms = thread_ms
        return (
            f"implausible: a call uses {call_ms:.4g} ms of processor time by the parent's clock, and {median_ms:.4g} "
            "ms is reported"
        )

    def _elsewhere(self, median_ms: float, stretched: float) -> str | None:
        """Return why the work of a burst must have been done elsewhere or at another time, or None."""
        paid_ms = LIMITS.waited * self.typical
        spent_ms = (self.elsewhere + paid_ms) / stretched - (1 + LIMITS.pace_share) * self.rest_thread
        if spent_ms > paid_ms:
            return (
                f"implausible: its process worked and waited for {spent_ms:.4g} ms a call by the parent's clock, "
                f"and one took {self.typical:.4g} ms"
            )
        if LIMITS.tiny_ms > self.typical > LIMITS.tiny_factor * stretched * median_ms + LIMITS.call_ms:
            return (
                f"implausible: a timed call takes {self.typical:.4g} ms, and {median_ms:.4g} ms is reported for others"
            )
        return None


class _Ended(Exception):
    """A fault of another kind, or a Failure, which ends a check."""


def _checked(reply: T | Failure | str) -> T:
    if isinstance(reply, (Failure, str)):
        raise _Ended(reply)
    return reply


def audit(
    ask: Callable[[int], Timed | Failure | str],
    pace: Callable[[int], Paced | Failure],
    median_ms: float,
    gauge: Callable[[], float | Failure],
) -> str | Failure | None:
    """Measure bursts on a CPU by this process's clocks. Return why the reported times are implausible, or None.

    The judging process makes the same bursts without the calls, so the rest is the calls' time, wherever a backend
    works: in the call, before it, or when the harness copies the output. The processor time shows this best, because it
    does not grow when other processes keep the machine busy.

    Bursts are measured until the test decides that enough are plausible, at most `bursts * attempts` of `Limits`. If it
    is undecided by then, the least times of all bursts count.

    Args:
        ask: Measures a burst of this many calls; returns a text if something else is wrong with it.
        pace: Returns the time of a burst of this many calls without the calls.
        median_ms: Median of the bursts of the record.
        gauge: Returns the slowdown of work on the device compared with an idle device.
    """
    most = max(1, min(LIMITS.most_audited, int(LIMITS.window_ms / (median_ms + LIMITS.move_ms))))
    bursts = min(LIMITS.bursts, most)
    # One long call is enough: it allows one burst, whose vote then decides.
    evidence, limit = 0.0, min(math.log(CERTAIN), bursts * VOTES[True])
    least, gauges = Least(), list[float]()
    until = now() + LIMITS.audit_s

    def votes(calls: int) -> float:
        """Measure some bursts, each between two without calls, and return the sum of their votes."""
        total, before = 0.0, _checked(pace(calls))
        least.take_rest(before, calls)
        for _ in range(bursts):
            timed = _checked(ask(calls))
            calls = len(timed.burst.samples_ms)
            after = _checked(pace(calls))
            least.take_rest(after, calls)
            least.take(timed)
            total += _vote(timed, before, after, least, median_ms)
            before = after
        return total

    try:
        for attempt in range(LIMITS.attempts):
            if attempt and now() >= until:
                break
            if attempt:
                log.debug("audit: attempt %d, evidence %.2f", attempt + 1, evidence)
                rest(LIMITS.pause_s * 2**attempt)
            evidence += votes(math.ceil(most / bursts))
            if evidence >= limit:
                return None
            # A gauge takes as long as an attempt, and would explain times that may yet be found plausible.
            if attempt == LIMITS.attempts - 1 or least.problem(median_ms) is not None:
                gauges.append(_checked(gauge()))
        if evidence > -limit and least.problem(median_ms) is None and least.is_confirmed(median_ms):
            return None
        stretched = statistics.median(gauges or [_checked(gauge())])
    except _Ended as ended:
        fault: str | Failure = ended.args[0]
        return fault
    accused = least.problem(median_ms, noise_ms=least.noise_ms)
    unexplained = stretched < LIMITS.stretched or least.problem(median_ms, LIMITS.uneven * stretched)
    return Implausible(accused) if evidence < 0 and accused and unexplained else _shared(stretched)


def _vote(timed: Timed, before: Paced, after: Paced, least: Least, median_ms: float) -> float:
    """Return a burst's vote: whether its times are plausible at the processor's speed around it.

    It is 0 if the two bursts without calls differ: a stall, or a neighbour on the same core, came between.
    """
    calls, now_least = len(timed.burst.samples_ms), Least(waits=least.waits)
    for paced in (before, after):
        now_least.take_rest(paced, calls)
    now_least.take(timed)
    if not now_least.is_confirmed(median_ms):
        return 0.0
    slowdown = now_least.rest_thread / least.rest_thread if least.rest_thread else 1.0
    return VOTES[now_least.problem(slowdown * median_ms) is None]


def watch(
    ask: Callable[[int], Burst | Failure],
    median_ms: float,
    enqueue_ms: float | None,
    gauge: Callable[[], float | Failure],
) -> str | Failure | None:
    """Time consecutive calls by this process's clock. Return why the reported times are implausible, or None.

    Returns a Failure if other work on the device can explain the times: processes that share a GPU by turns slow down
    consecutive calls but not single ones, which is not the backend's fault.

    Args:
        ask: Makes the process run this many calls and wait until the device is idle.
        median_ms: Median of the bursts.
        enqueue_ms: Host time to launch a call without waiting for it.
        gauge: Returns the slowdown of work on the device compared with an idle device.
    """
    single_ms = max(median_ms, enqueue_ms or 0.0)
    most = max(2, min(LIMITS.most_calls, math.ceil(LIMITS.window_ms / max(single_ms, 1e-3))))
    calls = min(LIMITS.first_calls, most)  # thousands of calls that take longer than reported would take minutes
    for _ in range(LIMITS.attempts):
        while True:
            begun = now()
            if isinstance(reply := ask(calls), Failure):
                return reply
            took_ms = 1e3 * (now() - begun)
            if took_ms >= LIMITS.window_ms or calls >= most:
                break
            calls = min(4 * calls, most)
        row = (reply.samples_ms, took_ms, calls, single_ms)
        problem = _problem(*row)
        if problem is None:
            return None
        calls = min(2 * calls, LIMITS.most_calls)
    if isinstance(stretched := gauge(), Failure):
        return stretched
    if stretched < LIMITS.stretched or _problem(*row, LIMITS.uneven * stretched):
        return problem
    return _shared(stretched)


def _shared(stretched: float) -> Disturbed:
    slower = f" and takes {stretched:.1f} times as long for the same work" if stretched >= LIMITS.stretched else ""
    return Disturbed(
        "error", f"{NOT_CHECKED}the device is shared with other work{slower}; measure again when it is idle"
    )


def _problem(
    samples_ms: Sequence[float], took_ms: float, calls: int, single_ms: float, stretched: float = 1.0
) -> str | None:
    """Return why the times of consecutive calls are implausible on a device with this slowdown, or None."""
    total = sum(samples_ms)
    if len(samples_ms) != calls:
        return f"implausible: {len(samples_ms)} times are reported for {calls} calls"
    if total > 1.01 * took_ms + 1 or took_ms - total > stretched * max(LIMITS.share * total, LIMITS.slack_ms):
        return (
            f"implausible: {calls} calls took {took_ms:.4g} ms by the parent's clock, until the device was idle, and "
            f"{total:.4g} ms by the backend's process"
        )
    typical = max(statistics.median(samples_ms), (took_ms - LIMITS.slack_ms) / calls)
    if typical > stretched * LIMITS.factor * single_ms + LIMITS.launch_ms:
        return f"implausible: a call in a row takes {typical:.4g} ms, and {single_ms:.4g} ms is reported for timed ones"
    return None


def stretch(device: str, usual_ms: float = math.inf) -> float:
    """Return the slowdown of known work compared with an idle device: 1 if nothing else runs.

    On a GPU the work is kernels that spin for half a millisecond each. Processes that share a GPU alternate every few
    milliseconds: most spins fit into a time slice and give the undisturbed time, the others include the slices of other
    processes. On a CPU it is sums by all threads of torch, in as many parts as an audit has bursts, of which the least
    disturbed counts.

    Args:
        usual_ms: Undisturbed time of a sum, measured earlier: a neighbour on the same core slows down all of them.
    """
    if device != "cuda":
        parts = [_timed_sums() for _ in range(LIMITS.bursts)]
        return min(map(statistics.fmean, parts)) / min(usual_ms, *map(_undisturbed, parts))
    torch.cuda._sleep(LIMITS.gauge_spins * LIMITS.gauge_cycles)  # brings the clock up
    events = [torch.cuda.Event(enable_timing=True) for _ in range(LIMITS.gauge_spins + 1)]
    for event in events[:-1]:
        event.record()
        torch.cuda._sleep(LIMITS.gauge_cycles)
    events[-1].record()
    torch.cuda.synchronize()
    spins = [before.elapsed_time(after) for before, after in itertools.pairwise(events)]
    return statistics.fmean(spins) / max(_undisturbed(spins), 1e-3)


def usual_ms() -> float:
    """Return the undisturbed time in ms of known work on a CPU."""
    return _undisturbed(_timed_sums())


def _timed_sums() -> list[float]:
    """Return the times in ms of known work on a CPU, which together take as long as a burst of an audit."""
    terms = torch.ones(LIMITS.gauge_values)
    total = torch.add(terms, terms)
    times: list[float] = []
    until = time.perf_counter() + 1e-3 * LIMITS.window_ms / LIMITS.bursts
    while (begun := time.perf_counter()) < until or not times:  # a stall may have taken all of the time
        torch.add(terms, terms, out=total)
        times.append(1e3 * (time.perf_counter() - begun))
    return times


def _undisturbed(times: Sequence[float]) -> float:
    """Return the time of the same work when nothing disturbs it."""
    return sorted(times)[len(times) // 10]
