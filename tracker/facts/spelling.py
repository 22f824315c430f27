"""One spelling for one cell: a second one would begin another series, without the history of the first."""

from __future__ import annotations

import re

import msgspec

from groupbench.tracker.facts.record import Cell

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


def canonical(cell: Cell) -> Cell:
    """Return the cell in its usual spelling: nothing without width, `bf16`, and no spaces in sizes."""
    dtype = _visible(cell.dtype)
    dtype = dtype.lower() if _WORD.fullmatch(dtype) else dtype
    fields = {
        "operator": _visible(cell.operator),
        "backend": _visible(cell.backend),
        "mode": _visible(cell.mode),
        "dtype": DTYPES.get(dtype, dtype),
        "shape": _sizes(_visible(cell.shape)),
    }
    changed = {name: value for name, value in fields.items() if value and value != getattr(cell, name)}
    return msgspec.structs.replace(cell, **changed) if changed else cell


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
