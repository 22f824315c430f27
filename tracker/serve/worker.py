"""A worker process of the server, which runs one job at a time within limits of CPU time and memory.

A job in a thread would delay every page, and a job in a pool cannot be stopped. This process is killed when its job
takes too long or when no client waits for the result any more; the next job starts another process. The process ends
when the server does, even if the server is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from groupbench.tracker.facts.errors import StoreError

LARGEST_MEMORY = 4 << 30
"""Maximum memory of a job in bytes, or half of the machine's memory if that is less."""

WALL_PER_CPU = 10
"""Ratio of a job's limits of wall time and CPU time. A job that waits for the database uses no CPU time."""

NICE_JOBS, NICE_PAGES = 10, 5
"""Priority of a process for jobs, which take seconds, and of one for large pages. Other pages come before both."""

_LOOK_S = 0.05
_PR_SET_PDEATHSIG = 1


class Stopped(StoreError):
    """A job was ended before it had a result."""


@dataclass(frozen=True)
class _Job:
    work: Callable[..., Any]
    args: tuple[Any, ...]
    seconds: float
    wanted: Callable[[], bool]
    future: Future[Any] = field(default_factory=Future)


class JobWorker:
    """A queue of jobs and the process that runs them. The process starts with the first job."""

    def __init__(self, nice: int = NICE_JOBS) -> None:
        self._nice = nice
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: Any = None
        self._pipe: Connection | None = None
        self._closed = False

    def submit(
        self, work: Callable[..., Any], *args: Any, seconds: float, wanted: Callable[[], bool] = lambda: True
    ) -> Future[Any]:
        """Queue `work(*args)`; function, arguments and result must be picklable.

        seconds  limit of CPU time; the limit of wall time is `WALL_PER_CPU` times as long
        wanted   called repeatedly; the job is stopped when it returns False

        The future raises the exceptions of the work, and Stopped if the job was stopped.
        """
        job = _Job(work, args, seconds, wanted)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="groupbench-worker", daemon=True)
            self._thread.start()
        self._queue.put(job)
        return job.future

    def close(self) -> None:
        """Stop the current job and end the process."""
        self._closed = True
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(10)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            job.future.set_running_or_notify_cancel()
            try:
                outcome = self._answer(job)
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(outcome)
        self._kill()

    def _answer(self, job: _Job) -> Any:
        if self._closed or not job.wanted():
            raise Stopped("no client waited for it")
        pipe = self._started()
        try:
            pipe.send((job.work, job.args, job.seconds))
            end = time.monotonic() + WALL_PER_CPU * job.seconds
            while not pipe.poll(_LOOK_S):
                if self._closed or not job.wanted():
                    self._kill()
                    raise Stopped("no client waited for it")
                if time.monotonic() > end:
                    self._kill()
                    raise Stopped(f"it took longer than {WALL_PER_CPU * job.seconds:g} s and was stopped; ask for less")
            failed, value = pipe.recv()
        except (EOFError, OSError) as error:
            if self._kill() == -signal.SIGXCPU:
                raise Stopped(
                    f"it used more than {job.seconds:g} s of CPU time and was stopped; ask for less"
                ) from error
            raise Stopped("the process that worked on it ended early, perhaps for want of memory") from error
        if failed:
            raise value
        return value

    def _started(self) -> Connection:
        if self._pipe is None:
            # Spawned, not forked: the server has threads, and connections that must not be shared.
            context = multiprocessing.get_context("spawn")
            self._pipe, other_end = context.Pipe()
            self._process = context.Process(target=_serve, args=(other_end, self._nice), daemon=True)
            self._process.start()
            other_end.close()
        return self._pipe

    def _kill(self) -> int | None:
        """Kill the process and return its exit code; minus the signal's number if a signal ended it."""
        process, pipe, self._process, self._pipe = self._process, self._pipe, None, None
        if pipe is not None:
            pipe.close()
        if process is None:
            return None
        process.kill()
        process.join(10)
        return process.exitcode


def spare_from_collection() -> None:
    """Exempt all objects of this process that exist now from garbage collection.

    Most are those of modules, which stay. To visit them would stop every page for 80 ms, once in a few dozen pages.
    """
    gc.collect()
    gc.freeze()


def _serve(pipe: Connection, nice: int = NICE_JOBS) -> None:
    """Run jobs until the pipe closes. This is the entry point of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C
    with contextlib.suppress(OSError, AttributeError):
        os.nice(nice)
    _end_with_parent()
    _limit_memory()
    while True:
        try:
            work, args, seconds = pipe.recv()
        except (EOFError, OSError):
            return
        _limit_cpu(seconds)
        try:
            outcome = (False, work(*args))
        except MemoryError:
            outcome = (True, Stopped(f"it needs more than {_memory_limit() >> 20} MiB; ask for less"))
        except Exception as error:
            outcome = (True, error)
        try:
            message = pickle.dumps(outcome)
        except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
            message = pickle.dumps((True, StoreError(f"{type(error).__name__}: {error}")))
        try:
            pipe.send_bytes(message)  # recv() reads what send() would have written
        except OSError:
            return  # the server was killed, or no longer wants this answer


def _end_with_parent() -> None:
    """Have the kernel kill this process when the server's thread that started it has ended. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_cpu(seconds: float) -> None:
    """Have the kernel end this process, without a core file, after this many more seconds of CPU time.

    A limit of wall time would also count the work of other processes on a busy machine.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        end = math.ceil(time.process_time() + seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (end, resource.getrlimit(resource.RLIMIT_CPU)[1]))


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (_memory_limit(), _memory_limit()))


def _memory_limit() -> int:
    try:
        return min(LARGEST_MEMORY, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    except (ValueError, OSError):
        return LARGEST_MEMORY
