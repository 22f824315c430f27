"""flat.py's grouped GEMM for rows whose number only the device knows: those past offs[-1] are left alone.

    out[rows of g] = a[rows of g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

With expert parallelism most of the T*k rows that are allocated are nobody's, and zeros for them, which flat.py promises
its callers, would be most of what the kernel writes.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from groupbench.kernels.grouped_gemm.flat import FlatConfig, _flat_kernel, choose_config, illegal, prepare_flat
from groupbench.kernels.grouped_gemm.support import no_tma, stored_weights, worker_count


def product(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]; weights stored as [G, N, K] come as a transposed view
    offs: Tensor,  # [G], int32 or int64 end offsets
    config: FlatConfig | None = None,
) -> Tensor:  # [M, N]; rows past offs[-1] are not written
    """Allocate and launch, for operands that are known to fit. Raises ValueError for a config that does not compile."""
    (M, K), (G, _, N) = a.shape, b.shape
    weights, nk, shared = stored_weights(b)
    if M == 0 or no_tma(N, a=a, b=weights) is not None:
        return prepare_flat(a, b, offs, trusted=True)()
    config = config or choose_config(M, G, N, K, a.dtype, a.device, nk)
    if reason := illegal(config, a.dtype):
        raise ValueError(f"{config}: {reason}")
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    block_a, block_n = [config.block_m, config.block_k], config.block_n // (2 if config.split_store else 1)
    half_a = [config.block_m // 2, config.block_k]
    programs = worker_count(a.device, config.per_sm)
    _flat_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, block_a),
        TensorDescriptor.from_tensor(a, half_a) if config.halves else None,
        TensorDescriptor.from_tensor(
            weights, [1, config.block_n, config.block_k] if nk else [1, config.block_k, config.block_n]
        ),
        create_ragged_descriptor(out, [config.block_m, block_n]),
        out,
        offs,
        0,  # the rows that are to be zero past the last group's
        N,
        K,
        G=G,
        G_POW2=triton.next_power_of_2(G),
        SHARED_B=shared,
        B_IS_NK=nk,
        PRECISION="ieee",
        NUM_PROGRAMS=programs,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        SWAP=config.swap,
        SPLIT_STORE=config.split_store,
        FLATTEN=config.flatten,
        HALVES=config.halves,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
