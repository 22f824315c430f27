"""FlashInfer's grouped_mm_bf16, which runs cuDNN's engine for mixtures of experts (nvidia-cudnn-frontend)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupbench.operators.catalog.rivals.package import RivalPackage, require, starts_and_ends, weights_nk
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Run, Target

if TYPE_CHECKING:
    from groupbench.operators.catalog.grouped_gemm import GroupedInputs
    from groupbench.operators.catalog.grouped_gemm_w4 import W4Inputs

PACKAGE = RivalPackage("flashinfer-python", "flashinfer.grouped_mm", "rivals-flashinfer")


def prepare(x: GroupedInputs) -> Run:
    from flashinfer.grouped_mm import grouped_mm_bf16

    b, bounds = weights_nk(x.b), starts_and_ends(x.offs)
    require(8, N=b.shape[1], K=b.shape[2])
    return lambda: grouped_mm_bf16(x.a, b, bounds(), out_dtype=x.a.dtype)


_SOURCE = "cuDNN's grouped GEMM for experts, through flashinfer.grouped_mm; offsets on the device"
_LAYER = "FlashInfer has W4A16 for Hopper only inside a whole layer, cutlass_fused_moe"
_unavailable = PACKAGE.unavailable(("bf16", "fp16"), least=(8, 0))


def prepare_w4(x: W4Inputs) -> Run:
    raise Unavailable(_LAYER)


def _only_a_layer(target: Target) -> str:
    return PACKAGE.missing or _LAYER


BACKENDS = (
    PACKAGE.backend("grouped_gemm", "flashinfer_cudnn", prepare, _SOURCE, unavailable=_unavailable),
    PACKAGE.backend("grouped_gemm_dgrad", "flashinfer_cudnn", prepare, _SOURCE, unavailable=_unavailable),
    PACKAGE.backend(
        "grouped_gemm_w4a16", "flashinfer", prepare_w4, "CUTLASS's mixed inputs for Hopper", unavailable=_only_a_layer
    ),
)
