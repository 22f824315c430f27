"""Gradient of a grouped GEMM's rows: dA[rows of g] = dC[rows of g] @ B[g].T.

The forward's maths with the other layout of B, so the forward's backends serve as they are, on dC and B transposed. A
shape is the layer's: G=8,M=...,N=...,K=...,W=nk has weights stored as [G, N, K], which a forward reads along K and this
gradient along N.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from groupbench.operators.dtypes import torch_dtype
from groupbench.operators.grouped_gemm import GROUPED_GEMM, GroupedInputs
from groupbench.operators.grouped_gemm import make_inputs as make_forward_inputs
from groupbench.operators.operator import Operator
from groupbench.operators.shapes import GroupedShape

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


def make_inputs(shape: GroupedShape, dtype: str, device: str, seed: int) -> GroupedInputs:
    """dC [M, N], standard normal, in a's place, and B transposed [G, N, K] in b's."""
    import torch

    x = make_forward_inputs(shape, dtype, device, seed)
    generator = torch.Generator(device).manual_seed(seed + 1)
    dc: Tensor = torch.randn(shape.M, shape.N, generator=generator, device=device, dtype=torch_dtype(dtype))
    return GroupedInputs(dc, x.b.transpose(1, 2), x.offs, x.rows)


GROUPED_GEMM_DGRAD: Operator = replace(
    GROUPED_GEMM,
    name="grouped_gemm_dgrad",
    backends=tuple(replace(backend, prepare_bwd=None) for backend in GROUPED_GEMM.backends if backend.name in BACKENDS),
    make_inputs=make_inputs,
    from_tritonbench=None,
    backward=None,
)
