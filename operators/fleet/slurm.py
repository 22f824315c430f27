"""A SLURM cluster, through submitit: a job array, each of its jobs some batches on one GPU.

Nothing is known of the cards beforehand: a job looks at its own, and refuses hardware that was not asked for. What a
job has found it leaves in a file, which is why the folder must be on a file system that the nodes share.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from groupbench.operators.errors import UsageError
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet.batch import Batch, Card
from groupbench.operators.fleet.drive import NotReached, WorkerDied
from groupbench.tracker.record import Record

LOCAL = "local"
MAX_ARRAY = 1000
"""SLURM's MaxArraySize is 1001 unless set."""

POLL_S = 0.5
JOB_MINUTES = 240
DEFAULTS = {"array_parallelism": 256, "timeout_min": JOB_MINUTES, "cpus_per_task": 8}

Result = list[list[Record] | Exception]


def parameters(text: str) -> dict[str, Any]:
    """`partition=gpu,constraint=h100,timeout_min=60` as submitit takes it; `local` is its own executor here.

    Raises UsageError.
    """
    if text == LOCAL:
        return {"cluster": LOCAL}
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    bad = [name for name, equals, value in pairs if not equals or not name.strip() or not value.strip()]
    if bad or not pairs:
        raise UsageError(f"--slurm {text!r} is not NAME=VALUE by comma, such as partition=gpu,constraint=h100")
    return {name.strip(): int(value) if value.strip().isdecimal() else value.strip() for name, _, value in pairs}


def executor(folder: Path, device: str, given: dict[str, Any]) -> Any:
    """submitit's executor with these parameters; what SLURM alone has goes by its own name. Raises UsageError."""
    try:
        import submitit
    except ModuleNotFoundError:
        raise UsageError("--slurm needs submitit: pip install 'groupbench[slurm]'") from None
    given = dict(given)
    cluster = given.pop("cluster", "slurm")
    jobs = folder if cluster == LOCAL else folder / "%j"  # of which its own executor makes a folder of that name
    try:
        found = submitit.AutoExecutor(folder=jobs, cluster=cluster, slurm_max_num_timeout=0)
        common = {"timeout_min": given.pop("timeout_min", DEFAULTS["timeout_min"]), "name": "groupbench"}
        if device == "cuda":
            common["gpus_per_node"] = 1
        if cluster != LOCAL:
            common["cpus_per_task"] = given.pop("cpus_per_task", DEFAULTS["cpus_per_task"])
            given.setdefault("array_parallelism", DEFAULTS["array_parallelism"])
            common |= {f"slurm_{name}": value for name, value in given.items()}
        found.update_parameters(**common)
    except (RuntimeError, ValueError, NameError, TypeError) as error:
        raise UsageError(f"--slurm: {' '.join(str(error).split())}") from error
    return found


class SlurmFleet:
    """Job arrays on a cluster; a job that dies has its batches measured again by another, once."""

    cards: tuple[Card, ...] = ()

    def __init__(
        self,
        found: Any,
        *,
        budget_s: float = math.inf,
        measure: Callable[[Batch], list[Record]] = batches.measure,
        max_array: int = MAX_ARRAY,
    ) -> None:
        """`found` is submitit's executor."""
        self._executor, self._measure, self._max_array = found, measure, max_array
        self._until = time.time() + budget_s  # on every node's clock
        self._closed = threading.Event()
        self._jobs: dict[Any, tuple[list[int], bool]] = {}  # job -> (its batches, whether they died once)
        self._watch: threading.Thread | None = None

    def submit(self, work: Sequence[Batch]) -> list[Future[list[Record]]]:
        self._work = list(work)
        self._futures: list[Future[list[Record]]] = [Future() for _ in work]
        self._send(_chunks(self._work, self._max_array), again=False)
        self._watch = threading.Thread(target=self._follow, daemon=True)
        self._watch.start()
        return self._futures

    def _send(self, chunks: list[list[int]], again: bool) -> None:
        if not chunks:
            return
        with self._executor.batch():  # one array
            jobs = [
                self._executor.submit(run, [self._work[n] for n in chunk], self._measure, self._until)
                for chunk in chunks
            ]
        self._jobs.update((job, (chunk, again)) for job, chunk in zip(jobs, chunks, strict=True))

    def _follow(self) -> None:
        """Ask submitit, which asks SLURM for all jobs at once, until every future has its records."""
        while self._jobs and not self._closed.is_set():
            died: list[list[int]] = []
            for job in [job for job in self._jobs if job.done()]:
                chunk, again = self._jobs.pop(job)
                try:
                    self._deliver(chunk, job)
                except Exception as error:
                    if again or not _is_death(error):
                        said = WorkerDied(f"SLURM jobs died of it twice, the last {job.job_id}: {job.paths.stderr}")
                        self._fail(chunk, said if _is_death(error) else error)
                    else:
                        died.append(chunk)
            try:
                self._send(died, again=True)
            except Exception as error:  # sbatch refuses
                for chunk in died:
                    self._fail(chunk, error)
            self._closed.wait(POLL_S)

    def _deliver(self, chunk: list[int], job: Any) -> None:
        result: Result = job.result()
        for number, found in zip(chunk, result, strict=True):
            if isinstance(found, Exception):
                self._futures[number].set_exception(found)
            else:
                self._futures[number].set_result(found)

    def _fail(self, chunk: list[int], error: Exception) -> None:
        for number in chunk:
            self._futures[number].set_exception(error)

    def close(self, at_once: bool = False) -> None:
        self._closed.set()
        for job in self._jobs:
            with contextlib.suppress(Exception):
                job.cancel(check=False)
        if self._watch is not None:
            self._watch.join(30)


def run(work: list[Batch], measure: Callable[[Batch], list[Record]], until: float) -> Result:
    """In a job: the records of each batch, or why there are none."""
    found: Result = []
    for batch in work:
        try:
            if time.time() >= until:
                raise NotReached("not begun within the budget")
            found.append(measure(batch))
        except Exception as error:
            found.append(error)
    return found


def _chunks(work: Sequence[Batch], most: int) -> list[list[int]]:
    """Numbers of batches by job: each batch its own where the array is large enough, else even in cells."""
    chunks: list[list[int]] = [[] for _ in range(min(most, len(work)))]
    loads = [0] * len(chunks)
    for number in sorted(range(len(work)), key=lambda n: -len(work[n].jobs)):
        least = loads.index(min(loads))
        chunks[least].append(number)
        loads[least] += len(work[number].jobs)
    return [sorted(chunk) for chunk in chunks]


def _is_death(error: Exception) -> bool:
    """The job has left no result, rather than an exception of ours."""
    from submitit.core.utils import FailedJobError, UncompletedJobError

    return isinstance(error, UncompletedJobError) and not isinstance(error, FailedJobError)
