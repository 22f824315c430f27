"""One spelling for one cell: a second one would begin another series, without the history of the first."""

from __future__ import annotations

import re
from datetime import datetime
from functools import lru_cache

import msgspec

from groupbench.tracker.facts.fleeting import settled, settled_machine, suspect
from groupbench.tracker.facts.record import Cell, Environment

DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "f16": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "f32": "fp32",
    "float64": "fp64",
    "double": "fp64",
    "f64": "fp64",
}
"""Other names of dtypes, in lower case."""

_WITHOUT_WIDTH = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))
_WORD = re.compile(r"\w+", re.ASCII)
_SIZE = re.compile(r"\s*\w+\s*(=.*)?")
_LOOSE = re.compile(r"\s*([,=|])\s*")


def canonical(cell: Cell, when: datetime | None = None) -> Cell:
    """Return the cell in its usual spelling: nothing without width, `bf16`, no spaces in sizes, nothing that changes.

    Args:
        cell: As a file has it.
        when: The start of the run, whose date no name keeps.
    """
    if _is_canonical(cell):
        return cell
    names = _spelled(cell.operator, cell.backend, cell.mode, cell.dtype, cell.shape)
    if any(suspect(name) for name in (names[0], names[1], names[4])):
        names = (_settled(names[0], when), _settled(names[1], when), *names[2:4], _sizes(_settled(names[4], when)))
    changed = {name: value for name, value in zip(_NAMES, names, strict=True) if value != getattr(cell, name) and value}
    return msgspec.structs.replace(cell, **changed) if changed else cell


_NAMES = ("operator", "backend", "mode", "dtype", "shape")


@lru_cache(maxsize=1 << 15)  # most runs have the cells of the run before
def _is_canonical(cell: Cell) -> bool:
    """Return whether a cell has its usual spelling in every run."""
    before = (cell.operator, cell.backend, cell.mode, cell.dtype, cell.shape)
    return _spelled(*before) == before and not any(map(suspect, (cell.operator, cell.backend, cell.shape)))


def _spelled(operator: str, backend: str, mode: str, dtype: str, shape: str) -> tuple[str, str, str, str, str]:
    dtype = _visible(dtype)
    dtype = dtype.lower() if _WORD.fullmatch(dtype) else dtype
    return _visible(operator), _visible(backend), _visible(mode), DTYPES.get(dtype, dtype), _sizes(_visible(shape))


def _settled(text: str, when: datetime | None) -> str:
    return settled(text, when)[0] or (text and "-")


def canonical_environment(environment: Environment) -> Environment:
    """Return the environment with a processor that later runs have too: not the id of a container."""
    cpu = environment.cpu
    if environment.device != "cpu" or cpu is None or (kept := settled_machine(cpu)) == cpu:
        return environment
    count = environment.cpu_count
    return msgspec.structs.replace(environment, cpu=kept or (f"{count} CPUs" if count else None))


def _sizes(shape: str) -> str:
    """Return a list of words and named sizes without spaces, and any other text unchanged."""
    return _LOOSE.sub(r"\1", shape) if all(_SIZE.fullmatch(part) for part in shape.split(",")) else shape


def sizes_of(shape: str) -> tuple[str, ...] | None:
    """Return the named sizes of a shape in alphabetical order, or None if any part has no name.

    Two shapes with the same sizes are the same problem: `M=32,N=64` and `N=64,M=32`.
    """
    parts = shape.split(",")
    return tuple(sorted(parts)) if len(parts) > 1 and all("=" in part for part in parts) else None


def _visible(text: str) -> str:
    """Return a text without characters that have no width, and without outer spaces."""
    return text.translate(_WITHOUT_WIDTH).strip(" \t")
