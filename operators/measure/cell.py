"""Run one cell at a time in a separate process: inputs, backend, calls. It does not check or record the results.

The parent sends one request at a time over a pipe, so several cells can be alive together with interleaved bursts. A
crash, a hang or a corrupt GPU context in this process does not affect the others. Replies are data with declared types
(wire.py). Another process checks the outputs (judge.py), and the parent's clock bounds the reported times (witness.py).
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
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from groupbench.kernels.variants import choices
from groupbench.operators import plugins, relayout
from groupbench.operators.errors import GroupbenchError, Unavailable
from groupbench.operators.measure import accuracy, compiled, costs, exchange, moves, seal, specials, triton_key
from groupbench.operators.measure.costs import Costs
from groupbench.operators.measure.deferred import torch
from groupbench.operators.measure.exchange import Sent
from groupbench.operators.measure.faults import is_oom, located
from groupbench.operators.measure.folders import caches_in
from groupbench.operators.measure.given import Given
from groupbench.operators.measure.keeper import Keeper
from groupbench.operators.measure.loaded import Seen, watch
from groupbench.operators.measure.protocol import CpuTimer, GpuTimer, Protocol, timer_of, timing_of
from groupbench.operators.measure.telemetry import Nvml
from groupbench.operators.measure.texts import one_line
from groupbench.operators.measure.wire import FAILED, RETURNED, Burst, Failure, Job, Prepared, Request
from groupbench.operators.operator import Backend, Operator
from groupbench.operators.registry import get_backend, get_operator
from groupbench.tracker.facts.record import Code

_now = time.perf_counter
_libc = ctypes.CDLL(None)


def open_gpu() -> None:
    """Open the GPU in a process without a cell."""
    with contextlib.suppress(Exception):  # the first request fails in the same way, and reports it
        torch.zeros(1, device="cuda")


def answer_requests(connection: Connection, handler: Any, idle: Callable[[], None] | None = None) -> None:
    """Answer requests until the pipe closes. Each calls the method of `handler` that it names.

    Args:
        idle: Called once, as soon as no request waits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
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
            reply = getattr(handler, request.verb)(*request.arguments)
            begins = RETURNED
        except BaseException as error:
            begins, reply = FAILED, _failure(error)
        _flush()
        send(request.token + begins + encode(reply))


def _failure(error: BaseException) -> Failure:
    kind = type(error).__name__
    if isinstance(error, Unavailable):
        return Failure("unavailable", one_line(str(error)) or "its `prepare` gives no reason", kind)
    if isinstance(error, GroupbenchError):
        return Failure("error", str(error), kind)
    traceback.print_exc()
    return Failure("oom" if is_oom(error) else "error", located(error), kind)


def _flush() -> None:
    """Flush the standard streams of Python and C. CUDA kernels' output arrives when the device is synchronized."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a backend may have closed it
            stream.flush()
    _libc.fflush(None)


@dataclass
class _Ready:
    """A prepared backend.

    Attributes:
        run: The callable that is timed.
        interpreted: Whether its kernels are interpreted.
        timer: The timer.
        given: Checksums of the inputs; None where nothing is restored.
        pads: Unused allocations.
    """

    run: Any
    interpreted: bool
    moves: moves.Moves
    timer: GpuTimer | CpuTimer
    given: Given | None = None
    nvml: Any = None
    pads: list[Any] | None = None


def _loaded() -> Seen:
    return watch().loaded()


class CellHandler:
    """One cell's requests, each a method. They come in the order in which a cell is measured (ARCHITECTURE.md)."""

    job: Job
    operator: Operator
    backend: Backend
    shape: Any
    inputs: Any

    def __init__(self, file: int) -> None:
        self.file = file
        self._ready: _Ready | None = None
        self.shown: Any = None  # tensors that another process may be reading
        self.kept: list[tuple[int, str, list[Any]]] | None = None
        self.buffers: list[list[Any]] = []  # memory for outputs of bursts on a CPU

    @property
    def ready(self) -> _Ready:
        assert self._ready is not None, "asked before `prepare` or `reload`"
        return self._ready

    def adopt(self, job: Job) -> None:
        """Set the job, and import the modules that it needs. `load` or `reload` makes the inputs."""
        torch.cuda.Event  # noqa: B018 - import it before the backend
        seal.close()
        self.unload()
        self.job = job
        self.operator = get_operator(job.operator, job.plugins).in_mode(job.mode)
        self.backend = get_backend(self.operator, job.backend)
        plugins.adopt_variables()
        if self.backend.kind != "torch":
            importlib.import_module(self.backend.kind)  # Helion takes 12 s on a machine that has not seen it

    def load(self) -> None:
        """Open the device and make the inputs. None of this is timed."""
        self.shape = self.job.shape_of(self.operator)
        self.inputs = self._draw(self.job.seed)
        _synchronize(self.job.device)

    def unload(self) -> None:
        """Drop everything except imported modules, so other processes can use the device's memory."""
        self.inputs = self._ready = self.shown = self.kept = None
        self.buffers = []
        gc.collect()
        _release()

    def prepare(self) -> Prepared:
        """Prepare the backend, timed, and call it twice on poisoned memory. Raises as the backend does."""
        job = self.job
        given = Given(self.inputs)
        _release()
        memory = costs.CudaMemory() if job.device == "cuda" else None
        before = memory.fresh() if memory else costs.Held()
        start = _now()
        with choices() as chosen, costs.building() as built:
            run, copies, interpreted = self._prepared()
        prepare_ms = 1e3 * (_now() - start)
        spent = built.metrics
        if memory is not None:
            spent |= costs.kept(before, memory.held())
        code: dict[str, Code] = {}
        with compiled.watched(code) as kernels:
            given.register(copies)
            shown = accuracy.rehearse(run, job.device, given, patient=not interpreted)
        problem = given.misuse(shown.returned) or seal.problem(job.device)
        sent = exchange.send(shown.form, [*shown.second, *shown.first], self.file)
        self.shown = shown
        self._ready = self._timed(run, copies, interpreted, job.protocol)
        self._ready.given = given
        self._ready.nvml = own_nvml() if job.device == "cuda" else None
        kernels_and_variants = compiled.with_variants(kernels, chosen)
        return Prepared(
            timing_of(job.device, interpreted), prepare_ms, self._ready.timer.enqueue_ms, kernels_and_variants, sent,
            not shown.first, problem, tuple(code.values()), spent, self._ready.moves.copied, shown.fresh,
            dict(plugins.variables),
        )  # fmt: skip

    def _prepared(self) -> tuple[Any, list[Any], bool]:
        """Prepare the backend and call it once.

        Returns:
            The callable, the input pairs (copy, source) it reads, and whether the kernels are interpreted.

        Raises TypeError if `prepare` does not return a callable, or registers a copy of something other than an input.
        """
        backend, inputs = self.backend, self.inputs
        relayout.take()  # discard those of the previous cell
        with compiled.interpreted() as launched:
            run = backend.prepare(inputs)
            if not callable(run):
                kind = "nothing" if run is None else f"a {type(run).__name__}"
                raise TypeError(f"prepare must return a callable, and {backend.name}'s returned {kind}")
            run()
        interpreted = self.job.interpreted and (backend.kind != "torch" or bool(launched))
        _synchronize(self.job.device)
        return run, moves.within(relayout.take(), inputs), interpreted

    def _timed(self, run: Any, copies: list[Any], interpreted: bool, protocol: Protocol) -> _Ready:
        moved = moves.Moves(self.inputs, self.operator.moves, copies, self._draw)
        return _Ready(run, interpreted, moved, timer_of(run, protocol, self.job.device, interpreted))

    def first(self) -> Costs:
        """Prepare the backend and call it once, with all compiler caches in an empty folder."""
        os.environ |= caches_in(Path(tempfile.mkdtemp()))
        triton_key.forget()
        start = _now()
        with costs.building() as built:
            self._prepared()
        return Costs(built.metrics | {"cold_prepare_ms": 1e3 * (_now() - start)})

    def costs(self, wanted: tuple[str, ...], call_ms: float) -> Costs:
        """Return the costs of a call other than its latency. Costs that cannot be measured are omitted."""
        ready = self.ready
        ready.moves.set(None)
        invariance = _invariance(self) if costs.INVARIANCE in wanted else {}
        if self.job.device != "cuda":
            return Costs(invariance)
        measured = costs.of_cuda(ready.run, wanted, call_ms, ready.nvml)
        return msgspec.structs.replace(measured, metrics=measured.metrics | invariance)

    def forget(self) -> None:
        """Drop the timed calls' outputs, including those returned by `show`."""
        self.shown = self.kept = None
        _release()

    def restore(self) -> str | None:
        """Restore the inputs' initial values. Returns a change to them or to the harness, made by the backend."""
        assert self.ready.given is not None
        self.ready.moves.set(None)
        changed = self.ready.given.misuse()
        return f"after its timed runs: {changed}" if changed else seal.problem(self.job.device)

    def reroute(self, seed: int, secret: int) -> Sent:
        """Return the output for other values and another routing of the same number of rows, in the same buffers."""
        ready = self.ready
        ready.moves.set(None)
        with moves.rerouted(self.operator, self.shape, self.inputs, seed):
            ready.moves.set(secret)
            return _shown_again(self)

    def reload(self, seed: int, samples: int) -> None:
        """Make the inputs again at other addresses, after allocations of random sizes, and prepare the backend.

        The input addresses change a kernel's time by up to 0.4 % (0.7 % at 13 us), within and across processes.
        Telemetry is not read, because comparisons do not use it.
        """
        self.unload()
        pads = _pads(seed, self.job.device)
        self.load()
        self._ready = self._timed(*self._prepared(), replace(self.job.protocol, samples=samples))
        self._ready.pads = pads

    def _draw(self, seed: int) -> Any:
        return self.operator.make_inputs(self.shape, self.job.dtype, self.job.device, seed)

    def burst(self, secret: int | None, calls: int | None = None) -> Burst:
        """Time a burst of calls, each on new input values: one full move by `secret`, then one step before each call.

        Args:
            secret: Without one, the full move is omitted.
            calls: Replaces the protocol's number of samples, on a CPU.
        """
        ready = self.ready
        self.kept = self.shown = None
        ready.moves.set(secret)
        most = calls or self.job.protocol.samples
        # On a GPU each burst allocates its own buffers, and `forget` frees them.
        buffers = None if self.job.device == "cuda" else self.buffers
        kept = Keeper(ready.moves, self.job.device, most, buffers)
        samples = ready.timer.burst(kept) if isinstance(ready.timer, GpuTimer) else ready.timer.burst(kept, calls)
        self.kept = kept.kept
        sums = kept.sums()
        timer = GpuTimer if isinstance(ready.timer, GpuTimer) else CpuTimer
        objects = (ready.timer, timer), (kept.inputs, moves.Moves), (kept, Keeper), (kept.kept, list)
        # On a CPU, a replaced function hides no time from the parent's clock, and `restore` looks once.
        problem = seal.problem(self.job.device, *objects) if self.job.device == "cuda" else seal.exchanged(*objects)
        if problem is None and kept.reserved:
            problem = f"a call reserved {kept.reserved / costs.MIB:.3g} MiB of the L2 cache, which stay unflushed"
        telemetry = ready.nvml.telemetry() if ready.nvml else None
        enqueue_ms = ready.timer.burst_enqueue_ms if isinstance(ready.timer, GpuTimer) else None
        return Burst(tuple(samples), telemetry, tuple(step for step, _, _ in kept.kept), sums, problem, enqueue_ms)

    def show(self, number: int) -> Sent:
        """Return the output of the timed call `number` of the last burst, counted among those that were kept."""
        assert self.kept
        _, form, parts = self.kept[number]
        return exchange.send(form, parts, self.file)

    def move(self, secret: int | None) -> None:
        """Move the inputs by the secret, or back to their initial values."""
        self.ready.moves.set(secret)
        _synchronize(self.job.device)

    def witness(self, calls: int) -> Burst:
        """Time consecutive calls on a GPU. The inputs move once among them, and `show(0)` returns the next output."""
        ready = self.ready
        assert isinstance(ready.timer, GpuTimer)
        self.kept = None
        keeper = Keeper(ready.moves, self.job.device, 1)
        samples = ready.timer.witness(calls, keeper)
        self.kept = keeper.kept
        return Burst(tuple(samples), sums=keeper.sums())

    def special(self, seed: int) -> Sent:
        """Return the output for special values. It must be the cell's last request: the inputs are not restored."""
        self.ready.moves.set(None)
        specials.write(self.operator, self.inputs, seed)
        self.ready.moves.refresh()
        return _shown_again(self)

    loaded = staticmethod(_loaded)


def _shown_again(handler: CellHandler) -> Sent:
    """Return the output of one more call."""
    form, parts = exchange.plain_parts(handler.ready.timer.run(), handler.job.device)
    handler.shown = [part.clone() for part in parts]
    _synchronize(handler.job.device)
    return exchange.send(form, handler.shown, handler.file)


def _invariance(handler: CellHandler) -> dict[str, float]:
    """Return the metric `batch_invariant`; nothing for interpreted kernels, whose bits are not those of a GPU."""
    placements = handler.operator.placements
    if placements is None or handler.ready.interpreted:
        return {}
    invariant = costs.batch_invariant(handler.backend.prepare, placements(handler.inputs))
    return {} if invariant is None else {"batch_invariant": float(invariant)}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _release() -> None:
    """Free the GPU memory that torch keeps for later allocations, if it has opened a GPU."""
    torch.cuda.empty_cache()


def _pads(seed: int, device: str) -> list[Any]:
    """Return unused allocations to shift later addresses: up to seven small ones, one up to 64 MiB."""
    draw = random.Random(seed)
    sizes = [512 * draw.randrange(1, 2048) for _ in range(draw.randrange(8))]
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in [*sizes, 512 * draw.randrange(1, 1 << 17)]]


def own_nvml() -> Any:
    """Return the state of this process's GPU."""
    return Nvml(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
