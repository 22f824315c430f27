"""The built-in host: measures operators with nothing but groupbench installed."""

from __future__ import annotations

from groupbench.operators import executor, foreign, plan, resume
from groupbench.operators.measure.texts import storable
from groupbench.operators.measure.wire import Job
from groupbench.operators.plan import Selection
from groupbench.operators.session import Session


def list_jobs(selections: list[Selection], device: str) -> list[Job]:
    """Return the cells of the selections, each once."""
    plugins = (plugin for selection in selections for plugin in selection.plugins)
    return list(foreign.ask(plan.planned, selections, device, plugins=plugins))


def record_failure(selections: list[Selection], device: str, session: Session, reason: str) -> int:
    """Write a record for every cell with the reason why the commit could not be measured. Return the exit code."""
    jobs = list_jobs(selections, device)
    machine = executor.probe(device)
    session.shows_table = False
    session.open("built-in host", machine.environment, planned=jobs)
    jobs = resume.not_done(jobs, session.records)
    return session.collect(
        lambda run, progress: (executor.record_of(job, machine, run, "error", storable(reason)) for job in jobs),
        len(jobs),
    )


def measure(selections: list[Selection], device: str, session: Session) -> int:
    """Measure, show and record the selections. Return the exit code."""
    jobs = list_jobs(selections, device)
    late = resume.left_out(session.previous) if session.previous is not None else frozenset()
    jobs = executor.first_of(jobs, lambda job: resume.key_of_job(job) in late)
    machine = executor.probe(device)
    session.open("built-in host", machine.environment, planned=jobs)
    jobs = resume.not_done(jobs, session.records)
    return session.collect(
        lambda run, progress: executor.execute(jobs, machine, run, session.timeout_s, progress, session.budget_s),
        len(jobs),
    )
