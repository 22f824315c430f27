"""The parent's end of a cell's process: start it, send requests, and end it.

Processes come from a fork server that has imported torch and Triton once but never opened a GPU, so that a fresh
process costs a fraction of a second and still shares no CUDA context with any other. Between the fork server and each
of them is a warden (warden.py), which ends every process that a cell has started.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import multiprocessing
import os
import re
import resource
import signal
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from groupbench.operators.errors import GroupbenchError, PlanError, UsageError, WorkerLost
from groupbench.operators.measure import cell, confine, folders, host_memory, judge, own_modules, servers, warden
from groupbench.operators.measure.channel import NOTICE_S, REPORT_EVERY_S, BadReply, Channel, warn_of_wait
from groupbench.operators.measure.environment import host_threads
from groupbench.operators.measure.faults import authors_frame, shown
from groupbench.operators.measure.servers import ForkServer
from groupbench.operators.measure.texts import joined_lines, storable
from groupbench.operators.measure.wire import Failure, Request, reply_of
from groupbench.tracker.facts.measured_tree import add_measured_folders
from groupbench.tracker.facts.record import NOT_CHECKED

log = logging.getLogger(__name__)

T = TypeVar("T")

MEASURING = "/groupbench/operators/measure/"
"""Folder of this package's own frames in a backend's stack."""
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""A frame in the output of Python's fault handler."""
FAULT = "Fatal Python error: "
"""The beginning of the fault handler's output."""


@dataclass(frozen=True)
class Ends:
    """The tuned numbers of this module. All are choices: how long a user waits in vain, and reads."""

    close_s: float = 5.0  # for a process to end by itself
    kill_s: float = 10.0  # for a warden to end its processes
    abort_s: float = 2.0  # for a process that does not answer to write where it is
    last_words: int = 300  # characters of its last output in a record's message


ENDS = Ends()
OPENING_S = 300.0
"""Seconds to import torch and open a GPU. The first time on a machine may take minutes."""
SIGNALS = ("Bus error", "Illegal instruction", "Floating-point exception", "Aborted", "Segmentation fault")
"""The fault handler's texts for signals that the exit code already names."""

DOING = {
    "call": "a call",
    "adopt": "its imports",
    "load": "making its inputs",
    "prepare": "prepare or the first calls",
    "reload": "prepare or the first call",
    "burst": "its timed calls",
    "show": "handing over an output",
    "move": "moving its inputs",
    "witness": "its timed calls",
    "restore": "the check after its timed calls",
    "reroute": "a call with another routing",
    "special": "a call on special values",
    "compare": "judging an output",
    "pace": "timing a burst without calls",
    "examine": "opening the device",
    "gauge": "looking for other work on the device",
    "unload": "its clearing away",
    "costs": "measuring the costs of a call",
    "loaded": "listing the files that it has loaded",
    "first": "prepare or the first call with empty caches",
}
"""The activity of a process for each request. It replies when done, so a silent process has no finer status."""


def preload(*modules: str) -> None:
    """Let the fork server of cells import these modules, if installed, before it forks its next process.

    Importing Dynamo takes 1 to 4 s. This way, it is imported once for all processes that need it, and others start
    sooner. Modules that were imported once stay so.
    """
    servers.CELLS.preload(modules)


def last_words(log: str) -> str:
    """Return a log's facts about the death of its process: ", at FILE:LINE in FUNCTION; it last wrote: ..."."""
    output, fault, stack = log.partition(FAULT)
    if fault:
        why = stack.partition("\n")[0].strip()
        output = output if why in SIGNALS else f"{output}\n{why}"
    where = place(log)
    text = joined_lines(output)
    if len(text) > ENDS.last_words:
        text = f"... {text[-ENDS.last_words :].partition(' ')[2] or text[-ENDS.last_words :]}"
    return where + (f"; it last wrote: {text}" if text else "")


def place(log: str) -> str:
    """Return where Python's fault handler found a process, as ", at FILE:LINE in FUNCTION", or "" if it wrote nothing.

    This is the innermost frame that does not belong to a library.
    """
    stack = log.partition(FAULT)[2]
    return _backends_frame(stack.partition("Current thread")[2].partition("\n\n")[0])


def _backends_frame(stack: str) -> str:
    """Return ", at FILE:LINE in FUNCTION" of the backend's innermost frame, or "" if no frame is the backend's."""
    frames = FRAME.findall(stack)
    way = next((n for n, (file, _, _) in enumerate(frames) if file.endswith(f"{MEASURING}cell.py")), None)
    inner = [frame for frame in frames[:way] if MEASURING not in frame[0]]
    if not inner:
        return ""
    file, line, function = inner[0]
    return authors_frame([(f, int(n), name) for f, n, name in inner]) or f", at {shown(file)}:{line} in {function}"


class Worker:
    """The process of one cell. Every request gets a reply: if the process dies or hangs, the reply is a Failure."""

    handler: ClassVar[type] = cell.CellHandler
    idle: ClassVar[Callable[[], None] | None] = None  # called on a GPU's machine as soon as no request waits
    server: ClassVar[ForkServer] = servers.CELLS

    def __init__(self, device: str, timeout_s: float, caches: Path | None = None) -> None:
        """Start the process, with compiled code in `caches`, by default as long as the process."""
        self.timeout_s = timeout_s
        self._device, self._kept = device, False
        self.processor: int | None = None  # where the thread that makes the calls ran last, before a burst
        self._folders = folders.new(caches) if self.server is servers.CELLS else None
        self._log = os.fdopen(os.memfd_create("log"), "rb")  # no folder is writable for the process and for others
        # Append, since a shell that the backend starts may truncate the file.
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)
        self._begun = 0
        self._file = os.memfd_create("groupbench")  # without a name, so that a killed process does not leave it behind
        self._doing, self._cell = "its start", ""
        self._limited = False
        self._memory_kills = host_memory.killed()
        connection, child_end = multiprocessing.Pipe()
        self._channel = Channel(connection)
        idle = type(self).idle if device == "cuda" else None
        self._process = self.server.fork(
            _serve,
            *(self.handler, idle, device, host_memory.limit(), self._folders),
            descriptors=(child_end.fileno(), self._log.fileno(), self._file),
        )
        log.info("process %s: started as %s on %s", self._process.pid, type(self).__name__.lower(), device)
        child_end.close()
        self._asked: Callable[..., Any] = str  # the function that computes the next reply

    @property
    def path(self) -> str:
        """Return the path at which another process of this user can open the file for outputs."""
        return f"/proc/{os.getpid()}/fd/{self._file}"

    def begin_log(self) -> None:
        """Attribute the process's output from now on to the next cell."""
        self._begun = os.fstat(self._log.fileno()).st_size

    @property
    def printed(self) -> str:
        """Return the end of the process's output since `begin_log`, including tracebacks."""
        descriptor = self._log.fileno()  # read without seeking: the process shares the position
        size, most = os.fstat(descriptor).st_size, warden.BOUNDS.log_end
        begun = self._begun if self._begun <= size else 0  # a shell of the backend, or the warden, has cut the file
        end = os.pread(descriptor, most, max(begun, size - most))
        return storable(end.decode(errors="replace"))

    @property
    def over(self) -> bool:
        """Return whether the process has ended."""
        return not self._process.lives()

    def send(self, request: Request) -> None:
        """Send a request without waiting. `receive` returns the reply."""
        if self._kept and request.verb != "burst":
            self._kept = False
            warden.keep_on(os.sched_getaffinity(0), self._process.pid)
        self._doing = DOING.get(request.verb, request.verb)
        if request.verb == "adopt":
            job = request.arguments[0]
            self._cell = f"{job.operator}/{job.backend} {job.shape}"
        self._asked = self._function_of(request)
        log.debug("process %s: %s", self._process.pid, request.verb)
        with contextlib.suppress(OSError):  # `receive` notices a process that is dead or does not read
            self._channel.token = os.urandom(8)  # a reply without it is forged, or belongs to an earlier request
            self._channel.send(replace(request, token=self._channel.token), self.timeout_s)

    def receive(self) -> Any:
        """Return the reply to the last request, or a Failure on a timeout, a death or an invalid reply.

        The types of the reply are checked, since data from a backend's process is not trusted.
        """
        # A child of the process may keep the pipe open after the process has died. A pidfd reports the death even
        # if the fork server has died as well.
        over = self._process.handle
        try:
            reply = reply_of(self._channel.receive(over, self.timeout_s, self._still_waiting), self._asked)
            return _as_its_own(reply) if isinstance(reply, Failure) else reply
        except TimeoutError:
            self._abort(over)
            self.kill()
            where = place(self.printed)
            return Failure("timeout", f"no answer within {self.timeout_s:g} s during {self._doing}{where}")
        except Exception as error:  # closed by its death, or an invalid reply
            self._process.join(ENDS.close_s if isinstance(error, EOFError) else 0)
            return self._obituary(error)
        finally:
            if self._limited:
                self._limited = False
                servers.watchdog().unlimit(self._process.handle)

    def _still_waiting(self, waited_s: float) -> None:
        if not self._limited:
            self._limited = True
            servers.watchdog().limit(self._process.handle, self.timeout_s - waited_s)
        if self._cell and NOTICE_S <= waited_s < NOTICE_S + REPORT_EVERY_S:
            warn_of_wait(log, self._cell, waited_s, self.timeout_s)
        wait_of = (self._process.pid, self._doing, waited_s, self.timeout_s)
        log.info("process %s: waiting for %s for %.0f s, at most %g s", *wait_of)

    def _function_of(self, request: Request) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self.handler, request.verb)
        return function

    def ask(self, request: Request) -> Any:
        """Send a request and return its reply, as `receive` does."""
        self.send(request)
        return self.receive()

    def processor_s(self) -> float:
        """Return the processor time in s that the process and those started by it have used so far."""
        return warden.processor_s(self._process.pid)

    def keep_on_processors(self) -> None:
        """Give the cell on a CPU as many processors as a backend may have threads, until another request than a burst.

        They begin with the one where it ran last: the scheduler has chosen this one, and the memory is near.
        """
        every, most = os.sched_getaffinity(0), host_threads()
        self.processor = warden.last_processor(self._timed())
        if self._device == "cpu" and most < len(every):
            first, self._kept = self.processor or 0, True
            warden.keep_on(sorted(every, key=lambda one: (one - first) % (1 + max(every)))[:most], self._process.pid)

    def has_started_others(self) -> bool:
        """Return whether the process that makes the calls has started other processes that still exist."""
        return len(warden.below(self._process.pid)) > 1

    def has_mapped(self, libraries: Iterable[str]) -> bool:
        """Return whether the process that makes the calls has loaded one of these libraries."""
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{self._timed()}/maps").read_text(errors="replace")
            return any(f"/{name}" in maps for name in libraries)
        return False

    def thread_s(self) -> tuple[float, float]:
        """Return the times in s that the thread which makes the calls has run, and waited for a free processor."""
        return warden.thread_s(self._timed())

    def _timed(self) -> int:
        """Return the id of the process that makes the calls, below the warden; 0 if it has ended."""
        return next(iter(warden.below(self._process.pid)), 0)

    def kill(self) -> None:
        """Kill the process and all processes started by it."""
        if self._process.exitcode is None:
            self._process.signal(signal.SIGTERM, signal.SIGCONT)  # its cell may have stopped it
            self._process.join(ENDS.kill_s)
        if self._process.exitcode is None:  # the fork server adopts and kills the processes below it
            self._process.signal(signal.SIGKILL)
            self._process.join(ENDS.kill_s)

    def close(self) -> None:
        """Let the process end, kill it after a while, and kill the processes left behind."""
        self._channel.close()
        self._process.join(ENDS.close_s)
        self.kill()
        self._log.close()
        os.close(self._file)
        if self._folders is not None:
            self._folders.remove(killed=self._process.exitcode != 0)

    def _abort(self, over: int) -> None:
        """Let Python's fault handler write where a silent process is, and end it. A backend may have disabled both."""
        below = warden.children(self._process.pid)
        if self._process.lives():  # or the number may be that of another process
            warden.signal_below(self._process.pid, below, signal.SIGABRT)
        wait([over], ENDS.abort_s)

    def _obituary(self, error: Exception) -> Failure:
        code, why = self._process.exitcode, str(error) if isinstance(error, BadReply) else repr(error)
        report = last_words(self.printed)
        if code is None:
            self.kill()
            return Failure("error", f"its answer after {self._doing} could not be read: {why}{report}")
        if code == -signal.SIGKILL:
            if warden.OUT_OF_MEMORY in self.printed or self._memory_kills != host_memory.killed():
                return Failure("oom", f"killed during {self._doing}, because the host ran out of memory{report}")
            return Failure("error", f"the process, or the one above it, was killed during {self._doing}{report}")
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Failure("error", f"the process died ({cause}) during {self._doing}{report}")


class Spare(Worker):
    """A process that opens its GPU at once, for the first cell that needs one. It has imported no plugin."""

    idle = staticmethod(cell.open_gpu)


class Judge(Worker):
    """The judging process, with the same interface."""

    handler = judge.JudgeHandler
    idle = staticmethod(judge.make_ready)
    server = servers.JUDGES


class _CallHandler:
    def __init__(self, file: int) -> None: ...

    @staticmethod
    def call(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ModuleNotFoundError as error:
            raise GroupbenchError(f"{error.name} is not installed: pip install 'groupbench[measure]'") from error


class _Caller(Worker):
    """A process to call functions, which may import plugins. Their results have the declared types."""

    handler = _CallHandler

    def _function_of(self, request: Request) -> Callable[..., Any]:
        function: Callable[..., Any] = request.arguments[0]
        return function


def living(judge: Judge | None, device: str, timeout_s: float) -> Judge:
    """Return the judging process, or a new one if it is missing or has died."""
    if judge is not None and not judge.over:
        return judge
    if judge is not None:
        judge.close()
    return Judge(device, timeout_s)


def _serve(
    connection: int, log: int, file: int, handler: type, idle: Callable[[], None] | None, device: str, memory: int,
    within: folders.Folders | None,
) -> None:  # fmt: skip
    """Answer requests below a warden with at most `memory` bytes.

    If the host runs out of memory, Linux kills this process first (oom_score_adj).
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if device == "cpu":  # CUDA reserves address space by the terabyte: no limit there
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    def serve() -> None:
        if within is not None:
            _enter_cell(within)
        cell.answer_requests(Connection(connection), handler(file), idle)

    warden.guard(serve, keep=(connection, file), log=log, memory=memory)


def _enter_cell(within: folders.Folders) -> None:
    """Confine this process. Those that it starts find the same modules and folders."""
    os.environ |= add_measured_folders(os.environ) | within.variables()
    os.environ |= own_modules.guard_programs(within.scratch)
    tempfile.tempdir = None  # another one, if the fork server has asked for it
    # CUDA does not start in a child of a confined process. Inductor's compile workers only ask whether there is a GPU,
    # and this makes torch ask NVML.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    confine.confine(within.writable, folders.layered())


def _as_its_own(failure: Failure) -> Failure:
    """Return a process's failure with a message that does not read like the parent's excuse of a busy machine."""
    if not failure.message.startswith(NOT_CHECKED):
        return failure
    return msgspec.structs.replace(failure, message=f"its process reports: {failure.message}")


def call(function: Callable[..., T], *arguments: Any, timeout_s: float = OPENING_S) -> T:
    """Return the result of a function in a new process, which is confined like a cell's.

    Args:
        function: Found by its module and name in the other process. It may import a plugin, so the reply is read as
            data of the declared type.
        timeout_s: Limit for the result.

    Raises GroupbenchError with the process's message if it fails, WorkerLost if it dies or does not answer.
    """
    caller = _Caller("cpu", timeout_s)
    try:
        result: T = result_of(caller.ask(Request("call", (function, *arguments))))
        return result
    finally:
        caller.close()


def result_of(reply: Any) -> Any:
    """Return a reply that is not a Failure. Raises GroupbenchError as the process did, WorkerLost if it is lost."""
    if not isinstance(reply, Failure):
        return reply
    kinds = {kind.__name__: kind for kind in (UsageError, PlanError)} | {"": WorkerLost}
    raise kinds.get(reply.kind, GroupbenchError)(reply.message)
