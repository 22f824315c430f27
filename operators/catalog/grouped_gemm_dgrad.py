"""Gradient of a grouped GEMM's rows: dA[rows of g] = dC[rows of g] @ B[g].T.

This is the forward product with B's other layout, so the forward backends compute it unchanged, from dC and B
transposed. Shapes are the layer's: G=8,M=...,N=...,K=...,W=nk has weights stored as [G, N, K], which the forward pass
reads along K and this gradient along N.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from groupbench.operators.catalog import shapes
from groupbench.operators.catalog.grouped_gemm import GROUPED_GEMM, GroupedInputs, make_backward_inputs
from groupbench.operators.catalog.shapes import GroupedShape
from groupbench.operators.deferred import Tensor
from groupbench.operators.operator import Operator

# The forward's backends that take weights in either layout without a copy.
BACKENDS = (
    *("torch_loop", "torch_grouped_mm", "triton_pointer", "triton_flat", "cuda_cluster"),
    *("helion_jagged", "helion_persistent", "helion_worklist"),
)


@dataclass(frozen=True)
class DgradInputs(GroupedInputs):
    """The gradient's operands, under the forward operands' names."""

    a: Tensor  # [M, N], dC
    b: Tensor  # [G, N, K], B transposed, any strides
    offs: Tensor  # [G] int32, where each group's rows end
    rows: tuple[int, ...]  # M_g on the host
    experts: tuple[int, ...] = ()  # empty: the rows of an expert are together


def make_inputs(shape: GroupedShape, dtype: str, device: str, seed: int) -> DgradInputs:
    """Draw a standard normal dC, and the forward's weights and offsets."""
    y = make_backward_inputs(shape, dtype, device, seed)
    return DgradInputs(y.dc, y.x.b.transpose(1, 2), y.x.offs, y.x.rows)


GROUPED_GEMM_DGRAD: Operator = replace(
    GROUPED_GEMM,
    name="grouped_gemm_dgrad",
    backends=tuple(replace(backend, prepare_bwd=None) for backend in GROUPED_GEMM.backends if backend.name in BACKENDS),
    make_inputs=make_inputs,
    suites=shapes.packed_suites(),
    parse_shape=shapes.parse_packed,
    returns="[M, K]",
    from_tritonbench=None,
    backward=None,
)
