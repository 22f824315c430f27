"""Softmax of each row of a matrix, and its gradient (kernels/attention): items c and d of gpu-mode's Triton course.

A kernel is right if it is as fast as a copy: forward it reads and writes each element once, backward it reads two
matrices and writes one. TritonBench has a `softmax`, of other shapes; this one is row_softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from groupbench.operators.catalog.backends import drawing, lazy, not_hopper
from groupbench.operators.catalog.inductor import compiled, no_gpu_to_compile_for
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.dtypes import BYTES
from groupbench.operators.operator import Backend, Backward, Operator, Run
from groupbench.operators.sizes import fields_of, shape_parser, size
from groupbench.operators.tolerances import TOLERANCES, Tolerance

MAX_SIZE = 2**31 - 1
HELP = "M=ROWS,N=COLUMNS, or M,N"


@dataclass(frozen=True)
class RowShape:
    """A matrix of M rows."""

    M: int
    N: int

    @property
    def dims(self) -> dict[str, int]:
        return {"M": self.M, "N": self.N}

    def __str__(self) -> str:
        return f"M={self.M},N={self.N}"


@dataclass(frozen=True)
class RowInputs:
    x: Tensor  # [M, N]


@dataclass(frozen=True)
class RowStep:
    """The input of the forward pass, and the output's gradient."""

    x: Tensor  # [M, N]
    dy: Tensor  # [M, N]


@shape_parser(HELP)
def parse_shape(text: str) -> RowShape:
    """Parse a shape of a form in HELP. Raises ValueError."""
    fields = fields_of(text, "M N", by_position=True)
    return RowShape(*(size(letter, fields[letter], MAX_SIZE) for letter in "MN"))


def make_inputs(shape: RowShape, dtype: str, device: str, seed: int) -> RowInputs:
    """Draw standard normal values."""
    return RowInputs(drawing(dtype, device, seed)(shape.M, shape.N))


def make_step(shape: RowShape, dtype: str, device: str, seed: int) -> RowStep:
    """Draw standard normal values and gradients."""
    return RowStep(*(drawing(dtype, device, seed + number)(shape.M, shape.N) for number in (0, 1)))


def reference_backward(step: RowStep) -> dict[str, Tensor]:
    """Compute the gradient of the output as it was saved: rounded, like every backend's.

    From the exact output, torch's own gradient would be off by 0.0023 RMS in a row of five, where terms cancel.
    """
    from groupbench.kernels.attention.softmax import softmax_backward_reference, softmax_reference

    y = softmax_reference(step.x)
    return {"dx": softmax_backward_reference(y.to(step.x.dtype).to(y.dtype), step.dy)}


# --- backends ---------------------------------------------------------------------------------------------------------


def prepare_torch(x: RowInputs) -> Run:
    return lambda: torch.softmax(x.x, 1)


def prepare_torch_bwd(step: RowStep) -> Run:
    x = step.x.detach().requires_grad_()
    y = torch.softmax(x, 1)
    return lambda: torch.autograd.grad(y, x, step.dy, retain_graph=True)


def prepare_torch_compile(x: RowInputs) -> Run:
    return compiled(_softmax, x.x)


def prepare_torch_compile_bwd(step: RowStep) -> Run:
    gradient = compiled(_softmax_backward, torch.softmax(step.x, 1), step.dy)
    return lambda: (gradient(),)


def _softmax(x: Tensor) -> Tensor:
    import torch

    return torch.softmax(x, 1)


def _softmax_backward(y: Tensor, dy: Tensor) -> Tensor:
    product = y.float() * dy.float()
    return (product - y.float() * product.sum(1, keepdim=True)).to(y.dtype)


def _backward_by(kernel: str, **settings: Any) -> Callable[[RowStep], Run]:
    """Return the `prepare_bwd` of a kernel that takes the output and its gradient."""

    def prepare(step: RowStep) -> Run:
        saved = RowStep(torch.softmax(step.x, 1), step.dy)
        gradient = lazy(kernel, "x dy", **settings)(saved)
        return lambda: (gradient(),)

    return prepare


def _shapes(*sizes: tuple[int, int]) -> tuple[RowShape, ...]:
    return tuple(RowShape(M, N) for M, N in sizes)


SUITES: dict[str, tuple[RowShape, ...]] = {
    # Rows of 1k to 64k elements, half a gigabyte in 16 bits.
    "rows": _shapes(*((2**28 >> power, 1 << power) for power in range(10, 17))),
    # Triton's tutorial and the course: 4096 rows of 256 to 12,672 columns.
    "course": _shapes(*((4096, 128 * step) for step in (2, 4, 8, 16, 32, 64, 99)), (1823, 781)),
    # Tokens times vocabulary (Llama 2, GPT-2, Llama 3, Qwen 3), scores of 32 heads, the router of DeepSeek-V3.
    "models": _shapes(
        (8192, 32000), (8192, 50257), (4096, 128256), (4096, 151936), (32 * 2048, 2048), (32 * 8192, 8192), (16384, 256)
    ),
    "smoke": _shapes((3, 100), (1, 257), (33, 5), (2, 17000)),
}

ROW_SOFTMAX = Operator(
    name="row_softmax",
    baseline="torch",
    backends=(
        Backend("torch", prepare_torch, "torch.softmax and its derivative", prepare_bwd=prepare_torch_bwd),
        Backend(
            "torch_compile",
            prepare_torch_compile,
            "torch.compile of the same formula",
            unavailable=no_gpu_to_compile_for,
            prepare_bwd=prepare_torch_compile_bwd,
        ),
        Backend(
            "triton",
            lazy("attention.softmax:prepare_softmax", "x"),
            "rows in registers, longer ones in two passes of an online softmax; after gpu-mode's tutorials",
            kind="triton",
            prepare_bwd=_backward_by("attention.softmax:prepare_softmax_backward"),
        ),
        Backend(
            "cuda_cluster",
            lazy("attention.softmax_cluster:prepare_softmax_cluster", "x", refuse=("unsuitable", "x")),
            "CUDA C++ for Hopper: a cluster of SMs keeps a row in registers; after QuACK's softmax",
            kind="cuda",
            unavailable=not_hopper,
            prepare_bwd=_backward_by(
                "attention.softmax_cluster:prepare_softmax_backward_cluster", refuse=("unsuitable", "x dy")
            ),
        ),
        Backend(
            "helion",
            lazy("attention.helion_softmax:prepare_softmax_helion", "x"),
            "the formula over tiles of rows; after Helion's examples/softmax.py",
            kind="helion",
            prepare_bwd=_backward_by("attention.helion_softmax:prepare_softmax_backward_helion"),
        ),
    ),
    suites=SUITES,
    parse_shape=parse_shape,
    make_inputs=make_inputs,
    reference=lazy("attention.softmax:softmax_reference", "x"),
    flops=lambda shape: 0,
    min_bytes=lambda shape, dtype: 2 * shape.M * shape.N * BYTES[dtype],
    returns="[M, N]",
    shapes_help=HELP,
    # torch rounds y * dy before it subtracts: it is off by 0.0013 RMS in a row of five in fp16, where terms cancel.
    tolerances={
        "bf16_difference": Tolerance(rms=1.6e-2, rtol=1.6e-2, atol=6.4e-2),
        "fp16_difference": Tolerance(rms=2e-3, rtol=2e-3, atol=8e-3),
        "fp32_difference": TOLERANCES["fp32_summed"],
    },
    backward=Backward(
        make_inputs=make_step,
        reference=reference_backward,
        flops=lambda shape: 0,
        min_bytes=lambda shape, dtype: 3 * shape.M * shape.N * BYTES[dtype],
        returns="(dx [M, N])",
        moves=("dy",),  # the rest was saved by the forward pass
        output_dtype=lambda dtype: f"{dtype}_difference",
        suites=SUITES,
    ),
)
