"""A process that looks after this one and its fork server: it needs neither of them to be alive.

- It ends the fork servers when this process ends, even if they are stopped.
- It lets a stopped fork server continue, and this process if no person can have stopped it at a terminal.
- It keeps the time limit of a long request: the process that does not answer is killed a moment after this process
  should have done so.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading

GRACE_S = 20.0
"""Time in s that this process has, after a time limit, to end a process itself."""

_PROGRAM = """
import os, select, signal, sys, time
parent = int(sys.argv[1])
servers, limits, unread = {}, {}, b""
def stat(pid):
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return [b"", b"", b"", b"", b""]
def send(handle, *numbers):
    try:
        for number in numbers:
            signal.pidfd_send_signal(handle, number)
    except OSError:
        pass
def let_go_on():
    for pid, handle in servers.items():
        if stat(pid)[0] == b"T":
            send(handle, signal.SIGCONT)
    state = stat(parent)
    if state[0] == b"T" and state[4] == b"0":
        send(own, signal.SIGCONT)
def obey(word, pid, seconds):
    if word == "unlimit":
        handle, _ = limits.pop(pid, (-1, 0))
        if handle >= 0:
            os.close(handle)
        return
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return
    if word == "server":
        servers[pid] = handle
    else:
        limits[pid] = handle, time.monotonic() + seconds
own = os.pidfd_open(parent)
while True:
    if select.select([0], [], [], 1.0)[0]:
        data = os.read(0, 4096)
        if not data:
            break
        *lines, unread = (unread + data).split(b"\\n")
        for line in lines:
            word, pid, seconds = line.decode().split()
            obey(word, int(pid), float(seconds))
    let_go_on()
    for handle, until in limits.values():
        if time.monotonic() >= until:
            send(handle, signal.SIGTERM, signal.SIGCONT)
for handle in servers.values():
    send(handle, signal.SIGKILL)
"""
"""Reads lines `server PID 0`, `limit PID SECONDS` and `unlimit PID 0`. The end of its input is the parent's end.

A stopped parent continues only if it has no terminal (the field tty_nr of its state).
"""


class Watchdog:
    """The end of the pipe to the watching process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        read_end, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid())],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        finally:
            os.close(read_end)
        os.set_blocking(self._pipe, False)

    def watch_server(self, pid: int) -> None:
        """Look after the fork server from now on, until this process ends."""
        self._tell(f"server {pid} 0")

    def limit(self, pid: int, seconds: float) -> None:
        """End a process if it is not `unlimited` before `seconds` and GRACE_S have passed."""
        self._tell(f"limit {pid} {seconds + GRACE_S:.0f}")

    def unlimit(self, pid: int) -> None:
        self._tell(f"unlimit {pid} 0")

    def _tell(self, line: str) -> None:
        with self._lock, contextlib.suppress(OSError):
            os.write(self._pipe, f"{line}\n".encode())
