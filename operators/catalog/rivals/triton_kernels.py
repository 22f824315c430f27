"""OpenAI's triton_kernels (triton-lang/triton): a persistent matmul over ragged rows, also with weights of mxfp4.

The package index has another project under the name triton-kernels; this one is published as tokenspeed-triton-kernels.
The metadata is made from row counts inside the call, as in triton_kernels' own MoE layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupbench.operators.catalog.rivals.package import RivalPackage, require, row_counts
from groupbench.operators.deferred import Tensor
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Run
from groupbench.operators.relayout import laid_out

if TYPE_CHECKING:
    from groupbench.operators.catalog.grouped_gemm import GroupedInputs
    from groupbench.operators.catalog.grouped_gemm_w4 import W4Inputs

PACKAGE = RivalPackage("tokenspeed-triton-kernels", "triton_kernels.matmul", "rivals-triton-kernels")


def prepare(x: GroupedInputs) -> Run:
    from triton_kernels.matmul import matmul
    from triton_kernels.tensor_details.ragged_tensor import make_ragged_tensor_metadata

    _, K, N = x.b.shape
    require(8, N=N, K=K)
    M, counts = x.a.shape[0], row_counts(x.offs)

    return lambda: matmul(x.a, x.b, None, a_ragged_metadata=make_ragged_tensor_metadata(counts(), M))


def prepare_w4(x: W4Inputs) -> Run:
    """Prepare the product with mxfp4 weights, which are repacked into the layout that it has for this GPU."""
    from triton_kernels.matmul import PrecisionConfig, matmul
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor
    from triton_kernels.tensor_details import layout
    from triton_kernels.tensor_details.ragged_tensor import make_ragged_tensor_metadata

    if x.fmt != "mxfp4":
        raise Unavailable(f"its four-bit weights are mxfp4, not {x.fmt}")
    values, scales = (
        convert_layout(wrap_torch_tensor(stored.transpose(1, 2), **kind), of(mx_axis=-2))
        for stored, kind, of in (
            (x.codes, {"dtype": FP4}, layout.make_default_matmul_mxfp4_w_layout),
            (x.scales, {}, layout.make_default_matmul_mxfp4_w_scale_layout),
        )
    )
    precision = PrecisionConfig(b_mx_scale=scales, b_microblock_size=32)
    bias = None if x.bias is None else laid_out(x.bias.float(), x.bias)
    M, counts = x.a.shape[0], row_counts(x.offs)

    def run() -> Tensor:
        metadata = make_ragged_tensor_metadata(counts(), M)
        out: Tensor = matmul(x.a, values, bias, a_ragged_metadata=metadata, precision_config=precision)
        return out

    return run


_SOURCE = "OpenAI's triton_kernels: persistent Triton matmul, config by its own rules; metadata made inside the call"
_unavailable = PACKAGE.unavailable(("bf16", "fp16"), least=(8, 0))
BACKENDS = (
    PACKAGE.backend("grouped_gemm", "triton_kernels", prepare, _SOURCE, kind="triton", unavailable=_unavailable),
    PACKAGE.backend("grouped_gemm_dgrad", "triton_kernels", prepare, _SOURCE, kind="triton", unavailable=_unavailable),
    PACKAGE.backend(
        "grouped_gemm_w4a16", "triton_kernels", prepare_w4, _SOURCE, kind="triton", unavailable=_unavailable
    ),
)
