"""A process that looks after this one and its fork server: it needs neither of them to be alive.

- It ends the fork servers when this process ends, even if they are stopped.
- It lets a stopped fork server continue, and this process if no person can have stopped it at a terminal. The signal
  changes nothing for a process that is not stopped.
- It keeps the time limit of a long request: the process that does not answer is killed a moment after this process
  should have done so.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading

GRACE_S = 20.0
"""Time in s that this process has, after a time limit, to end a process itself."""

_PROGRAM = """
import os, select, signal, socket, sys, time
parent, has_terminal = map(int, sys.argv[1:])
servers, limits, client = {}, {}, socket.socket(fileno=0)
def send(handle, *numbers):
    try:
        for number in numbers:
            signal.pidfd_send_signal(handle, number)
    except OSError:
        pass
def obey(word, number, seconds, handle=-1):
    if word == "server":
        servers[number] = handle
    elif word == "limit":
        limits[number] = handle, time.monotonic() + seconds
    elif number in limits:
        os.close(limits.pop(number)[0])
own = os.pidfd_open(parent)
while True:
    if select.select([client], [], [], 1.0)[0]:
        line, handles, _, _ = socket.recv_fds(client, 100, 1)
        if not line:
            break
        word, number, seconds = line.decode().split()
        obey(word, int(number), float(seconds), *handles)
    for handle in [*servers.values(), *([] if has_terminal else [own])]:
        send(handle, signal.SIGCONT)
    for handle, until in limits.values():
        if time.monotonic() >= until:
            send(handle, signal.SIGTERM, signal.SIGCONT)
for handle in servers.values():
    send(handle, signal.SIGKILL)
"""
"""Reads messages `server PID 0`, `limit NUMBER SECONDS` and `unlimit NUMBER 0`. The first two come with the pidfd of a
process, so no signal goes to another one with the same PID. The end of its input is the parent's end.
"""


class Watchdog:
    """The end of the socket to the watching process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far_end:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), str(int(_has_terminal()))],
                stdin=far_end.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        self._socket.setblocking(False)

    def watch_server(self, pid: int) -> None:
        """Look after a fork server, a child of this process, from now on until this process ends."""
        handle = os.pidfd_open(pid)
        self._tell(f"server {pid} 0", handle)
        os.close(handle)

    def limit(self, handle: int, seconds: float) -> None:
        """End the process of this pidfd if it is not `unlimited` before `seconds` and GRACE_S have passed."""
        self._tell(f"limit {handle} {seconds + GRACE_S:.0f}", handle)

    def unlimit(self, handle: int) -> None:
        self._tell(f"unlimit {handle} 0")

    def _tell(self, line: str, *handles: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            socket.send_fds(self._socket, [line.encode()], handles)


def _has_terminal() -> bool:
    """Return whether a person can stop this process at a terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
