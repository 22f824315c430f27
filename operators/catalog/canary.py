"""Canaries: a copy for bandwidth and a cuBLAS product for compute, measured along with everything else.

They detect a faulty machine: a slower copy on the same card is not a kernel's fault. Do not normalise by them, since
different kernels' noise is not correlated. A product is the ceiling for a grouped GEMM with the same number of
operations: one matrix instead of many.
"""

from __future__ import annotations

from dataclasses import dataclass

from groupbench.operators.catalog.backends import described, drawing
from groupbench.operators.deferred import Tensor
from groupbench.operators.operator import Operator, Run
from groupbench.operators.sizes import fields_of, shape_parser, size

MAX_SIZE = 1 << 20  # 2 N^3 fits 64 bits
SHAPES_HELP = "copy,N=SIZE, matmul,N=SIZE or matmul,M=SIZE,N=SIZE,K=SIZE (,W=nk)"


@dataclass(frozen=True)
class CanaryShape:
    """A copy of N x N elements, or a product of [M, K] and [K, N].

    Attributes:
        M, K: 0 means N.
        nk: The second matrix is stored as [N, K], as layers store weights.
    """

    kind: str
    N: int
    M: int = 0
    K: int = 0
    nk: bool = False

    @property
    def dims(self) -> dict[str, int]:
        return {"M": self.M, "N": self.N, "K": self.K} if self.M else {"N": self.N}

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N, K, with N for a missing M or K."""
        return self.M or self.N, self.N, self.K or self.N

    def __str__(self) -> str:
        if not self.M:
            return f"{self.kind},N={self.N}"
        return f"{self.kind},M={self.M},N={self.N},K={self.K}" + (",W=nk" if self.nk else "")


@dataclass(frozen=True)
class CanaryInputs:
    kind: str  # copy or matmul
    x: Tensor  # [M, K]
    y: Tensor  # [K, N]


@shape_parser(SHAPES_HELP)
def parse_shape(text: str) -> CanaryShape:
    """Parse a shape as in SHAPES_HELP. Raises ValueError."""
    kind, _, sizes = text.partition(",")
    fields = fields_of(sizes, "N", "M K W")
    product = kind == "matmul" and {"M", "K"} <= fields.keys() and fields.get("W", "nk") == "nk"
    if kind not in ("copy", "matmul") or not (product or fields.keys() == {"N"}):
        raise ValueError("its fields are not those of one form")
    numbers = {letter: size(letter, value, MAX_SIZE) for letter, value in fields.items() if letter != "W"}
    return CanaryShape(kind, nk="W" in fields, **numbers)


def make_inputs(shape: CanaryShape, dtype: str, device: str, seed: int) -> CanaryInputs:
    values, (M, N, K) = drawing(dtype, device, seed), shape.sizes
    x = values(M, K)
    return CanaryInputs(shape.kind, x, values(N, K).t() if shape.nk else values(K, N))


def reference(inputs: CanaryInputs) -> Tensor:
    return inputs.x.clone() if inputs.kind == "copy" else inputs.x.float() @ inputs.y.float()


def flops(shape: CanaryShape) -> int:
    M, N, K = shape.sizes
    return 2 * M * N * K if shape.kind == "matmul" else 0


def min_bytes(shape: CanaryShape, dtype: str) -> int:
    M, N, K = shape.sizes
    elements = 2 * N * N if shape.kind == "copy" else M * K + K * N + M * N
    return elements * (4 if dtype == "fp32" else 2)


def prepare_torch(inputs: CanaryInputs) -> Run:
    """torch's own copy and matmul."""
    if inputs.kind == "copy":
        return lambda: inputs.x.clone()
    return lambda: inputs.x @ inputs.y


CANARY = Operator(
    name="canary",
    baseline="torch",
    backends=(described(prepare_torch),),
    suites={
        "cuda": (CanaryShape("copy", 16384), CanaryShape("matmul", 8192)),
        "cpu": (CanaryShape("copy", 2048), CanaryShape("matmul", 512)),
        "smoke": (CanaryShape("copy", 64), CanaryShape("matmul", 64), CanaryShape("matmul", 33, 17, 48, nk=True)),
    },
    parse_shape=parse_shape,
    make_inputs=make_inputs,
    reference=reference,
    flops=flops,
    min_bytes=min_bytes,
    returns="[M, N]: a copy of x.x, or the product of x.x and x.y",
    shapes_help=SHAPES_HELP,
)
