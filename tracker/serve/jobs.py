"""What takes longer than a page may: a run's verdict over all of its series, and two commits side by side.

They are worked out by a process of their own, one at a time, and kept until something is stored: a page shows what is
known, says what is being worked out, and looks again. In a thread it would hold up every other page.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, TimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from groupbench.tracker.errors import StoreError

PATIENCE_S = 0.12
"""How long a page waits for an answer before it is shown without."""

KEPT = 12
"""Answers that are kept: the newest of what was asked for."""

WAITING = 6
"""Jobs that may queue; a request for one more is told to come back."""


@dataclass(frozen=True)
class Working:
    """Not known yet."""

    seconds: float  # since it was asked for
    crowded: bool = False  # too many wait already: it was not even queued


@dataclass(frozen=True)
class Known:
    """An answer, and whether more has been stored since."""

    value: Any
    stale: bool = False


@dataclass(frozen=True)
class Failed:
    """No answer, and why."""

    message: str


class Jobs:
    """A queue of one worker, and what it found. Safe to be asked from several threads."""

    def __init__(self, executor: Executor | None = None, patience: float = PATIENCE_S) -> None:
        self._given = executor
        self._executor: Executor | None = executor
        self._patience = patience
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, tuple[Hashable, Any]] = OrderedDict()  # of: (version, value)
        self._running: dict[tuple[Hashable, Hashable], tuple[float, Future[Any]]] = {}

    def ask(
        self, of: Hashable, version: Hashable, work: Callable[..., Any], *args: Any, patience: float | None = None
    ) -> Known | Working:
        """The answer of `work(*args)`, which must be picklable, for a version of the database.

        While it is worked out anew, the one before is given as stale. What the work raises is raised here.
        """
        with self._lock:
            kept = self._answers.get(of)
            if kept is not None and kept[0] == version:
                self._answers.move_to_end(of)
                return Known(kept[1])
            began, future = self._running.get((of, version), (0.0, None))
            if future is None:
                if len(self._running) >= WAITING:
                    return Known(kept[1], stale=True) if kept else Working(0.0, crowded=True)
                began, future = time.monotonic(), self._submit(work, *args)
                self._running[of, version] = (began, future)
        try:
            value = future.result(self._patience if patience is None else patience)
        except TimeoutError:
            return Known(kept[1], stale=True) if kept else Working(time.monotonic() - began)
        except BrokenProcessPool as error:
            self._forget(of, version, broken=True)
            raise StoreError("the process that judges ended early, perhaps for want of memory") from error
        except Exception:
            self._forget(of, version)
            raise
        with self._lock:
            self._running.pop((of, version), None)
            self._answers[of] = (version, value)
            self._answers.move_to_end(of)
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)
        return Known(value)

    def _submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        if self._executor is None:
            self._executor = _process()
        try:
            return self._executor.submit(work, *args)
        except BrokenProcessPool:
            self._executor = _process()
            return self._executor.submit(work, *args)

    def _forget(self, of: Hashable, version: Hashable, *, broken: bool = False) -> None:
        with self._lock:
            self._running.pop((of, version), None)
            if broken and self._given is None:
                self._executor = None

    def close(self) -> None:
        """Ends the worker, whatever it is at: nobody waits for it any more."""
        executor, self._executor = self._executor, None
        if executor is None or self._given is not None:
            return
        workers = list((getattr(executor, "_processes", None) or {}).values())  # a job in hand cannot be cancelled
        executor.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.terminate()


def _process() -> ProcessPoolExecutor:
    import multiprocessing

    # Not a fork: this process has threads, and connections that must not be shared.
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)


def _begin() -> None:
    """In the worker: a key press that ends the server is the server's to handle, and pages come first."""
    import os
    import signal
    from contextlib import suppress

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError, AttributeError):
        os.nice(5)
