"""The process that judges: it has the reference, and no backend is ever imported there.

It makes a problem's inputs itself, moves them as the parent says that a backend's were moved, computes the reference
with its own torch, and compares what the backend's process sent. One for each run; the reference of a round serves all
backends of the problem.
"""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from groupbench.operators import registry
from groupbench.operators.errors import UsageError
from groupbench.operators.measure import accuracy, exchange, moves
from groupbench.operators.measure.cell import Done, Failure, Job, _release, _synchronize, answer_requests
from groupbench.operators.measure.exchange import Sent
from groupbench.operators.tolerances import TOLERANCES, Tolerance
from groupbench.tracker.record import Accuracy

LOCAL = 6.0
"""Times the slack of the whole that a row, block or element has for inputs that are drawn."""


class At(msgspec.Struct, frozen=True):
    """What a backend's inputs were: moved by a secret and so many steps, or as they were made; rerouted by a seed."""

    secret: int | None = None
    step: int = 0
    rerouted: int | None = None


class Judged(msgspec.Struct, frozen=True, tag=True):
    """Answer to `compare`: errors, and what is wrong, or None."""

    accuracy: Accuracy
    problem: str | None


class Rerouted(msgspec.Struct, frozen=True, tag=True):
    """Answer to `can_reroute`."""

    possible: bool


JudgeAnswer = Judged | Rerouted | Done | Failure


def serve(connection: Connection, file: int) -> None:
    """Answer requests until the pipe closes."""
    answer_requests(connection, lambda request, own: own or _Judge())


class _Judge:
    def __init__(self) -> None:
        self.job: Job | None = None

    def load(self, job: Job) -> Done:
        """Make the inputs of a problem, unless they are there."""
        if self.job is None or _problem(self.job) != _problem(job):
            self.unload()
            self.job = job
            self.operator = _operator(job)
            self.shape = job.shape_of(self.operator)
            self.inputs = self.operator.make_inputs(self.shape, job.dtype, job.device, job.seed)
            self.moves = moves.of(self.operator, self.inputs)
            self.at: At | None = None
            self.reference: Any = None
        return Done("loaded")

    def can_reroute(self, seed: int) -> Rerouted:
        """Whether this problem has another routing."""
        held = moves.reroute(self.operator, self.shape, self.inputs, seed)
        for tensor, before in held or ():
            tensor.copy_(before)
        return Rerouted(held is not None)

    def compare(
        self, sent: Sent, path: str, at: At, row: str | None, rtol: float | None, atol: float | None, slack: float
    ) -> Judged:
        """An output of a backend whose row of the tolerance table is `row`, for inputs that were `at`.

        slack  by which the tolerance is multiplied
        """
        assert self.job is not None
        job = self.job
        tolerance = _tolerance(self.operator, row, job.dtype).with_overrides(rtol, atol)
        # A row or an element of drawn inputs may cancel to next to nothing; a stale one is off by as much as it is.
        local = 1.0 if slack == 1 else LOCAL
        wide = slack * local
        tolerance = Tolerance(slack * tolerance.rms, wide * tolerance.rtol, wide * tolerance.atol)
        outputs = exchange.receive(sent, path, job.device)
        reference = self._reference(at)
        measured, problem = accuracy.judge(outputs, reference, self.operator, job.dtype, tolerance, local)
        del outputs, reference
        _release(job.device)
        return Judged(measured, problem)

    def _reference(self, at: At) -> Any:
        """The reference for inputs that were `at`, computed once."""
        assert self.job is not None
        if at != self.at:
            self.at = self.reference = None
            _release(self.job.device)
            held = None
            if at.rerouted is not None:
                self.moves.set(None)
                held = moves.reroute(self.operator, self.shape, self.inputs, at.rerouted)
            self.moves.set(at.secret, at.step)
            self.reference = self.operator.reference(self.inputs)
            _synchronize(self.job.device)
            for tensor, before in held or ():
                tensor.copy_(before)
            self.at = at
        return self.reference

    def unload(self) -> Done:
        """Give the memory back."""
        if self.job is not None:
            device = self.job.device
            self.__dict__.clear()
            self.job = None
            gc.collect()
            _release(device)
        return Done("unloaded")


def _problem(job: Job) -> tuple[Any, ...]:
    return (job.operator, job.shape, job.dtype, job.mode, job.seed, job.device)


def _operator(job: Job) -> Any:
    """The operator, without the plugins' backends; a plugin is imported only where the operator itself is in one."""
    own = getattr(registry, "catalog_operator", registry.get_operator)
    try:
        return own(job.operator).in_mode(job.mode)
    except UsageError:
        return registry.get_operator(job.operator, job.plugins).in_mode(job.mode)


def _tolerance(operator: Any, row: str | None, dtype: str) -> Tolerance:
    """The row of the table that a backend is held to. Raises ValueError for one of another dtype."""
    own: str = operator.output_dtype(dtype)
    name = (row or "{dtype}").format(dtype=own)
    if name not in TOLERANCES or name.partition("_")[0] != own.partition("_")[0]:
        raise ValueError(f"the backend asks for the tolerance {name!r}, which is not one of {own}")
    return TOLERANCES[name]
