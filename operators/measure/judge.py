"""The judging process: it computes the reference and compares outputs with it. It never imports a backend.

It makes a problem's inputs, applies the same moves as the parent applied to the backend's inputs, computes the
reference with a separate torch, and compares the outputs sent by the backend's process. There is one per run. A round's
reference serves all the problem's backends.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from groupbench.operators import registry
from groupbench.operators.dtypes import BYTES, torch_dtype
from groupbench.operators.errors import UsageError
from groupbench.operators.measure import accuracy, costs, environment, exchange, moves, specials, witness
from groupbench.operators.measure.arrays import size_of
from groupbench.operators.measure.cell import _release, _synchronize, own_nvml
from groupbench.operators.measure.deferred import Tensor, torch
from groupbench.operators.measure.exchange import Sent
from groupbench.operators.measure.given import Given, named_tensors
from groupbench.operators.measure.keeper import Keeper
from groupbench.operators.measure.protocol import CpuTimer, Protocol
from groupbench.operators.measure.wire import Job, Paced
from groupbench.operators.tolerances import TOLERANCES, Tolerance, table_of
from groupbench.tracker.facts.record import Accuracy


@dataclass(frozen=True)
class Precision:
    """The tuned numbers of a judgement, and where each comes from.

    The relative RMS error of a timed result may be little more (`accuracy.Finer`) than that of the first one, or of one
    rounding. Moved inputs keep their magnitudes, so an honest backend's errors agree within a few per cent if there are
    many elements. int8 in place of bf16 has three to seven times the error.
    """

    local: float = 6.0  # tolerance of a row, block or element of random inputs, in units of that of the whole output
    # Relative RMS error of one rounding, in units of the dtype's roundoff. A first result may be exact, for small
    # integers as inputs, and a result for the moved inputs is rounded.
    rounded: float = 0.42
    slack: float = 4.0  # for rows and elements on moved inputs, in units of the tolerance, which stale ones exceed
    rerouted_slack: float = 10.0  # the same under another routing


PRECISION = Precision()
_SUMMED = {"fp32": 6e-7, "fp64": 1e-14}
"""Relative RMS error of one rounding of the dtypes that are also summed in: of K = 4096 terms."""

LATE = "the output is not the one that was kept: it has changed since the burst"
"""The fault of an output whose sum is not the one that was named with the burst."""

FEW = 1 << 20
"""Elements that an output may have beyond twice those of the reference, such as scales of a packed one."""

OF_PROBLEM = ("operator", "shape", "dtype", "mode", "seed", "device")
"""The fields of a job that name its problem."""

_CHECKED: set[str] = set()
"""Operators of plugins whose inputs were made twice."""


class At(msgspec.Struct, frozen=True):
    """The state of a backend's inputs: moved by a secret and a number of steps, rerouted or made special by a seed."""

    secret: int | None = None
    step: int = 0
    rerouted: int | None = None
    special: int | None = None


class OutputJudgement(msgspec.Struct, frozen=True):
    """The reply to `compare`: an output's errors, the fault as text, or None, and the size in bytes."""

    accuracy: Accuracy
    problem: str | None
    size: int = 0


def make_ready() -> None:
    """Make a GPU context and load a judgement's kernels, which together take half a second."""
    with contextlib.suppress(Exception):  # the next request fails in the same way, and reports it
        output = torch.ones(128, 128, dtype=torch.bfloat16, device="cuda")
        wide = output.float()
        accuracy.compare(output, wide @ wide, TOLERANCES["bf16"])


class _Problem:
    """One problem's inputs, and the reference for their state."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.operator = registry.operator_alone(job.operator, job.plugins).in_mode(job.mode)
        self.shape = job.shape_of(self.operator)
        self.inputs = self.draw(job.seed)
        self._check_inputs()
        self.moves = moves.Moves(self.inputs, self.operator.moves, draw=self.draw)
        self.buffers: list[list[Any]] = []
        self.output: tuple[Any, ...] = ()  # the parts of the last output that was judged
        self._at: At | None = None
        self._reference: Any = None
        self.usual_ms = witness.usual_ms() if job.device == "cpu" else math.inf

    def draw(self, seed: int) -> Any:
        return self.operator.make_inputs(self.shape, self.job.dtype, self.job.device, seed)

    def rerouted(self, seed: int) -> contextlib.AbstractContextManager[bool]:
        return moves.rerouted(self.operator, self.shape, self.inputs, seed)

    def _check_inputs(self) -> None:
        """Raise UsageError if a plugin's inputs come from an unseeded generator.

        Each process makes separate inputs, so a result would be compared with the reference for other inputs. To detect
        this, one problem's inputs are made twice for each operator.
        """
        job = self.job
        if not job.plugins or job.operator in _CHECKED:
            return
        first, again = Given(self.inputs), Given(self.draw(job.seed))
        if not first.is_like(again):
            raise UsageError(
                f"{job.operator} makes other inputs each time: draw them from the global generator of torch or NumPy, "
                "which is seeded, or take `seed` as a parameter"
            )
        _CHECKED.add(job.operator)

    def reference(self, at: At) -> Any:
        """Return the reference for inputs in the state `at`, which is computed once."""
        if at != self._at:
            self._at = self._reference = None
            _release()
            with contextlib.ExitStack() as context:
                if at.rerouted is not None:
                    self.moves.set(None)
                    context.enter_context(self.rerouted(at.rerouted))
                self.moves.set(at.secret, at.step)
                if at.special is not None:
                    specials.write(self.operator, self.inputs, at.special)
                self._reference = self.operator.reference(self.inputs)
                _synchronize(self.job.device)
            self._at = at
        return self._reference


class JudgeHandler:
    """The judging process's requests, each a method. It holds one problem."""

    def __init__(self, file: int = -1) -> None:
        """Ignore the descriptor of the file for outputs: this process sends no output."""
        self._loaded: _Problem | None = None

    @property
    def problem(self) -> _Problem:
        assert self._loaded is not None, "asked before `load`"
        return self._loaded

    examine = staticmethod(environment.examine)

    def load(self, job: Job) -> bool:
        """Make a problem's inputs, unless they exist. Return whether they change between calls.

        If not, a stale result is not noticed.
        """
        if self._loaded is None or any(getattr(self._loaded.job, name) != getattr(job, name) for name in OF_PROBLEM):
            self.unload()
            _release()  # the inputs of a problem that did not fit
            self._loaded = _Problem(job)
        return self.problem.moves.any

    def gauge(self) -> float:
        """Return how many times as long known work takes on the problem's device, because of other work there."""
        return witness.stretch(self.problem.job.device, self.problem.usual_ms)

    def idle_watts(self) -> float | None:
        """Measure the power of the GPU at rest, which belongs to the records of all backends."""
        nvml = own_nvml() if self.problem.job.device == "cuda" else None
        return costs.idle_watts(nvml.joules) if nvml and nvml.joules() is not None else None

    def pace(self, secret: int, calls: int, copies: tuple[moves.Copied, ...], processor: int | None = None) -> Paced:
        """Time everything in a CPU burst but the calls: moving the inputs, and copying and deleting outputs.

        The outputs are like the last judged one.

        Args:
            copies: The backend's copies of inputs, which are updated too, up to the size of all inputs together.
            processor: Number of the processor to run on. On a virtual machine, one may be twice as slow as another.
        """
        problem = self.problem
        outputs = [torch.ones(part.shape, dtype=getattr(torch, part.dtype)) for part in problem.output]
        keeper = Keeper(problem.moves, problem.job.device, calls, problem.buffers)
        spent = [0.0, 0.0, 0.0]

        def run() -> list[Any]:
            began = _clocks()
            made = [output.clone() for output in outputs]
            spent[:] = (total + now - then for total, now, then in zip(spent, _clocks(), began, strict=True))
            return made

        with _on(processor):
            problem.moves.set(None)
            problem.moves.copies = _like(copies, problem.inputs)
            began = _clocks()
            problem.moves.set(secret)
            CpuTimer(run, Protocol(samples=calls), interpreted=False).burst(keeper)
            keeper.sums()
            took = [now - then - made for now, then, made in zip(_clocks(), began, spent, strict=True)]
        problem.moves.copies = []
        wall_ms, processor_ms, run_ms = (1e3 * seconds for seconds in took)
        return Paced(wall_ms, processor_ms, torch.get_num_threads(), run_ms)

    def can_reroute(self, seed: int) -> bool:
        """Return whether this problem has another routing."""
        with self.problem.rerouted(seed) as can:
            return can

    def can_be_special(self) -> bool:
        """Return whether any input can hold special values."""
        return specials.possible(self.problem.operator, self.problem.inputs) and self.problem.moves.any

    def compare(
        self,
        sent: Sent,
        path: str,
        at: At,
        row: str | None,
        rtol: float | None,
        atol: float | None,
        slack: float,
        named: int | None = None,
        first_rms: float | None = None,
    ) -> OutputJudgement:
        """Compare the backend's output with the reference for inputs in the state `at`.

        Args:
            row: The backend's row of the tolerance table.
            slack: Factor for the tolerance.
            named: The output's sum by the backend's process, before it knew that this output would be compared.
            first_rms: The error of the backend's first output, if this one must not be much coarser.
        """
        problem = self.problem
        operator, dtype, device = problem.operator, problem.job.dtype, problem.job.device
        tolerance = _tolerance(operator, row, dtype).with_overrides(rtol, atol)
        # A row or an element of drawn inputs may cancel to next to nothing; a stale one is off by as much as it is.
        local = 1.0 if slack == 1 else PRECISION.local
        wide = slack * local
        tolerance = Tolerance(slack * tolerance.rms, wide * tolerance.rtol, wide * tolerance.atol)
        like = None if first_rms is None else max(first_rms, _one_rounding(operator.output_dtype(dtype)))
        reference = problem.reference(at)
        expected = sum(part.numel() for part in (reference.values() if isinstance(reference, dict) else [reference]))
        if sent.size > 2 * expected + FEW:  # before memory is allocated for them
            raise ValueError(f"the backend returned {sent.size:,} elements, and the reference has {expected:,}")
        outputs = _received(sent, path, device)
        problem.output = sent.parts
        tensors = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        size = size_of(tensors)
        late = named is not None and exchange.sums([tensors]) != (named,)
        view = accuracy.as_given if at.special is None else specials.comparable
        measured, fault = accuracy.judge(outputs, reference, operator, dtype, tolerance, local, view, like)
        if at.special is not None:
            self.unload()  # the inputs cannot be restored
        del outputs, reference, tensors
        _release()
        return OutputJudgement(measured, LATE if late else fault, size)

    def unload(self) -> None:
        """Release the problem's memory."""
        if self._loaded is not None:
            self._loaded = None
            gc.collect()
            _release()


def _one_rounding(output_dtype: str) -> float:
    """Return the relative RMS error of a result rounded once; 0 for integers and packed formats, such as w4."""
    name = output_dtype.partition("_")[0]
    if name in _SUMMED:
        return _SUMMED[name]
    if name not in BYTES or not torch_dtype(name).is_floating_point:
        return 0.0
    return PRECISION.rounded * torch.finfo(torch_dtype(name)).eps / 2


def _clocks() -> tuple[float, float, float]:
    """Return the time, and the processor time of this process and of this thread, in s."""
    return time.perf_counter(), time.process_time(), time.thread_time()


@contextlib.contextmanager
def _on(processor: int | None) -> Iterator[None]:
    """Run this thread on a processor, if the system allows it."""
    allowed = os.sched_getaffinity(0)
    if processor in allowed:
        os.sched_setaffinity(0, {processor})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _like(copies: Sequence[moves.Copied], inputs: Any) -> list[tuple[Any, Any]]:
    """Return tensors like a backend's copies and their sources, up to all inputs' size together."""
    room = sum(tensor.untyped_storage().nbytes() for _, tensor in named_tensors(inputs))
    pairs = []
    for copied in copies:
        pair = copied.pair(2 * room)
        size = pair[0].numel() * pair[0].element_size() if pair else 0
        if pair and size <= room:
            pairs.append(pair)
            room -= size
    return pairs


def _received(sent: Sent, path: str, device: str) -> Any:
    """Return the output in this process: a tensor, or a tuple or list of tensors, copied to `device`.

    Args:
        path: The file of `exchange.send`.

    Raises ValueError if the data does not describe tensors, or if the file is too short for them.
    """
    tensors = []
    for part in sent.parts:
        dtype = getattr(torch, part.dtype, None)
        if not isinstance(dtype, torch.dtype) or any(size < 0 for size in part.shape):
            raise ValueError(f"the backend's process sent {part.dtype} {list(part.shape)}, which is not a tensor")
        size = math.prod(part.shape) * dtype.itemsize
        if not size:
            tensors.append(torch.empty(part.shape, dtype=dtype, device=device))
        elif part.handle is not None:
            storage = torch.UntypedStorage._new_shared_cuda(*part.handle)
            flat = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
            tensors.append(flat[part.start : part.start + size].clone().view(dtype).view(part.shape))
            del flat, storage
        else:
            tensors.append(_read(path, part.offset, size, device).view(dtype).view(part.shape))
    return exchange.arranged(sent.form, tensors)


def _read(path: str, offset: int, size: int, device: str) -> Tensor:
    """Return a copy of `size` bytes at `offset`, since the other process may still change the file.

    They are read, not mapped: a file that is cut at this time would end this process by SIGBUS.

    Raises ValueError if the file is too short.
    """
    data = bytearray(size)
    with Path(path).open("rb") as file:
        file.seek(max(offset, 0))
        read = file.readinto(data)
    if read < size or offset < 0:
        raise ValueError("the backend's process sent fewer bytes than it announced")
    return torch.frombuffer(data, dtype=torch.uint8).to(device)


def _tolerance(operator: Any, row: str | None, dtype: str) -> Tolerance:
    """Return the tolerance in the backend's table row. Raises ValueError for another dtype's row."""
    dtype_: str = operator.output_dtype(dtype)
    name = (row or "{dtype}").format(dtype=dtype_)
    table = table_of(operator)
    if name not in table or name.partition("_")[0] != dtype_.partition("_")[0]:
        raise ValueError(f"the backend asks for the tolerance {name!r}, which is not one of {dtype_}")
    return table[name]
