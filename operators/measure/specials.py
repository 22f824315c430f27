"""Special values that a real caller could send, to find backends that are right on ordinary ones alone.

A row of an input gets a NaN, an infinity, zeros or subnormal numbers; the rows of a matrix, and the elements of a
vector, get magnitudes between 1/8192 and 8192 of the ordinary ones. A kernel that loses a NaN, masks with a product
instead of a selection, or quantises in secret differs here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from groupbench.operators.measure.deferred import Tensor, torch
from groupbench.operators.measure.given import named_tensors


@dataclass(frozen=True)
class Magnitudes:
    """The tuned numbers of this module for a dtype, from the range: the exponents of fp16 have 5 bits, of fp64 11."""

    spread: int  # largest binary exponent of a row's magnitude: products of fp16 would overflow beyond 2 ** 3
    smallest: float  # below which rows are not compared relative to their own: near the subnormal ones, bits are lost


MAGNITUDES = {
    "float16": Magnitudes(3, 2.0**-8),
    "bfloat16": Magnitudes(13, 2.0**-100),
    "float32": Magnitudes(13, 2.0**-100),
    "float64": Magnitudes(13, 2.0**-900),
}
ROWS_PER_SPECIAL = 4
"""At most one row in ROWS_PER_SPECIAL is special, so that most of the output has ordinary numbers."""
MAGNITUDES_DRAWN = 1 << 16
"""Most magnitudes that are drawn, on the CPU. They repeat in further rows: 2 ** 28 would take five seconds."""
LEAST_WIDTH = 16
"""Least number of columns of an output whose rows are compared relative to their own magnitude: in one element, a sum
may cancel."""


def write(operator: Any, inputs: Any, seed: int) -> None:
    """Write special values into the floating-point inputs that may move, in place."""
    draw = random.Random(seed)
    for tensor in _movable(operator, inputs):
        rows = tensor.unsqueeze(-1) if tensor.dim() == 1 else tensor
        if rows.dim() == 2:
            _spread(rows, draw)
        if tensor.dim() > 1:
            _treat(rows, draw, getattr(operator, "nonfinite", True))


def possible(operator: Any, inputs: Any) -> bool:
    """Return whether any input can hold special values."""
    return any(True for _ in _movable(operator, inputs))


def _movable(operator: Any, inputs: Any) -> Iterator[Tensor]:
    """Yield the inputs to write to, each memory once and without repetition."""
    seen = set()
    for name, tensor in named_tensors(inputs):
        if str(tensor.dtype).removeprefix("torch.") not in MAGNITUDES or not tensor.numel() or not tensor.dim():
            continue
        if operator.moves and name not in operator.moves:
            continue
        storage = tensor.untyped_storage().data_ptr()
        if storage and storage not in seen:
            seen.add(storage)
            yield tensor.detach()[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]


def _spread(rows: Tensor, draw: random.Random) -> None:
    """Scale each row by a power of two. Values lose no bit, unless they become subnormal."""
    most = MAGNITUDES[str(rows.dtype).removeprefix("torch.")].spread
    generator = torch.Generator().manual_seed(draw.getrandbits(31))
    exponents = torch.randint(-most, most + 1, (min(rows.size(0), MAGNITUDES_DRAWN), 1), generator=generator)
    factors = torch.exp2(exponents.double()).to(rows)
    rows.mul_(factors.repeat(-(-rows.size(0) // len(factors)), 1)[: rows.size(0)])


def _treat(rows: Tensor, draw: random.Random, nonfinite: bool) -> None:
    total = math.prod(rows.shape[:-1])
    kinds = ["zero", "subnormal", *(("nan", "inf", "-inf") if nonfinite else ())]
    for kind in draw.sample(kinds, min(len(kinds), total // ROWS_PER_SPECIAL)):
        row = rows[tuple(draw.randrange(size) for size in rows.shape[:-1])]
        if kind == "zero":
            row.zero_()
        elif kind == "subnormal":
            row.mul_(torch.finfo(rows.dtype).tiny / 8)
        else:
            row[draw.randrange(len(row))] = float(kind)


def comparable(out: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return an output and its reference with each row relative to the reference's, in the reference's dtype.

    A finite number beyond half of the largest of the output's dtype may have become an infinity, and counts as right.
    """
    wide = out.to(reference.dtype)
    if out.is_floating_point():
        overflow = reference.isfinite() & (reference.abs() > torch.finfo(out.dtype).max / 2)
        wide = torch.where(overflow, reference, wide)
    if reference.dim() < 2 or reference.size(-1) < LEAST_WIDTH:
        return wide, reference
    size = reference.nan_to_num(0.0, 0.0, 0.0).square().mean(-1, keepdim=True).sqrt()
    known = MAGNITUDES.get(str(out.dtype).removeprefix("torch."))
    size = size.clamp_min(known.smallest if known else 1.0)
    return wide / size, reference / size
