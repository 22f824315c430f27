"""QuACK's GEMM with variable-length batches, in CuTe DSL (Dao-AILab): the product, and both gradients.

The public function is called: `gemm` chooses a config at the first call for a problem, before the clock starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from groupbench.operators.catalog.rivals.package import RivalPackage, require, starts_and_ends
from groupbench.operators.deferred import Tensor
from groupbench.operators.operator import Run
from groupbench.operators.relayout import laid_out

if TYPE_CHECKING:
    from groupbench.operators.catalog.grouped_gemm import GroupedInputs
    from groupbench.operators.catalog.grouped_gemm_wgrad import WgradInputs

PACKAGE = RivalPackage("quack-kernels", "quack.gemm_interface", "rivals-quack")
_SOURCE = "QuACK: CuTe DSL, tuned by its own search; offsets on the device"


def prepare(x: GroupedInputs) -> Run:
    from quack.gemm_interface import gemm

    _, K, N = x.b.shape
    require(8, N=N, K=K)
    b, bounds = _one_each(x.b), starts_and_ends(x.offs)

    return lambda: gemm(x.a, b, cu_seqlens_m=bounds())


def prepare_wgrad(x: WgradInputs) -> Run:
    """Prepare left.T @ right by row groups, in the order giving the gradient the weights' layout."""
    from quack.gemm_interface import gemm

    require(8, N=x.dc.shape[1], K=x.a.shape[1])
    left, right = (x.dc, x.a) if x.nk else (x.a, x.dc)
    bounds = starts_and_ends(x.offs)

    def run() -> Tensor:
        out: Tensor = gemm(left.t(), right, cu_seqlens_k=bounds())
        return out.transpose(1, 2) if x.nk else out

    return run


def _one_each(b: Tensor) -> Tensor:
    """Return the weights with a separate matrix in memory for each group; a shared matrix is repeated."""
    if b.stride(0):
        return b
    return laid_out(b.new_empty(b.shape), b)


_unavailable = PACKAGE.unavailable(("bf16", "fp16"), least=(8, 0))
BACKENDS = (
    PACKAGE.backend("grouped_gemm", "quack", prepare, _SOURCE, unavailable=_unavailable),
    PACKAGE.backend("grouped_gemm_dgrad", "quack", prepare, _SOURCE, unavailable=_unavailable),
    PACKAGE.backend("grouped_gemm_wgrad", "quack", prepare_wgrad, _SOURCE, unavailable=_unavailable),
)
