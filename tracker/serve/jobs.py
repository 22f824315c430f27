"""Run work in the background that takes too long for a page: the verdict on a run, and the comparison of two commits.

Each kind of work has its own process (`worker.py`), so that comparisons never delay verdicts. An answer is kept until
the database changes. Until it is ready, a page shows the rest, reports work in progress, and reloads. Work is stopped
when no client asks for it any more.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, TimeoutError
from dataclasses import dataclass
from typing import Any

from groupbench.tracker.serve.worker import JobWorker

PATIENCE_S = 0.12
"""Time in seconds that a page waits for an answer before it is sent without."""

KEPT = 12
"""Number of answers that are kept, the most recently requested ones."""

WAITING = 6
"""Maximum number of queued jobs of one kind; a client that requests one more must ask again later."""

LIMIT_S = 60.0
"""Maximum CPU time of a job in seconds, six times as much as judging 20,000 series takes."""

UNWANTED_S = 5.0
"""Time in seconds after which a job is stopped if no client asks for it. Pages ask every second or two."""


@dataclass(frozen=True)
class Working:
    """The answer is not ready."""

    seconds: float  # since the job was started
    crowded: bool = False  # the queue was full, so the job was not queued


@dataclass(frozen=True)
class Known:
    """An answer. It is stale if the database has changed since."""

    value: Any
    stale: bool = False


@dataclass(frozen=True)
class Failed:
    """The question failed; `message` is the reason."""

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
    """Run jobs and keep their answers. Thread-safe."""

    def __init__(self, executor: Executor | None = None, patience: float = PATIENCE_S) -> None:
        self._executor = executor
        self._workers: dict[Callable[..., Any], JobWorker] = {}
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
        """Return the result of `work(*args)` for this version of the database, or Working if it is not ready in time.

        of        the key of the question; an older answer to it is returned as stale until the new one is ready
        work      a function that can be pickled, like its arguments and its result
        patience  seconds to wait for the answer
        keep      finish the job even if no client asks again

        Exceptions of the work are raised here.
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
            worker = self._workers.setdefault(work, JobWorker())
            job.future = worker.submit(work, *args, seconds=LIMIT_S, wanted=job.wanted)
        job.future.add_done_callback(lambda future: self._done(of, version, future))
        return job

    def _done(self, of: Hashable, version: Hashable, future: Future[Any]) -> None:
        """Keep the answer of a finished job, even if no client waits for it. Errors are not kept."""
        with self._lock:
            self._running.pop((of, version), None)
            if future.cancelled() or future.exception() is not None:
                return
            self._answers[of] = (version, future.result())
            self._answers.move_to_end(of)
            while len(self._answers) > KEPT:
                self._answers.popitem(last=False)

    def close(self) -> None:
        """Stop all jobs and end their processes."""
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
