"""What stands between the fork server and a cell: it ends all that the cell has started, wherever that has gone.

A backend may start processes, and those may leave their process group and session, and outlive their parents. The
kernel gives such orphans to the nearest ancestor that asked for them (PR_SET_CHILD_SUBREAPER, Linux 3.4): the cell's
warden, a process that does nothing but wait. What a cell does to its parent, it does to its own warden, and no other
cell notices. A cell holds no descriptors but its own, so that it cannot write into the fork server's pipes, nor what it
leaves behind keep anyone's output open.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Collection
from multiprocessing import connection, forkserver, resource_tracker
from pathlib import Path
from types import FrameType
from typing import NoReturn

from groupbench.tracker.exits import ExitCode

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def guard(serve: Callable[[], None], keep: Collection[int], log: int) -> NoReturn:
    """Run `serve` in a child and end as that ends, when nothing is left of what it started.

    keep  descriptors that stay open in the child
    log   descriptor of the file for its standard output and error
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a signal is passed on, and one dump is enough
    _close_all_but({0, 1, 2, *keep})
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()  # the terminal's Ctrl-C is the parent's to handle
            serve()
            code = 0
        finally:
            os._exit(code)
    for descriptor in keep:
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _give_up)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # the fork server ends with its client, however that ends
    status = _wait_for(child)
    _end_children()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if os.WIFEXITED(status) else ExitCode.FAILED)


def _give_up(number: int, frame: FrameType | None) -> NoReturn:
    """When the parent asks for it."""
    _end_children()
    os._exit(ExitCode.TERMINATED)


def _wait_for(child: int) -> int:
    """Its status; other processes that end are orphans of its making."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return status


def end_with_parent() -> None:
    """Have a thread end this process when the one that started it through multiprocessing has ended."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(ExitCode.FAILED)

    threading.Thread(target=wait, daemon=True).start()


def _end_children() -> None:
    """Kill all children until there are none: those of a child that is killed are ours next."""
    while True:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def children(parent: int) -> list[int]:
    """Processes whose parent is `parent`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(process.name))
    return found


def end(pid: int, alive: bool) -> None:
    """End a warden and all below it, without asking; what is left of one that is over, by its fork server."""
    if alive:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)
    _end_orphans()


def kill_group(pid: int) -> None:
    """End a process and the group it leads, without asking."""
    kill_left(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def kill_left(leader: int) -> None:
    """End what is left of the group that a process led, which may be over: its number is no other's until all are."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _end_orphans() -> None:
    """End what wardens that were killed have left behind, which is the fork server's now (fork_server.py)."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    if server is None:
        return
    ours = {process.pid for process in multiprocessing.active_children()}
    for pid in children(server):
        if pid not in ours:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _close_all_but(keep: Collection[int]) -> None:
    """Close all other descriptors, the fork server's and the resource tracker's pipes among them."""
    for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        if descriptor not in keep:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    for holder, fields in (
        (forkserver._forkserver, ("_forkserver_alive_fd", "_forkserver_address", "_forkserver_pid")),
        (resource_tracker._resource_tracker, ("_fd", "_pid")),
    ):
        for field in fields:
            if hasattr(holder, field):
                setattr(holder, field, None)


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
