"""flat.py's grouped GEMM for rows whose number only the device knows: those past offs[-1] are left alone.

    out[rows of g] = a[rows of g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

With expert parallelism most of the T*k rows that are allocated are nobody's, and zeros for them, which flat.py promises
its callers, would be most of what the kernel writes.
"""

from __future__ import annotations

from torch import Tensor

from groupbench.kernels.grouped_gemm.flat import FlatConfig, prepare_flat


def product(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]; weights stored as [G, N, K] come as a transposed view
    offs: Tensor,  # [G], int32 or int64 end offsets
    config: FlatConfig | None = None,
) -> Tensor:  # [M, N]; rows past offs[-1] are not written
    """Allocate and launch, for operands that are known to fit. Raises ValueError for a config that does not compile."""
    return prepare_flat(a, b, offs, config, trusted=True, zero_rest=False)()
