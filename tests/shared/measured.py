"""Measure cells in processes of their own, without a session."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from groupbench.operators import executor, registry
from groupbench.operators.executor import Machine, Progress
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.wire import Job
from groupbench.tracker.facts.record import Commit, Environment, Record, Run

RUN = Run(id="r", started=datetime(2026, 1, 1, tzinfo=UTC), commit=Commit(hash="c" * 40))
CPU = Machine(Environment(device="cpu", memory_mib=64_000), None)


def measure(
    jobs: Sequence[Job], timeout_s: float = 300.0, machine: Machine = CPU, progress: Progress | None = None
) -> list[Record]:
    return list(executor.execute(jobs, machine, RUN, timeout_s, progress or Progress()))


def measure_plugin(plugin: Path, name: str, device: str = "cpu") -> dict[str, Record]:
    """Return the records of all backends on the operator's first shape in suite smoke, by backend."""
    made = registry.get_operator(name, (str(plugin),))
    shape, dtype = str(made.suites["smoke"][0]), "fp16" if "fp16" in made.dtypes else made.dtypes[0]
    facts = {"protocol": Protocol(bursts=2, samples=2), "plugins": (str(plugin),), "interpreted": device == "cpu"}
    jobs = [Job(name, backend.name, shape, dtype, device, **facts) for backend in made.backends]
    machine = CPU if device == "cpu" else executor.probe(device)
    return {record.cell.backend: record for record in measure(jobs, machine=machine)}
