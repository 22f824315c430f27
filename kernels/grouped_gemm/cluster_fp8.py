"""Grouped GEMM in fp8 (e4m3fn) with one scale per row, with clusters of two SMs on Hopper: backend `cuda_cluster_fast`.

    out[m, n] = scale_a[m] scale_b[g, n]  sum_k a[m, k] b[g, n, k]        m in the rows of g

    a [M, K]   b [G, N, K]   out [M, N] in bf16; rows past offs[-1] are zero

It is cluster.py's kernel with wgmma's fp8 products, whose tiles have as many bytes and twice as much K. Sums stay in
the tensor cores (fp8.py explains the cost), so a thread has room for as many as in 16 bits. They are multiplied by the
scales just before they are stored. Results equal fp8.py's plain kernel and torch's `use_fast_accum` bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from groupbench.kernels.device import Device, device_of
from groupbench.kernels.grouped_gemm.cluster import default_config, illegal, launcher
from groupbench.kernels.grouped_gemm.cluster_tiles import ClusterConfig, unsuitable
from groupbench.kernels.grouped_gemm.fp8 import ROWWISE_FAST, require_scaled
from groupbench.kernels.grouped_gemm.quantize import E4M3
from groupbench.kernels.grouped_gemm.support import group_ends, require_dense
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal, problem_key


def choose_config(M: int, G: int, N: int, K: int, device: Device) -> ClusterConfig:
    """Return this problem's tuned config on this GPU, else the default."""
    key = problem_key(M, G, N, K, ROWWISE_FAST)
    default = default_config(M, G, N, K // 2, device)
    return first_legal(configs_in_order("cluster_fp8", key, device, default, lambda c: illegal(c, E4M3, device)))


def why_not_cluster_fp8(a: Tensor, b: Tensor) -> str | None:
    """Return why the kernel cannot take a [M, K] and b [G, N, K], or None if it can."""
    return unsuitable(b.size(1), b.size(0), dtypes=(E4M3,), a=a, b=b)


def prepare_cluster_fp8(
    a: Tensor,  # [M, K] e4m3fn
    scale_a: Tensor,  # [M] fp32
    b: Tensor,  # [G, N, K] e4m3fn
    scale_b: Tensor,  # [G, N] fp32, contiguous
    offs: Tensor,  # [G], int32 or int64 end offsets
    config: ClusterConfig | None = None,
    trusted: bool = False,  # the caller vouches for the offsets; checking them synchronises with the device
) -> Callable[[], Tensor]:  # [M, N] in bf16; rows past offs[-1] are zero
    """Compile the kernel and describe the operands; the returned callable allocates the output and launches once.

    The callable reads `offs` on the device and follows later changes. It may be called from any thread. Raises
    ValueError for unsupported operands or configs, OSError without NVRTC.
    """
    require_scaled(a, scale_a, b, scale_b, fast_accum=True, out_dtype=torch.bfloat16)
    require_dense(offs) if trusted else group_ends(a, b.transpose(1, 2), offs)
    (M, K), (G, N, _) = a.shape, b.shape
    if reason := why_not_cluster_fp8(a, b):
        raise ValueError(reason)
    if M == 0 or N == 0 or K == 0:
        return lambda: torch.zeros(M, N, dtype=torch.bfloat16, device=a.device)
    config = config or choose_config(M, G, N, K, device_of(a.device))
    run = launcher(a, b, True, False, offs, config, (scale_a, scale_b))
    return lambda: run(a, b, offs, scale_a, scale_b)
