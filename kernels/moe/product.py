"""Compute flat.py's grouped GEMM without zeroing the rows past offs[-1], for rows whose number only the device knows.

    out[rows of g] = a[rows of g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

With expert parallelism most of the T*k allocated rows belong to no expert. flat.py promises its callers zeros there,
and these zeros would be most of the kernel's writes.
"""

from __future__ import annotations

from torch import Tensor

from groupbench.kernels.grouped_gemm.flat import prepare_flat
from groupbench.kernels.grouped_gemm.flat_config import FlatConfig


def product(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]; weights stored as [G, N, K] come as a transposed view
    offs: Tensor,  # [G], int32 or int64 end offsets
    config: FlatConfig | None = None,
) -> Tensor:  # [M, N]; rows past offs[-1] are not written
    """Return the grouped product, for operands that were checked; raise ValueError for a config that is illegal."""
    return prepare_flat(a, b, offs, config, trusted=True, zero_rest=False)()
