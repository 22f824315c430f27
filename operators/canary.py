"""Canaries: a copy for bandwidth and a cuBLAS product for compute, measured beside everything else.

They tell that the machine is ill (a slower copy on the same card is no kernel's fault); they are no normaliser, since
the noise of different kernels is not correlated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from groupbench.operators.dtypes import torch_dtype
from groupbench.operators.operator import Backend, Operator, Run

if TYPE_CHECKING:
    from torch import Tensor


MAX_SIZE = 1 << 20  # 2 N^3 fits 64 bits


@dataclass(frozen=True)
class CanaryShape:
    """A copy of N x N elements, or the product of two such matrices."""

    kind: str
    N: int

    @property
    def dims(self) -> dict[str, int]:
        return {"N": self.N}

    def __str__(self) -> str:
        return f"{self.kind},N={self.N}"


@dataclass(frozen=True)
class CanaryInputs:
    kind: str
    x: Tensor  # [N, N]
    y: Tensor  # [N, N]


def parse_shape(text: str) -> CanaryShape:
    kind, _, size = text.partition(",N=")
    if kind not in ("copy", "matmul") or not size.isdecimal() or not 1 <= int(size) <= MAX_SIZE:
        raise ValueError(f"canary {text!r} is neither copy,N=SIZE nor matmul,N=SIZE")
    return CanaryShape(kind, int(size))


def make_inputs(shape: CanaryShape, dtype: str, device: str, seed: int) -> CanaryInputs:
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    x, y = (torch.randn(shape.N, shape.N, generator=generator, device=device, dtype=torch_dtype(dtype)) for _ in "xy")
    return CanaryInputs(shape.kind, x, y)


def reference(inputs: CanaryInputs) -> Tensor:
    return inputs.x.clone() if inputs.kind == "copy" else inputs.x.float() @ inputs.y.float()


def prepare_torch(inputs: CanaryInputs) -> Run:
    if inputs.kind == "copy":
        return lambda: inputs.x.clone()
    return lambda: inputs.x @ inputs.y


CANARY = Operator(
    name="canary",
    baseline="torch",
    backends=(Backend("torch", prepare_torch, "torch's own copy and matmul"),),
    suites={
        "cuda": (CanaryShape("copy", 16384), CanaryShape("matmul", 8192)),
        "cpu": (CanaryShape("copy", 2048), CanaryShape("matmul", 512)),
    },
    parse_shape=parse_shape,
    make_inputs=make_inputs,
    reference=reference,
    flops=lambda shape: 2 * shape.N**3 if shape.kind == "matmul" else 0,
    min_bytes=lambda shape, dtype: (2 if shape.kind == "copy" else 3) * shape.N**2 * (4 if dtype == "fp32" else 2),
    shapes_help="copy,N=SIZE or matmul,N=SIZE",
)
