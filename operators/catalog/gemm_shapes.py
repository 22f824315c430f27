"""Shapes, text and inputs for operators with one matrix product.

out = a @ b with a [M, K] and b [K, N]. A shape's text names the whole problem; the database stores this text:

    M=16,N=4096,K=4096            row-major operands
    M=16,N=4096,K=4096,W=nk       b stored as [N, K], as layers store weights, and passed on transposed
    M=64,N=64,K=32768,A=km        a stored as [K, M]
"""

from __future__ import annotations

from dataclasses import dataclass

from groupbench.operators.catalog.backends import drawing
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.dtypes import BYTES
from groupbench.operators.operator import Backend, Operator, Run
from groupbench.operators.sizes import fields_of, shape_parser, whole, within

MAX_SIZE = 2**31 - 1
HELP = "M,N,K (b stored as [N, K]: M=..,N=..,K=..,W=nk; a as [K, M]: ..,A=km)"


@dataclass(frozen=True)
class GemmShape:
    """One product.

    Attributes:
        nk: B is stored as [N, K].
        km: A is stored as [K, M].
    """

    M: int
    N: int
    K: int
    nk: bool = False
    km: bool = False

    def __post_init__(self) -> None:
        for letter, value in self.dims.items():
            within(letter, value, MAX_SIZE)
        if 2 * self.M * self.N * self.K >= 2**63:
            raise ValueError("the number of operations does not fit in 64 bits")

    @property
    def dims(self) -> dict[str, int]:
        return {"M": self.M, "N": self.N, "K": self.K}

    def __str__(self) -> str:
        layout = (",A=km" if self.km else "") + (",W=nk" if self.nk else "")
        return f"M={self.M},N={self.N},K={self.K}{layout}"


@dataclass(frozen=True)
class GemmInputs:
    a: Tensor  # [M, K], any strides
    b: Tensor  # [K, N], any strides


def parse_shape(text: str) -> GemmShape:
    """Parse a shape of a form in HELP. Raises ValueError."""
    fields = fields_of(text, "M N K", "A W", by_position=True)
    for key, value in (("A", "km"), ("W", "nk")):
        if fields.get(key, value) != value:
            raise ValueError(f"{key}={fields[key]} is not {key}={value}")
    M, N, K = (whole(letter, fields[letter]) for letter in "MNK")
    return GemmShape(M, N, K, nk="W" in fields, km="A" in fields)


def make_inputs(shape: GemmShape, dtype: str, device: str, seed: int) -> GemmInputs:
    """Draw standard normal operands, a [M, K] and b [K, N]."""
    values, M, N, K = drawing(dtype, device, seed), shape.M, shape.N, shape.K
    a = values(K, M).t() if shape.km else values(M, K)
    return GemmInputs(a, values(N, K).t() if shape.nk else values(K, N))


def reference(x: GemmInputs) -> Tensor:
    """Return the product [M, N] in fp64: a long sum in fp32 has errors as large as the backends'."""
    return x.a.double() @ x.b.double()


def flops(shape: GemmShape) -> int:
    return 2 * shape.M * shape.N * shape.K


def min_bytes(shape: GemmShape, dtype: str) -> int:
    return (shape.M * shape.K + shape.K * shape.N + shape.M * shape.N) * BYTES[dtype]


def prepare_torch_mm(x: GemmInputs) -> Run:
    return lambda: torch.mm(x.a, x.b)


def product(
    name: str, torch_mm: str, backends: tuple[Backend, ...], suites: dict[str, tuple[GemmShape, ...]]
) -> Operator:
    """Return an operator for one product. The first backend, the baseline, is cuBLAS.

    torch_mm describes the baseline
    """
    return Operator(
        name=name,
        baseline="torch_mm",
        backends=(Backend("torch_mm", prepare_torch_mm, torch_mm), *backends),
        suites=suites,
        parse_shape=shape_parser(f"{HELP}; there are suites too: {', '.join(suites)}")(parse_shape),
        make_inputs=make_inputs,
        reference=reference,
        flops=flops,
        min_bytes=min_bytes,
        returns="[M, N]",
        shapes_help=HELP,
    )
