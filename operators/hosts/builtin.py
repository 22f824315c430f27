"""The built-in host: measures operators with nothing but groupbench installed."""

from __future__ import annotations

from collections.abc import Iterator

from groupbench.operators import executor, foreign, plan, resume
from groupbench.operators.executor import Progress
from groupbench.operators.measure.texts import storable
from groupbench.operators.measure.wire import Job
from groupbench.operators.plan import Selection
from groupbench.operators.session import Session
from groupbench.tracker.facts.record import Record, Run


def list_jobs(selections: list[Selection], device: str) -> list[Job]:
    """Return the cells of the selections, each once."""
    plugins = (plugin for selection in selections for plugin in selection.plugins)
    return list(foreign.ask(plan.planned, selections, device, plugins=plugins))


def measure(selections: list[Selection], device: str, session: Session, unmeasured: str | None = None) -> int:
    """Measure, show and record the selections. Return the exit code.

    Args:
        unmeasured: Why nothing is measured: each cell gets a record with this reason, and no table is shown.
    """
    jobs = list_jobs(selections, device)
    late = resume.left_out(session.previous) if session.previous is not None else frozenset()
    jobs = executor.first_of(jobs, lambda job: resume.key_of_job(job) in late)
    machine = executor.probe(device)
    session.shows_table = unmeasured is None
    session.open("built-in host", machine.environment, planned=jobs)
    jobs = resume.not_done(jobs, session.records)

    def produce(run: Run, progress: Progress) -> Iterator[Record]:
        if unmeasured is None:
            return executor.execute(jobs, machine, run, session.timeout_s, progress, session.budget_s)
        return (executor.record_of(job, machine, run, "error", storable(unmeasured)) for job in jobs)

    return session.collect(produce, len(jobs))
