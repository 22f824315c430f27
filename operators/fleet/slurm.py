"""Use a SLURM cluster through submitit: a job array, in which each job measures some batches on one GPU.

The cards are not known in advance: a job checks its own card, and refuses hardware that was not requested. A job writes
its results to a file, so the folder must be on a file system that the nodes share.
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
from groupbench.tracker.facts.record import Record

LOCAL = "local"
MAX_ARRAY = 1000
"""Largest job array. SLURM's MaxArraySize is 1001 by default."""

POLL_S = 0.5
JOB_MINUTES = 240
DEFAULTS = {"array_parallelism": 256, "timeout_min": JOB_MINUTES, "cpus_per_task": 8}

Result = list[list[Record] | Exception]


def parameters(text: str) -> dict[str, Any]:
    """Return the parameters in `partition=gpu,constraint=h100,timeout_min=60` by name, for submitit.

    `local` selects submitit's executor on this machine. Raises UsageError.
    """
    if text == LOCAL:
        return {"cluster": LOCAL}
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    bad = [name for name, equals, value in pairs if not equals or not name.strip() or not value.strip()]
    if bad or not pairs:
        raise UsageError(
            f"--slurm {text!r} is not a list of NAME=VALUE joined by commas, such as partition=gpu,constraint=h100"
        )
    return {name.strip(): int(value) if value.strip().isdecimal() else value.strip() for name, _, value in pairs}


def executor(folder: Path, device: str, settings: dict[str, Any]) -> Any:
    """Return submitit's executor with these settings; other names are SLURM's own. Raises UsageError."""
    try:
        import submitit
    except ModuleNotFoundError:
        raise UsageError("--slurm needs submitit: pip install 'groupbench[slurm]'") from None
    settings = dict(settings)
    cluster = settings.pop("cluster", "slurm")
    jobs = folder if cluster == LOCAL else folder / "%j"  # the local executor makes a folder per job itself
    try:
        submitter = submitit.AutoExecutor(folder=jobs, cluster=cluster, slurm_max_num_timeout=0)
        common = {"timeout_min": settings.pop("timeout_min", DEFAULTS["timeout_min"]), "name": "groupbench"}
        if device == "cuda":
            common["gpus_per_node"] = 1
        if cluster != LOCAL:
            common["cpus_per_task"] = settings.pop("cpus_per_task", DEFAULTS["cpus_per_task"])
            settings.setdefault("array_parallelism", DEFAULTS["array_parallelism"])
            common |= {f"slurm_{name}": value for name, value in settings.items()}
        submitter.update_parameters(**common)
    except (RuntimeError, ValueError, NameError, TypeError) as error:
        raise UsageError(f"--slurm: {' '.join(str(error).split())}") from error
    return submitter


class SlurmFleet:
    """Job arrays on a cluster. If a job dies, another one measures its batches, once."""

    cards: tuple[Card, ...] = ()

    def __init__(
        self,
        submitter: Any,
        *,
        budget_s: float = math.inf,
        measure: Callable[[Batch], list[Record]] = batches.measure,
        max_array: int = MAX_ARRAY,
    ) -> None:
        """Make a fleet of `submitter`, which is submitit's executor."""
        self._executor, self._measure, self._max_array = submitter, measure, max_array
        self._until = time.time() + budget_s  # wall-clock time, which the nodes share
        self._closed = threading.Event()
        self._jobs: dict[Any, tuple[list[int], bool]] = {}  # job -> (its batches, whether this is the second try)
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
        """Poll submitit until every future has its records. submitit polls SLURM for all jobs at once."""
        while self._jobs and not self._closed.is_set():
            died: list[list[int]] = []
            for job in [job for job in self._jobs if job.done()]:
                chunk, again = self._jobs.pop(job)
                try:
                    self._deliver(chunk, job)
                except Exception as error:
                    if again or not _is_death(error):
                        death = WorkerDied(f"two SLURM jobs died, the last one {job.job_id}: see {job.paths.stderr}")
                        self._fail(chunk, death if _is_death(error) else error)
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
        for number, outcome in zip(chunk, result, strict=True):
            if isinstance(outcome, Exception):
                self._futures[number].set_exception(outcome)
            else:
                self._futures[number].set_result(outcome)

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
    """Return the records of each batch, or the exception that prevented them. Runs in a job."""
    results: Result = []
    for batch in work:
        try:
            if time.time() >= until:
                raise NotReached("not begun within the budget")
            results.append(measure(batch))
        except Exception as error:
            results.append(error)
    return results


def _chunks(work: Sequence[Batch], most: int) -> list[list[int]]:
    """Return the batch numbers of each job: one batch per job if the array allows it, otherwise evenly many cells."""
    chunks: list[list[int]] = [[] for _ in range(min(most, len(work)))]
    loads = [0] * len(chunks)
    for number in sorted(range(len(work)), key=lambda n: -len(work[n].jobs)):
        least = loads.index(min(loads))
        chunks[least].append(number)
        loads[least] += len(work[number].jobs)
    return [sorted(chunk) for chunk in chunks]


def _is_death(error: Exception) -> bool:
    """Return whether the job ended without a result, in contrast to an exception of our code."""
    from submitit.core.utils import FailedJobError, UncompletedJobError

    return isinstance(error, UncompletedJobError) and not isinstance(error, FailedJobError)
