"""Select a run's cells: the product of operators, shapes, backends and dtypes, as a job list.

The selection comes from the command line, or from a plan: `[[measure]]` in a groupbench.toml (tracker/project.py).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from groupbench.operators.errors import PlanError, UsageError
from groupbench.operators.measure.costs import CHEAP, COLD
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.selection import select_dtypes, select_mode, select_shapes
from groupbench.operators.measure.texts import storable
from groupbench.operators.measure.wire import Job
from groupbench.operators.operator import Operator
from groupbench.operators.registry import check_baselines, get_backend, get_operator, plugin_backends
from groupbench.tracker import project
from groupbench.tracker.project import PlanEntry
from groupbench.tracker.text.wording import counted
from groupbench.tracker.tools import traces

TRACE_STEPS = 16
"""Steps to take from a routing trace, evenly spaced in time."""


@dataclass(frozen=True)
class Plan:
    """A plan file's part for one device.

    Attributes:
        builds: Whether it has a `setup`.
    """

    name: str
    selections: list[Selection]
    budget_s: float | None = None
    builds: bool = False


@dataclass(frozen=True)
class Selection:
    """One operator's selected cells; an empty tuple selects the operator's default.

    Attributes:
        place: The entry of a plan that selects them, for errors; empty for the command line.
    """

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
    place: str = field(default="", compare=False)


def named(
    ops: tuple[str, ...],
    only: tuple[str, ...],
    skip: tuple[str, ...],
    plugins: tuple[str, ...],
    baseline: str | None = None,
) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return, by operator, the names in --only and --skip without other operators' backends.

    An unknown name is kept and reported later. Raises UsageError if --only leaves an operator without a backend, or if
    one does not have the `baseline`.
    """
    for op in ops if baseline else ():
        get_backend(get_operator(op, plugins), baseline or "")
    backends = {op: [b.name for b in get_operator(op, plugins).backends] for op in ops}
    of_any = {name for names in backends.values() for name in names}

    def names_for(op: str, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name for name in names if name in backends[op] or name not in of_any)

    for op in ops:
        if only and not names_for(op, only):
            raise UsageError(f"{op} does not have the backends in --only; its backends: {', '.join(backends[op])}")
    return {op: (names_for(op, only), names_for(op, skip)) for op in ops}


def integer(text: str) -> int:
    """Parse an input number. Raises UsageError."""
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"--input-id {text!r} is not a number") from None


def read_plan(path: Path, device: str, plugins: tuple[str, ...] = ()) -> Plan:
    """Read a plan file's part for this device, with the plan's plugins and the given ones. Raises UsageError."""
    try:
        loaded = project.load(path)
    except project.ProjectError as error:
        raise PlanError(f"plan {error.message}") from error
    plugins = loaded.plugins(plugins)
    selections = [
        _selection(entry, plugins, f"{path.name}, [[measure]] {number}")
        for number, entry in enumerate(loaded.settings.measure, 1)
        if entry.device in (None, device)
    ]
    if not selections:
        raise PlanError(f"plan {path}: no entry in it is for device {device}")
    return Plan(storable(loaded.settings.name), selections, loaded.budget_s, bool(loaded.settings.setup))


def _selection(entry: PlanEntry, plugins: tuple[str, ...], place: str) -> Selection:
    """Return an entry's cells. Raises PlanError."""
    with _placed(place):
        protocol = _protocol(entry)
    return Selection(
        operator=entry.operator,
        suites=entry.suites,
        shapes=entry.shapes,
        dtypes=entry.dtypes,
        only=entry.only,
        skip=entry.skip,
        mode=entry.mode,
        protocol=protocol,
        seed=entry.seed,
        plugins=plugins,
        costs=entry.costs,
        place=place,
    )


@contextmanager
def _placed(place: str) -> Iterator[None]:
    """Put the place in the plan, if any, in front of a UsageError."""
    try:
        yield
    except UsageError as error:
        if not place:
            raise
        raise PlanError(f"{place}: {error}") from error


def _protocol(entry: PlanEntry) -> Protocol:
    values: dict[str, Any] = {
        "name": entry.protocol,
        "bursts": entry.bursts,
        "samples": entry.samples,
        "idle_s": entry.idle,
    }
    return Protocol(**{name: value for name, value in values.items() if value is not None})


def planned(selections: Sequence[Selection], device: str) -> tuple[Job, ...]:
    """Return the cells of the selections, each once, with the shapes as text. Raises UsageError as `jobs` does."""
    cells = (job for selection in selections for job in jobs(selection, device, interpreted=device == "cpu"))
    return tuple(dict.fromkeys(replace(job, problem=None) for job in cells))


def jobs(selection: Selection, device: str, interpreted: bool) -> list[Job]:
    """Return a selection's cells by shape, dtype and backend, so a shape's backends run together.

    Raises UsageError for an unknown operator, backend, suite, shape or dtype.
    """
    plugin_backends(selection.plugins)  # reports one that does not load, without an entry
    with _placed(selection.place):
        check_baselines(selection.operator, selection.plugins)
        return _jobs(selection, device, interpreted)


def _jobs(selection: Selection, device: str, interpreted: bool) -> list[Job]:
    operator = select_mode(get_operator(selection.operator, selection.plugins), selection.mode)
    dtypes = select_dtypes(operator, selection.dtypes, device)
    names = [get_backend(operator, name).name for name in selection.only or [b.name for b in operator.backends]]
    skipped = {get_backend(operator, name).name for name in selection.skip}
    names = [name for name in dict.fromkeys(names) if name not in skipped]
    if not names:
        raise UsageError("no backend to measure: --skip excludes every backend in --only")
    shapes = shapes_of(operator, selection, device)
    # Compile time hardly depends on the shape, so one measurement per backend is enough: a new process takes seconds.
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
        if selection.only or operator.is_default(name, shape)
    ]


def shapes_of(operator: Operator, selection: Selection, device: str) -> list[Any]:
    """Return the shapes selected by suites, --shapes, --input-id and --num-inputs, without duplicates.

    With a routing trace, each shape is replaced by one for every step with rows for it. Raises UsageError.
    """
    shapes = select_shapes(operator, selection.suites, selection.shapes, device)
    if selection.routing_trace is not None:
        try:
            steps = traces.spread(traces.read(selection.routing_trace), selection.trace_steps)
        except ValueError as error:
            raise UsageError(str(error)) from error
        shapes = _on_trace(operator, shapes, steps)
    return [shapes[i] for i in input_ids(len(shapes), selection.input_ids, selection.num_inputs)]


def _on_trace(operator: Operator, shapes: list[Any], steps: list[traces.TraceStep]) -> list[Any]:
    """Return the shapes with each step's rows. Raises UsageError without routing, or if no step has rows."""
    if operator.on_trace is None:
        raise UsageError(f"--routing-trace: {operator.name} has no routing; remove the option")
    try:
        routed = [operator.on_trace(shape, step) for shape in shapes for step in steps]
    except ValueError as error:
        raise UsageError(f"{operator.name}, --routing-trace: {error}") from error
    kept = list({str(shape): shape for shape in routed if shape.M}.values())
    if not kept:
        raise UsageError("--routing-trace: the trace routes no row to the experts of the shapes")
    idle = sum(not shape.M for shape in routed)
    if idle:
        print(
            f"tritonbench: --routing-trace: {idle} of {counted(len(routed), 'problem')} left out: "
            "the step routes no row to the experts of the shape",
            file=sys.stderr,
        )
    return kept


def input_ids(count: int, ids: tuple[int, ...], number: int | None) -> list[int]:
    """Return the inputs selected by --input-id and --num-inputs: several ids, or a first id and a count.

    Raises UsageError for an id out of range, or several ids with a count.
    """
    bad = [i for i in ids if not 0 <= i < count]
    if bad:
        raise UsageError(f"--input-id {bad[0]}: not one of the inputs, 0 to {count - 1}")
    if number is not None and (number < 1 or len(ids) > 1):
        raise UsageError("--num-inputs must be at least 1, with at most one --input-id")
    if len(ids) > 1:
        return list(dict.fromkeys(ids))
    first = ids[0] if ids else 0
    return list(range(first, count if number is None else min(count, first + number)))
