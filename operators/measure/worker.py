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
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from groupbench.operators.errors import GroupbenchError, PlanError, UsageError, WorkerLost
from groupbench.operators.measure import cell, confine, host_memory, judge, servers, warden
from groupbench.operators.measure.channel import BadReply, Channel
from groupbench.operators.measure.faults import authors_frame, located, shown
from groupbench.operators.measure.judge import JudgeAnswer
from groupbench.operators.measure.servers import ForkServer
from groupbench.operators.measure.texts import joined_lines, storable
from groupbench.operators.measure.wire import Answer, Failure, Request
from groupbench.tracker.facts.measured_tree import add_measured_folders
from groupbench.tracker.facts.record import NOT_CHECKED

log = logging.getLogger(__name__)

LOG_TAIL = 1 << 20
"""Bytes at the end of a cell's log that are searched for its last output."""
LAST_WORDS = 300
"""Maximum number of reported characters of that output."""
MEASURING = "/groupbench/operators/measure/"
"""Folder of this package's own frames in a backend's stack."""
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
"""A frame in the output of Python's fault handler."""
FAULT = "Fatal Python error: "
"""The beginning of the fault handler's output."""
END_S = 10.0
"""Time for a warden to end its processes."""
ABORT_S = 2.0
"""Time for a process that does not answer to write where it is."""
SIGNALS = ("Bus error", "Illegal instruction", "Floating-point exception", "Aborted", "Segmentation fault")
"""The fault handler's texts for signals that the exit code already names."""

DOING = {
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
    if len(text) > LAST_WORDS:
        text = f"... {text[-LAST_WORDS:].partition(' ')[2] or text[-LAST_WORDS:]}"
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

    answers: Any = Answer
    serves: Callable[..., None] = staticmethod(cell.serve)
    server: ClassVar[ForkServer] = servers.CELLS

    def __init__(self, device: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - without a name, as long as the process
        # Append, since a shell that the backend starts may truncate the file.
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)
        self._begun = 0
        self._file = os.memfd_create("groupbench")  # without a name, so that a killed process does not leave it behind
        self._doing = "its start"
        self._limited = False
        self._memory_kills = host_memory.killed()
        connection, child_end = multiprocessing.Pipe()
        self._channel = Channel(connection)
        confined = self.server is servers.CELLS
        self._process = self.server.fork(
            _serve_limited,
            *(type(self).serves, device, host_memory.limit(), confined),
            descriptors=(child_end.fileno(), self._log.fileno(), self._file),
        )
        log.info("process %s: started as %s on %s", self._process.pid, type(self).__name__.lower(), device)
        child_end.close()
        self._decoder = msgspec.msgpack.Decoder(self.answers)

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
        size = os.fstat(descriptor).st_size
        begun = self._begun if self._begun <= size else 0  # a shell of the backend, or the warden, has cut the file
        end = os.pread(descriptor, LOG_TAIL, max(begun, size - LOG_TAIL))
        return storable(end.decode(errors="replace"))

    @property
    def over(self) -> bool:
        """Return whether the process has ended."""
        return not self._process.lives()

    def send(self, request: Request) -> None:
        """Send a request without waiting. `receive` returns the reply."""
        self._doing = DOING.get(request.verb, request.verb)
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
            reply = self._decoder.decode(self._channel.receive(over, self.timeout_s, self._still_waiting))
            return _as_its_own(reply) if isinstance(reply, Failure) else reply
        except TimeoutError:
            self._abort(over)
            self.kill()
            where = place(self.printed)
            return Failure("timeout", f"no answer within {self.timeout_s:g} s during {self._doing}{where}")
        except Exception as error:  # closed by its death, or an invalid reply
            self._process.join(5 if isinstance(error, EOFError) else 0)
            return self._obituary(error)
        finally:
            if self._limited:
                self._limited = False
                servers.watchdog().unlimit(self._process.handle)

    def _still_waiting(self, waited_s: float) -> None:
        if not self._limited:
            self._limited = True
            servers.watchdog().limit(self._process.handle, self.timeout_s - waited_s)
        log.info(
            "process %s: waiting for %s for %.0f s, at most %g s",
            *(self._process.pid, self._doing, waited_s, self.timeout_s),
        )

    def ask(self, request: Request) -> Any:
        """Send a request and return its reply, as `receive` does."""
        self.send(request)
        return self.receive()

    def processor_s(self) -> float:
        """Return the processor time in s that the process and those started by it have used so far."""
        return warden.processor_s(self._process.pid)

    def has_started_others(self) -> bool:
        """Return whether the process that makes the calls has started other processes that still exist."""
        return len(warden.listed_below(self._process.pid)) > 1

    def has_mapped(self, libraries: Iterable[str]) -> bool:
        """Return whether the process that makes the calls has loaded one of these libraries."""
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{self._timed()}/maps").read_text(errors="replace")
            return any(f"/{name}" in maps for name in libraries)
        return False

    def thread_s(self) -> tuple[float, float]:
        """Return the times in s that the thread which makes the calls has run, and waited for a free processor."""
        return warden.thread_s(self._timed())

    def last_processor(self) -> int | None:
        """Return the number of the processor on which the thread that makes the calls ran last; None if unknown."""
        return warden.last_processor(self._timed())

    def _timed(self) -> int:
        """Return the id of the process that makes the calls, below the warden; 0 if it has ended."""
        return next(iter(warden.listed_below(self._process.pid)), 0)

    def kill(self) -> None:
        """Kill the process and all processes started by it."""
        if self._process.exitcode is None:
            self._process.signal(signal.SIGTERM, signal.SIGCONT)  # its cell may have stopped it
            self._process.join(END_S)
        if self._process.exitcode is None:  # the fork server adopts and kills the processes below it
            self._process.signal(signal.SIGKILL)
            self._process.join(END_S)

    def close(self) -> None:
        """Let the process end, kill it after 5 s, and kill the processes left behind."""
        self._channel.close()
        self._process.join(5)
        self.kill()
        self._log.close()
        os.close(self._file)

    def _abort(self, over: int) -> None:
        """Let Python's fault handler write where a silent process is, and end it. A backend may have disabled both."""
        below = warden.children(self._process.pid)
        if self._process.lives():  # or the number may be that of another process
            warden.signal_below(self._process.pid, below, signal.SIGABRT)
        wait([over], ABORT_S)

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
        return Failure("error", f"the process died ({_cause_of_death(code)}) during {self._doing}{report}")


class Spare(Worker):
    """A process that opens its GPU at once, for the first cell that needs one. It has imported no plugin."""

    serves = staticmethod(cell.serve_opened)


class Judge(Worker):
    """The judging process, with the same interface."""

    answers = JudgeAnswer
    serves = staticmethod(judge.serve)
    server = servers.JUDGES


def living(judge: Judge | None, device: str, timeout_s: float) -> Judge:
    """Return the judging process, or a new one if it is missing or has died."""
    if judge is not None and not judge.over:
        return judge
    if judge is not None:
        judge.close()
    return Judge(device, timeout_s)


def _serve_limited(
    connection: int, log: int, file: int, serves: Callable[..., None], device: str, memory: int, confined: bool
) -> None:
    """Run `serves` below a warden with at most `memory` bytes.

    If the host runs out of memory, Linux kills this process first (oom_score_adj).
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if device == "cpu":  # CUDA reserves address space by the terabyte: no limit there
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))

    def serve() -> None:
        if confined:
            _enter_cell()
        serves(Connection(connection), file, device)

    warden.guard(serve, keep=(connection, file), log=log, memory=memory)


def _enter_cell() -> None:
    """Confine this process. Those that it starts find the measured modules, as it does."""
    os.environ |= add_measured_folders(os.environ)
    # CUDA does not start in a child of a confined process. Inductor's compile workers only ask whether there is a GPU,
    # and this makes torch ask NVML.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    confine.confine()


def _as_its_own(failure: Failure) -> Failure:
    """Return a process's failure with a message that does not read like the parent's excuse of a busy machine."""
    if not failure.message.startswith(NOT_CHECKED):
        return failure
    return msgspec.structs.replace(failure, message=f"its process reports: {failure.message}")


def _cause_of_death(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def call(
    function: Callable[..., Any],
    *args: Any,
    returns: Any = Any,
    server: ForkServer = servers.CELLS,
    timeout_s: float = 300,
) -> Any:
    """Return the result of a function that runs in a new process, so that this process never opens the GPU.

    Args:
        function: found by its module and name in the other process.
        returns: type of the result. The function may import a plugin, so what comes back is read as data of this type.
        server: where the process comes from.
        timeout_s: limit for the result.

    Raises GroupbenchError with the process's message if it fails, WorkerLost if it dies or does not answer.
    """
    parent_end, child_end = multiprocessing.Pipe()
    channel = Channel(parent_end)
    channel.token = os.urandom(8)
    arguments = function, args, server is servers.CELLS, channel.token
    process = server.fork(_call, *arguments, descriptors=(child_end.fileno(),))
    child_end.close()
    try:
        called = msgspec.msgpack.decode(channel.receive(process.handle, timeout_s), type=_Called)
        if called.failure is None:
            return msgspec.msgpack.decode(called.value, type=returns)
    except TimeoutError:
        raise WorkerLost(f"no answer within {timeout_s:g} s") from None
    except EOFError:
        process.join(5)
        raise WorkerLost(f"the process died ({_cause_of_death(process.exitcode or 0)})") from None
    except (BadReply, msgspec.DecodeError) as error:
        raise WorkerLost(f"its answer could not be read: {error}") from None
    finally:
        channel.close()
        if process.exitcode is None:
            process.join(5)
            process.signal(signal.SIGKILL)
    raise {kind.__name__: kind for kind in (UsageError, PlanError)}.get(called.kind, GroupbenchError)(called.failure)


class _Called(msgspec.Struct, frozen=True):
    """The answer of a process to `call`: the result, or a failure and its class."""

    value: bytes = b""  # msgpack
    failure: str | None = None
    kind: str = ""


def _call(channel: int, function: Callable[..., Any], args: tuple[Any, ...], confined: bool, token: bytes) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    warden.die_with_parent()
    if confined:
        _enter_cell()
    connection = Connection(channel)
    with contextlib.suppress(OSError):  # the pipe is closed if the caller was interrupted
        if connection.poll():  # nothing is ever sent, so the caller was interrupted and closed the pipe
            return
        try:
            called = _Called(msgspec.msgpack.encode(function(*args)))
        except ModuleNotFoundError as error:
            called = _Called(failure=f"{error.name} is not installed: pip install 'groupbench[measure]'")
        except GroupbenchError as error:
            called = _Called(failure=str(error), kind=type(error).__name__)
        except BaseException as error:  # a plugin may raise KeyboardInterrupt; a real one does not reach this process
            called = _Called(failure=located(error))
        connection.send_bytes(token + msgspec.msgpack.encode(called))
