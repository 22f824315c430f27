"""Call a function on many items in processes, as `map` does in this one.

The processes are forks, and begin at once with this process's modules. They end with this process, however it ends, and
leave Ctrl-C to it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

from groupbench.tracker.tools.parent import end_with_parent

T = TypeVar("T")
R = TypeVar("R")

_MOST_PROCESSES = 4
"""Largest number of processes. More would wait for the process that gives them items and takes their results."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def processes() -> int:
    """Return how many processes `mapped` can use; 1 if it cannot be used.

    Only Linux forks safely, and only a process without other threads.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return 1
    return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)


@contextmanager
def mapped(function: Callable[[T], R], items: Iterable[T], *, ahead: int) -> Iterator[Iterator[R]]:
    """Enter a context in which processes call the function on each item, and iterate over the results in order.

    The first `ahead` items are given to the processes at once, and as many always wait for them. Raises what the
    function raises, ChildProcessError if a process dies, and OSError or NotImplementedError if none can be started.
    """
    rest = iter(items)
    pool = ProcessPoolExecutor(processes(), multiprocessing.get_context("fork"), _begin)
    try:
        with _starting():
            futures = deque(pool.submit(function, item) for item in islice(rest, ahead))
        yield _results(futures, (pool.submit(function, item) for item in rest))
    except BrokenProcessPool as error:
        raise ChildProcessError("one of its processes was killed") from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _starting() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a process must not begin with our handlers
    others = multiprocessing.active_children()
    try:
        with warnings.catch_warnings():
            # From 3.12 on, Python warns of threads. All here are of numerical libraries, which prepare for forks.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    except OSError:  # the pool forgets processes that began before one that could not, and exit would wait for them
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()
                process.join()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _results(futures: deque[Future[R]], more: Iterator[Future[R]]) -> Iterator[R]:
    while futures:
        result = futures.popleft().result()
        futures.extend(islice(more, 1))
        yield result


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    end_with_parent()
