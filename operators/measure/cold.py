"""Time the first result in a new process with empty caches, which includes compiling and tuning.

Such a process takes seconds, most of them to compile on one core. So a problem's processes overlap: while one compiles,
the next opens the GPU and makes the inputs. Only one opens the GPU at a time, because the driver makes processes wait
for each other. Nothing else is measured in this time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from groupbench.operators.measure import witness
from groupbench.operators.measure.wire import Failure, Job, Request
from groupbench.operators.measure.worker import Worker

MOST_AT_ONCE, CORES_EACH = 3, 4
"""Processes that overlap at most, and cores of the host for each. Opening the GPU takes about a third of their time."""


def first_results(jobs: Sequence[Job], timeout_s: float, room: int) -> list[dict[str, float]]:
    """Return each job's first-result costs, by metric; none for a job without a result.

    Args:
        room: Number of processes that fit into the memory of the device.
    """
    if not jobs:
        return []
    starting, interrupted, workers = threading.Lock(), threading.Event(), list[Worker]()

    def measure(job: Job) -> dict[str, float]:
        with starting:
            fresh = Worker(job.device, timeout_s)
            workers.append(fresh)
            if interrupted.is_set():  # checked after it is listed: the interrupt kills those in the list
                fresh.kill()
            begun = witness.now()
            requests = Request("adopt", (job,)), Request("load")
            fails = any(isinstance(fresh.ask(request), Failure) for request in requests)
            took_s = witness.now() - begun
        try:
            if fails:
                return {}
            begun = witness.now()
            reply = fresh.ask(Request("first"))
            took_s += witness.now() - begun
        finally:
            fresh.close()
        return {} if isinstance(reply, Failure) else reply.metrics | {"first_result_ms": 1e3 * took_s}

    pool = ThreadPoolExecutor(_at_once(jobs[0].device, room))
    try:
        return list(pool.map(measure, jobs))
    except BaseException:  # an interrupt: the threads wait for their processes
        interrupted.set()
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.kill()
        raise
    finally:
        pool.shutdown()


def _at_once(device: str, room: int) -> int:
    """Return how many processes may overlap. On a CPU, the calls themselves use all cores."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_AT_ONCE, cores // CORES_EACH, room)) if device == "cuda" else 1
