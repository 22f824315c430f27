"""flat.py's loop with pointers instead of TMA: any strides, any alignment, any GPU with Triton.

    out[start_g:end_g] = a[start_g:end_g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

Sizes are read on the device at every call, as there. Loads mask the next expert's rows and all elements past N and K:
memory behind a row may contain anything if rows are not multiples of 16 bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import Device, device_of
from groupbench.kernels.grouped_gemm.experts import expert_of, expert_tiles, of_groups, zero_past
from groupbench.kernels.grouped_gemm.pointer import PointerConfig, default_config, fit
from groupbench.kernels.grouped_gemm.support import worker_count
from groupbench.kernels.grouped_gemm.tile_order import super_grouped


def choose_config(mean_rows: float, dtype: torch.dtype, device: Device) -> PointerConfig:
    """Return the config for the mean rows per expert, shrunk until it fits the device.

    Few rows get tiles with few rows. Element-wise loads and stores keep their addresses in registers: with odd strides,
    twice as many columns would spill 368 bytes per thread (sm_90, Triton 3.7.1).
    """
    if device.vendor == "cpu" or dtype == torch.float32:
        return default_config(device, dtype)
    if mean_rows <= 32:
        config = PointerConfig(16 if mean_rows <= 16 else 32, 128, 64, group_m=8, num_warps=4, num_stages=3)
    elif mean_rows <= 96:
        config = PointerConfig(64, 64, 32, group_m=8, num_warps=4, num_stages=3)
    else:
        config = PointerConfig(128, 64, 32, group_m=8, num_warps=8, num_stages=3)
    return fit(config, dtype, device)


@triton.jit
def _flat_pointer_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [G, K, N]
    out_ptr,  # [M, N] contiguous
    offs_ptr,  # [G]
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bg,
    stride_bk,
    stride_bn,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    starts, ends, counts, before = expert_tiles(offs_ptr, G, G_POW2, BLOCK_M)
    tiles_m = tl.sum(counts, 0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_PROGRAMS):
        tile_m, tile_n = super_grouped(tile, tiles_m, tiles_n, GROUP_M)
        g, start, size, row = expert_of(tile_m, starts, ends, counts, before, G_POW2, BLOCK_M)
        rows = row + tl.arange(0, BLOCK_M)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_ok = (rows < size)[:, None]
        column_ok = (columns < N)[None, :]
        k = tl.arange(0, BLOCK_K)
        at_row = (start + rows).to(tl.int64)[:, None]
        at_column = columns.to(tl.int64)[None, :]
        at_k = k.to(tl.int64)
        a_ptrs = a_ptr + at_row * stride_am + at_k[None, :] * stride_ak
        b_ptrs = b_ptr + g.to(tl.int64) * stride_bg + at_k[:, None] * stride_bk + at_column * stride_bn
        step = tl.full((), BLOCK_K, tl.int64)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for first in range(0, K, BLOCK_K):
            # The K tail must be zero on both sides: memory past it may be NaN, and 0 * NaN is NaN.
            a = tl.load(a_ptrs, mask=row_ok if EVEN_K else row_ok & (k < K - first)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=column_ok if EVEN_K else column_ok & (k < K - first)[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            a_ptrs += step * stride_ak
            b_ptrs += step * stride_bk
        tl.store(out_ptr + at_row * N + columns[None, :], acc.to(out_ptr.dtype.element_ty), mask=row_ok & column_ok)
    zero_past(out_ptr, tl.load(offs_ptr + G - 1).to(tl.int32), M, N, N, NUM_PROGRAMS, BLOCK_N)


def grouped_gemm_pointers(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [G, K, N], any strides; one shared matrix is expanded
    offs: Tensor,  # [G], int32 or int64 end offsets, contiguous
    zero_rest: bool = True,  # else rows past offs[-1] stay uninitialised
    config: PointerConfig | None = None,
) -> Tensor:  # [M, N]
    """Allocate the output and launch, for checked operands."""
    (M, K), (G, _, N) = a.shape, b.shape
    config = config or choose_config(M / G, a.dtype, device_of(a.device))
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    programs = worker_count(a.device)
    _flat_pointer_kernel[(programs,)](
        a,
        b,
        out,
        offs,
        M if zero_rest else 0,
        N,
        K,
        *a.stride(),
        *b.stride(),
        **launch_keywords(_flat_pointer_kernel, config, **of_groups(G), EVEN_K=K % config.block_k == 0),
        PRECISION="ieee",
        NUM_PROGRAMS=programs,
    )
    return out
