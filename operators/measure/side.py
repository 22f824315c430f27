"""One side of an A/B comparison: `python -m groupbench.operators.measure.side`, asked over its standard input.

One question and one answer a line of JSON. The process itself opens no device and runs no backend: it keeps the cell's
processes (see worker.py), so that a cell that crashes or hangs costs an answer, and a fresh process costs no import.
The one that is timed is replaced now and then, since each is a few tenths of a per cent off for as long as it lives.
Results are checked in one of their own that stays: a fresh one takes seconds on a GPU.

    hello   device            -> device, capability, environment
    cells   operator, ...     -> what there is to compare
    prepare cell, timeout_s   -> timing, accuracy, compiled kernels
    adopt   seed, samples, fresh -> the same cell in the process that is timed, in a new one if fresh
    reload  seed, samples     -> the same cell at other addresses
    burst                     -> samples in ms
    unload
    quit

An answer is {"value": ...} or {"failure": {"status", "message"}}. Whatever a backend prints goes elsewhere: the answers
have a file descriptor of their own.
"""

from __future__ import annotations

import importlib
import os
import signal
from dataclasses import replace
from types import FrameType
from typing import Any

import msgspec

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.measure.cell import Burst, Failure, Job, Prepared, Rechecked, Request, describe
from groupbench.operators.measure.environment import resolve_device
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.texts import one_line
from groupbench.operators.measure.worker import Worker, call
from groupbench.tracker.exits import ExitCode


class Question(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    verb: str
    arguments: dict[str, Any] = {}


class Side:
    """Answers by verb. Each method's keyword arguments are the question's, its result is JSON."""

    def __init__(self) -> None:
        self._checker: Worker | None = None
        self._timed: Worker | None = None
        self._job: Job | None = None
        self._timeout_s = 300.0
        self._device = "cpu"
        self._capability: tuple[int, int] | None = None
        self._able: set[Job] = set()  # a comparison that is repeated need not ask again

    def hello(self, device: str) -> dict[str, Any]:
        check_contract()
        self._device = resolve_device(device)
        facts = call(probe, self._device)
        self._capability = facts["capability"]
        return {"device": self._device, **facts}

    def cells(self, **selection: Any) -> list[dict[str, Any]]:
        return call(list_cells, self._device, self._capability, selection)

    def prepare(self, cell: dict[str, Any], timeout_s: float) -> dict[str, Any] | Failure:
        self._timeout_s = timeout_s
        self._job = self._as_job(cell)
        if self._job not in self._able:
            reason = call(unavailable, self._job, self._capability)
            if reason is not None:
                return Failure("unavailable", reason)
            self._able.add(self._job)
        self._checker = self._started(self._checker)
        prepared: Any = None
        for request in (Request("adopt", self._job), *map(Request, ("load", "prepare", "burst", "recheck", "unload"))):
            if request.verb in ("burst", "recheck") and (prepared.problem or prepared.timing == "interpreted"):
                continue
            answer = self._checker.ask(request)
            match answer:
                case Failure():
                    return self._answer(answer)
                case Prepared():
                    prepared = answer
                case Rechecked(accuracy, problem):
                    prepared = replace(prepared, accuracy=accuracy or prepared.accuracy, problem=problem)
        return {
            "timing": prepared.timing,
            "accuracy": msgspec.to_builtins(prepared.accuracy),
            "problem": prepared.problem,
            "prepare_ms": prepared.prepare_ms,
            "kernels": msgspec.to_builtins(prepared.kernels),
        }

    def adopt(self, seed: int, samples: int, fresh: bool = False) -> str | Failure:
        if fresh:
            _end(self._timed)
            self._timed = None
        self._timed = self._started(self._timed)
        adopted = self._ask(Request("adopt", self._job))
        return adopted if isinstance(adopted, Failure) else self.reload(seed, samples)

    def reload(self, seed: int, samples: int) -> str | Failure:
        return self._ask(Request("reload", arguments=(seed, samples)))

    def burst(self) -> list[float] | Failure:
        taken = self._ask(Request("burst"))
        return list(taken.samples_ms) if isinstance(taken, Burst) else taken

    def unload(self) -> str | Failure:
        return self._ask(Request("unload")) if self._timed is not None else "nothing was loaded"

    def end(self) -> None:
        """End the cell's processes, at once."""
        _end(self._checker)
        _end(self._timed)
        self._checker = self._timed = None

    def _started(self, worker: Worker | None) -> Worker:
        worker = worker or Worker(self._device, self._timeout_s)
        worker.timeout_s = self._timeout_s
        return worker

    def _ask(self, request: Request) -> Any:
        if self._timed is None:
            return Failure("error", f"asked to {request.verb} before anything was loaded")
        return self._answer(self._timed.ask(request))

    def _answer(self, answer: Any) -> Any:
        if isinstance(answer, Failure):
            self.end()
        return answer

    def _as_job(self, cell: dict[str, Any]) -> Job:
        named = {key: cell[key] for key in ("operator", "backend", "shape", "dtype", "mode", "seed")}
        return Job(
            **named,
            plugins=tuple(cell["plugins"]),
            device=self._device,
            interpreted=self._device == "cpu",
            protocol=Protocol(cudagraph=cell["cudagraph"]),
        )


def _end(worker: Worker | None) -> None:
    if worker is not None:
        worker.kill()
        worker.close()


def check_contract() -> None:
    """Raises ImportError where the operators beside this code do not offer what measuring asks of them."""
    importlib.import_module("groupbench.operators.measure.accuracy")
    from groupbench.operators.operator import Operator

    if not hasattr(Operator, "in_mode"):
        raise ImportError("its operators have no modes")


def probe(device: str) -> dict[str, Any]:
    """What this side runs on; in a process of its own, since it opens the device."""
    import torch

    from groupbench.kernels.device import cuda_capability
    from groupbench.operators.measure import environment

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA GPU here; --device cpu measures without one")
    capability = cuda_capability() if device == "cuda" else None
    return {"capability": capability, "environment": msgspec.to_builtins(environment.detect(device))}


def unavailable(job: Job, capability: tuple[int, int] | None) -> str | None:
    """Why the job's backend cannot run here, or None. Raises UsageError where this side has no such thing."""
    from groupbench.operators.measure.selection import why_unavailable
    from groupbench.operators.operator import Target
    from groupbench.operators.registry import get_backend, get_operator

    operator = get_operator(job.operator, job.plugins).in_mode(job.mode)
    backend = get_backend(operator, job.backend)
    return why_unavailable(operator, backend.name, Target(job.device, job.dtype, job.interpreted, capability))


def list_cells(device: str, capability: tuple[int, int] | None, selection: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells of one operator that a selection names: all backends, the first suite, one dtype, unless it says so.

    selection  operator, and where given: backends, shapes, suites, dtypes, mode, plugins

    Raises UsageError for what does not exist.
    """
    from groupbench.operators.measure.selection import select_dtypes, select_mode, select_shapes, why_unavailable
    from groupbench.operators.operator import Target
    from groupbench.operators.registry import get_backend, get_operator

    operator = get_operator(selection["operator"], tuple(selection.get("plugins") or ()))
    mode = selection.get("mode") or "fwd"
    operator = select_mode(operator, mode)
    dtypes = select_dtypes(operator, selection.get("dtypes") or (), device)
    shapes = select_shapes(operator, selection.get("suites") or (), selection.get("shapes") or (), device)
    backends = [get_backend(operator, name) for name in selection.get("backends") or ()] or list(operator.backends)
    return [
        {
            "operator": operator.name,
            "backend": backend.name,
            "shape": str(shape),
            "dtype": dtype,
            "mode": mode,
            "unavailable": why_unavailable(operator, backend.name, Target(device, dtype, device == "cpu", capability)),
        }
        for shape in shapes
        for dtype in dtypes
        for backend in backends
    ]


def serve(side: Side, questions: Any, answers: Any) -> None:
    """Answer lines of `questions` on `answers` until `quit` or the end."""
    for line in questions:
        try:
            question = msgspec.json.decode(line, type=Question)
            if question.verb == "quit":
                return
            value = getattr(side, question.verb)(**question.arguments)
        except GroupbenchError as error:
            value = Failure("usage", one_line(str(error)))
        except Exception as error:
            value = Failure("error", describe(error))
        if isinstance(value, Failure):
            body: dict[str, Any] = {"failure": {"status": value.status, "message": value.message}}
        else:
            body = {"value": value}
        answers.write(msgspec.json.encode(body) + b"\n")
        answers.flush()


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb")
    questions = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    side = Side()

    def end(number: int, frame: FrameType | None) -> None:
        side.end()
        raise SystemExit(ExitCode.TERMINATED)  # so that what multiprocessing keeps in the temporary folder goes too

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(side, questions, answers)
    finally:
        side.end()


if __name__ == "__main__":
    # By its own name, which is where the processes it starts look for its functions.
    importlib.import_module("groupbench.operators.measure.side").main()
