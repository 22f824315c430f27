"""The built-in host on more than one GPU: `--gpus`, `--scheduler` and `--slurm`, as a session's records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groupbench.operators import executor, resume
from groupbench.operators.errors import UsageError
from groupbench.operators.fleet import batch as batches
from groupbench.operators.fleet import drive
from groupbench.operators.fleet.drive import Fleet
from groupbench.operators.hosts import builtin
from groupbench.operators.measure.cell import Job
from groupbench.operators.plan import Selection
from groupbench.operators.session import Session
from groupbench.operators.sizes import counted
from groupbench.tracker.record import Environment


@dataclass(frozen=True)
class Place:
    """Where cells are measured, as the user says; nothing said is one GPU here, in this process's own queue."""

    gpus: str | None = None
    scheduler: str | None = None
    slurm: str | None = None
    hardware: str | None = None
    named: bool = True  # False where all GPUs are used without having been asked for

    @property
    def far(self) -> bool:
        return self.scheduler is not None or self.slurm is not None

    def __bool__(self) -> bool:
        return self.gpus is not None or self.far


def place(options: dict[str, Any]) -> Place:
    """Of the command line: a plan takes all of a host's GPUs, a table the first, unless told. Raises UsageError."""
    given = Place(options["gpus"], options["scheduler"], options["slurm"], options["hardware"])
    said = [name for name in ("gpus", "scheduler", "slurm") if options[name] is not None]
    if len(said) > 1:
        raise UsageError(f"--{said[0]} and --{said[1]} are two places to measure: give one")
    if given.hardware is not None and not given.far:
        raise UsageError("--hardware says which of a fleet's cards measure: it goes with --scheduler or --slurm")
    return given


def for_plan(device: str) -> Place:
    """Of a plan for which no place is said: all GPUs, where there are several."""
    from groupbench.operators.fleet import local

    if device != "cuda":
        return Place()
    try:
        several = len(local.visible_gpus()) > 1
    except UsageError:  # cannot be counted: the one that torch opens is measured on
        several = False
    return Place(gpus="all", named=False) if several else Place()


def measure(selections: list[Selection], device: str, session: Session, where: Place) -> int:
    """Measure, show and write the selections. Returns the exit code."""
    jobs = builtin.list_jobs(selections, device)
    known = {}
    if session.previous is not None:
        late = resume.left_out(session.previous)
        jobs = executor.first_of(jobs, lambda job: resume.key_of_job(job) in late)
        known = batches.before(resume.read_run(session.previous))
    fleet = _open(where, device, session, jobs)
    try:
        first = fleet.cards[0].machine.environment if fleet.cards else Environment(device=_device(device))
        session.open(_host(where, fleet), first, fleet=True)
        jobs = resume.not_done(jobs, session.records)
        if hasattr(fleet, "known"):
            fleet.known = known | batches.before(session.records)
    except BaseException:
        fleet.close(at_once=True)
        raise
    return session.collect(
        lambda run, progress: drive.records(
            fleet,
            batches.batches(jobs, run, session.timeout_s, batches.code(), where.hardware, session.logs),
            progress,
        ),
        len(jobs),
    )


def _open(where: Place, device: str, session: Session, jobs: list[Job]) -> Fleet:
    if where.scheduler is not None:
        from groupbench.operators.fleet.dask import DaskFleet

        plugins = jobs[0].plugins if jobs else ()
        return DaskFleet(where.scheduler, device, where.hardware, plugins=plugins, budget_s=session.budget_s)
    if where.slurm is not None:
        from groupbench.operators.fleet import slurm

        records = session.records_path or Path("groupbench.jsonl")
        folder = records.with_name(f"{records.name}.slurm")
        return slurm.SlurmFleet(
            slurm.executor(folder, device, slurm.parameters(where.slurm)), budget_s=session.budget_s
        )
    from groupbench.operators.fleet import local

    found, imports = local.slots(where.gpus or "all", device), executor.imports(jobs)
    return local.LocalFleet(found, named=where.named, budget_s=session.budget_s, imports=imports, say=session.say)


def _host(where: Place, fleet: Fleet) -> str:
    if where.slurm is not None:
        return "built-in host through SLURM"
    through = f" behind {where.scheduler}" if where.scheduler else ""
    return f"built-in host on {counted(len(fleet.cards), 'card')}{through}"


def _device(device: str) -> Any:
    return "cuda" if device == "cuda" else "cpu"
