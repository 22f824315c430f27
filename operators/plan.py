"""What a run measures: the product of operators, shapes, backends, dtypes, as a list of jobs.

From the command line's flags, or from a plan file (TOML) that says what a night holds:

    name = "nightly"
    budget_minutes = 60         # optional: what has not begun by then is left out, and recorded as skipped

    [[measure]]
    operator = "grouped_gemm"
    suites = ["smoke"]          # and/or shapes = ["G,M,N,K", ...]
    dtypes = ["fp16"]
    device = "cpu"              # this entry is for machines without a GPU; "cuda" for those with one; absent: both
    only = ["torch_loop"]       # optional, as are skip, protocol, bursts, samples, idle, seed, mode
"""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from groupbench.operators.errors import UsageError
from groupbench.operators.measure.cell import Job
from groupbench.operators.measure.protocol import Protocol
from groupbench.operators.measure.selection import select_dtypes, select_mode, select_shapes
from groupbench.operators.measure.texts import storable
from groupbench.operators.operator import Operator
from groupbench.operators.registry import get_backend, get_operator


class Entry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One `[[measure]]` of a plan file."""

    operator: str
    suites: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    device: str | None = None
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    mode: str = "fwd"
    protocol: str = "cooled"
    bursts: int = Protocol.bursts
    samples: int = Protocol.samples
    idle: float = Protocol.idle_s
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class PlanFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    measure: tuple[Entry, ...]
    budget_minutes: Annotated[float, msgspec.Meta(gt=0, le=100_000)] | None = None


@dataclass(frozen=True)
class Plan:
    """A plan file as it stands for one device."""

    name: str
    selections: list[Selection]
    budget_minutes: float | None = None


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
    """What a plan file holds for this device. Raises UsageError."""
    try:
        plan = msgspec.convert(tomllib.loads(path.read_text()), PlanFile, strict=True)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"plan {path}: {error}") from error
    for entry in plan.measure:
        if entry.device not in (None, "cuda", "cpu"):
            raise UsageError(f"plan {path}: device {entry.device!r} is neither cuda nor cpu")
    selections = [
        Selection(
            operator=entry.operator,
            suites=entry.suites,
            shapes=entry.shapes,
            dtypes=entry.dtypes,
            only=entry.only,
            skip=entry.skip,
            mode=entry.mode,
            protocol=Protocol(entry.protocol, entry.bursts, entry.samples, idle_s=entry.idle),
            seed=entry.seed,
            plugins=plugins,
        )
        for entry in plan.measure
        if entry.device in (None, device)
    ]
    if not selections:
        raise UsageError(f"plan {path}: nothing in it is for device {device}")
    return Plan(storable(plan.name), selections, plan.budget_minutes)


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
            problem=shape,
        )
        for shape, dtype, name in itertools.product(shapes, dtypes, names)
    ]


def shapes_of(operator: Operator, selection: Selection, device: str) -> list[Any]:
    """Return the shapes that suites, --shapes, --input-id and --num-inputs pick, each once. Raises UsageError."""
    shapes = select_shapes(operator, selection.suites, selection.shapes, device)
    return [shapes[i] for i in input_ids(len(shapes), selection.input_ids, selection.num_inputs)]


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
