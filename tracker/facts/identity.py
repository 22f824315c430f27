"""A series' identity: the fields in which all points agree. And the toolchain in the name of a run's plan.

Each field is one of the record's cell, or `hardware`: the GPU model, or the processor model if the device is the CPU.
"""

from __future__ import annotations

from functools import lru_cache
from operator import attrgetter
from typing import Any

from groupbench.tracker.facts.environment import digest, hardware_class
from groupbench.tracker.facts.record import Cell, Environment, Record

IDENTITY = ("operator", "backend", "mode", "dtype", "shape", "host", "protocol", "hardware", "seed")
"""The fields in the order of hashing. A different order would change every identity."""

SHOWN = ("operator", "backend", "mode", "shape", "dtype", "hardware", "host", "protocol", "seed")
"""The same fields in the order of tables and files."""

PROBLEM = ("operator", "shape", "dtype", "mode", "host", "protocol", "hardware", "seed")
"""All fields but the backend, in sorting order. Backends are compared if these are equal."""

EXACT = ("operator", "backend", "mode", "dtype", "host", "protocol")
"""Fields that filters match exactly. Shape and hardware may be patterns."""

OF_CELL = tuple(name for name in IDENTITY if name != "hardware")

OF_PROBLEM = tuple(name for name in OF_CELL if name not in ("backend", "host"))
"""Fields that say which result a cell computes and how it is timed, without backend and host."""

TOOLCHAIN_MARK = "@"
"""Separates the name of a plan from that of its toolchain."""

_of_cell = attrgetter(*OF_CELL)


def cell_fields(cell: Cell) -> tuple[Any, ...]:
    """Return the cell fields in the series' identity. They distinguish the cells of a run."""
    return _of_cell(cell)


def series_fields(cell: Cell, environment: Environment) -> dict[str, Any]:
    """Return the fields of a cell's series identity by name, in the order of IDENTITY."""
    values = dict(zip(OF_CELL, cell_fields(cell), strict=True))
    values["hardware"] = hardware_class(environment)
    return {name: values[name] for name in IDENTITY}


def series_identity(record: Record) -> str:
    """Return the hash shared by all points of a series."""
    return _identity(record.cell, hardware_class(record.environment))


@lru_cache(maxsize=1 << 15)  # most runs have the series of the run before
def _identity(cell: Cell, hardware: str) -> str:
    return identity_of(dict(zip((*OF_CELL, "hardware"), (*cell_fields(cell), hardware), strict=True)))


def identity_of(fields: dict[str, Any]) -> str:
    """Return the hash of the identity fields."""
    return digest([fields[name] for name in IDENTITY])


def plan_with(plan: str, toolchain: str) -> str:
    """Return the name of a plan that is measured with one of the project's toolchains."""
    return f"{plan}{TOOLCHAIN_MARK}{toolchain}"


def toolchain_of(plan: str | None) -> str:
    """Return the toolchain in the name of a plan; empty for the interpreter that ran the night."""
    return (plan or "").partition(TOOLCHAIN_MARK)[2]
