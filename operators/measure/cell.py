"""One cell at a time in a process of its own: inputs, backend, accuracy, bursts.

The parent asks over a pipe, one request and one answer at a time, so that several cells can be alive together and their
bursts interleaved; whatever this process does (crash, hang, corrupt its GPU context), its neighbours do not feel it.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from groupbench.operators.errors import Unavailable
from groupbench.operators.measure.protocol import CpuTimer, GpuTimer, Protocol
from groupbench.operators.measure.texts import LONGEST, one_line
from groupbench.operators.operator import Operator
from groupbench.operators.registry import get_backend, get_operator
from groupbench.tracker.record import Accuracy, Kernel, Telemetry, Timing


@dataclass(frozen=True)
class Job:
    """What to measure, small enough to send to a process anywhere.

    shape    its canonical text
    problem  the shape itself, None where only its text is known
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
    problem: Any = field(default=None, compare=False)

    def shape_of(self, operator: Operator) -> Any:
        """Return the shape. Raises ValueError where the operator does not read its text."""
        return operator.parse_shape(self.shape) if self.problem is None else self.problem


@dataclass(frozen=True)
class Prepared:
    """Answer to `prepare`: everything but the latency."""

    timing: Timing
    prepare_ms: float
    enqueue_ms: float | None
    accuracy: Accuracy
    problem: str | None  # what is wrong with the output
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class Burst:
    """Answer to `burst`."""

    samples_ms: tuple[float, ...]
    telemetry: Telemetry | None


@dataclass(frozen=True)
class Rechecked:
    """Answer to `recheck`: None where the output is still, bit for bit, what was judged; or how it is judged now."""

    accuracy: Accuracy | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Failure:
    """Any answer may be this instead: the cell is over."""

    status: str  # error, oom, unavailable
    message: str


@dataclass(frozen=True)
class Request:
    """adopt (with a job), load, prepare, burst, recheck, reload (with a seed and samples a burst), unload."""

    verb: str
    job: Job | None = None
    arguments: tuple[Any, ...] = ()


def serve(connection: Connection, log: int) -> None:
    """Entry point of the process: answers requests until the pipe closes. `log` is a descriptor."""
    os.setpgid(0, 0)  # the terminal's Ctrl-C is the parent's to handle, and a kill reaches what a backend starts
    _redirect(log)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cell: _Cell | None = None
    gc.freeze()  # what was imported lives as long as the process: collecting need not look at it again
    while True:
        try:
            request: Request = connection.recv()
        except (EOFError, OSError):
            return
        try:
            if request.job is not None:
                cell = _Cell(request.job)
            answer = getattr(cell, request.verb)(*request.arguments)
        except Unavailable as reason:
            answer = Failure("unavailable", one_line(str(reason)) or "its `prepare` does not say why")
        except BaseException as error:
            traceback.print_exc()
            answer = Failure("oom" if is_oom(error) else "error", describe(error))
        connection.send(answer)


class _Cell:
    def __init__(self, job: Job) -> None:
        self.job = job

    def load(self) -> str:
        """Open the device, make the inputs: nothing of it is timed."""
        job = self.job
        self.inputs = self.operator.make_inputs(job.shape_of(self.operator), job.dtype, job.device, job.seed)
        _synchronize(job.device)
        return "loaded"

    def adopt(self) -> str:
        """Import what the cell needs, and no more: `load` makes its inputs, or `reload`."""
        job = self.job
        self.operator = get_operator(job.operator, job.plugins).in_mode(job.mode)
        self.backend = get_backend(self.operator, job.backend)
        if self.backend.kind != "torch":
            importlib.import_module(self.backend.kind)  # Helion takes 12 s on a machine that has not seen it
        return "adopted"

    def unload(self) -> str:
        """Drop everything but what was imported, so that others find the device's memory free."""
        job = self.job
        self.__dict__.clear()
        gc.collect()
        _release(job.device)
        return "unloaded"

    def prepare(self) -> Prepared:
        from groupbench.kernels.variants import choices
        from groupbench.operators.measure import accuracy, compiled
        from groupbench.operators.measure.given import Given

        job = self.job
        self.given = Given(self.inputs)
        _release(job.device)
        reference = self.operator.reference(self.inputs)
        _synchronize(job.device)
        start = time.perf_counter()
        with choices() as chosen:
            run = self.backend.prepare(self.inputs)
            run()
        _synchronize(job.device)
        prepare_ms = 1e3 * (time.perf_counter() - start)
        self.seen = accuracy.Seen()
        with compiled.watched() as kernels:
            measured, problem = self._checked(run, reference)
        del reference
        _release(job.device)  # the neighbours' checks want the memory
        interpreted = job.interpreted and self.backend.kind != "torch"
        self.timer = self._timer(run, job.protocol)
        timing: Timing = "gpu" if job.device == "cuda" else "interpreted" if interpreted else "cpu"
        self.nvml = _nvml() if job.device == "cuda" else None
        return Prepared(
            timing, prepare_ms, self.timer.enqueue_ms, measured, problem, compiled.with_variants(kernels, chosen)
        )

    def recheck(self) -> Rechecked:
        """After the timed runs, what was timed: a kernel that counts on what it left in a buffer may be right until
        then, and the replay of a CUDA graph may be another thing than the call that was captured.
        """
        timed = self.timer.run
        changed = self.given.misuse()
        if changed:
            return Rechecked(None, f"after its timed runs: {changed}")
        if self.seen.again(timed, self.operator):
            return Rechecked()
        measured, problem = self._checked(timed, self.operator.reference(self.inputs))
        _release(self.job.device)
        measured = msgspec.structs.replace(measured, repeatable=False)
        return Rechecked(measured, problem and f"after its timed runs: {problem}")

    def _checked(self, run: Callable[[], Any], reference: Any) -> tuple[Accuracy, str | None]:
        from groupbench.operators.measure import accuracy

        job = self.job
        return accuracy.check_backend(
            run, reference, self.operator, job.backend, job.dtype, job.rtol, job.atol, self.seen, self.given
        )

    def reload(self, seed: int, samples: int) -> str:
        """The same problem at other addresses: what lies before it in memory is of random size.

        Where a kernel's inputs lie moves its time by up to 0.4 % (0.7 % at 13 us), in one process as between two.
        """
        job = self.job
        for name in ("timer", "inputs", "given", "pads"):
            self.__dict__.pop(name, None)
        gc.collect()
        _release(job.device)
        self.pads = _pads(seed, job.device)
        self.inputs = self.operator.make_inputs(job.shape_of(self.operator), job.dtype, job.device, job.seed)
        run = self.backend.prepare(self.inputs)
        run()
        _synchronize(job.device)
        self.nvml = None  # telemetry is a record's, not a comparison's
        self.timer = self._timer(run, replace(job.protocol, samples=samples))
        return "reloaded"

    def _timer(self, run: Any, protocol: Protocol) -> GpuTimer | CpuTimer:
        if self.job.device == "cuda":
            return GpuTimer(run, protocol)
        return CpuTimer(run, protocol, self.job.interpreted and self.backend.kind != "torch")

    def burst(self) -> Burst:
        samples = self.timer.burst()
        return Burst(tuple(samples), self.nvml.telemetry() if self.nvml else None)


def describe(error: BaseException) -> str:
    """An exception in one line."""
    text = one_line(str(error))
    return f"{type(error).__name__}: {text}"[:LONGEST] if text else type(error).__name__


def is_oom(error: BaseException) -> bool:
    """Out of memory, on the GPU or the host; torch's CPU allocator says it in a RuntimeError's text."""
    import torch

    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


def _synchronize(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def _release(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def _pads(seed: int, device: str) -> list[Any]:
    """Memory that is held and never used: some small pieces and one of up to 64 MiB, of sizes that the seed says."""
    import torch

    draw = random.Random(seed)
    sizes = [512 * draw.randrange(1, 2048) for _ in range(draw.randrange(8))]
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in [*sizes, 512 * draw.randrange(1, 1 << 17)]]


def _nvml() -> Any:
    import torch

    from groupbench.operators.measure.telemetry import Nvml

    return Nvml(f"GPU-{torch.cuda.get_device_properties(0).uuid}")


def _redirect(log: int) -> None:
    """What a backend prints goes to a file, whose end explains a crash; the table on the screen stays whole."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    faulthandler.enable()
