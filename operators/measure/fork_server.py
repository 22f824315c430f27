"""Prepare the fork server for the processes that it starts. Only the fork server imports this module.

Before it starts a process, it imports the modules that its client has asked for (`worker.preload`). It looks up the
entry points of installed packages, which each process needs, and imports groupbench's operators, all of which a process
that imports a plugin guards against it. It remembers the functions that the seal watches. While its first processes
open the GPU, it computes Triton's digest of itself for all that follow.

It is the parent of processes whose warden was killed, and it keeps quiet about a process that had nothing to do because
an interrupt came before its client had sent any work. At its end it removes the folder of its socket, which a client
that was killed could not.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import traceback
from functools import partial
from multiprocessing import spawn
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType

from groupbench.operators import plugins, registry
from groupbench.operators.measure import environment, seal, triton_key, warden, worker
from groupbench.tracker.tools import logs

log = logging.getLogger(__name__)

IDLE_S = 0.05
"""Time in s after the first process in which others may be requested, before the server is busy for 0.4 s."""


def _print_unless_abandoned(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback as usual, unless the process ended while it waited for its work."""
    frames = traceback.extract_tb(trace)
    abandoned = issubclass(kind, EOFError | UnpicklingError) and frames and frames[-1].filename == spawn.__file__
    if not abandoned:
        sys.__excepthook__(kind, error, trace)


def _socket() -> Path | None:
    """Return the file of the socket that this process listens on."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not link.is_socket():
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as listener:
                name = listener.getsockname()
                if isinstance(name, str) and name.startswith("/"):
                    return Path(name)
    return None


def _remove(place: Path) -> None:
    with contextlib.suppress(OSError):
        place.unlink(missing_ok=True)
        place.with_name(worker.WANTED).unlink(missing_ok=True)
        place.parent.rmdir()


def _import_wanted(place: Path, server: int, tried: set[str]) -> None:
    """Import the modules that the client of this server has asked for, each once."""
    if os.getpid() != server:  # a process that the server started forks
        return
    with contextlib.suppress(OSError):
        for name in place.with_name(worker.WANTED).read_text().split():
            if name not in tried:
                tried.add(name)
                log.info("the fork server imports %s", name)
                with contextlib.suppress(Exception):  # the process that needs it reports the error
                    importlib.import_module(name)


def _compute_when_idle(server: int, begun: list[bool]) -> None:
    """Compute Triton's digest of itself, once, when this server has had nothing to do for a moment."""
    if os.getpid() == server and not begun:
        begun.append(True)
        signal.signal(signal.SIGALRM, lambda number, frame: triton_key.compute())
        signal.setitimer(signal.ITIMER_REAL, IDLE_S)


def _forget_alarm(server: int) -> None:
    """Give a process of this server, but none that it forks, the usual reaction to an alarm."""
    if os.getppid() == server:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


logs.configure(0)
warden._prctl(warden.PR_SET_CHILD_SUBREAPER, 1)
_place = _socket()
if _place is not None:
    atexit.register(_remove, _place)
    os.register_at_fork(before=partial(_import_wanted, _place, os.getpid(), set()))
if not environment.interpreted():
    os.register_at_fork(
        after_in_parent=partial(_compute_when_idle, os.getpid(), []),
        after_in_child=partial(_forget_alarm, os.getpid()),
    )
plugins.offered()
for _name in registry.CATALOG:
    registry.catalog_operator(_name)
seal.close()
sys.excepthook = _print_unless_abandoned
