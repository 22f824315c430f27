"""Measure a call's costs besides latency: memory, kernels launched, energy, compile and tuning time.

They are measured in the cell's process after the bursts, so they do not affect the latency. Each cost is a metric in
`tracker/facts/metrics.py`; unmeasurable ones are omitted.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from groupbench.operators.errors import Unavailable
from groupbench.operators.measure.compiled import replaced
from groupbench.operators.measure.deferred import torch
from groupbench.operators.operator import Placement, Run

_now = time.perf_counter

MIB = 1 << 20
FOREIGN_MIB = 4
"""Memory of other allocators below this is their granularity, not a workspace."""
SAMPLED_CALLS = 3
"""Calls during which the device's free memory is watched."""


class Costs(msgspec.Struct, frozen=True):
    """A call's costs, by metric, and the launched kernels."""

    metrics: dict[str, float]
    launched: tuple[str, ...] | None = None  # kernels, copies and fills, in order


@dataclass(frozen=True)
class Loads:
    """The tuned numbers of measurements under load, and where each comes from.

    An H200's counter of energy changes every 0.1 s, so that the first change comes 0.1 to 0.2 s after the start, and
    the last one 0.2 s later. Longer spans lower the scatter little, because the card's own control of power changes
    the clocks: it was 1.0 % over 16 repetitions of two products with spans of 0.3 and of 0.6 s.
    """

    loop_ms: float = 20.0  # a loop without waits
    loops: int = 5
    fewest_calls: int = 10
    most_calls: int = 500
    rest_s: float = 0.1  # before the idle power is measured: the power of an H200 falls within 0.1 s
    idle_s: float = 0.2  # over which it is
    warm_s: float = 0.1  # of calls before the counter is read: the first 0.1 s of a load take up to 25 % more power
    span_s: float = 0.18  # between its first and last change
    longest_s: float = 2.5  # if it rarely changes
    least_ticks: int = 3  # changes under load, which come every 20 to 100 ms; power is the slope over them
    # GPU time of the calls that are enqueued together. It must exceed several readings of the counter, each of which
    # may take the host 5 ms: with batches of 2 ms the GPU was idle half of the time.
    batch_s: float = 0.02
    backlog: int = 1  # batches behind the running one, so that the GPU never waits for the host


LOADS = Loads()

MEMORY, KERNELS, EAGER, ENERGY, COLD, INVARIANCE = "memory", "kernels", "eager", "energy", "cold", "invariance"
CHEAP = (MEMORY,)
"""The costs measured by default: they take milliseconds and do not change the process."""
ALL = (MEMORY, KERNELS, EAGER, ENERGY, COLD, INVARIANCE)
"""All costs: energy takes 0.4 s per cell, cold a new process with empty caches, invariance 70 calls of `prepare`."""


def of_cuda(run: Callable[[], Any], wanted: Sequence[str], call_ms: float, nvml: Any) -> Costs:
    """Return the wanted costs for a call on the current CUDA device, without unmeasurable ones."""
    values: dict[str, float] = {}
    names = None
    with contextlib.suppress(Exception):
        if ENERGY in wanted and nvml and nvml.joules() is not None:
            values |= _energy(run, call_ms, nvml)
    with contextlib.suppress(Exception):
        if EAGER in wanted:
            values["eager_ms"] = eager_ms(run, call_ms, torch.cuda.synchronize)
    with contextlib.suppress(Exception):
        if MEMORY in wanted:
            values["workspace_mib"] = workspace_mib(run, CudaMemory())
    if KERNELS in wanted:
        names = launched(run)
        run()  # fails here if a capture has broken the process
    torch.cuda.synchronize()
    return Costs({name: value for name, value in values.items() if math.isfinite(value) and value >= 0}, names)


def _energy(run: Callable[[], Any], call_ms: float, nvml: Any) -> dict[str, float]:
    def event() -> Any:
        recorded = torch.cuda.Event(enable_timing=True)
        recorded.record()
        return recorded

    return energy(run, call_ms, nvml.joules, event, torch.cuda.synchronize)


# ---- compiling and tuning


@dataclass
class Building:
    """Milliseconds spent compiling and tuning during a period; None without any."""

    compiled_ms: float | None = None  # of kernels that no cache had
    tuned_ms: float | None = None  # with the compiling of candidates
    within_tuning_ms: float = 0.0  # compiling of candidates
    _depth: int = field(default=0, repr=False)

    @property
    def metrics(self) -> dict[str, float]:
        """Return `compile_ms` and `tune_ms`, each only if there was any; tuning without compiling."""
        values = {} if self.compiled_ms is None else {"compile_ms": self.compiled_ms}
        if self.tuned_ms is not None:
            values["tune_ms"] = max(0.0, self.tuned_ms - self.within_tuning_ms)
        return values


@contextmanager
def building() -> Iterator[Building]:
    """Add up Triton's compile and tuning time in this context. Cached kernels cost nothing and are not counted.

    Triton calls a listener for each compiled kernel; the autotuner has no hook, so the method is wrapped.
    """
    total = Building()
    try:
        from triton import knobs
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        yield total
        return
    before = knobs.compilation.listener

    def listener(**event: Any) -> None:
        if not event.get("cache_hit"):
            total.compiled_ms = (total.compiled_ms or 0.0) + event["times"].total / 1e3
            if total._depth:
                total.within_tuning_ms += event["times"].total / 1e3
        if before is not None:
            before(**event)

    original = Autotuner._bench

    def bench(self: Any, *args: Any, **keywords: Any) -> Any:
        begun = _now()
        total._depth += 1
        try:
            return original(self, *args, **keywords)
        finally:
            total._depth -= 1
            if not total._depth:
                total.tuned_ms = (total.tuned_ms or 0.0) + 1e3 * (_now() - begun)

    with replaced(knobs.compilation, "listener", listener), replaced(Autotuner, "_bench", bench):
        yield total


# ---- memory


@dataclass(frozen=True)
class Held:
    """Device memory in use, in bytes: live tensors, and all memory outside torch's allocator."""

    tensors: int = 0
    outside: int = 0


def kept(before: Held, after: Held) -> dict[str, float]:
    """Return the device memory kept by a backend between two moments, by metric."""
    return {
        "kept_mib": max(0, after.tensors - before.tensors) / MIB,
        "kept_outside_mib": max(0, after.outside - before.outside) / MIB,
    }


def outside(memory: CudaMemory) -> int:
    """Return the device's used bytes not reserved by torch."""
    return memory.used() - memory.reserved()


class CudaMemory:
    """The memory counters of the current CUDA device."""

    def __init__(self) -> None:
        self._cuda = cuda = torch.cuda
        self._clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
        self.synchronize = cuda.synchronize
        self.allocated, self.reserved = cuda.memory_allocated, cuda.memory_reserved  # bytes of live tensors, of torch
        self.reset_peak, self.peak = cuda.reset_peak_memory_stats, cuda.max_memory_allocated

    def fresh(self) -> Held:
        """Return the memory in use before a backend is prepared.

        cuBLAS's workspaces are freed first: an earlier cell in this process may have allocated them, and they count as
        kept if this cell uses cuBLAS. Do not call this after `prepare`, since a captured graph may use them.
        """
        self._cuda.synchronize()
        self._clear()
        return self.held()

    def held(self) -> Held:
        """Return the memory in use, without torch's cache."""
        self._cuda.synchronize()
        self._cuda.empty_cache()
        return Held(self.allocated(), outside(self))

    def used(self) -> int:
        """Return the used bytes of the device, including other processes."""
        free, total = self._cuda.mem_get_info()
        return int(total - free)


def workspace_mib(run: Callable[[], Any], memory: CudaMemory) -> float:
    """Return the peak device memory during a call beyond inputs and output, in MiB.

    Torch's allocator counts allocations to the byte. Other allocations show in the device's free memory, which a thread
    reads while calls run; a workspace allocated and freed within one call may be missed there.
    """
    run()  # ignore allocations that only the first call makes
    memory.synchronize()
    memory.reset_peak()
    out = run()
    memory.synchronize()
    held = memory.allocated()  # inputs, memory kept by the backend, and the output
    inside = max(0, memory.peak() - held)
    del out
    before = highest = outside(memory)
    done = threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, outside(memory))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        for _ in range(SAMPLED_CALLS):
            run()
        memory.synchronize()
    finally:
        done.set()
        watcher.join()
    foreign = highest - before
    return (inside + (foreign if foreign >= FOREIGN_MIB * MIB else 0)) / MIB


# ---- kernels launched

_KERNEL, _MEMCPY, _MEMSET = 0, 1, 2
"""Values of CUDA's enum CUgraphNodeType."""


class _KernelNode(ctypes.Structure):
    """CUDA's struct CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("func", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kern", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def launched(run: Callable[[], Any]) -> tuple[str, ...] | None:
    """Return one call's GPU operations, in order: kernels, `[memcpy]`, `[memset]`.

    The call is captured into a CUDA graph, which is read and dropped: nothing runs. None if the call cannot be captured
    (for example, because it waits for the GPU), or if this torch or driver does not expose the graph.
    """
    try:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
        names = _names(ctypes.CDLL("libcuda.so.1"), graph.raw_cuda_graph())
        graph.reset()
    except Exception:  # a backend may do anything that a capture does not allow
        return None
    finally:
        with contextlib.suppress(Exception):
            torch.cuda.synchronize()
    return names


def _names(driver: Any, graph: int) -> tuple[str, ...] | None:
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph)
    if driver.cuGraphGetNodes(handle, None, ctypes.byref(count)):
        return None
    nodes = (ctypes.c_void_p * count.value)()
    if driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)):
        return None
    names = []
    for node in filter(None, nodes[: count.value]):
        kind = ctypes.c_int()
        if driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)):
            return None
        if kind.value == _KERNEL:
            names.append(_name(driver, node))
        elif kind.value in (_MEMCPY, _MEMSET):
            names.append("[memcpy]" if kind.value == _MEMCPY else "[memset]")
    return tuple(names)


def _name(driver: Any, node: int) -> str:
    parameters, name = _KernelNode(), ctypes.c_char_p()
    if driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(parameters)):
        return "[kernel]"
    for get, value in ((driver.cuFuncGetName, parameters.func), (driver.cuKernelGetName, parameters.kern)):
        if value and not get(ctypes.byref(name), ctypes.c_void_p(value)) and name.value:
            return name.value.decode(errors="replace")
    return "[kernel]"


# ---- a loop without waits


def eager_ms(run: Callable[[], Any], call_ms: float, synchronize: Callable[[], None]) -> float:
    """Return the time per call in ms for calls without waits between them, the median over a few loops.

    A call takes as long as the host needs for it or the GPU, whichever is longer. Inputs are in L2 if they fit.
    """
    calls = min(max(round(LOADS.loop_ms / max(call_ms, 1e-3)), LOADS.fewest_calls), LOADS.most_calls)
    times = []
    for _ in range(LOADS.loops):
        synchronize()
        begun = _now()
        for _ in range(calls):
            run()
        synchronize()
        times.append(1e3 * (_now() - begun) / calls)
    return statistics.median(times)


# ---- dependence on the batch


def batch_invariant(prepare: Callable[[Any], Run], placements: Iterable[Placement]) -> bool | None:
    """Return whether a planted row's result has the same bits in every batch.

    Outputs with a row for each row of the inputs are compared; others, such as gradients of weights, sum over rows.

    Args:
        prepare: a backend's; it is called again for each batch.
        placements: batches with the same planted row.

    Returns:
        None with fewer than two batches that the backend can compute, or without such an output.
    """
    seen: list[tuple[bytes | None, ...]] = []
    for placement in placements:
        try:
            output = prepare(placement.inputs)()
        except Unavailable:
            continue
        parts = output if isinstance(output, (tuple, list)) else (output,)
        seen.append(tuple(_bits(part, placement) for part in parts))
    by_output = [bits for bits in zip(*seen, strict=True) if None not in bits]
    if len(seen) < 2 or not by_output:
        return None
    return all(len(set(bits)) == 1 for bits in by_output)


def _bits(output: Any, placement: Placement) -> bytes | None:
    """Return the bits of the planted row, or None for an output with other rows."""
    if output.dim() < 2 or output.size(0) != placement.rows:
        return None
    bits: bytes = output[placement.row].detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()
    return bits


# ---- energy


def idle_watts(joules: Callable[[], float], sleep: Callable[[float], None] = time.sleep) -> float | None:
    """Return the power of the idle GPU in watts, after a rest. None if the counter does not change."""
    sleep(LOADS.rest_s)
    ticks = _Ticks(joules)
    end = _now() + LOADS.idle_s
    while _now() < end or (len(ticks.at) < 2 and _now() < end + LOADS.idle_s):
        ticks.look()
        sleep(0.005)
    return ticks.watts()


def energy(
    run: Callable[[], Any],
    call_ms: float,  # approximate duration of a call
    joules: Callable[[], float],  # reading of the counter
    event: Callable[[], Any],  # records an event, with the methods `query` and `elapsed_time` of torch's
    synchronize: Callable[[], None],
) -> dict[str, float]:
    """Return a call's energy and power, measured by the GPU's counter over consecutive calls, by metric.

    The GPU is kept busy. Power is the counter's slope between changes; a call's energy is this power times the mean
    time from one call to the next, by the GPU's clock. There is nothing to return if the counter does not change.
    """
    batch = max(1, round(1e3 * LOADS.batch_s / max(call_ms, 1e-3)))
    pending: deque[Any] = deque()
    ticks: _Ticks | None = None
    first: Any = None
    calls, begun = 0, _now()
    while True:
        while len(pending) <= LOADS.backlog:
            for _ in range(batch):
                run()
            pending.append(event())
        while not pending[0].query():
            if ticks is not None:
                ticks.look()
        last = pending.popleft()
        if ticks is not None:
            ticks.look()  # if the host is slower than the GPU, no batch is ever waited for
            calls += batch
            if ticks.enough or _now() - begun >= LOADS.warm_s + LOADS.longest_s:
                break
        elif _now() - begun >= LOADS.warm_s:
            ticks, first = _Ticks(joules), last
    synchronize()
    watts = ticks.watts()
    if watts is None:
        return {}
    return {"energy_j": watts * first.elapsed_time(last) / calls / 1e3, "power_w": watts}


class _Ticks:
    """Counter readings at the moments when it changed."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read
        self._last, self._looked = read(), _now()
        self.at: list[tuple[float, float]] = []

    def look(self) -> None:
        """Read the counter, and note a change at the middle between the last two readings."""
        value, now = self._read(), _now()
        if value != self._last:
            self.at.append(((self._looked + now) / 2, value))
        self._last, self._looked = value, now

    @property
    def enough(self) -> bool:
        """Return whether the changes are as many and as far apart as the slope needs."""
        return len(self.at) >= LOADS.least_ticks and self.at[-1][0] - self.at[0][0] >= LOADS.span_s

    def watts(self) -> float | None:
        """Return the slope in units of the counter per second; None with fewer than two changes."""
        if len(self.at) < 2:
            return None
        first = self.at[0]
        return statistics.linear_regression(
            [at - first[0] for at, _ in self.at], [value - first[1] for _, value in self.at]
        ).slope
