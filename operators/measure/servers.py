"""The client's end of the fork servers: start them, and have them fork processes.

There are two. `CELLS` forks the processes in which backends and plugins run, `JUDGES` those that decide: the judging
process, and the one that describes the machine. They are separate interpreters that share no socket, no folder and no
parent but this process, so nothing that a plugin does reaches a judge through its fork server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from groupbench.operators.measure.watchdog import Watchdog
from groupbench.tracker.facts.measured_tree import measured_folders

log = logging.getLogger(__name__)

PRELOAD = ("torch", "triton", "groupbench.operators.measure.cell", "groupbench.operators.measure.judge")
LONGEST, MOST_DESCRIPTORS = 1 << 16, 16
"""Largest request in bytes, and most descriptors that it carries. The work of a process is a file."""
NUMBER = struct.Struct("q")
"""The id of a process, and later its exit code, on the socket to the client."""
LOST = 255
"""Exit code of a process whose fork server has died."""


class Forked:
    """A process of a fork server, with the interface of multiprocessing's.

    `handle` is its pidfd, which the fork server opened before it could reap the process. Signals go through it, so they
    never reach another process with the same number.
    """

    def __init__(self, report: socket.socket) -> None:
        """Wait until the process exists. Raises EOFError if the fork server dies first."""
        self.sentinel = report  # readable when the process has ended
        self._code: int | None = None
        number, handles, _, _ = socket.recv_fds(report, NUMBER.size, 1)
        if not number:
            report.close()
            raise EOFError
        self.pid: int = NUMBER.unpack(number)[0]
        (self.handle,) = handles

    def signal(self, *numbers: int) -> None:
        """Send signals to the process, if it has not ended."""
        with contextlib.suppress(ProcessLookupError):
            for number in numbers:
                signal.pidfd_send_signal(self.handle, number)

    def lives(self) -> bool:
        """Return whether the process has not ended, even if its fork server has, which reports that."""
        return not wait([self.handle], 0)

    @property
    def exitcode(self) -> int | None:
        """The exit code, or the negative number of the signal that ended it; None while it runs."""
        if self._code is None and wait([self.sentinel], 0):
            number = self.sentinel.recv(NUMBER.size)
            self._code = NUMBER.unpack(number)[0] if number else LOST
        return self._code

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most `timeout` seconds."""
        if self._code is None:
            wait([self.sentinel], timeout)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.sentinel.close()
            os.close(self.handle)


class ForkServer:
    """One fork server, which is started when it is first needed, and again after its death."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._imports: dict[str, None] = {}
        self._starting = threading.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        """Start the fork server without waiting for its imports, which take seconds."""
        with self._starting:
            if self._control is not None:
                return
            self._control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with server_end:
                self._process = self._started(server_end.fileno())
            watchdog().watch_server(self._process.pid)

    def _started(self, control: int) -> subprocess.Popen[bytes]:
        """Start the server in a session of its own, so that a terminal's signals reach this process alone."""
        log.info("starting the fork server of %s, which imports %s", self.name, ", ".join(PRELOAD[:2]))
        modules = [*PRELOAD, *self._imports]
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            "from groupbench.operators.measure.loaded import watch; watch(); "  # before anything else that a cell loads
            "from groupbench.operators.measure.fork_server import main; "
            f"main({control}, {modules!r})"
        )
        return subprocess.Popen(
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
            stdin=subprocess.DEVNULL,
            pass_fds=[control],
            start_new_session=True,
        )

    def preload(self, modules: Sequence[str]) -> None:
        """Have it import these modules, if they are installed, before it forks its next process."""
        more = [name for name in modules if name not in self._imports]
        if not more:
            return
        self._imports |= dict.fromkeys(more)
        with self._starting:
            if self._control is not None:
                with contextlib.suppress(OSError):  # a new server imports them all
                    self._control.send(" ".join(more).encode())

    def fork(self, function: Callable[..., None], *arguments: Any, descriptors: Sequence[int] = ()) -> Forked:
        """Run `function(*descriptors, *arguments)` in a process of its own, which has no other descriptor but 0 to 2.

        Raises WorkerLost's cause, EOFError, if the server dies twice.
        """
        work = os.memfd_create("work")
        try:
            with os.fdopen(os.dup(work), "wb") as file:
                pickle.dump((self._path(), str(Path.cwd())), file)  # under which the function is found
                pickle.dump((function, arguments), file)
            for _ in range(2):
                self.begin()
                with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
                    return Forked(self._request([work, *descriptors]))
                self._forget()
            raise EOFError(f"the fork server of {self.name} has died twice")
        finally:
            os.close(work)

    def _path(self) -> list[str]:
        """Return a process's `sys.path`: the measured folders before the libraries for a cell, behind for a judge.

        A judge finds the operator there, but no module in place of one of Python's, torch's or groupbench's.
        """
        folders = measured_folders()
        return [*sys.path[:1], *folders, *sys.path[1:]] if self is CELLS else [*sys.path, *folders]

    def _request(self, descriptors: Sequence[int]) -> socket.socket:
        """Ask for a process, and return the socket on which it is reported."""
        assert self._control is not None
        report, server_end = socket.socketpair()
        with server_end:
            try:
                work, *inherited = descriptors
                socket.send_fds(self._control, [b"\0"], [work, server_end.fileno(), *inherited])
            except OSError:
                report.close()
                raise
        return report

    def _forget(self) -> None:
        with self._starting:
            if self._control is not None:
                self._control.close()
            if self._process is not None:
                self._process.poll()
            self._control = self._process = None


@cache
def watchdog() -> Watchdog:
    """Return the process that looks after this one and the fork servers."""
    return Watchdog()


CELLS, JUDGES = ForkServer("cells"), ForkServer("judges")


def begin() -> None:
    """Start both servers at once, so that their imports overlap."""
    CELLS.begin()
    JUDGES.begin()
