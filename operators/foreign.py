"""Ask about cells and their plugins without importing a plugin here.

The command measures, judges and records, so no code of a plugin runs in its process: a plugin could start a thread
there, or replace a function. Another process, which is confined like a cell's, imports the plugins and answers with
data. Without plugins, the answer needs no other process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from groupbench.operators import plugins as plugin_sources
from groupbench.operators import registry
from groupbench.operators.measure.selection import LargeModule, imports_of
from groupbench.operators.measure.wire import HeldTo, Job
from groupbench.operators.measure.worker import call
from groupbench.operators.operator import Operator, runs_everywhere


class Facts(msgspec.Struct, frozen=True):
    """Facts about a cell for the process that measures.

    Attributes:
        dims, flops, min_bytes: Of the problem.
        packages: Distributions whose code the backend runs.
        is_baseline: Whether it is the baseline of the shape.
        is_asked: Whether the backend may be unavailable on a target.
        plugins: Imported by the cell's process; none for a backend of groupbench.
        imports: Large modules of the cell's process.
        held_to: Facts for the judge.
    """

    dims: dict[str, int]
    flops: int
    min_bytes: int
    packages: tuple[str, ...]
    is_baseline: bool
    is_asked: bool
    plugins: tuple[str, ...]
    imports: tuple[LargeModule, ...]
    held_to: HeldTo


def ask(function: Callable[..., Any], *arguments: Any, plugins: Iterable[str]) -> Any:
    """Return the function's result, from another process if plugins are named or installed.

    Raises UsageError as the function does, and WorkerLost if a plugin ends the process.
    """
    if any(plugins) or any(plugin_sources.offered().values()):
        return call(function, *arguments)
    return function(*arguments)


_facts: dict[Job, Facts] = {}


def learn(jobs: Iterable[Job]) -> None:
    """Find the facts of these jobs, with one process for all jobs with the same plugins."""
    unknown: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        if job not in _facts:
            unknown.setdefault(job.plugins, []).append(job)
    for plugins, group in unknown.items():
        answers = ask(describe, group, plugins=plugins)
        for job, facts in zip(group, answers, strict=True):
            # A plugin's answer about a backend of groupbench does not count.
            if not facts.plugins and job.operator in registry.CATALOG:
                facts = _described(job, registry.catalog_operator(job.operator), ())
            _facts[job] = facts


def facts_of(job: Job) -> Facts:
    """Return the facts of a job."""
    learn([job])
    return _facts[job]


def describe(jobs: Sequence[Job]) -> tuple[Facts, ...]:
    """Return the facts of these jobs. Imports their plugins in this process."""
    return tuple(
        _described(
            job,
            registry.get_operator(job.operator, job.plugins),
            registry.plugins_of(job.operator, job.backend, job.plugins),
            registry.home_of(job.operator, job.plugins),
        )
        for job in jobs
    )


def _described(job: Job, operator: Operator, plugins: tuple[str, ...], home: tuple[str, ...] = ()) -> Facts:
    operator = operator.in_mode(job.mode)
    shape, backend = job.shape_of(operator), registry.get_backend(operator, job.backend)
    return Facts(
        dims={name: int(size) for name, size in shape.dims.items()},
        flops=int(operator.flops(shape)),
        min_bytes=int(operator.min_bytes(shape, job.dtype)),
        packages=backend.packages,
        is_baseline=job.backend == operator.baseline_of(shape),
        is_asked=backend.unavailable is not runs_everywhere or backend.kind != "torch",
        plugins=plugins,
        imports=imports_of(backend, plugins),
        held_to=HeldTo(backend.tolerance, home),
    )
