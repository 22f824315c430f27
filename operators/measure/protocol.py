"""Measure latency in short call bursts.

Most noise in a GPU benchmark comes from power management: a compute-bound kernel's time depends on the work in the
preceding half second. Samples within a burst agree to 0.2 %, but bursts taken back to back differ by 5 %. Therefore the
GPU idles before each burst, bursts are short and alternate between backends, and statistics treat a burst, not a
sample, as one observation. On an H100 with unlocked clocks, such bursts' medians repeat to 0.04-0.4 % for kernels
taking 0.1-0.6 ms.

This is the protocol `cooled`. `sustained` first loads the GPU with the kernel itself, whose latency is then 18 %
higher. Every record names the protocol.
"""

from __future__ import annotations

import ctypes
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from groupbench.operators.errors import UsageError
from groupbench.operators.measure.deferred import torch
from groupbench.tracker.facts.record import Timing
from groupbench.tracker.text.wording import no_such

PROTOCOLS = ("cooled", "sustained")


@dataclass(frozen=True)
class Queue:
    """The tuned numbers of this module, and where each comes from: how calls are queued on a GPU, or made on a CPU."""

    flush_bytes: int = 256 << 20  # five times an H100's L2
    spin_cycles: int = 2_000_000  # of a millisecond, at the highest SM clock; too long a spin is only idle time
    most_lead_ms: float = 40.0  # that the GPU spins while the host queues a burst
    attempts: int = 4  # to queue a burst, each with four times the lead, before late calls are accepted
    cpu_s: float = 0.25  # after which a burst on a CPU ends, however few its calls
    # Calls on an idle GPU that measure the host's time of one: fewest, most, and their total.
    least_enqueued: int = 7
    most_enqueued: int = 60
    enqueue_s: float = 0.05


QUEUE = Queue()

_now = time.perf_counter  # bound before any plugin is imported


@dataclass(frozen=True)
class Protocol:
    """A measurement's settings. Raises UsageError if a value is out of range.

    Attributes:
        name: Cooled or sustained.
        bursts: Bursts of a cell.
        samples: Timed calls of a burst.
        warmups: Untimed calls at the start of each burst.
        idle_s: Seconds of idle GPU before each burst.
        warm_s: Seconds of load before each burst, if sustained.
        cudagraph: Time replays of a captured CUDA graph.
    """

    name: str = "cooled"
    bursts: int = 4
    samples: int = 10
    warmups: int = 3
    idle_s: float = 0.3
    warm_s: float = 1.0
    cudagraph: bool = False
    test_only: bool = False  # one sample shows that a backend runs; it does not belong to a series of latencies

    def __post_init__(self) -> None:
        if self.name not in PROTOCOLS:
            raise UsageError(no_such("no protocol", self.name, PROTOCOLS))
        if self.bursts < 1 or self.samples < 1 or not 0 <= self.idle_s <= 3600:
            raise UsageError("--bursts and --samples must be at least 1, and --idle must be 0 to 3600 seconds")

    @property
    def label(self) -> str:
        """The protocol in a series' identity: only settings with an effect on the latency, so not the burst count."""
        parts = [self.name]
        if self.name == "cooled" and self.idle_s != Protocol.idle_s:
            parts.append(f"idle={self.idle_s:g}s")
        if self.cudagraph:
            parts.append("cudagraph")
        if self.test_only:
            parts.append("test-only")
        return "+".join(parts)


class Watch:
    """Hooks around each call in a burst, which may move inputs and keep outputs; by default they do nothing."""

    def before(self) -> None:
        """Run before each call, including warm-ups."""

    def warm(self, out: Any) -> None:
        """Run after a warm-up."""

    def after(self, out: Any) -> None:
        """Run after a timed call, outside the timed interval. On a GPU it must not wait for the device."""


class GpuTimer:
    """Time a callable on the current CUDA device."""

    def __init__(self, run: Callable[[], Any], protocol: Protocol) -> None:
        self.protocol = protocol
        self.flush_buffer = _flush_buffer(torch.cuda.current_device())
        self.stream = torch.cuda.current_stream()
        self.run = _captured(run) if protocol.cudagraph else run
        self.enqueue_ms = self.host_ms()
        self._host_s: list[float] = []  # of each call of the last burst; the list itself never changes

    def burst(self, watch: Watch | None = None) -> list[float]:
        """Return each call's time in ms. The L2 cache is overwritten before each call.

        The GPU spins until the host has queued the burst, so the GPU's work is timed: otherwise a call with a longer
        launch than run would be timed by the launch. If the GPU starts a run before the host has queued all calls, the
        run is repeated with four times the lead, since a host may stall for some milliseconds, once in a few hundred
        bursts on a virtual machine. A run late even then is host-bound and is kept.

        `watch` is called around each run, in the same queue. It moves the inputs on the GPU right before the run, and
        keeps the output right after it. Work on a stream without a dependency on the move reads stale inputs, and work
        the copy does not wait for is missing from the output. The garbage collector is off around the run, where its
        callbacks could compute.
        """
        cuda, watch, flush = torch.cuda, watch or Watch(), self.flush_buffer
        _reset_persisting_l2()
        cuda.set_stream(self.stream)
        if self.protocol.name == "sustained":
            self._load(self.protocol.warm_s)
        around_ms = 0.0
        for _ in range(self.protocol.warmups):
            begun = _now()
            watch.before()
            around_ms = max(around_ms, 1e3 * (_now() - begun))
            torch.Tensor.zero_(flush)
            watch.warm(self.run())
        samples = self.protocol.samples
        clean: list[tuple[Any, Any]] = []
        late: list[tuple[Any, Any]] = []
        self._host_s.clear()
        collects = gc.isenabled()
        gc.disable()
        for attempt in range(QUEUE.attempts):
            run_lead_ms = min(4**attempt * (2 * self.enqueue_ms + 0.05), QUEUE.most_lead_ms)
            ahead_ms = samples * (run_lead_ms + 2 * around_ms)
            cuda._sleep(int(min(1 + ahead_ms, QUEUE.most_lead_ms) * QUEUE.spin_cycles))
            for _ in range(samples - len(clean)):
                watch.before()
                torch.Tensor.zero_(flush)
                cuda._sleep(int(run_lead_ms * QUEUE.spin_cycles))
                start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
                start.record(self.stream)
                begun = _now()
                if collects:
                    gc.enable()
                out = self.run()
                collects = gc.isenabled()
                gc.disable()
                self._host_s.append(_now() - begun)
                end.record(self.stream)
                (late if start.query() else clean).append((start, end))
                cuda.set_stream(self.stream)
                watch.after(out)
                del out
            cuda.synchronize()
            if len(clean) == samples:
                break
        if collects:
            gc.enable()
        if flush.numel() * flush.element_size() != QUEUE.flush_bytes:
            raise RuntimeError("the backend's process changed the buffer that flushes the L2 cache")
        taken = (clean + late)[:samples]
        # The event clock ticks in steps, so an empty kernel may read 0, which is not a valid latency.
        return [max(start.elapsed_time(end), 1e-6) for start, end in taken]

    def witness(self, calls: int, watch: Watch) -> list[float]:
        """Return the times of `calls` consecutive calls in ms. The hooks in `watch` run around one drawn at random.

        An outer clock checks the times' sum. Waits until the whole device is idle, whichever streams the calls have
        used.
        """
        watched = random.SystemRandom().randrange(1, calls)
        begun = _now()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(self.stream)
        for number in range(calls):
            if number == watched:
                watch.before()
                watch.after(self.run())
            else:
                self.run()
        end.record(self.stream)
        enqueued_ms = 1e3 * (_now() - begun)
        end.synchronize()
        mean = max(start.elapsed_time(end), enqueued_ms) / calls
        torch.cuda.synchronize()
        return [max(mean, 1e-6)] * calls

    def _load(self, seconds: float) -> None:
        """Keep the GPU busy with the kernel itself."""
        stop = _now() + seconds
        while _now() < stop:
            for _ in range(10):
                self.run()
            torch.cuda.synchronize()

    @property
    def burst_enqueue_ms(self) -> float | None:
        """The host time in ms to launch a call, in the last burst."""
        return 1e3 * _lower_quartile(self._host_s) if self._host_s else None

    def host_ms(self) -> float:
        """Return the host time in ms to launch a call on an idle GPU."""
        times: list[float] = []
        begun = _now()
        fewest, most = QUEUE.least_enqueued, QUEUE.most_enqueued
        while len(times) < fewest or (len(times) < most and _now() - begun < QUEUE.enqueue_s):
            torch.cuda.synchronize()
            start = _now()
            self.run()
            times.append(_now() - start)
        torch.cuda.synchronize()
        return 1e3 * _lower_quartile(times)


def _lower_quartile(host_s: list[float]) -> float:
    """Return the host times' lower quartile, because disturbances only make them longer."""
    return sorted(host_s)[len(host_s) // 4]


class CpuTimer:
    """Time a callable by the wall clock. For an interpreted kernel, this is the interpreter's time, not a latency."""

    def __init__(self, run: Callable[[], Any], protocol: Protocol, interpreted: bool) -> None:
        self.run = run
        self.samples = 1 if interpreted else protocol.samples
        self.warm = not interpreted
        self.enqueue_ms = None

    def burst(self, watch: Watch | None = None, samples: int | None = None) -> list[float]:
        """Return each call's time in ms. The hooks in `watch` run around it, outside the timed interval.

        Args:
            samples: Number of timed calls; that of the protocol by default.
        """
        watch, samples = watch or Watch(), samples or self.samples
        if self.warm:
            watch.before()
            watch.warm(self.run())
        times: list[float] = []
        collects = gc.isenabled()
        gc.disable()  # outside of calls, where its callbacks could compute
        while len(times) < samples and (not times or sum(times) < 1e3 * QUEUE.cpu_s):
            watch.before()
            if collects:
                gc.enable()
            start = _now()
            out = self.run()
            end = _now()
            collects = gc.isenabled()
            gc.disable()
            times.append(max(1e3 * (end - start), 1e-6))
            watch.after(out)
            del out
        if collects:
            gc.enable()
        return times


def timing_of(device: str, interpreted: bool) -> Timing:
    """Return the kind of time a timer measures."""
    return "gpu" if device == "cuda" else "interpreted" if interpreted else "cpu"


def timer_of(run: Callable[[], Any], protocol: Protocol, device: str, interpreted: bool) -> GpuTimer | CpuTimer:
    return GpuTimer(run, protocol) if device == "cuda" else CpuTimer(run, protocol, interpreted)


def cooled_bursts(
    run: Callable[[], Any], protocol: Protocol, device: str, interpreted: bool
) -> tuple[list[tuple[float, ...]], float | None]:
    """Time a callable's bursts alone. Return them and the time to enqueue a call; an interpreted one has one."""
    timer = timer_of(run, protocol, device, interpreted)
    bursts = []
    for _ in range(1 if interpreted else protocol.bursts):
        if device == "cuda":
            time.sleep(protocol.idle_s)
        bursts.append(tuple(timer.burst()))
    return bursts, timer.enqueue_ms


@cache
def _flush_buffer(device: int) -> torch.Tensor:
    """Return memory whose overwriting flushes a GPU's L2. All timers share it: a tuner has dozens."""
    return torch.empty(QUEUE.flush_bytes // 4, dtype=torch.int32, device=torch.device("cuda", device))


PERSISTING_L2_LIMIT = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE"""


def _reset_persisting_l2() -> None:
    """Release the L2 part a backend may have reserved for data, which a flush does not reach."""
    driver = _driver()
    if driver is not None:
        driver.cuCtxSetLimit(PERSISTING_L2_LIMIT, ctypes.c_size_t(0))
        driver.cuCtxResetPersistingL2Cache()


def reserved_l2() -> int:
    """Return the L2 bytes reserved by a backend since the burst began: a flush does not reach them."""
    reserved, driver = ctypes.c_size_t(0), _driver()
    if driver is None or driver.cuCtxGetLimit(ctypes.byref(reserved), PERSISTING_L2_LIMIT):
        return 0
    return reserved.value


@cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function to replay a CUDA graph for `run`.

    The graph is captured after a warm-up on a side stream, as torch's documentation asks. Each replay overwrites the
    captured output, which it returns.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph: torch.cuda.CUDAGraph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay() -> Any:
        graph.replay()
        return out

    return replay
