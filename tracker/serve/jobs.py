"""Work that takes longer than a page may: a run's verdict over all of its series, and two commits side by side.

Each kind of work has a process of its own (`worker.py`), so that comparisons never hold up verdicts. Answers are kept
until something is stored: a page shows the known results, reports work in progress, and asks again. Work that no client
asks for any more is stopped.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, TimeoutError
from dataclasses import dataclass
from typing import Any

from groupbench.tracker.serve.worker import Worker

PATIENCE_S = 0.12
"""How long a page waits for an answer before it is shown without."""

KEPT = 12
"""Answers that are kept: the newest ones requested."""

WAITING = 6
"""Jobs of one kind that may queue; a request for one more is asked to come back."""

LIMIT_S = 60.0
"""CPU time that a job may take: six times as much as judging 20,000 series."""

UNWANTED_S = 5.0
"""A job is stopped when no client has asked for it for so long. Pages ask again every second or two."""


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


@dataclass
class _Running:
    work: Callable[..., Any]
    began: float
    waited_until: float  # when a client last waited for it
    keep: bool
    future: Future[Any] | None = None

    def wanted(self) -> bool:
        return self.keep or time.monotonic() - self.waited_until < UNWANTED_S


class Jobs:
    """Work in progress and the answers that are kept. Safe to be asked from several threads."""

    def __init__(self, executor: Executor | None = None, patience: float = PATIENCE_S) -> None:
        self._executor = executor
        self._workers: dict[Callable[..., Any], Worker] = {}
        self._patience = patience
        self._lock = threading.RLock()
        self._answers: OrderedDict[Hashable, tuple[Hashable, Any]] = OrderedDict()  # of: (version, value)
        self._running: dict[tuple[Hashable, Hashable], _Running] = {}

    def ask(
        self,
        of: Hashable,
        version: Hashable,
        work: Callable[..., Any],
        *args: Any,
        patience: float | None = None,
        keep: bool = False,
    ) -> Known | Working:
        """Return the answer of `work(*args)`, which must be picklable, for a version of the database.

        keep  finish it even if no client asks again

        While a new answer is computed, the one before is returned as stale. Exceptions of the work are raised here.
        """
        with self._lock:
            kept = self._answers.get(of)
            if kept is not None and kept[0] == version:
                self._answers.move_to_end(of)
                return Known(kept[1])
            job = self._running.get((of, version))
            if job is None:
                if sum(other.work is work for other in self._running.values()) >= WAITING:
                    return Known(kept[1], stale=True) if kept else Working(0.0, crowded=True)
                job = self._begin(of, version, work, args, keep)
            waits = self._patience if patience is None else patience
            # Every client that waits keeps the job running.
            job.waited_until = max(job.waited_until, time.monotonic() + waits)
            future = job.future
        assert future is not None
        try:
            return Known(future.result(waits))
        except TimeoutError:
            return Known(kept[1], stale=True) if kept else Working(time.monotonic() - job.began)

    def _begin(
        self, of: Hashable, version: Hashable, work: Callable[..., Any], args: tuple[Any, ...], keep: bool
    ) -> _Running:
        now = time.monotonic()
        job = self._running[of, version] = _Running(work, now, now, keep)
        if self._executor is not None:
            job.future = self._executor.submit(work, *args)
        else:
            worker = self._workers.setdefault(work, Worker())
            job.future = worker.submit(work, *args, seconds=LIMIT_S, wanted=job.wanted)
        job.future.add_done_callback(lambda future: self._done(of, version, future))
        return job

    def _done(self, of: Hashable, version: Hashable, future: Future[Any]) -> None:
        """Keep an answer, whether or not anybody waits for it; an error is not kept."""
        with self._lock:
            self._running.pop((of, version), None)
            if future.cancelled() or future.exception() is not None:
                return
            self._answers[of] = (version, future.result())
            self._answers.move_to_end(of)
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)

    def close(self) -> None:
        """End the processes, whatever they are doing: no client waits for them."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
