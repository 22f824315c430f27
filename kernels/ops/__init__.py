"""Operations that a model calls: grouped products, the MoE layer and its parts, as functions of torch's tensors.

    from groupbench.kernels import ops

    y = ops.grouped_mm(x, weights.transpose(1, 2), offs)
    out = ops.moe_layer(x, ids, weights, w_gate_up, w_down)

They choose a kernel for a problem, take any strides, and work under torch.compile(fullgraph=True), torch.export, CUDA
graphs, activation checkpointing and autocast. `grouped_mm` also works under torch.func.grad.
"""

from groupbench.kernels.grouped_gemm.choose import check_offsets
from groupbench.kernels.ops.layers import layer_fallback_reason, moe_layer, permute, quantize, unpermute
from groupbench.kernels.ops.products import (
    fallback_reason,
    grouped_mm,
    scaled_fallback_reason,
    scaled_grouped_mm,
)

__all__ = [
    "check_offsets",
    "fallback_reason",
    "grouped_mm",
    "layer_fallback_reason",
    "moe_layer",
    "permute",
    "quantize",
    "scaled_fallback_reason",
    "scaled_grouped_mm",
    "unpermute",
]
