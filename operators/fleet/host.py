"""Measure with the built-in host on several GPUs: `--gpus`, `--scheduler` and `--slurm`."""

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
from groupbench.operators.measure.wire import Job
from groupbench.operators.plan import Selection
from groupbench.operators.session import Session
from groupbench.tracker.facts.record import Environment
from groupbench.tracker.text.wording import counted


@dataclass(frozen=True)
class DeviceChoice:
    """The GPUs that the user chose to measure on. By default it is one GPU of this machine, without a fleet."""

    gpus: str | None = None
    scheduler: str | None = None
    slurm: str | None = None
    hardware: str | None = None
    named: bool = True  # False if all GPUs are used by default

    @property
    def far(self) -> bool:
        return self.scheduler is not None or self.slurm is not None

    def __bool__(self) -> bool:
        return self.gpus is not None or self.far


def place(options: dict[str, Any]) -> DeviceChoice:
    """Return the choice that the options make. Raises UsageError if they contradict each other."""
    chosen = DeviceChoice(options["gpus"], options["scheduler"], options["slurm"], options["hardware"])
    names = [name for name in ("gpus", "scheduler", "slurm") if options[name] is not None]
    if len(names) > 1:
        raise UsageError(f"--{names[0]} and --{names[1]} both choose where to measure: use one")
    if chosen.hardware is not None and not chosen.far:
        raise UsageError("--hardware selects GPUs of a fleet: use it with --scheduler or --slurm")
    return chosen


def for_plan(device: str) -> DeviceChoice:
    """Return the default choice for a plan: all GPUs, if there are several."""
    from groupbench.operators.fleet import slots

    if device != "cuda":
        return DeviceChoice()
    try:
        several = len(slots.visible_gpus()) > 1
    except UsageError:  # GPUs cannot be counted, so only the one that torch opens is used
        several = False
    return DeviceChoice(gpus="all", named=False) if several else DeviceChoice()


def measure(selections: list[Selection], device: str, session: Session, where: DeviceChoice) -> int:
    """Measure, show and write the selections. Returns the exit code."""
    jobs = builtin.list_jobs(selections, device)
    history = {}
    if session.previous is not None:
        late = resume.left_out(session.previous)
        jobs = executor.first_of(jobs, lambda job: resume.key_of_job(job) in late)
        history = batches.before(resume.read_run(session.previous))
    fleet = _open(where, device, session, jobs)
    try:
        first = fleet.cards[0].machine.environment if fleet.cards else Environment(device=_device(device))
        session.open(_host(where, fleet), first, fleet=True, planned=jobs)
        jobs = resume.not_done(jobs, session.records)
        fleet.history = history | batches.before(session.records)
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


def _open(where: DeviceChoice, device: str, session: Session, jobs: list[Job]) -> Fleet:
    plugins = jobs[0].plugins if jobs else ()
    if where.scheduler is not None:
        from groupbench.operators.fleet.dask import DaskFleet

        return DaskFleet(where.scheduler, device, where.hardware, plugins=plugins, budget_s=session.budget_s)
    if where.slurm is not None:
        return _open_slurm(where.slurm, where.hardware, device, session, plugins)
    from groupbench.operators.fleet import local, slots

    chosen = slots.choose(where.gpus or "all", device)
    return local.LocalFleet(chosen, named=where.named, planned=jobs, budget_s=session.budget_s, say=session.say)


def _open_slurm(text: str, hardware: str | None, device: str, session: Session, plugins: tuple[str, ...]) -> Fleet:
    from groupbench.operators.fleet import slurm

    records = session.records_path or Path("groupbench.jsonl")
    settings = slurm.parameters(text)
    local = settings.get("cluster") == slurm.LOCAL
    interface, jobs = settings.pop("interface", None), settings.get("array_parallelism", slurm.JOBS)
    return slurm.SlurmFleet(
        slurm.executor(records.with_name(f"{records.name}.slurm"), device, settings),
        device,
        hardware,
        jobs=1 if local else jobs,
        interface=interface,
        local=local,
        plugins=plugins,
        say=session.say,
        budget_s=session.budget_s,
    )


def _host(where: DeviceChoice, fleet: Fleet) -> str:
    if where.slurm is not None:
        return "built-in host through SLURM"
    through = f" behind {where.scheduler}" if where.scheduler else ""
    return f"built-in host on {counted(len(fleet.cards), 'GPU')}{through}"


def _device(device: str) -> Any:
    return "cuda" if device == "cuda" else "cpu"
