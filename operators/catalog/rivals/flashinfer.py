"""FlashInfer's grouped_mm_bf16, which runs cuDNN's engine for mixtures of experts (nvidia-cudnn-frontend)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupbench.operators.catalog.rivals.layouts import require, starts_and_ends, weights_nk
from groupbench.operators.catalog.rivals.package import RivalPackage
from groupbench.operators.operator import Run

if TYPE_CHECKING:
    from torch import Tensor

    from groupbench.operators.catalog.grouped_gemm import GroupedInputs

PACKAGE = RivalPackage("flashinfer-python", "flashinfer.grouped_mm", "rivals-flashinfer")


def prepare(x: GroupedInputs) -> Run:
    import torch
    from flashinfer.grouped_mm import grouped_mm_bf16

    b, bounds = weights_nk(x.b), starts_and_ends(x.offs)
    require(8, N=b.shape[1], K=b.shape[2])
    dtype: torch.dtype = x.a.dtype

    def run() -> Tensor:
        out: Tensor = grouped_mm_bf16(x.a, b, bounds(), out_dtype=dtype)
        return out

    return run


_SOURCE = "cuDNN's grouped GEMM for experts, through flashinfer.grouped_mm; offsets on the device"
_unavailable = PACKAGE.unavailable(("bf16", "fp16"), least=(8, 0))
BACKENDS = (
    PACKAGE.backend("grouped_gemm", "flashinfer_cudnn", prepare, _SOURCE, unavailable=_unavailable),
    PACKAGE.backend("grouped_gemm_dgrad", "flashinfer_cudnn", prepare, _SOURCE, unavailable=_unavailable),
)
