"""FBGEMM GenAI's CUTLASS grouped GEMMs (Meta): bf16, gradients, fp8 with one scale per row, and weights of int4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from groupbench.operators.catalog.rivals.package import RivalPackage, require, row_counts, weights_nk
from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Run

if TYPE_CHECKING:
    from groupbench.operators.catalog.grouped_gemm import GroupedInputs
    from groupbench.operators.catalog.grouped_gemm_fp8 import Fp8Inputs
    from groupbench.operators.catalog.grouped_gemm_w4 import W4Inputs
    from groupbench.operators.catalog.grouped_gemm_wgrad import WgradInputs

PACKAGE = RivalPackage(
    "fbgemm-gpu-genai",
    "fbgemm_gpu.experimental.gen_ai",
    "rivals-fbgemm",
    note="its library loads only with the torch that it was built for",
)


def _operators() -> Any:
    import fbgemm_gpu.experimental.gen_ai  # noqa: F401 - registers the operators

    return torch.ops.fbgemm


def _int64_counts(offs: Tensor) -> Any:
    counts = row_counts(offs)
    return lambda: counts().to(torch.int64)


def prepare(x: GroupedInputs) -> Run:
    fbgemm = _operators()
    b, counts = weights_nk(x.b), _int64_counts(x.offs)
    require(8, N=b.shape[1], K=b.shape[2])

    return lambda: fbgemm.bf16bf16bf16_grouped_stacked(x.a, b, counts())


def prepare_dgrad(x: GroupedInputs) -> Run:
    """Prepare FBGEMM's operator for gradients, or the forward's if B is stored in another layout.

    It takes [G, N, K] with stride 1 along N: weights as a forward pass stores them.
    """
    fbgemm = _operators()
    _, K, N = x.b.shape
    require(8, N=N, K=K)
    if x.b.stride(-1) != 1 or not x.b.stride(0):
        return prepare(x)
    counts = _int64_counts(x.offs)

    return lambda: fbgemm.bf16bf16bf16_grouped_grad(x.a, x.b.transpose(1, 2), counts())


def prepare_wgrad(x: WgradInputs) -> Run:
    fbgemm = _operators()
    require(8, N=x.dc.shape[1], K=x.a.shape[1])
    left, right = (x.dc, x.a) if x.nk else (x.a, x.dc)
    counts = _int64_counts(x.offs)

    def run() -> Tensor:
        out: Tensor = fbgemm.bf16bf16bf16_grouped_wgrad(left, right, counts())
        return out.transpose(1, 2) if x.nk else out

    return run


def prepare_fp8(x: Fp8Inputs) -> Run:
    fbgemm = _operators()
    require(16, N=x.b.shape[1], K=x.b.shape[2])
    counts = _int64_counts(x.offs)

    return lambda: fbgemm.f8f8bf16_rowwise_grouped_stacked(x.a, x.b, x.scale_a, x.scale_b, counts())


def prepare_w4(x: W4Inputs) -> Run:
    """Prepare the product with int4 weights, which are shuffled into the layout of its kernel, expert by expert."""
    fbgemm = _operators()
    w = x.weights
    if w.fmt.floating or w.fmt.zero_point or w.fmt.group % 128 or x.bias is not None:
        raise Unavailable("its four-bit weights are integers without zero points, a scale for every 128 of K, no bias")
    require(128, N=w.N, K=w.K)
    signed = (x.codes ^ 0x88).view(torch.int8)
    shuffled = [fbgemm.preshuffle_i4(signed[g], x.scales[g].t().contiguous()) for g in range(w.G)]
    codes, scales = (torch.stack(parts) for parts in zip(*shuffled, strict=True))
    zeros, counts = torch.zeros_like(scales), row_counts(x.offs)

    return lambda: fbgemm.bf16i4bf16_shuffled_grouped(x.a, codes, scales, zeros, counts())


_SOURCE = (
    "FBGEMM GenAI: CUTLASS, config by its own heuristics; row counts are computed from the offsets inside the call"
)
_bf16, _fp8 = PACKAGE.unavailable(("bf16",)), PACKAGE.unavailable(("fp8",))
BACKENDS = (
    PACKAGE.backend("grouped_gemm", "fbgemm", prepare, _SOURCE, unavailable=_bf16),
    PACKAGE.backend("grouped_gemm_dgrad", "fbgemm", prepare_dgrad, _SOURCE, unavailable=_bf16),
    PACKAGE.backend("grouped_gemm_wgrad", "fbgemm", prepare_wgrad, _SOURCE, unavailable=_bf16),
    PACKAGE.backend("grouped_gemm_w4a16", "fbgemm", prepare_w4, _SOURCE, unavailable=_bf16),
    # Its sums stay in the tensor cores, like those of torch with use_fast_accum.
    PACKAGE.backend("grouped_gemm_fp8", "fbgemm", prepare_fp8, _SOURCE, unavailable=_fp8, tolerance="bf16_fast_accum"),
)
