"""Backends that hang, end, or reach for the processes above them. Each doubles `x`, unless it is lost before."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from groupbench.operators.define import operator

FOREIGN = range(3, 64)


@operator({"smoke": ["M=32,N=64"]}, dtypes=["fp32"])
def hostile(M: int, N: int, dtype: np.dtype):
    return np.random.default_rng(0).standard_normal((M, N)).astype(dtype)


@hostile.reference
def exact(x):
    return x * 2


@hostile.backend
def good(x):
    return x * 2


@hostile.backend
def good_too(x):
    return x + x


def on_first_call(act: Callable[[], object]) -> None:
    """Add a backend that does something hostile once, and computes the product otherwise."""
    done: list[bool] = []

    def backend(x):
        if not done:
            done.append(True)
            act()
        return x * 2

    backend.__name__ = act.__name__
    hostile.backend(backend)


def above() -> list[int]:
    """Return the process above, the fork server, and the command alone."""
    pids, pid = [], os.getppid()
    for _ in range(3):
        pids.append(pid)
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pids


def each_descriptor(act: Callable[[int], object]) -> None:
    for descriptor in FOREIGN:
        with contextlib.suppress(OSError):
            act(descriptor)


@on_first_call
def hangs():
    time.sleep(600)


@on_first_call
def spins():
    while True:
        pass


@on_first_call
def hangs_with_the_interpreters_lock():
    ctypes.PyDLL(None).sleep(600)


@on_first_call
def hangs_deaf():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)


@on_first_call
def hangs_with_signals_blocked():
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    time.sleep(600)


@on_first_call
def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


@on_first_call
def leaves():
    os._exit(0)


@on_first_call
def leaves_with_an_error():
    os._exit(3)


@on_first_call
def exits():
    sys.exit(0)


@on_first_call
def interrupts():
    raise KeyboardInterrupt


@on_first_call
def kills_itself():
    os.kill(os.getpid(), signal.SIGKILL)


@on_first_call
def aborts():
    os.abort()


@on_first_call
def crashes():
    ctypes.string_at(0)


@on_first_call
def becomes_another_program():
    os.execv("/bin/sleep", ["sleep", "600"])


@on_first_call
def recurses():
    recurses_without_end()


def recurses_without_end():
    return recurses_without_end()


@on_first_call
def writes_to_descriptors():
    each_descriptor(lambda descriptor: os.write(descriptor, b"\x00garbage" * 10))


@on_first_call
def promises_a_reply():
    each_descriptor(lambda descriptor: os.write(descriptor, struct.pack("!i", 1 << 20) + bytes(100)))


@on_first_call
def floods_descriptors():
    def flood(descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        while True:
            os.write(descriptor, bytes(1 << 16))

    each_descriptor(flood)


@on_first_call
def reads_from_descriptors():
    each_descriptor(lambda descriptor: os.read(descriptor, 1 << 20))


@on_first_call
def closes_descriptors():
    os.closerange(0, 1024)


@on_first_call
def redirects_descriptors():
    null = os.open(os.devnull, os.O_RDWR)
    each_descriptor(lambda descriptor: os.dup2(null, descriptor))


@on_first_call
def closes_its_output():
    os.close(1)
    os.close(2)


@on_first_call
def forbids_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))


@on_first_call
def ends_the_group_above():
    os.killpg(os.getpgid(os.getppid()), signal.SIGTERM)


@on_first_call
def kills_the_group_above():
    os.killpg(os.getpgid(os.getppid()), signal.SIGKILL)


@on_first_call
def stops_the_process_above():
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(600)


@on_first_call
def stops_all_above():
    for pid in above():
        os.kill(pid, signal.SIGSTOP)


@on_first_call
def hangs_up_all_above():
    for pid in above():
        os.kill(pid, signal.SIGHUP)


@on_first_call
def interrupts_all_above():
    for pid in above():
        os.kill(pid, signal.SIGINT)


@on_first_call
def kills_all_above():
    for pid in reversed(above()):
        os.kill(pid, signal.SIGKILL)


@on_first_call
def starts_sleepers():
    for _ in range(200):
        subprocess.Popen(["sleep", "600"])


@on_first_call
def leaves_a_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os._exit(0)


@on_first_call
def hangs_at_its_end():
    atexit.register(time.sleep, 600)
    threading.Thread(target=time.sleep, args=(600,)).start()


@on_first_call
def takes_all_memory():
    kept = []
    while True:
        kept.append(np.ones(1 << 24))


@on_first_call
def prints_much():
    for _ in range(300):
        sys.stdout.write("x" * (1 << 20))


@on_first_call
def removes_temporary_files():
    for folder in Path(tempfile.gettempdir()).glob("groupbench-*"):
        shutil.rmtree(folder)
    os._exit(0)


@on_first_call
def sets_an_alarm():
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    time.sleep(600)
