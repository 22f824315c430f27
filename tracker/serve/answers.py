"""Compute verdicts in background threads, and keep them until the database changes.

Judging thousands of series takes seconds. A page waits briefly, shows the other contents, and reloads. Only one task
per kind runs at a time, so a search for damage never delays verdicts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from typing import Any

from groupbench.tracker.facts.errors import TrackerError
from groupbench.tracker.serve.limits import LIMITS

logger = logging.getLogger(__name__)

PAGE_WAIT_S = 0.12
"""Default time in seconds that a page waits for an answer."""

MOST_WAITING = 6
"""Maximum number of unfinished questions of one kind. Further ones must be asked again later."""

Question = tuple[Any, ...]
"""The key of a question. The first item is the kind, such as `verdict`."""


@dataclass(frozen=True)
class Working:
    """The answer is not ready."""

    seconds: float  # since the work started
    crowded: bool = False  # too many questions wait, so this one was not accepted


@dataclass(frozen=True)
class Known:
    """An answer. It is stale if the database has changed since."""

    value: Any
    stale: bool = False


@dataclass(frozen=True)
class Failed:
    """The work failed; `message` is the reason."""

    message: str


@dataclass(frozen=True)
class _Running:
    began: float
    future: Future[Any]


class Answers:
    """Run work in the background and cache the answers. Thread-safe."""

    def __init__(self, patience: float = PAGE_WAIT_S) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by kind
        self._answers: OrderedDict[Question, tuple[Any, Any]] = OrderedDict()  # (version, value)
        self._running: dict[tuple[Question, Any], _Running] = {}

    def ask(
        self, question: Question, version: Any, work: Callable[[], Any], *, patience: float | None = None
    ) -> Known | Working:
        """Return the result from `work()` for this database version, or Working if it is not ready in time.

        Args:
            question: The cache key. An older answer is returned as stale until the new one is ready.
            version: The version of the database, from `database.version`.
            work: Called in another thread, unless the answer is known.
            patience: Seconds to wait for the answer. Default: the cache's patience.

        Raises:
            Exception: The exception from the work. It is not cached.
        """
        with self._lock:
            kept = self._answers.get(question)
            if kept is not None and kept[0] == version:
                self._answers.move_to_end(question)
                return Known(kept[1])
            running = self._running.get((question, version))
            if running is None:
                if sum(other[0] == question[0] for other, _ in self._running) >= MOST_WAITING:
                    return Known(kept[1], stale=True) if kept else Working(0.0, crowded=True)
                running = self._begin(question, version, work)
        try:
            return Known(running.future.result(self._patience if patience is None else patience))
        except TimeoutError:
            return Known(kept[1], stale=True) if kept else Working(time.monotonic() - running.began)

    def _begin(self, question: Question, version: Any, work: Callable[[], Any]) -> _Running:
        running = self._running[question, version] = _Running(time.monotonic(), Future())
        turn = self._turns[question[0]]
        # A daemon, so that work in progress does not delay the end of the server.
        thread = threading.Thread(target=self._run, args=(question, version, work, running, turn), daemon=True)
        thread.start()
        return running

    def _run(
        self, question: Question, version: Any, work: Callable[[], Any], running: _Running, turn: threading.Lock
    ) -> None:
        try:
            with turn:
                value = work()
        except BaseException as error:
            with self._lock:
                del self._running[question, version]
            level = logging.WARNING if isinstance(error, TrackerError) else logging.ERROR
            logger.log(level, "%s failed: %s", question[0], error)
            running.future.set_exception(error)
            return
        with self._lock:
            del self._running[question, version]
            self._answers[question] = (version, value)
            self._answers.move_to_end(question)
            while len(self._answers) > LIMITS.answers:
                self._answers.popitem(last=False)
        logger.info("%s took %.1f s", question[0], time.monotonic() - running.began)
        running.future.set_result(value)
