"""Gradient of a grouped GEMM's rows: dA[rows of g] = dC[rows of g] @ B[g].T.

The forward's maths with the other layout of B, so the forward's backends serve as they are, on dC and B transposed. A
shape is the layer's: G=8,M=...,N=...,K=...,W=nk has weights stored as [G, N, K], which a forward reads along K and this
gradient along N.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from groupbench.operators.catalog.grouped_gemm import GROUPED_GEMM, GroupedInputs, make_backward_inputs
from groupbench.operators.catalog.shapes import GroupedShape
from groupbench.operators.operator import Operator

if TYPE_CHECKING:
    from torch import Tensor

# Of the forward's: those that take weights in either layout as they are.
BACKENDS = (
    "torch_loop",
    "torch_grouped_mm",
    "triton_pointer",
    "triton_flat",
    "helion_jagged",
    "helion_persistent",
    "helion_worklist",
)


@dataclass(frozen=True)
class DgradInputs(GroupedInputs):
    """As the forward's, in whose places they are."""

    a: Tensor  # [M, N], dC
    b: Tensor  # [G, N, K], B transposed, any strides
    offs: Tensor  # [G] int32, where each group's rows end
    rows: tuple[int, ...]  # M_g on the host


def make_inputs(shape: GroupedShape, dtype: str, device: str, seed: int) -> DgradInputs:
    """dC is standard normal."""
    y = make_backward_inputs(shape, dtype, device, seed)
    return DgradInputs(y.dc, y.x.b.transpose(1, 2), y.x.offs, y.x.rows)


GROUPED_GEMM_DGRAD: Operator = replace(
    GROUPED_GEMM,
    name="grouped_gemm_dgrad",
    backends=tuple(replace(backend, prepare_bwd=None) for backend in GROUPED_GEMM.backends if backend.name in BACKENDS),
    make_inputs=make_inputs,
    returns="[M, K]",
    from_tritonbench=None,
    backward=None,
)
