"""What makes two results points of one series: the fields of its identity, written out here alone.

A field is one of the record's cell, or `hardware`: the model of the GPU, or of the processor where that is the device.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from groupbench.tracker.environment import digest, hardware_class
from groupbench.tracker.record import Cell, Environment, Record

IDENTITY = ("operator", "backend", "mode", "dtype", "shape", "host", "protocol", "hardware", "seed")
"""In the order in which their values are hashed: another order would make another series of each."""

SHOWN = ("operator", "backend", "mode", "shape", "dtype", "hardware", "host", "protocol", "seed")
"""The same, in the order in which tables and files list them."""

PROBLEM = ("operator", "shape", "dtype", "mode", "host", "protocol", "hardware", "seed")
"""All but the backend, in the order in which rows are sorted: backends are compared where these are equal."""

EXACT = ("operator", "backend", "mode", "dtype", "host", "protocol")
"""Fields that filters take by exact name. A shape and the hardware may be patterns."""

OF_CELL = tuple(name for name in IDENTITY if name != "hardware")

_of_cell = attrgetter(*OF_CELL)


def series_fields(cell: Cell, environment: Environment) -> dict[str, Any]:
    """Return the identity of a cell's series: the value of each field by name, in the order of IDENTITY."""
    values = dict(zip(OF_CELL, _of_cell(cell), strict=True))
    values["hardware"] = hardware_class(environment)
    return {name: values[name] for name in IDENTITY}


def series_identity(record: Record) -> str:
    """Return the hash that all points of one series share."""
    return identity_of(series_fields(record.cell, record.environment))


def identity_of(fields: dict[str, Any]) -> str:
    """Return the hash of the values of IDENTITY's fields."""
    return digest([fields[name] for name in IDENTITY])
