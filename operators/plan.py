"""What a run measures: the product of operators, shapes, backends, dtypes, as a list of jobs.

From the command line's flags, or from a plan: the `[[measure]]` of a groupbench.toml (tracker/project.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from groupbench.operators.catalog import trace
from groupbench.operators.errors import UsageError
from groupbench.operators.measure.cell import Job
from groupbench.operators.measure.costs import CHEAP, COLD
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.selection import select_dtypes, select_mode, select_shapes
from groupbench.operators.measure.texts import storable
from groupbench.operators.operator import Operator
from groupbench.operators.registry import get_backend, get_operator
from groupbench.tracker import project
from groupbench.tracker.project import PlanEntry

TRACE_STEPS = 16
"""Of a routing trace, evenly over time."""


@dataclass(frozen=True)
class Plan:
    """A plan file as it stands for one device."""

    name: str
    selections: list[Selection]
    budget_s: float | None = None


@dataclass(frozen=True)
class Selection:
    """Which cells of one operator; empty tuples mean the operator's own default."""

    operator: str
    suites: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    mode: str = "fwd"
    protocol: Protocol = field(default_factory=Protocol)
    seed: int = 0
    input_ids: tuple[int, ...] = ()
    num_inputs: int | None = None
    rtol: float | None = None
    atol: float | None = None
    plugins: tuple[str, ...] = ()
    costs: tuple[str, ...] = CHEAP
    routing_trace: Path | None = None
    trace_steps: int = TRACE_STEPS


def named(
    ops: tuple[str, ...], only: tuple[str, ...], skip: tuple[str, ...], plugins: tuple[str, ...]
) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Of what --only and --skip name, each operator's own: a name that some other has is none of its faults.

    Raises UsageError where --only leaves an operator nothing.
    """
    backends = {op: [b.name for b in get_operator(op, plugins).backends] for op in ops}
    known = {name for names in backends.values() for name in names}

    def own(op: str, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name in backends[op] or name not in known)

    for op in ops:
        if only and not own(op, only):
            raise UsageError(f"{op} has none of the backends of --only; there are: {', '.join(backends[op])}")
    return {op: (own(op, only), own(op, skip)) for op in ops}


def integer(text: str) -> int:
    """An input's number. Raises UsageError."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--input-id {text!r} is no number") from None


def read_plan(path: Path, device: str, plugins: tuple[str, ...] = ()) -> Plan:
    """Return what a plan file holds for this device, with its plugins and further ones. Raises UsageError."""
    try:
        found = project.load(path)
    except project.ProjectError as error:
        raise UsageError(f"plan {error.message}") from error
    plugins = found.plugins(plugins)
    selections = [
        Selection(
            operator=entry.operator,
            suites=entry.suites,
            shapes=entry.shapes,
            dtypes=entry.dtypes,
            only=entry.only,
            skip=entry.skip,
            mode=entry.mode,
            protocol=_protocol(entry),
            seed=entry.seed,
            plugins=plugins,
            costs=entry.costs,
        )
        for entry in found.settings.measure
        if entry.device in (None, device)
    ]
    if not selections:
        raise UsageError(f"plan {path}: nothing in it is for device {device}")
    return Plan(storable(found.settings.name), selections, found.budget_s)


def _protocol(entry: PlanEntry) -> Protocol:
    given: dict[str, Any] = {
        "name": entry.protocol,
        "bursts": entry.bursts,
        "samples": entry.samples,
        "idle_s": entry.idle,
    }
    return Protocol(**{name: value for name, value in given.items() if value is not None})


def jobs(selection: Selection, device: str, interpreted: bool) -> list[Job]:
    """The cells of a selection: shapes outermost, so that backends of one shape stand together.

    Raises UsageError for anything that does not exist.
    """
    operator = select_mode(get_operator(selection.operator, selection.plugins), selection.mode)
    dtypes = select_dtypes(operator, selection.dtypes, device)
    names = [get_backend(operator, name).name for name in selection.only or [b.name for b in operator.backends]]
    skipped = {get_backend(operator, name).name for name in selection.skip}
    names = [name for name in dict.fromkeys(names) if name not in skipped]
    if not names:
        raise UsageError("--only and --skip leave no backend")
    shapes = shapes_of(operator, selection, device)
    # What compiling takes hardly depends on the shape: one each is enough, and a fresh process takes seconds.
    warm = tuple(name for name in selection.costs if name != COLD)
    return [
        Job(
            operator=operator.name,
            backend=name,
            shape=str(shape),
            dtype=dtype,
            device=device,
            mode=selection.mode,
            seed=selection.seed,
            interpreted=interpreted,
            protocol=selection.protocol,
            rtol=selection.rtol,
            atol=selection.atol,
            plugins=selection.plugins,
            costs=selection.costs if shape is shapes[0] else warm,
            problem=shape,
        )
        for shape, dtype, name in itertools.product(shapes, dtypes, names)
    ]


def shapes_of(operator: Operator, selection: Selection, device: str) -> list[Any]:
    """Return the shapes that suites, --shapes, --input-id and --num-inputs pick, each once. Raises UsageError.

    With a routing trace, each stands for as many as there are steps with rows for it.
    """
    shapes = select_shapes(operator, selection.suites, selection.shapes, device)
    if selection.routing_trace is not None:
        shapes = _on_trace(operator, shapes, trace.spread(trace.read(selection.routing_trace), selection.trace_steps))
    return [shapes[i] for i in input_ids(len(shapes), selection.input_ids, selection.num_inputs)]


def _on_trace(operator: Operator, shapes: list[Any], steps: list[trace.Step]) -> list[Any]:
    """Raises UsageError where there is no routing, or no step has a row for any shape."""
    if operator.on_trace is None:
        raise UsageError(f"{operator.name} has no routing, so --routing-trace says nothing about it")
    try:
        found = [operator.on_trace(shape, step) for shape in shapes for step in steps]
    except ValueError as error:
        raise UsageError(f"{operator.name}, --routing-trace: {error}") from error
    found = list({str(shape): shape for shape in found if shape.M}.values())
    if not found:
        raise UsageError("--routing-trace: no row of it falls to the experts of the shapes")
    return found


def input_ids(count: int, ids: tuple[int, ...], number: int | None) -> list[int]:
    """TritonBench's --input-id and --num-inputs: several ids, or a first one and how many. Raises UsageError."""
    bad = [i for i in ids if not 0 <= i < count]
    if bad:
        raise UsageError(f"--input-id {bad[0]}: there are inputs 0 to {count - 1}")
    if number is not None and (number < 1 or len(ids) > 1):
        raise UsageError("--num-inputs is at least 1 and goes with at most one --input-id")
    if len(ids) > 1:
        return list(dict.fromkeys(ids))
    first = ids[0] if ids else 0
    return list(range(first, count if number is None else min(count, first + number)))
