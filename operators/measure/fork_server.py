"""A fork server: a process that imports torch and Triton once, and forks the processes of cells from there.

Only its client can reach it: it has no listener, no folder and no terminal. Requests come through an inherited socket,
which its children close before anything else. multiprocessing's own fork server listens on a socket in a folder, where
any process of the user can connect and have a pickle loaded.

There are two of them (servers.py): judges are never forked from the server that starts the processes of backends.

Before it answers, it imports groupbench's operators, which a process that imports a plugin guards against it, and looks
up the entry points of installed packages, which each process needs. It remembers the functions that the seal watches.
When it is idle for the first time, it computes Triton's digest of itself for all processes that follow.

It adopts the processes of a cell whose warden was killed, and ends them. It ends when its client does, and every warden
ends with it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import pickle
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from groupbench.operators import plugins, registry
from groupbench.operators.measure import environment, seal, triton_key, warden
from groupbench.operators.measure.servers import LONGEST, MOST_DESCRIPTORS, NUMBER
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.tools import logs

log = logging.getLogger(__name__)

FORK_WAIT_S = 0.05
"""Time in s after the first process in which others may be requested, before the server is busy for 0.4 s."""


class _Server:
    """The state of a fork server. `children` are the forked processes."""

    def __init__(self, control: int) -> None:
        self._control = socket.socket(fileno=control)
        self._children: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._imported: set[str] = set()

    def run(self) -> NoReturn:
        """Answer requests until the client closes its end."""
        self._selector.register(self._control, selectors.EVENT_READ)
        idle = environment.interpreted()  # an interpreted kernel needs no digest
        forked = False
        while True:
            ready = self._selector.select(FORK_WAIT_S if forked and not idle else None)
            if not ready:
                idle = True
                triton_key.compute()
            for key, _ in ready:
                if key.fileobj is self._control:
                    self._serve()
                    forked = forked or bool(self._children)
                else:
                    self._reap(key.fd, *key.data)

    def _serve(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._control, LONGEST, MOST_DESCRIPTORS)
        if not message and not descriptors:
            os._exit(ExitCode.OK)
        if descriptors:
            self._fork(descriptors)
        else:
            self.import_all(message.decode().split())

    def import_all(self, names: Sequence[str]) -> None:
        """Import modules, each once. The process that needs one reports why it cannot be imported."""
        for name in names:
            if name not in self._imported:
                self._imported.add(name)
                log.info("the fork server imports %s", name)
                with contextlib.suppress(Exception):
                    importlib.import_module(name)

    def _fork(self, descriptors: list[int]) -> None:
        work, report, *inherited = descriptors
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:  # no descriptor and no handler of the server is left
            warden.close_all_but({0, 1, 2, work, *inherited})
            signal.signal(signal.SIGHUP, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _work(work, inherited)
        self._children.add(pid)
        handle = os.pidfd_open(pid)
        self._selector.register(handle, selectors.EVENT_READ, (pid, report))
        _report(report, pid, handle)
        for descriptor in (work, *inherited):
            os.close(descriptor)

    def _reap(self, handle: int, pid: int, report: int) -> None:
        """Reap an ended process, end the orphans of killed wardens, and report the exit status."""
        self._selector.unregister(handle)
        _, status = os.waitpid(pid, 0)
        self._children.remove(pid)
        while orphans := [child for child in warden.children(os.getpid()) if child not in self._children]:
            for child in orphans:  # not reaped yet, so each is the process that was listed
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        _report(report, os.waitstatus_to_exitcode(status))
        for descriptor in (handle, report):
            os.close(descriptor)


def _report(report: int, number: int, *handles: int) -> None:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(report)) as client:  # it may have ended
        socket.send_fds(client, [NUMBER.pack(number)], handles, socket.MSG_NOSIGNAL)


def _work(file: int, descriptors: list[int]) -> NoReturn:
    code: int = ExitCode.FAILED
    try:
        with os.fdopen(file, "rb") as pickled:
            pickled.seek(0)
            sys.path[:], folder = pickle.load(pickled)  # noqa: S301 - of the client, which alone can send it
            os.chdir(folder)
            function, arguments = pickle.load(pickled)  # noqa: S301
        function(*descriptors, *arguments)
        code = ExitCode.OK
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def main(control: int, modules: Sequence[str]) -> NoReturn:
    """Run a fork server that imports these modules first."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the client's to handle
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a launcher may ignore it, and nothing could then be reaped
    logs.configure(0)
    warden.adopt_orphans()
    server = _Server(control)
    server.import_all(modules)
    plugins.offered()
    for name in registry.CATALOG:
        registry.catalog_operator(name)
    seal.close()
    server.run()
