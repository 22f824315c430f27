"""Run one cell at a time in a process of its own: inputs, backend, calls. It does not check or record the results.

The parent sends one request at a time over a pipe, so several cells can be alive together with interleaved bursts. A
crash, a hang or a corrupt GPU context in this process does not affect the others. Its replies are data of declared
types. Its outputs are checked in another process (judge.py), and the parent's clock bounds the times that it reports
(witness.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from groupbench.operators.errors import Unavailable
from groupbench.operators.measure import accuracy, compiled, costs, exchange, moves, seal, triton_key
from groupbench.operators.measure.arrays import size_of
from groupbench.operators.measure.costs import CHEAP, Costs
from groupbench.operators.measure.exchange import Sent
from groupbench.operators.measure.faults import is_oom, located
from groupbench.operators.measure.given import Given, held_by, places
from groupbench.operators.measure.protocol import (
    CpuTimer,
    GpuTimer,
    Protocol,
    Watch,
    reserved_l2,
    timer_of,
    timing_of,
)
from groupbench.operators.measure.texts import one_line
from groupbench.operators.operator import Operator
from groupbench.operators.registry import get_backend, get_operator
from groupbench.tracker.facts.record import Code, Kernel, Telemetry, Timing

MOST_KEPT, KEEP_BYTES = 32, {"cuda": 1 << 30, "cpu": 64 << 20}
"""Maximum number of outputs of a burst, and memory for them by device. They are kept until some are judged."""

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HELION_CACHE_DIR", "CUDA_CACHE_PATH")
"""Environment variables with the folders of compilers' caches."""

_now = time.perf_counter
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Job:
    """One cell to measure, small enough to send to a process anywhere.

    shape    the shape's canonical text
    problem  the shape itself; None if only its text is known
    """

    operator: str
    backend: str
    shape: str
    dtype: str
    device: str
    mode: str = "fwd"
    seed: int = 0
    interpreted: bool = False
    protocol: Protocol = field(default_factory=Protocol)
    rtol: float | None = None
    atol: float | None = None
    plugins: tuple[str, ...] = ()
    costs: tuple[str, ...] = CHEAP  # costs to measure in addition to latency and accuracy
    problem: Any = field(default=None, compare=False)

    def shape_of(self, operator: Operator) -> Any:
        """Return the shape. Raises ValueError if the operator does not read its text."""
        return operator.parse_shape(self.shape) if self.problem is None else self.problem


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """The reply to `prepare`: all results except latency and accuracy.

    sent  the output of the second of two calls on poisoned memory, followed by that of the first if they differ
    """

    timing: Timing
    prepare_ms: float
    enqueue_ms: float | None
    kernels: tuple[Kernel, ...]
    sent: Sent
    repeatable: bool
    problem: str | None = None  # a change by the backend to its inputs or to the harness
    code: tuple[Code, ...] = ()  # of the kernels
    metrics: dict[str, float] = {}  # costs of preparing, by metric
    copies: tuple[moves.Copied, ...] = ()  # of inputs, refreshed after each move


class Burst(msgspec.Struct, frozen=True, tag=True):
    """The reply to `burst`.

    steps  for each timed call whose output was kept, the number of steps that its inputs had moved
    sums   for each of these outputs, the sum of its bits

    Both are named before the parent chooses the outputs that `show` is to return.
    """

    samples_ms: tuple[float, ...]
    telemetry: Telemetry | None
    steps: tuple[int, ...]
    sums: tuple[int, ...] = ()
    problem: str | None = None
    enqueue_ms: float | None = None  # host time to launch a call, on a GPU


class Shown(msgspec.Struct, frozen=True, tag=True):
    """The reply to `show` and `reroute`: an output."""

    sent: Sent


class Witnessed(msgspec.Struct, frozen=True, tag=True):
    """The reply to `witness`, with the sum of the output that was kept."""

    samples_ms: tuple[float, ...]
    sums: tuple[int, ...] = ()


class Paced(msgspec.Struct, frozen=True, tag=True):
    """The judge's reply to `pace`: the cost of a burst without its calls, by all clocks, and the threads of torch.

    run_ms  processor time of the thread that would make the calls; it waits for nothing
    """

    wall_ms: float
    processor_ms: float
    threads: int
    run_ms: float = 0.0


class Restored(msgspec.Struct, frozen=True, tag=True):
    """The reply to `restore`. Unless `problem` is set, the inputs have their initial values again."""

    problem: str | None = None


class Done(msgspec.Struct, frozen=True, tag=True):
    """The reply to requests that have no result."""

    what: str


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The reply to a request that failed. The cell cannot be used afterwards."""

    status: str  # error, oom, unavailable
    message: str


Answer = Prepared | Burst | Shown | Witnessed | Restored | Costs | Done | Failure


@dataclass(frozen=True)
class Request:
    """A call of one of _CellHandler's methods. `adopt` also sets the job; the reply starts with the token."""

    verb: str
    job: Job | None = None
    arguments: tuple[Any, ...] = ()
    token: bytes = b""


def serve(connection: Connection, file: int, device: str, idle: Callable[[], None] | None = None) -> None:
    """Answer requests until the pipe closes. `file` is the descriptor of the file for outputs.

    idle  is called once, as soon as no request waits
    """
    answer_requests(
        connection, lambda request, cell: _CellHandler(request.job, file) if request.job is not None else cell, idle
    )


def serve_opened(connection: Connection, file: int, device: str) -> None:
    """Answer requests as `serve` does, in a process that opens its GPU before it gets a cell."""
    serve(connection, file, device, _open_gpu if device == "cuda" else None)


def _open_gpu() -> None:
    import torch

    with contextlib.suppress(Exception):  # the first request fails in the same way, and reports it
        torch.zeros(1, device="cuda")


def answer_requests(
    connection: Connection, take: Callable[[Request, Any], Any], idle: Callable[[], None] | None = None
) -> None:
    """Answer requests until the pipe closes, each with the method of that name of the object that `take` returns.

    take  returns the object for a request, given the object of the previous request
    idle  is called once, as soon as no request waits
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    handler: Any = None
    encode, send = msgspec.msgpack.encode, connection.send_bytes
    gc.freeze()  # imported modules live as long as the process, so the garbage collector can skip them
    while True:
        try:
            if idle is not None and not connection.poll():
                idle()
                idle = None
            request: Request = connection.recv()
        except (EOFError, OSError):
            return
        try:
            handler = take(request, handler)
            reply = getattr(handler, request.verb)(*request.arguments)
        except Unavailable as reason:
            reply = Failure("unavailable", one_line(str(reason)) or "its `prepare` gives no reason")
        except BaseException as error:
            traceback.print_exc()
            reply = Failure("oom" if is_oom(error) else "error", located(error))
        _flush()
        send(request.token + encode(reply))


def _flush() -> None:
    """Flush the standard streams of Python and C. Output of CUDA kernels arrives when the device is synchronized."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a backend may have closed it
            stream.flush()
    _libc.fflush(None)


class Keeper(Watch):
    """Move the inputs before each call of a burst, and keep outputs of timed calls.

    buffers  copies of outputs of earlier bursts, whose memory is used again
    held     names of inputs by the address of their memory, in which no output may be
    """

    def __init__(
        self,
        inputs: moves.Moves,
        device: str,
        samples: int,
        buffers: list[list[Any]] | None = None,
        held: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self.inputs, self.device, self.samples = inputs, device, samples
        self.kept: list[tuple[int, str, list[Any]]] = []
        self.step = self.timed = self.room = 0
        self.buffers = [] if buffers is None else buffers
        self.held, self.returned = held, list[str]()
        self.reserved = 0  # bytes of a GPU's L2

    def before(self) -> None:
        self.step += 1
        self.inputs.advance()

    def warm(self, out: Any) -> None:
        """Allocate buffers for outputs, so that nothing is allocated while the GPU's queue is being filled."""
        if not self.buffers and self.device == "cuda":
            _, parts = exchange.plain_parts(out, self.device)
            import torch

            self.room = self._room(parts)
            self.buffers = [[torch.empty_like(part) for part in parts] for _ in range(self.room)]

    def after(self, out: Any) -> None:
        """Keep a random sample of the outputs.

        The draw follows the call, so that a backend cannot know during a call whether its output will be checked. On a
        CPU, the other outputs are copied too, so that reading an output takes as long whether it is kept or not.
        """
        form, parts = exchange.plain_parts(out, self.device)
        self.returned += held_by(parts, self.held)
        if self.device == "cuda":
            self.reserved = max(self.reserved, reserved_l2())
        self.room = self.room or self._room(parts)
        self.timed += 1
        slot = len(self.kept)
        if slot >= self.room:
            slot = min(random.SystemRandom().randrange(self.timed), self.room)
            if slot == self.room and self.device == "cuda":
                return
        copies = self._copied(slot, parts)
        if slot < self.room:
            self.kept[slot : slot + 1] = [(self.step, form, copies)]

    def _copied(self, slot: int, parts: list[Any]) -> list[Any]:
        """Return copies of the parts, in the buffers of that number if they are alike."""
        held = self.buffers[slot] if slot < len(self.buffers) else []
        if len(held) == len(parts) and all(map(_are_alike, held, parts)):
            return [copy.copy_(part) for copy, part in zip(held, parts, strict=True)]
        copies = [part.clone() for part in parts]
        if self.device == "cpu":  # a GPU's memory is for the next backend
            self.buffers[slot : slot + 1] = [copies]
        return copies

    def sums(self) -> tuple[int, ...]:
        """Return the sums of the outputs that were kept."""
        return exchange.sums([parts for _, _, parts in self.kept])

    def _room(self, parts: list[Any]) -> int:
        return room_for(size_of(parts), self.samples, self.device)


def room_for(size: int, samples: int, device: str) -> int:
    """Return how many outputs of this many bytes are kept of a burst of so many timed calls."""
    return max(1, min(samples, MOST_KEPT, KEEP_BYTES[device] // max(size, 1)))


def _are_alike(x: Any, y: Any) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype


class _CellHandler:
    """The requests of one cell, each a method. They are asked in the order of the path of a cell (ARCHITECTURE.md)."""

    def __init__(self, job: Job, file: int) -> None:
        self.job = job
        self.file = file
        self.shown: Any = None  # tensors that another process may be reading
        self.kept: list[tuple[int, str, list[Any]]] | None = None

    def load(self) -> Done:
        """Open the device and make the inputs. None of this is timed."""
        job = self.job
        self.shape = job.shape_of(self.operator)
        self.inputs = self._draw(job.seed)
        _synchronize(job.device)
        return Done("loaded")

    def adopt(self) -> Done:
        """Set the job, and import the modules that it needs. `load` or `reload` makes the inputs."""
        import torch

        torch.cuda.Event  # noqa: B018 - import it before the backend
        _first_threads()
        seal.close()
        job = self.job
        self.operator = get_operator(job.operator, job.plugins).in_mode(job.mode)
        self.backend = get_backend(self.operator, job.backend)
        if self.backend.kind != "torch":
            importlib.import_module(self.backend.kind)  # Helion takes 12 s on a machine that has not seen it
        return Done("adopted")

    def unload(self) -> Done:
        """Drop everything except imported modules, so that other processes can use the device's memory."""
        job = self.job
        self.__dict__.clear()
        gc.collect()
        _release(job.device)
        return Done("unloaded")

    def prepare(self) -> Prepared:
        """Prepare the backend, timed, and call it twice on poisoned memory. Raises as the backend does."""
        job = self.job
        self.given = Given(self.inputs)
        _release(job.device)
        memory = costs.CudaMemory() if job.device == "cuda" else None
        before = memory.fresh() if memory else costs.Held()
        start = _now()
        with _choices() as chosen, costs.building() as built:
            run, copies = self._prepared()
        prepare_ms = 1e3 * (_now() - start)
        spent = built.metrics
        if memory is not None:
            spent |= costs.kept(before, memory.held())
        code: dict[str, Code] = {}
        with compiled.watched(code) as kernels:
            self.given.register(copies)
            form, second, first, returned = accuracy.rehearse(run, job.device, self.given)
        problem = self.given.misuse(returned) or seal.problem()
        sent = exchange.send(form, [*second, *first], self.file, by_handle=True)
        self.shown = second, first
        self.run = run
        self.moves = moves.of(self.operator, self.inputs, self._draw, copies)
        self.held = self.given.held
        self.timer = self._timer(run, job.protocol)
        timing = timing_of(job.device, self.interpreted)
        self.nvml = _nvml() if job.device == "cuda" else None
        kernels_and_variants = compiled.with_variants(kernels, chosen)
        return Prepared(
            timing, prepare_ms, self.timer.enqueue_ms, kernels_and_variants, sent, not first, problem,
            tuple(code.values()), spent, self.moves.copied,
        )  # fmt: skip

    def _prepared(self) -> tuple[Any, list[Any]]:
        """Prepare the backend and call it once. Return the callable, and the pairs (copy, source) of inputs it reads.

        Raises TypeError if `prepare` does not return a callable, or registers a copy of something other than an input.
        """
        moves.registered_copies()  # discard those of the previous cell
        with compiled.interpreted() as launched:
            run = self.backend.prepare(self.inputs)
            if not callable(run):
                raise TypeError(f"prepare must return a callable, and {self.backend.name}'s returned {_kind(run)}")
            run()
        self.interpreted: bool = self.job.interpreted and (self.backend.kind != "torch" or bool(launched))
        _synchronize(self.job.device)
        return run, moves.within(moves.registered_copies(), self.inputs)

    def first(self, folder: str) -> Costs:
        """Prepare the backend and call it once, with all compiler caches in `folder`, which is empty."""
        os.environ |= {name: str(Path(folder) / name.lower()) for name in CACHES}
        triton_key.forget()
        start = _now()
        with costs.building() as built:
            self._prepared()
        return Costs(built.metrics | {"cold_prepare_ms": 1e3 * (_now() - start)})

    def costs(self, wanted: tuple[str, ...], call_ms: float) -> Costs:
        """Return the costs of a call other than its latency. Costs that cannot be measured are omitted."""
        if self.job.device != "cuda":
            return Costs({})
        self.moves.set(None)
        enqueue_ms = self.timer.host_ms() if isinstance(self.timer, GpuTimer) else None
        measured = costs.of_cuda(self.run, wanted, call_ms, self.nvml)
        return msgspec.structs.replace(measured, enqueue_ms=enqueue_ms)

    def forget(self) -> Done:
        """Drop the outputs of timed calls, including those that `show` returned."""
        self.shown = self.kept = None
        _release(self.job.device)
        return Done("forgotten")

    def restore(self) -> Restored:
        """Restore the initial values of the inputs, and report any that the backend has changed."""
        self.moves.set(None)
        changed = self.given.misuse()
        return Restored(f"after its timed runs: {changed}" if changed else seal.problem())

    def reroute(self, seed: int, secret: int) -> Shown:
        """Return the output for other values and another routing of the same number of rows, in the same buffers.

        This must be the cell's last request, because it does not restore the inputs.
        """
        self.moves.set(None)
        moves.reroute(self.operator, self.shape, self.inputs, seed)
        self.moves.set(secret)
        form, parts = exchange.plain_parts(self.timer.run(), self.job.device)
        self.shown = [part.clone() for part in parts]
        _synchronize(self.job.device)
        return Shown(exchange.send(form, self.shown, self.file, by_handle=True))

    def reload(self, seed: int, samples: int) -> Done:
        """Make the inputs again at other addresses, after allocations of random sizes, and prepare the backend.

        The addresses of the inputs change a kernel's time by up to 0.4 % (0.7 % at 13 us), within and across processes.
        """
        job = self.job
        for name in ("timer", "inputs", "given", "pads", "moves", "shown", "kept"):
            self.__dict__.pop(name, None)
        gc.collect()
        _release(job.device)
        self.pads = _pads(seed, job.device)
        self.shape = job.shape_of(self.operator)
        self.inputs = self._draw(job.seed)
        run, copies = self._prepared()
        self.nvml = None  # records contain telemetry, comparisons do not
        self.moves = moves.of(self.operator, self.inputs, self._draw, copies)
        self.held = places(self.inputs, copies)
        self.timer = self._timer(run, replace(job.protocol, samples=samples))
        return Done("reloaded")

    def _draw(self, seed: int) -> Any:
        return self.operator.make_inputs(self.shape, self.job.dtype, self.job.device, seed)

    def _timer(self, run: Any, protocol: Protocol) -> GpuTimer | CpuTimer:
        timer = timer_of(run, protocol, self.job.device, self.interpreted)
        self.built = dict(vars(timer))
        return timer

    def _altered(self, keeper: Keeper) -> str | None:
        """Return the part of an object of the harness that the backend has exchanged, or None."""
        timer = GpuTimer if self.job.device == "cuda" else CpuTimer
        objects = (self, _CellHandler), (self.timer, timer), (self.moves, moves.Moves), (keeper, Keeper)
        name = seal.exchanged(*objects, (keeper.kept, list))
        return name or seal.differing(f"the {timer.__name__}'s", vars(self.timer), self.built)

    def burst(self, secret: int | None, calls: int | None = None) -> Burst:
        """Time a burst of calls, each on new input values: one full move by `secret`, then one step before each call.

        Without a secret, the full move is omitted. On a CPU, `calls` replaces the protocol's number of samples.
        """
        self.kept = self.shown = None
        self.moves.set(secret)
        most = calls or self.job.protocol.samples
        kept = Keeper(self.moves, self.job.device, most, self._buffers(), self.held)
        samples = self.timer.burst(kept) if isinstance(self.timer, GpuTimer) else self.timer.burst(kept, calls)
        self.kept = kept.kept
        sums = kept.sums()
        problem = seal.problem() or seal.as_problem(self._altered(kept))
        if kept.returned:
            problem = problem or f"the output of a timed call shares memory with its input {kept.returned[0]}"
        if kept.left_thread:
            problem = problem or "a call returned while a thread that it had started was still running"
        if (threads := _torch_threads()) > _first_threads():
            problem = problem or f"the backend's process raised torch's threads from {_first_threads()} to {threads}"
        if kept.reserved:
            reserved_mib = kept.reserved / costs.MIB
            problem = problem or f"a call reserved {reserved_mib:.3g} MiB of the L2 cache, which stay unflushed"
        telemetry = self.nvml.telemetry() if self.nvml else None
        enqueue_ms = self.timer.burst_enqueue_ms if isinstance(self.timer, GpuTimer) else None
        return Burst(tuple(samples), telemetry, tuple(step for step, _, _ in kept.kept), sums, problem, enqueue_ms)

    def _buffers(self) -> list[list[Any]] | None:
        """Return memory for outputs that all bursts use; on a GPU each allocates its own, and `forget` frees it."""
        if self.job.device == "cuda":
            return None
        return self.__dict__.setdefault("buffers", [])

    def show(self, number: int) -> Shown:
        """Return the output of the timed call `number` of the last burst, counted among those that were kept."""
        assert self.kept
        _, form, parts = self.kept[number]
        return Shown(exchange.send(form, parts, self.file, by_handle=True))

    def move(self, secret: int | None) -> Done:
        """Move the inputs by the secret, or back to their initial values."""
        self.moves.set(secret)
        _synchronize(self.job.device)
        return Done("moved")

    def witness(self, calls: int) -> Witnessed:
        """Time consecutive calls on a GPU. The inputs move once among them, and `show(0)` returns the next output."""
        assert isinstance(self.timer, GpuTimer)
        self.kept = None
        keeper = Keeper(self.moves, self.job.device, 1, held=self.held)
        samples = self.timer.witness(calls, keeper)
        self.kept = keeper.kept
        return Witnessed(tuple(samples), keeper.sums())


def _choices() -> Any:
    """Return a context that lists the kernel variants chosen in it. The list stays empty in trees without variants."""
    try:
        from groupbench.kernels.variants import choices
    except ImportError:
        return contextlib.nullcontext([])
    return choices()


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"a {name}" if value is not None else "nothing"


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


@cache
def _first_threads() -> int:
    """Return the number of torch's threads before a plugin was imported."""
    return _torch_threads()


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _release(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def _pads(seed: int, device: str) -> list[Any]:
    """Return unused allocations that shift the addresses of later ones: up to seven small ones, one of up to 64 MiB."""
    import torch

    draw = random.Random(seed)
    sizes = [512 * draw.randrange(1, 2048) for _ in range(draw.randrange(8))]
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in [*sizes, 512 * draw.randrange(1, 1 << 17)]]


def _nvml() -> Any:
    import torch

    from groupbench.operators.measure.telemetry import Nvml

    return Nvml(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
