"""humming (vllm-project/humming): products with weights of few bits, compiled for the problem, in vLLM's MoE layers.

It takes checkpoints' layouts (mxfp4 as it is, integers as compressed-tensors packs them) and repacks them into its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from groupbench.operators.catalog.rivals.package import RivalPackage, require, starts_and_ends
from groupbench.operators.deferred import torch
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Run

if TYPE_CHECKING:
    from groupbench.operators.catalog.grouped_gemm_w4 import W4Inputs

PACKAGE = RivalPackage("humming-kernels", "humming.layer", "rivals-humming", note="it needs nvcc or NVRTC")


def prepare(x: W4Inputs) -> Run:
    from humming.layer import HummingLayer

    G, N, _ = x.codes.shape
    w = x.weights
    require(64, N=N, K=x.K)
    if w.zeros is not None:
        raise Unavailable("zero points would have to be packed in its own layout")
    if x.scale_a is not None and x.scale_a.ndim == 2:
        raise Unavailable("scales of every 128 of K are not tried")
    weight_config: dict[str, Any] = {"quant_method": "mxfp4"}
    names = ("weight", "weight_scale")
    if not w.fmt.floating:
        weight_config = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "type": "int", "num_bits": 4,
            "strategy": "group", "symmetric": True, "group_size": w.fmt.group,
        }  # fmt: skip
        names = ("weight_packed", "weight_scale")
    codes = x.codes if w.fmt.floating else x.codes.view(torch.int32)
    tensors = {names[0]: codes, names[1]: x.scales} | ({} if x.bias is None else {"bias": x.bias})
    input_config = None if x.scale_a is None else {"dtype": "float8e4m3", "quant_mode": "dynamic_token"}
    layer = HummingLayer(
        N, x.K, weight_config, input_config, num_experts=G, has_bias=x.bias is not None, torch_dtype=torch.bfloat16
    ).cuda()
    layer.load_from_tensors(tensors)
    layer.transform()
    bounds, scale = starts_and_ends(x.offs), None if x.scale_a is None else x.scale_a[:, None]
    config = {"gemm_type": "grouped_contiguous"}

    return lambda: layer(x.a, input_scale=scale, expert_layout=bounds(), compute_config=config)


_SOURCE = "humming: CUDA C++ compiled for the problem, config by its own rules; bounds are made inside the call"
BACKENDS = (
    PACKAGE.backend("grouped_gemm_w4a16", "humming", prepare, _SOURCE, unavailable=PACKAGE.unavailable(("bf16",))),
    PACKAGE.backend(
        "grouped_gemm_w4a8", "humming", prepare, _SOURCE, unavailable=PACKAGE.unavailable(("fp8",)),
        tolerance="bf16_fast_accum",
    ),
)  # fmt: skip
