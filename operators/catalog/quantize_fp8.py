"""Quantisation to fp8 (e4m3fn), the step before a scaled grouped GEMM, measured separately.

Recipes `rowwise` and `blockwise` (1 x 128) from kernels/grouped_gemm/quantize.py. The reference is the input itself.
Rounding to 3 mantissa bits has a 2.7 % RMS error for normal values; a truncating kernel has twice as much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from groupbench.operators.catalog.backends import described, drawing, lazy
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.dtypes import BYTES
from groupbench.operators.operator import Backend, Operator, Run
from groupbench.operators.sizes import fields_of, shape_parser, size

MAX_SIZE = 2**31 - 1
RECIPES = ("rowwise", "blockwise")
HELP = "rowwise,M=ROWS,K=COLUMNS or blockwise,M=ROWS,K=COLUMNS"


@dataclass(frozen=True)
class QuantizeShape:
    """A matrix [M, K], with one scale per row or per 128 columns in a row."""

    recipe: str
    M: int
    K: int

    @property
    def dims(self) -> dict[str, int]:
        return {"M": self.M, "K": self.K}

    def __str__(self) -> str:
        return f"{self.recipe},M={self.M},K={self.K}"


@dataclass(frozen=True)
class QuantizeInputs:
    x: Tensor  # [M, K]
    blockwise: bool  # one scale per 128 columns of a row, not per row


@shape_parser(HELP)
def parse_shape(text: str) -> QuantizeShape:
    """Parse a shape as in HELP. Raises ValueError."""
    recipe, _, sizes = text.partition(",")
    if recipe not in RECIPES:
        raise ValueError(f"{recipe!r} is not one of {', '.join(RECIPES)}")
    fields = fields_of(sizes, "M K")
    return QuantizeShape(recipe, *(size(letter, fields[letter], MAX_SIZE) for letter in "MK"))


def make_inputs(shape: QuantizeShape, dtype: str, device: str, seed: int) -> QuantizeInputs:
    return QuantizeInputs(drawing(dtype, device, seed)(shape.M, shape.K), shape.recipe == "blockwise")


def reference(inputs: QuantizeInputs) -> Tensor:
    return inputs.x.float()


def decode(output: Any) -> Tensor:
    """Return the values represented by (q, scale). Raises TypeError for any other output."""
    from groupbench.kernels.grouped_gemm.quantize import dequantize

    if not isinstance(output, tuple) or len(output) != 2 or not all(isinstance(x, torch.Tensor) for x in output):
        raise TypeError(f"the backend returned {type(output).__name__}, not the pair (q, scale)")
    q, scale = output
    if (q.dtype, scale.dtype) != (torch.float8_e4m3fn, torch.float32):
        raise TypeError(f"the backend returned {q.dtype} with {scale.dtype}, expected float8_e4m3fn with float32")
    return dequantize(q, scale)


def min_bytes(shape: QuantizeShape, dtype: str) -> int:
    """Count the input read once, and values and scales written once."""
    scales = shape.M * (math.ceil(shape.K / 128) if shape.recipe == "blockwise" else 1)
    return shape.M * shape.K * (BYTES[dtype] + 1) + 4 * scales


def prepare_torch(inputs: QuantizeInputs) -> Run:
    """Absolute maximum, scale, multiply, clamp, cast: torch's own operations."""
    from groupbench.kernels.grouped_gemm import quantize

    function = quantize.quantize_blocks_reference if inputs.blockwise else quantize.quantize_rows_reference
    return lambda: function(inputs.x)


def _both(*sizes: tuple[int, int]) -> tuple[QuantizeShape, ...]:
    return tuple(QuantizeShape(recipe, M, K) for M, K in sizes for recipe in RECIPES)


QUANTIZE_FP8 = Operator(
    name="quantize_fp8",
    baseline="torch",
    backends=(
        described(prepare_torch),
        Backend(
            "triton",
            lazy("grouped_gemm.quantize:prepare_quantize", "x blockwise"),
            "one program per row, or per 32 x 128 values: read once",
            kind="triton",
        ),
    ),
    suites={
        "moe": _both((1024, 7168), (16384, 4096), (32768, 7168), (32768, 2048), (65536, 2048)),
        "smoke": _both((1, 128), (33, 300), (64, 80)),
    },
    parse_shape=parse_shape,
    make_inputs=make_inputs,
    reference=reference,
    flops=lambda shape: 0,
    min_bytes=min_bytes,
    returns="(q [M, K] e4m3fn, scale fp32: [M], or [M, K/128] if block-wise)",
    output_dtype=lambda dtype: "fp8",
    decode=decode,
    shapes_help=HELP,
)
