"""Compute a grouped GEMM without zeroing the rows past offs[-1], for rows whose number only the device knows.

    out[rows of g] = a[rows of g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

With expert parallelism most of the T*k allocated rows belong to no expert. The products of grouped_gemm/ promise their
callers zeros there, and these zeros would be most of the kernel's writes.
"""

from __future__ import annotations

from torch import Tensor

from groupbench.kernels.grouped_gemm import choose


def product(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]; weights stored as [G, N, K] come as a transposed view
    offs: Tensor,  # [G], int32 or int64 end offsets
) -> Tensor:  # [M, N]; rows past offs[-1] are not written
    """Return the grouped product, for operands that were checked."""
    return choose.product(a, b, offs, zero_rest=False)
