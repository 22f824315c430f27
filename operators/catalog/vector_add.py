"""Sum two tensors, element by element (kernels/elementwise.py): a bandwidth canary.

Two reads and a write per element and almost no arithmetic: it is as fast as a copy with as many bytes, or something is
wrong with the kernel, compiler or memory. A shape's text:

    N=1000003               vectors
    N=1000003,stride=3      every third element of longer vectors
    M=1000,N=3000,y=t       matrices, y stored as [N, M] and passed on transposed

TritonBench also has a vector_add; under TritonBench, these backends are added to it (hosts/tritonbench.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from groupbench.operators.catalog.backends import described, drawing, lazy
from groupbench.operators.deferred import Tensor
from groupbench.operators.dtypes import BYTES, dtype_name
from groupbench.operators.operator import Backend, Example, Operator, Run
from groupbench.operators.sizes import fields_of, shape_parser, size

MAX_ELEMENTS = 2**40
HELP = "N=SIZE, N=SIZE,stride=STEP or M=ROWS,N=COLUMNS (,y=t: y stored transposed)"


@dataclass(frozen=True)
class VectorShape:
    """Vectors of N elements, `stride` apart, or matrices of M x N; y is stored transposed if `turned`."""

    N: int
    M: int = 0
    stride: int = 1
    turned: bool = False

    @property
    def dims(self) -> dict[str, int]:
        return {"M": self.M, "N": self.N} if self.M else {"N": self.N}

    @property
    def elements(self) -> int:
        return (self.M or 1) * self.N

    def __str__(self) -> str:
        if self.M:
            return f"M={self.M},N={self.N}" + (",y=t" if self.turned else "")
        return f"N={self.N}" + (f",stride={self.stride}" if self.stride != 1 else "")


@dataclass(frozen=True)
class VectorInputs:
    x: Tensor  # [N] or [M, N]
    y: Tensor  # as x


@shape_parser(HELP)
def parse_shape(text: str) -> VectorShape:
    """Parse a shape as in HELP. Raises ValueError."""
    fields = fields_of(text, "N", "M stride y")
    if fields.get("y", "t") != "t" or ("stride" if "M" in fields else "y") in fields:
        raise ValueError("its fields are not those of one form")
    sizes = {name: size(name, value, MAX_ELEMENTS) for name, value in fields.items() if name != "y"}
    shape = VectorShape(**sizes, turned="y" in fields)
    if shape.elements * shape.stride > MAX_ELEMENTS:
        raise ValueError(f"it has more than {MAX_ELEMENTS} elements")
    return shape


def make_inputs(shape: VectorShape, dtype: str, device: str, seed: int) -> VectorInputs:
    """Draw standard normal operands."""
    values = drawing(dtype, device, seed)
    if shape.M:
        x = values(shape.M, shape.N)
        return VectorInputs(x, values(shape.N, shape.M).t() if shape.turned else values(shape.M, shape.N))
    x, y = (values(shape.N * shape.stride)[:: shape.stride] for _ in "xy")
    return VectorInputs(x, y)


def from_tritonbench(x: Tensor, y: Tensor) -> Example:
    """Convert TritonBench's two vectors to an example, without a copy."""
    return Example(VectorShape(x.numel()), dtype_name(x.dtype) or str(x.dtype), VectorInputs(x, y))


def reference(inputs: VectorInputs) -> Tensor:
    return inputs.x.float() + inputs.y.float()


def min_bytes(shape: VectorShape, dtype: str) -> int:
    """Count both operands and the output once; memory between strided elements is not counted."""
    return 3 * shape.elements * BYTES[dtype]


def prepare_torch(inputs: VectorInputs) -> Run:
    """torch's own addition."""
    return lambda: inputs.x + inputs.y


VECTOR_ADD = Operator(
    name="vector_add",
    baseline="torch",
    backends=(
        described(prepare_torch),
        Backend(
            "triton",
            lazy("elementwise:prepare_add", "x y"),
            "one pass, masked; flat if operands have the same layout, else by index; after gpu-mode/triton-tutorials",
            kind="triton",
        ),
    ),
    suites={
        # The largest is the canary's copy; 2**26 elements are about the size in the tutorial.
        "bandwidth": tuple(VectorShape(2**power) for power in (28, 26, 24, 20)),
        "tutorial": (VectorShape(1024), VectorShape(257)),
        "ragged": (
            VectorShape(1),
            VectorShape(100000007),
            VectorShape(1000003, stride=3),
            VectorShape(1009, M=8191),
            VectorShape(4096, M=4096, turned=True),
            VectorShape(1009, M=8191, turned=True),
        ),
        "smoke": (
            VectorShape(1),
            VectorShape(257),
            VectorShape(1009, stride=3),
            VectorShape(33, M=17),
            VectorShape(33, M=17, turned=True),
        ),
    },
    parse_shape=parse_shape,
    make_inputs=make_inputs,
    reference=reference,
    flops=lambda shape: shape.elements,
    min_bytes=min_bytes,
    returns="[N] or [M, N], as x.x",
    shapes_help=HELP,
    from_tritonbench=from_tritonbench,
)
