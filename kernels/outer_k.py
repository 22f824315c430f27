"""A tiled matrix product, K in the outer loop: the tutorial's second kernel, for any size, strides and dtype.

    out = a @ b        a [M, K]   b [K, N]   out [M, N]

A program owns an output tile and walks along K. It loads a column block from `a` and a row block from `b`, and adds
their product to the tile, which stays in registers, in fp32, until it is stored once.

               K                     N
          +---------+           +---------+
        M | ..[a].. |    K :    |   [b]   |     acc += [a] @ [b]    for each block of K
          +---------+           |    :    |
                                +---------+

Rows and columns past the end are masked, in loads (zeros, which add nothing) and in the store. There are no further
optimisations: tiles in numbering order, loads by pointers, no TMA, no tuning. Compared with cuBLAS, it shows how fast
compiled plain code is.

After gpu-mode/triton-tutorials (matmul_outer_k.py). Different here: the output has the operands' dtype instead of
always fp32; pointers step along K instead of being computed again; offsets are 64 bits wide; fp32 is multiplied as
fp32, not as TF32; the tile depends on the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.device import INTERPRETER, Device, device_of, fitted, halved
from groupbench.kernels.grouped_gemm.support import illegal_tile
from groupbench.kernels.launch import Launch
from groupbench.kernels.split_k.problem import require_product
from groupbench.kernels.variants import by_config, first_that_runs


@dataclass(frozen=True)
class OuterKConfig:
    """The outer-K kernel's tile sizes and launch options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


CONFIGS = {
    "tutorial": OuterKConfig(64, 64, 64, num_warps=4, num_stages=3),
    # Twice the sides, twice the products for each byte that is loaded; two programs per SM hide each other's waits.
    "cuda": OuterKConfig(128, 128, 64, num_warps=8, num_stages=3),
    # IEEE fp32 runs on FMA units, which read registers.
    "cuda_fp32": OuterKConfig(64, 64, 32, num_warps=4, num_stages=3),
    # The cost in the interpreter depends on the number of operations, not of elements.
    "cpu": OuterKConfig(64, 64, 64, num_warps=4, num_stages=1),
}


def default_config(device: Device, dtype: torch.dtype) -> OuterKConfig:
    """Return the config for a dtype, shrunk until it fits the device's shared memory."""
    if device.vendor == "cpu":
        return CONFIGS["cpu"]
    config = CONFIGS["cuda_fp32" if dtype == torch.float32 else "cuda"]
    return fitted(config, lambda smaller: illegal(smaller, dtype, device))


def illegal(config: OuterKConfig, dtype: torch.dtype, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot be compiled for a GPU, or None if it can."""
    return illegal_tile(config.block_m, config.block_n, config.block_k, config.num_stages, dtype, device)


@triton.jit
def _outer_k_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    out_ptr,  # [M, N]
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K: no mask along K
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    # A grid of one dimension, since the second one is limited to 65535.
    row = (tl.program_id(0) // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row_ok = (row < M)[:, None]
    col_ok = (col < N)[None, :]
    one = tl.full((), 1, tl.int64)  # offsets may pass 2**31
    a_ptrs = a_ptr + row[:, None] * (one * stride_am) + k[None, :] * (one * stride_ak)
    b_ptrs = b_ptr + k[:, None] * (one * stride_bk) + col[None, :] * (one * stride_bn)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in tl.range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=row_ok, other=0.0)
            b = tl.load(b_ptrs, mask=col_ok, other=0.0)
        else:
            a = tl.load(a_ptrs, mask=row_ok & (k < K - first)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=col_ok & (k < K - first)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += one * stride_ak * BLOCK_K
        b_ptrs += one * stride_bk * BLOCK_K
    at = out_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=row_ok & col_ok)


def prepare_outer_k(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [K, N], any strides
    config: OuterKConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """Check the operands; the returned callable allocates the output and launches.

    Raises ValueError for unsupported operands or configs.
    """
    require_product(a, b)
    M, N = a.size(0), b.size(1)
    device = device_of(a.device)
    if config is not None and (reason := illegal(config, a.dtype, device)):
        raise ValueError(f"{config}: {reason}")
    if M == 0 or N == 0:
        return lambda: torch.empty(M, N, dtype=a.dtype, device=a.device)
    if config is not None:
        return _prepare_with(a, b, config)
    devices = (("default", device), ("small", halved(device)))
    configs = [(name, default_config(of, a.dtype), None) for name, of in devices]
    return first_that_runs("outer_k", by_config("", configs, partial(_prepare_with, a, b), (a.dtype, a.device)))


def _prepare_with(a: Tensor, b: Tensor, config: OuterKConfig) -> Callable[[], Tensor]:
    """Run `prepare_outer_k` for checked operands and config."""
    (M, K), N = a.shape, b.size(1)
    grid = (triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n),)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launch = Launch(_outer_k_kernel, grid, **kernel_constants(config, K), **options)

    def run() -> Tensor:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        launch(a, b, out, M, N, K, *a.stride(), *b.stride())
        return out

    return run


def kernel_constants(config: OuterKConfig, K: int) -> dict[str, object]:
    """Return the kernel's compile-time constants, without warps and stages."""
    return {
        "EVEN_K": K % config.block_k == 0,
        "PRECISION": "ieee",  # TF32 would leave fp32 operands fp16's mantissa
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }


def matmul_reference(a: Tensor, b: Tensor) -> Tensor:
    """Return the product in fp64, without rounding to the operands' dtype."""
    return a.double() @ b.double()
