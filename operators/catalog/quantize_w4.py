"""Packing of weights into four bits, in the formats of kernels/four_bit/formats.py, as when a checkpoint is made.

The reference is the input itself. Four bits have an error of 9 to 13 % RMS for normal values, which hides small errors
of a kernel; tests compare the codes with those of plain torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from groupbench.operators.catalog.backends import described, drawing
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.dtypes import BYTES
from groupbench.operators.operator import Operator, Run
from groupbench.operators.sizes import fields_of, shape_parser, size
from groupbench.operators.tolerances import Tolerance

if TYPE_CHECKING:
    from groupbench.kernels.four_bit.formats import Format, Weights

MAX_SIZE = 2**31 - 1
HELP = "fmt=FORMAT,N=ROWS,K=COLUMNS, with a format as in grouped_gemm_w4a16: mxfp4, int4(128), int4(32,zp)"


@dataclass(frozen=True)
class PackShape:
    """A matrix [N, K] and the text of a format."""

    fmt: str
    N: int
    K: int

    @property
    def dims(self) -> dict[str, int]:
        return {"N": self.N, "K": self.K}

    @property
    def format(self) -> Format:
        from groupbench.kernels.four_bit.weight_format import parse_format

        return parse_format(self.fmt)

    def __str__(self) -> str:
        return f"fmt={self.fmt},N={self.N},K={self.K}"


@dataclass(frozen=True)
class PackInputs:
    x: Tensor  # [N, K]
    fmt: str  # name of the format


@shape_parser(HELP)
def parse_shape(text: str) -> PackShape:
    """Parse a shape of the form in HELP. Raises ValueError."""
    fields = fields_of(text, "fmt N K")
    shape = PackShape(fields["fmt"], *(size(letter, fields[letter], MAX_SIZE) for letter in "NK"))
    if shape.K % shape.format.group:
        raise ValueError(f"K={shape.K} is not a multiple of the group, {shape.format.group}")
    return shape


def make_inputs(shape: PackShape, dtype: str, device: str, seed: int) -> PackInputs:
    return PackInputs(drawing(dtype, device, seed)(shape.N, shape.K), shape.fmt)


def reference(inputs: PackInputs) -> Tensor:
    return inputs.x.float()


def decode(output: Any) -> Tensor:
    """Return the values of packed weights (codes, scales[, zeros]). Raises TypeError for any other output."""
    from groupbench.kernels.four_bit.formats import MXFP4, Format, Weights, dequantize

    if not isinstance(output, tuple) or len(output) not in (2, 3) or not all(torch.is_tensor(x) for x in output):
        raise TypeError(f"the backend returned {type(output).__name__}, not (codes, scales) or (codes, scales, zeros)")
    codes, scales, *zeros = output
    K = 2 * codes.shape[1]
    fmt = MXFP4 if scales.dtype == torch.uint8 else Format("int4", K // scales.shape[1], bool(zeros))
    return dequantize(Weights(fmt, K, *(x[None] for x in output)), torch.float32)[0]


def min_bytes(shape: PackShape, dtype: str) -> int:
    """Count the input read once, and codes, scales and zero points written once."""
    return shape.N * (shape.K * BYTES[dtype] + shape.format.row_bytes(shape.K))


def prepare_torch(x: PackInputs) -> Run:
    """Largest value of a group, scale, nearest code, two codes in a byte, by torch."""
    from groupbench.kernels.four_bit.formats import parse_format, quantize_reference

    fmt = parse_format(x.fmt)
    return lambda: _parts(quantize_reference(x.x[None], fmt))


def prepare_triton(x: PackInputs) -> Run:
    """One program for 16 rows of a group, which it reads once."""
    from groupbench.kernels.four_bit.quantize import prepare_quantize_w4
    from groupbench.kernels.four_bit.weight_format import parse_format

    run = prepare_quantize_w4(x.x, parse_format(x.fmt))
    return lambda: _parts(run())


def _parts(w: Weights) -> tuple[Tensor, ...]:
    return tuple(part[0] for part in (w.codes, w.scales, w.zeros) if part is not None)


def _shapes(*sizes: tuple[int, int]) -> tuple[PackShape, ...]:
    formats = ("mxfp4", "int4(128)", "int4(32)", "int4(128,zp)")
    shapes = (PackShape(fmt, N, K) for N, K in sizes for fmt in formats)
    return tuple(shape for shape in shapes if shape.K % shape.format.group == 0)


QUANTIZE_W4 = Operator(
    name="quantize_w4",
    baseline="torch",
    backends=(
        described(prepare_torch),
        described(prepare_triton, kind="triton"),
    ),
    suites={"moe": _shapes((5760, 2880), (4096, 7168), (7168, 2048)), "smoke": _shapes((3, 128), (33, 256))},
    parse_shape=parse_shape,
    make_inputs=make_inputs,
    reference=reference,
    flops=lambda shape: 0,
    min_bytes=min_bytes,
    returns="(codes [N, K/2], scales[, zeros]) as grouped_gemm_w4a16 takes them",
    output_dtype=lambda dtype: "w4",
    decode=decode,
    # mxfp4 rounds to 1 bit of mantissa, and saturates up to a quarter of a group's largest value.
    tolerances={"w4": Tolerance(rms=2.5e-1, rtol=5e-1, atol=6e-1)},
    shapes_help=HELP,
)
