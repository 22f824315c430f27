"""The parent's end of a cell's process: start it, ask it, give up on it.

Processes come from a fork server that has imported torch and Triton once but never opened a GPU, so that a fresh
process costs a fraction of a second and still shares no CUDA context with any other.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from groupbench.operators.errors import GroupbenchError
from groupbench.operators.measure.cell import Failure, Request, serve
from groupbench.operators.measure.texts import storable

PRELOAD = (
    *("torch", "triton"),
    *("groupbench.operators.measure.cell", "groupbench.operators.measure.accuracy"),
)
DYNAMO = "torch._dynamo"
_besides = [DYNAMO]
HOST_MEMORY_SHARE = 0.8
LOG_TAIL = 1 << 20
"""Bytes at the end of a cell's log in which its last words are looked for."""

DOING = {
    "adopt": "its imports",
    "load": "making its inputs",
    "prepare": "prepare or the first calls",
    "reload": "prepare or the first call",
    "burst": "its timed calls",
    "recheck": "the check after its timed calls",
    "unload": "its clearing away",
}
"""What a process is at, by what it was asked for. It answers at the end: of one that does not, no more is known."""


def preload(*modules: str) -> None:
    """What the fork server imports besides torch and Triton, said before it starts; unless said, Dynamo.

    Dynamo takes 1 to 4 s: each process of a backend that needs it has it so, and where none does, all start sooner.
    """
    _besides[:] = modules


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *_besides])  # what is not installed is passed over
    _start_quietly()
    return context


def _start_quietly() -> None:
    """Start the fork server with SIGINT blocked, for it and for its children, as it ignores it once it has imported.

    A Ctrl-C is this process's to handle, and reaches it once it is through here.
    """
    resource_tracker.ensure_running()  # which unblocks SIGINT, and so must not be begun below
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Log:
    """What a cell's process prints: a file without a name, so that nobody who is killed leaves it behind."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        # A shell that the backend starts may empty it: what follows is to stand at its end all the same.
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_APPEND)

    def __reduce__(self) -> tuple[Any, ...]:
        return _descriptor, (DupFd(self._file.fileno()),)

    def tail(self, characters: int = 400) -> str:
        """What it says of the process's death, in one line: the fault handler's first lines, or else the end."""
        descriptor = self._file.fileno()  # read without seeking: the position is the process's too
        end = os.pread(descriptor, LOG_TAIL, max(0, os.fstat(descriptor).st_size - LOG_TAIL))
        text = storable(" ".join(end.decode(errors="replace").split()))
        fault = text.find("Fatal Python error")
        return text[fault : fault + characters] if fault >= 0 else text[-characters:]

    def close(self) -> None:
        self._file.close()


def _descriptor(sent: Any) -> int:
    """A log as its process gets it."""
    return sent.detach()


class Worker:
    """One cell's process. Every question is answered, by it or, when it cannot, by a Failure in its place."""

    def __init__(self, device: str, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._log = _Log()
        self._doing = "its start"
        self._connection, theirs = multiprocessing.Pipe()
        self._process = _context().Process(target=_serve_limited, args=(device, theirs, self._log), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, request: Request) -> None:
        """Ask without waiting; `receive` gets the answer."""
        self._doing = DOING.get(request.verb, request.verb)
        with contextlib.suppress(OSError):  # a dead process is noticed by receive
            self._connection.send(request)

    def receive(self) -> Any:
        try:
            if not self._connection.poll(self.timeout_s):
                self.kill()
                return Failure("timeout", f"no answer within {self.timeout_s:g} s during {self._doing}")
            return self._connection.recv()
        except Exception as error:  # closed by its death, or an answer that does not unpickle
            self._process.join(5)
            return self._obituary(error)

    def ask(self, request: Request) -> Any:
        self.send(request)
        return self.receive()

    def kill(self) -> None:
        """End the process and whatever it started, now."""
        if self._process.pid is not None and self._process.is_alive():
            kill_group(self._process.pid)
        self._process.join(10)

    def close(self) -> None:
        """Let the process end, killing it where it does not."""
        self._connection.close()
        self._process.join(5)
        self.kill()
        self._log.close()

    def _obituary(self, error: Exception) -> Failure:
        code = self._process.exitcode
        log = self._log.tail()
        said = f"; it last wrote: {log}" if log else ""
        if code is None:
            self.kill()
            return Failure("error", f"its answer after {self._doing} could not be read: {error!r}{said}")
        if code == -signal.SIGKILL:
            return Failure("oom", f"killed during {self._doing}, as the system does when host memory runs out{said}")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Failure("error", f"the process died ({how}) during {self._doing}{said}")


def kill_group(pid: int) -> None:
    """End a process and the group it leads, without asking."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _serve_limited(device: str, connection: Connection, log: int) -> None:
    """`serve`, as the first to go when host memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    if device == "cpu":  # CUDA reserves address space by the terabyte: no limit there
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_DATA, (int(HOST_MEMORY_SHARE * total),) * 2)
    serve(connection, log)


def call(function: Callable[..., Any], *args: Any, timeout_s: float = 300) -> Any:
    """The result of a function run in a process of its own, so that this one never opens the GPU.

    Raises GroupbenchError with what the process said when it fails.
    """
    ours, theirs = multiprocessing.Pipe()
    process = _context().Process(target=_call, args=(function, args, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        ok, value = ours.recv() if ours.poll(timeout_s) else (False, f"no answer within {timeout_s:g} s")
    except EOFError:
        process.join(5)
        ok, value = False, f"the process died with exit code {process.exitcode}"
    finally:
        if process.is_alive():
            process.join(5)
            process.kill()
    if not ok:
        raise GroupbenchError(value)
    return value


def _call(function: Callable[..., Any], args: tuple[Any, ...], connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # of the pipe: whoever asked was interrupted meanwhile
        if connection.poll():  # closed, since nothing is ever sent: interrupted while this process was being started
            return
        try:
            connection.send((True, function(*args)))
        except ModuleNotFoundError as error:
            connection.send((False, f"{error.name} is not installed: pip install 'groupbench[measure]'"))
        except GroupbenchError as error:
            connection.send((False, str(error)))
        except Exception as error:
            connection.send((False, f"{type(error).__name__}: {error}"))
