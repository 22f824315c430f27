"""One side of an A/B comparison: `python -m groupbench.operators.measure.side` answers requests on standard input.

A request and its answer are one line of JSON each. This process neither opens a device nor runs a backend. It keeps
three worker processes (worker.py), so that a crash or hang costs one answer and a new process needs no imports:

- The checking process runs the first calls and their checks. It is kept, since a new one takes seconds on a GPU.
- The timed process runs the bursts. The driver replaces it from time to time, because each process has its own offset
  of a few tenths of a per cent as long as it lives.
- The judging process compares outputs with the reference; no backend runs there. It judges the first calls, the first
  burst after each start, and from then on one burst in four, chosen at random.

Requests:

    hello   device            -> device, capability, environment
    cells   operator, ...     -> the cells that can be compared
    prepare cell, timeout_s   -> timing, accuracy, compiled kernels
    adopt   seed, samples, fresh -> the same cell in the process that is timed, in a new one if fresh
    reload  seed, samples     -> the same cell at other addresses
    burst                     -> samples in ms
    amounts                   -> the fewest operations and bytes for the problem
    unchecked                 -> checks since `prepare` that could not be made, each with its reason
    unload
    quit

An answer is {"value": ...} or {"failure": {"status", "message"}}. Answers have their own file descriptor, so that a
backend's output does not mix with them.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

import msgspec

from groupbench.operators import registry
from groupbench.operators.errors import GroupbenchError, WorkerLost
from groupbench.operators.measure import selection, servers
from groupbench.operators.measure.environment import resolve_device
from groupbench.operators.measure.faults import describe
from groupbench.operators.measure.folders import of_this_command
from groupbench.operators.measure.further import describe_kernels, find_properties
from groupbench.operators.measure.live import CHECKS, Live, drawn, fingerprint_of, new_secret, settle
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.texts import one_line
from groupbench.operators.measure.wire import Failure, HeldTo, Job, Request
from groupbench.operators.measure.witness import Implausible
from groupbench.operators.measure.worker import Judge, Worker, call, living, preload, result_of
from groupbench.operators.operator import Target
from groupbench.operators.registry import get_backend, get_operator, home_of
from groupbench.tracker.facts.exits import ExitCode

T = TypeVar("T")


@dataclass(frozen=True)
class Shares:
    """The tuned numbers of this module: choices between a comparison's length and what it finds."""

    look: int = 4  # one in so many bursts is judged
    audit: int = 8  # on a CPU, the second of a process and one in so many are followed by one that this process times
    most_owed: int = 2  # audited bursts, from the second on, without a clear result; one takes up to ten seconds


SHARES = Shares()


class SideQuestion(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One line of the input: a method of `AbServer` and its keyword arguments."""

    verb: str
    arguments: dict[str, Any] = {}


class AbServer:
    """Answers questions: each verb is a method, its arguments are keyword arguments, and its result becomes JSON."""

    def __init__(self) -> None:
        self._checker: Worker | None = None
        self._timed: Worker | None = None
        self._judge: Judge | None = None
        self._live: Live | None = None
        self._is_right = True
        self._owed = 0  # attempts left to audit the timed process for the first time
        self._audited: bool | None = None  # whether an audit found the cell's times plausible; None before the first
        self._moving = True  # whether the cell's inputs change between calls
        self._checked: Live | None = None  # the cell in the checking process
        self._job: Job | None = None
        self._held_to: HeldTo | None = None
        self._to_count: tuple[selection.LargeModule, ...] = ()  # imports to count operations and bytes
        self._timeout_s = 300.0
        self._device = "cpu"
        self._capability: tuple[int, int] | None = None
        self._known: dict[tuple[Callable[..., Any], Job], Any] = {}

    def hello(self, device: str) -> dict[str, Any]:
        """Set the device, and return it with its capability and environment.

        Raises UsageError without the device.
        """
        self._device = resolve_device(device)
        servers.begin()
        facts, self._capability = result_of(self._judging().ask(Request("examine", (self._device,))))
        return {"device": self._device, "capability": self._capability, "environment": msgspec.to_builtins(facts)}

    def cells(self, **selection: Any) -> list[dict[str, Any]]:
        """Return the selected cells, as `list_cells` does."""
        return call(list_cells, self._device, self._capability, selection)

    def offers(self, candidate: str, plugins: list[str]) -> list[dict[str, Any]]:
        """Return the backends that a plugin adds to those of other plugins and of groupbench."""
        return call(list_offers, candidate, tuple(plugins))

    def prepare(self, cell: dict[str, Any], timeout_s: float) -> dict[str, Any] | Failure:
        """Check a cell's results in the checking process, and return its accuracy, costs and kernels.

        Args:
            timeout_s: Limit for each later reply of the cell's processes.
        """
        self._timeout_s = timeout_s
        self._job = self._as_job(cell)
        reason, imports, self._to_count = self._learned(look_up, self._job, self._capability)
        if reason is not None:
            return Failure("unavailable", reason)
        preload(*imports)
        self._held_to = self._as_held(cell)
        self._checker = self._started(self._checker)
        # On a GPU, each process takes a second or more to open it: let both do so at the same time.
        judged = replace(self._job, plugins=self._held_to.home)
        self._judging().send(Request("load", (judged,)))
        for request in (Request("adopt", (self._job,)), Request("load")):
            reply = self._checker.ask(request)
            if isinstance(reply, Failure):
                return self._end_on_failure(reply)
        moving = self._judging().receive()
        if isinstance(moving, Failure):
            return self._end_on_failure(moving)
        self._moving, self._audited = moving, None
        live = Live(self._job, self._checker, self._judging, self._held_to)
        live.prepare()
        if live.going and not live.problem:
            settle([live])
            live.burst(new_secret(), drawn(31))
            live.finish(new_secret())
            live.repeat(1)
        loaded, usable = fingerprint_of(live.worker), find_properties(live)
        if not usable:
            _end(self._checker)
            self._checker = None
        elif live.failure is None:
            live.ask("unload")
        if live.failure is not None:
            self._end_on_failure(live.failure)
            return live.failure
        assert live.prepared is not None
        self._is_right, self._checked = live.problem is None, live
        return {
            "timing": live.prepared.timing,
            "accuracy": msgspec.to_builtins(live.accuracy),
            "problem": live.problem,
            "suspicious": live.suspicious,
            "dynamic": live.properties.get("dynamic_routing"),
            "prepare_ms": live.prepared.prepare_ms,
            "kernels": msgspec.to_builtins(describe_kernels(live)),
            "loaded": msgspec.to_builtins(loaded),
        }

    def adopt(self, seed: int, samples: int, fresh: bool = False) -> str | Failure:
        """Load the prepared cell into the timed process. With `fresh`, start a new one first."""
        if fresh:
            _end(self._timed)
            self._timed = None
        self._timed = self._started(self._timed)
        adopted = self._ask(Request("adopt", (self._job,)))
        return adopted if isinstance(adopted, Failure) else self.reload(seed, samples)

    def reload(self, seed: int, samples: int) -> str | Failure:
        """Make the inputs again at other addresses in the timed process, and prepare the backend.

        Args:
            samples: Number of timed calls in each following burst.
        """
        reply = self._ask(Request("reload", (seed, samples)))
        if isinstance(reply, Failure):
            return reply
        assert self._timed is not None and self._job is not None and self._held_to is not None
        if self._live is None or self._live.worker is not self._timed or self._live.job is not self._job:
            self._live = Live(self._job, self._timed, self._judging, self._held_to)
            self._live.learn(self._checked)
            self._owed = SHARES.most_owed
        self._live.samples = samples
        self._live.rest.disturb()
        return "reloaded"

    def burst(self) -> list[float] | Failure:
        """Return the samples in ms, or a Failure if the output was right in `prepare` but is wrong in a timed call."""
        live = self._live
        if self._timed is None or live is None:
            return Failure("error", "asked to burst before anything was loaded")
        if not live.bursts:
            settle([live])
        looked_at = self._is_right and (not live.bursts or _one_in(SHARES.look))
        taken = live.burst(new_secret(), drawn(31) if looked_at else None)
        if isinstance(taken, Failure):
            self._end_on_failure(taken)
            return taken
        fault: str | Failure | None = live.problem
        if self._is_right and fault is None and self._device == "cpu" and self._is_audited(len(live.bursts)):
            audits = [live.audit()]
            while isinstance(audits[-1], Implausible) and len(audits) < CHECKS.accused:
                audits.append(live.audit())
            fault = audits[-1]
            self._audited = self._audited or fault is None
            self._owed = 0 if audits == [None] else max(self._owed - 1, 0)
            live.rest.disturb()
        # A Failure is that of a busy machine, which the comparison copes with, or of a process that the next one names.
        if self._is_right and isinstance(fault, str):
            return Failure("wrong", str(fault))
        return list(taken.samples_ms)

    def amounts(self) -> list[int]:
        """Return the fewest operations and bytes for the prepared cell's problem.

        Only the limit of a latency needs them, and counting the bytes imports Dynamo, which takes 1 to 4 s.
        """
        assert self._job is not None and self._held_to is not None
        preload(*self._to_count)
        return list(self._learned(amounts, replace(self._job, plugins=self._held_to.home)))

    def unchecked(self) -> list[str]:
        """Return the checks of the prepared cell and its bursts that could not be made, each with its reason."""
        reasons = []
        if self._audited is False:
            reasons.append("times, because other work kept the CPU busy")
        if not self._moving:
            reasons.append("stale results, because its inputs do not change between calls")
        return reasons

    def _is_audited(self, bursts: int) -> bool:
        """Return whether the timed process's last burst of so many is followed by one that this process times.

        Its second is, since a backend may be honest in the checking process and forge its times in this one.
        """
        return bursts >= 2 and (self._owed > 0 or _one_in(SHARES.audit))

    def unload(self) -> str | Failure:
        """Free the timed process's memory on the device, so that the other side has it alone."""
        self._live = None
        if self._timed is None:
            return "nothing was loaded"
        reply = self._ask(Request("unload"))
        return reply if isinstance(reply, Failure) else "unloaded"

    def end(self) -> None:
        """Kill the cell's processes."""
        for worker in (self._checker, self._timed, self._judge):
            _end(worker)
        self._checker = self._timed = self._judge = self._live = None

    def _judging(self) -> Judge:
        self._judge = living(self._judge, self._device, self._timeout_s)
        return self._judge

    def _started(self, worker: Worker | None) -> Worker:
        worker = worker or Worker(self._device, self._timeout_s, of_this_command())
        worker.timeout_s = self._timeout_s
        return worker

    def _ask(self, request: Request) -> Any:
        if self._timed is None:
            return Failure("error", f"asked to {request.verb} before anything was loaded")
        return self._end_on_failure(self._timed.ask(request))

    def _end_on_failure(self, reply: T) -> T:
        if isinstance(reply, Failure):
            self.end()
        return reply

    def _as_held(self, cell: dict[str, Any]) -> HeldTo:
        """Return the facts that the judge needs, from the cell's backend or from base's, if head's is not trusted.

        Runs in another process: this one, whose clock bounds the times, imports no plugin.
        """
        assert self._job is not None
        job = self._job
        if cell.get("trusted") is not None:
            job = replace(job, plugins=tuple(cell["trusted"]), backend=cell["base_backend"])
        return self._learned(held_to, job)

    def _learned(self, function: Callable[..., T], job: Job, *more: Any) -> T:
        """Return a function's result for a job, which another process computes once."""
        if (function, job) not in self._known:
            self._known[function, job] = call(function, job, *more)
        result: T = self._known[function, job]
        return result

    def _as_job(self, cell: dict[str, Any]) -> Job:
        named = {key: cell[key] for key in ("operator", "backend", "shape", "dtype", "mode", "seed")}
        return Job(
            **named,
            plugins=tuple(cell["plugins"]),
            device=self._device,
            interpreted=self._device == "cpu",
            protocol=Protocol(cudagraph=cell["cudagraph"]),
        )


def _one_in(number: int) -> bool:
    return drawn(31) % number == 0


def _end(worker: Worker | None) -> None:
    if worker is not None:
        worker.kill()
        worker.close()


def held_to(job: Job) -> HeldTo:
    """Return the facts declared by the backend. Imports the plugins, in this process.

    The judge imports only the plugin defining the operator, if any.
    """
    operator = get_operator(job.operator, job.plugins).in_mode(job.mode)
    return HeldTo(get_backend(operator, job.backend).tolerance, home_of(job.operator, job.plugins))


def look_up(
    job: Job, capability: tuple[int, int] | None
) -> tuple[str | None, tuple[selection.LargeModule, ...], tuple[selection.LargeModule, ...]]:
    """Return why the job's backend cannot run here, or None, and the modules for its processes and for `amounts`.

    Raises UsageError if operator or backend is unknown.
    """
    operator = get_operator(job.operator, job.plugins).in_mode(job.mode)
    backend = get_backend(operator, job.backend)
    target = Target(job.device, job.dtype, job.interpreted, capability)
    to_count = selection.imports_to_count(held_to(job).home)
    reason = selection.why_unavailable(operator, backend.name, target)
    return reason, selection.imports_of(backend, job.plugins), to_count


def list_offers(candidate: str, plugins: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the operator, name and baseline of the candidate's backends, and whether it defines the operator.

    Raises UsageError if the candidate does not load, or if a backend's operator is unknown.
    """
    # Before the candidate is imported: its decorators add backends to the plugins' operators.
    added = [name for name in registry.operator_names(plugins) if name not in registry.CATALOG]
    before = {op: {b.name for b in registry.get_operator(op, plugins).backends} for op in added}
    plugin = registry.read(candidate)
    registry.plugin_backends((*plugins, candidate))
    offers = [(b.operator, b.name) for b in plugin.backends]
    offers += [
        (op.name, b.name) for op in plugin.operators for b in op.backends if b.name not in before.get(op.name, ())
    ]
    answers = []
    for operator, backend in offers:
        extended = registry.get_operator(operator, (*plugins, candidate))
        defines = operator in registry.operator_names((*plugins, candidate)) and not registry.has_operator(
            operator, plugins
        )
        if defines and backend == extended.baseline and len(offers) > 1:
            continue
        answers.append({"operator": operator, "backend": backend, "baseline": extended.baseline, "own": defines})
    return answers


def amounts(job: Job) -> tuple[int, int]:
    """Return the smallest (operations, bytes) that the job's problem needs."""
    operator = get_operator(job.operator, job.plugins).in_mode(job.mode)
    shape = job.shape_of(operator)
    return operator.flops(shape), operator.min_bytes(shape, job.dtype)


def list_cells(device: str, capability: tuple[int, int] | None, chosen: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the selected cells of one operator; by default all backends, the first suite and one dtype.

    Args:
        chosen: Operator, and optionally: backends, shapes, suites, dtypes, mode, plugins.

    Raises UsageError for an unknown name or an invalid shape.
    """
    operator = get_operator(chosen["operator"], tuple(chosen.get("plugins") or ()))
    mode = chosen.get("mode") or "fwd"
    operator = selection.select_mode(operator, mode)
    dtypes = selection.select_dtypes(operator, chosen.get("dtypes") or (), device)
    shapes = selection.select_shapes(operator, chosen.get("suites") or (), chosen.get("shapes") or (), device)
    # Backends of an older tree lack the field.
    usual = [backend for backend in operator.backends if not getattr(backend, "only_as_baseline", False)]
    backends = [get_backend(operator, name) for name in chosen.get("backends") or ()] or usual
    return [
        {
            "operator": operator.name,
            "backend": backend.name,
            "shape": str(shape),
            "dtype": dtype,
            "mode": mode,
            "unavailable": selection.why_unavailable(operator, backend.name, target),
        }
        for shape in shapes
        for dtype in dtypes
        for target in [Target(device, dtype, device == "cpu", capability)]
        for backend in backends
    ]


def serve(side: AbServer, questions: Any, answers: Any) -> None:
    """Answer each line of `questions` on `answers` until `quit` or the end of the input."""
    for line in questions:
        failed: tuple[str, str] | None = None
        try:
            question = msgspec.json.decode(line, type=SideQuestion)
            if question.verb == "quit":
                return
            value = getattr(side, question.verb)(**question.arguments)
            if isinstance(value, Failure):
                failed = value.status, value.message
        except GroupbenchError as error:
            failed = "error" if isinstance(error, WorkerLost) else "usage", one_line(str(error))
        except Exception as error:
            failed = "error", describe(error)
        body = {"value": value} if failed is None else {"failure": {"status": failed[0], "message": failed[1]}}
        answers.write(msgspec.json.encode(body) + b"\n")
        answers.flush()


def end_with_driver(questions: int, over: threading.Event) -> None:
    """Wait until the driver closes its end of `questions`. End this process if it is still busy one second later."""
    poll = select.poll()
    poll.register(questions, 0)  # an empty event mask still reports that the other end is closed
    poll.poll()
    if not over.wait(1):
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Answer on standard output. All other output of this process goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    questions = os.fdopen(os.dup(0), "rb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    side = AbServer()
    over = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        side.end()
        raise SystemExit(ExitCode.TERMINATED)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_driver, args=(questions.fileno(), over), daemon=True).start()
    try:
        serve(side, questions, answers)
    finally:
        over.set()
        side.end()


if __name__ == "__main__":
    # Import this module by its full name, under which worker processes find its functions.
    importlib.import_module("groupbench.operators.measure.side").main()
