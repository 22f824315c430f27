"""Use a SLURM cluster: submitit starts the workers of a Dask scheduler in a job array, one GPU a job.

The scheduler runs in this process and ends with it. The cards are not known in advance: a card takes batches when the
job starts. Scheduler and workers authenticate each other by a key that is made for the run, since other users of the
cluster can reach the scheduler's port.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from groupbench.operators.errors import GroupbenchError, UsageError
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet import worker
from groupbench.operators.fleet.batch import Batch, Card
from groupbench.operators.fleet.dask import TIMES, Look, ScheduledFleet, card_here, settle
from groupbench.tracker.facts.record import Record

log = logging.getLogger(__name__)

LOCAL = "local"
JOBS = 256
"""Number of jobs, at most, unless `array_parallelism` is set. SLURM's MaxArraySize is 1001 by default."""

DEFAULTS = {"timeout_min": 240, "cpus_per_task": 8}


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
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it has the run's key
    jobs = folder if cluster == LOCAL else folder / "%j"  # the local executor makes a folder per job itself
    try:
        submitter = submitit.AutoExecutor(folder=jobs, cluster=cluster, slurm_max_num_timeout=0)
        common = {"timeout_min": settings.pop("timeout_min", DEFAULTS["timeout_min"]), "name": "groupbench"}
        if device == "cuda":
            common["gpus_per_node"] = 1
        if cluster != LOCAL:
            common["cpus_per_task"] = settings.pop("cpus_per_task", DEFAULTS["cpus_per_task"])
            common |= {f"slurm_{name}": value for name, value in settings.items()}
        submitter.update_parameters(**common)
    except (RuntimeError, ValueError, NameError, TypeError) as error:
        raise UsageError(f"--slurm: {' '.join(str(error).split())}") from error
    return submitter


class SlurmFleet(ScheduledFleet):
    """Workers in the jobs of an array. A card that joins takes batches until none is left."""

    def __init__(
        self,
        submitter: Any,
        device: str,
        hardware: str | None = None,
        *,
        jobs: int = JOBS,
        interface: str | None = None,
        local: bool = False,
        plugins: Sequence[str] = (),
        look: Look = card_here,
        say: Callable[[str], None] = lambda text: None,
        **settings: Any,
    ) -> None:
        """Start the scheduler.

        Args:
            submitter: submitit's executor.
            hardware: Pattern of the GPU's model. Workers with another one are sent away.
            jobs: Number of jobs, at most.
            interface: Network interface of the scheduler, such as ib0.
            local: Whether all jobs run on this machine.
            look: Returns the card of a worker, on which it runs.
            say: Prints a line about a worker that is sent away.
            settings: Those of `ScheduledFleet`.
        """
        self._submitter, self._device, self._hardware, self._most = submitter, device, hardware, jobs
        self._plugins, self._look, self._say = plugins, look, say
        self._jobs: list[Any] = []
        self._refused: dict[str, str] = {}  # reason by worker
        self._cluster, self._security = _scheduler(interface, local)
        super().__init__(self._cluster.get_client(), **settings)
        self.client.run_on_scheduler(settle, patience_s=TIMES.card_wait_s)

    def submit(self, work: Sequence[Batch]) -> list[Future[list[Record]]]:
        futures = super().submit(work)
        arguments = self._cluster.scheduler_address, self._device, self._security
        with self._submitter.batch():  # one array
            self._jobs = [self._submitter.submit(worker.run_job, *arguments) for _ in range(min(self._most, len(work)))]
        log.info("submitted %d jobs, the first is %s", len(self._jobs), self._jobs[0].job_id if self._jobs else None)
        threading.Thread(target=self._admit_workers, daemon=True).start()
        return futures

    def _admit_workers(self) -> None:
        """Let the cards of new workers take batches, until no batch waits or no job is left."""
        logged_s = time.monotonic()
        while self._common and not self._closed.is_set():
            try:
                self._admit_new()
                if all(job.done() for job in self._jobs) and not any(t.is_alive() for t in self._threads.values()):
                    self.abandon(self._why_no_job_is_left())
            except Exception as error:
                if not self._closed.is_set():
                    self.abandon(f"the scheduler is gone: {type(error).__name__}: {error}")
                return
            if time.monotonic() >= logged_s + TIMES.log_every_s:
                logged_s = time.monotonic()
                states = sorted({str(job.state) for job in self._jobs})
                log.info(
                    "%d batches wait for jobs, which are %s; %d cards have joined",
                    *(len(self._common), ", ".join(states), len(self._threads)),
                )
            self._closed.wait(TIMES.scheduler_check_s / 4)

    def _admit_new(self) -> None:
        for address, name in self.client.run_on_scheduler(_names).items():
            if name in self._refused or (name in self._threads and self._threads[name].is_alive()):
                continue
            try:
                (card,) = self.client.run(self._look, self._device, workers=[address]).values()
                if reason := self._why_not(card, address):
                    raise GroupbenchError(reason)
            except GroupbenchError as error:
                self._refused[name] = f"worker {name}: {error}"
                self._say(self._refused[name])
                self.client.retire_workers([address], close_workers=True)
            else:
                log.info("worker %s has joined", name)
                self.join(card)

    def _why_not(self, card: Card, address: str) -> str | None:
        """Return why a worker cannot measure this run, or None."""
        if not batches.matches(card.machine.environment, self._hardware):
            return f"it has {card.hardware}, and the run needs {self._hardware}"
        if card.code != batches.code():
            return "it runs different code than the client"
        faults = self.client.run(batches.plugin_fault, self._plugins, workers=[address]) if self._plugins else {}
        return faults.get(address)

    def _why_no_job_is_left(self) -> str:
        refusals = list(self._refused.values())
        return refusals[0] if refusals else f"no SLURM job is left: see {self._jobs[0].paths.stderr}"

    def close(self, at_once: bool = False) -> None:
        super().close(at_once)
        with contextlib.suppress(Exception):
            self._cluster.close(timeout=10)  # the workers end with the scheduler
        for job in self._jobs:
            with contextlib.suppress(Exception):
                job.cancel(check=False)


def _scheduler(interface: str | None, local: bool) -> tuple[Any, Any]:
    """Return a Dask scheduler in this process, and the workers' keys. Raises UsageError."""
    try:
        from distributed import LocalCluster
        from distributed.security import Security
        from distributed.utils import get_ip

        security = Security.temporary()
    except (ModuleNotFoundError, ImportError):
        raise UsageError("--slurm needs Dask distributed and cryptography: pip install 'groupbench[slurm]'") from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # failures are reported in records
    where = {"interface": interface} if interface else {"host": "127.0.0.1" if local else get_ip()}
    try:
        cluster = LocalCluster(
            n_workers=0, security=security, protocol="tls://", dashboard_address=None, silence_logs=False, **where
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(f"--slurm: no scheduler starts here: {' '.join(str(error).split())}") from error
    return cluster, security


def _names(dask_scheduler: Any) -> dict[str, str]:
    """Return the names of the workers by address. Runs on the scheduler."""
    return {address: str(state.name) for address, state in dask_scheduler.workers.items()}
