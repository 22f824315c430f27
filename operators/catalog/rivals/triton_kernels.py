"""OpenAI's triton_kernels (triton-lang/triton): a persistent matmul over ragged rows.

The package index has another project under the name triton-kernels; this one is published as
tokenspeed-triton-kernels. Its metadata is made from row counts inside the call, as in its own MoE layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupbench.operators.catalog.rivals.layouts import require, row_counts
from groupbench.operators.catalog.rivals.package import RivalPackage
from groupbench.operators.operator import Run

if TYPE_CHECKING:
    from torch import Tensor

    from groupbench.operators.catalog.grouped_gemm import GroupedInputs

PACKAGE = RivalPackage("tokenspeed-triton-kernels", "triton_kernels.matmul", "rivals-triton-kernels")


def prepare(x: GroupedInputs) -> Run:
    from triton_kernels.matmul import matmul
    from triton_kernels.tensor_details.ragged_tensor import make_ragged_tensor_metadata

    _, K, N = x.b.shape
    require(8, N=N, K=K)
    M, counts = x.a.shape[0], row_counts(x.offs)

    def run() -> Tensor:
        out: Tensor = matmul(x.a, x.b, None, a_ragged_metadata=make_ragged_tensor_metadata(counts(), M))
        return out

    return run


_SOURCE = "OpenAI's triton_kernels: persistent Triton matmul, config by its own rules; metadata made inside the call"
_unavailable = PACKAGE.unavailable(("bf16", "fp16"), least=(8, 0))
BACKENDS = (
    PACKAGE.backend("grouped_gemm", "triton_kernels", prepare, _SOURCE, kind="triton", unavailable=_unavailable),
    PACKAGE.backend("grouped_gemm_dgrad", "triton_kernels", prepare, _SOURCE, kind="triton", unavailable=_unavailable),
)
