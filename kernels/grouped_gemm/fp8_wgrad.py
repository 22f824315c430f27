"""A grouped GEMM's weight gradient from scaled fp8: the fp8 operators' backend `triton_flat`, mode bwd.

    dW[g, n, k] = main_grad[g, n, k] + sum over g's rows m: dc[m, n] a[m, k]                fp32, [G, N, K]

wgmma takes fp8 only with the summed dimension innermost, here the rows. So the operands are stored
transposed, and each group's rows begin at a 128-row boundary, with zeros up to the next group (quantize.py):

    dct [N, P]   at [K, P]   P = padded_rows(M, G), where the device uses the groups' blocks

Scales. Block-wise, DeepSeek-V3's recipe: one per 128 rows in a column, [P/128, N] and [P/128, K]; a block's product is
scaled and added in fp32. Row-wise, torchao's: one per column in a group, [G, N] and [G, K]; sums are promoted to fp32
every 128 rows, and scaled at the end.

On Hopper, block-wise scales are cluster_fp8_wgrad.py's, and this file's kernel is for all else.

`main_grad` is the buffer in which a step's micro-batches add up, in fp32 as in Megatron-LM. It is read and written by
the epilogue, so no bf16 gradient exists in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import device_of, fitted
from groupbench.kernels.grouped_gemm import cluster_fp8_wgrad
from groupbench.kernels.grouped_gemm.experts import expert_tiles, of_groups
from groupbench.kernels.grouped_gemm.quantize import E4M3, SCALE_BLOCK, dequantize_groups
from groupbench.kernels.grouped_gemm.reference import without_tf32
from groupbench.kernels.grouped_gemm.support import illegal_tile, require_device, require_tensors, worker_count
from groupbench.kernels.grouped_gemm.tile_order import super_grouped
from groupbench.kernels.launch import Launch


@dataclass(frozen=True)
class Fp8WgradConfig:
    """Gradient tile and launch options; a step sums 128 rows."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # tile rows of a super-group, see tile_order.py
    per_sm: int = 1


CONFIGS = {
    "blockwise": Fp8WgradConfig(64, 128, num_warps=4, num_stages=4, per_sm=2),
    "rowwise": Fp8WgradConfig(128, 128, num_warps=8, num_stages=4),
    "cpu": Fp8WgradConfig(64, 32, num_warps=4, num_stages=1, group_m=2),
}


@triton.jit
def _fp8_wgrad_kernel(
    dct_desc,  # [N, P], boxes [BLOCK_N, 128]
    at_desc,  # [K, P], boxes [BLOCK_K, 128]
    scale_dc_ptr,  # [P/128, N] or [G, N]
    scale_a_ptr,  # [P/128, K] or [G, K]
    main_grad_ptr,  # [G, N, K], or None: zeros
    out_ptr,  # [G, N, K], may be main_grad
    offs_ptr,  # [G]
    N,
    K,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    BLOCKWISE: tl.constexpr,
    FAST_ACCUM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    _, _, counts, before = expert_tiles(offs_ptr, G, G_POW2, 128)
    groups = tl.arange(0, G_POW2)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    each = tiles_n * tiles_k
    for tile in range(tl.program_id(0), G * each, tl.num_programs(0)):
        g = tile // each
        tile_n, tile_k = super_grouped(tile % each, tiles_n, tiles_k, GROUP_M)
        first = tl.sum(tl.where(groups == g, before, 0), 0)
        blocks = tl.sum(tl.where(groups == g, counts, 0), 0)
        n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
        acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
        dc_scales = scale_dc_ptr + first.to(tl.int64) * N + n
        a_scales = scale_a_ptr + first.to(tl.int64) * K + k
        for block in range(first, first + blocks):
            dct = dct_desc.load([tile_n * BLOCK_N, block * 128])
            at = at_desc.load([tile_k * BLOCK_K, block * 128])
            if BLOCKWISE:
                scale_dc = tl.load(dc_scales, mask=n < N, other=0.0)
                scale_a = tl.load(a_scales, mask=k < K, other=0.0)
                acc += tl.dot(dct, at.T) * scale_dc[:, None] * scale_a[None, :]
                dc_scales += N
                a_scales += K
            elif FAST_ACCUM:
                acc = tl.dot(dct, at.T, acc)
            else:
                acc += tl.dot(dct, at.T)
        if not BLOCKWISE:
            scale_dc = tl.load(scale_dc_ptr + g.to(tl.int64) * N + n, mask=n < N, other=0.0)
            scale_a = tl.load(scale_a_ptr + g.to(tl.int64) * K + k, mask=k < K, other=0.0)
            acc *= scale_dc[:, None] * scale_a[None, :]
        inside = (n < N)[:, None] & (k < K)[None, :]
        at_out = g.to(tl.int64) * N * K + n.to(tl.int64)[:, None] * K + k[None, :]
        if main_grad_ptr is not None:
            acc += tl.load(main_grad_ptr + at_out, mask=inside)
        tl.store(out_ptr + at_out, acc.to(out_ptr.dtype.element_ty), mask=inside)


def prepare_fp8_wgrad(
    dct: Tensor,  # [N, P] e4m3fn: the gradient of the output, transposed, padded by group
    scale_dc: Tensor,  # [P/128, N] fp32; row-wise [G, N]
    at: Tensor,  # [K, P] e4m3fn: the rows, transposed, padded by group
    scale_a: Tensor,  # [P/128, K] fp32; row-wise [G, K]
    offs: Tensor,  # [G], int32 or int64 end offsets of the rows before padding
    blockwise: bool,
    main_grad: Tensor | None = None,  # [G, N, K] fp32, to which the gradient is added
    in_place: bool = False,  # write into main_grad instead of a new tensor
    out_dtype: torch.dtype = torch.float32,
    fast_accum: bool = False,  # leave sums in the tensor cores' short accumulators; row-wise only
    config: Fp8WgradConfig | None = None,
) -> Callable[[], Tensor]:  # [G, N, K]
    """Make the descriptors; the returned callable launches once. It reads `offs` on the device.

    Raises ValueError if operands do not fit together or the kernel cannot take them.
    """
    require_tensors(dct=dct, scale_dc=scale_dc, at=at, scale_a=scale_a, offs=offs)
    (N, P), K, G = dct.shape, at.size(0), offs.numel()
    sides = P // SCALE_BLOCK if blockwise else G
    if dct.dtype != E4M3 or at.dtype != E4M3 or at.size(1) != P or P % SCALE_BLOCK or not P:
        raise ValueError(
            f"expected {E4M3} [N, P] and [K, P], P in blocks of {SCALE_BLOCK}, got {dct.shape}, {at.shape}"
        )
    if scale_dc.shape != (sides, N) or scale_a.shape != (sides, K):
        raise ValueError(f"expected scales [{sides}, {N}] and [{sides}, {K}], got {scale_dc.shape} and {scale_a.shape}")
    if main_grad is not None and (main_grad.shape != (G, N, K) or not main_grad.is_contiguous()):
        raise ValueError(f"expected main_grad [{G}, {N}, {K}], contiguous, got {tuple(main_grad.shape)}")
    if in_place and main_grad is None:
        raise ValueError("in_place needs main_grad")
    require_device(dct.device)
    out_dtype = main_grad.dtype if in_place and main_grad is not None else out_dtype

    def run_with(launch: Callable[[Tensor], object]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            out = main_grad if in_place else torch.empty(G, N, K, dtype=out_dtype, device=dct.device)
            assert out is not None
            launch(out)
            return out

        return run

    by_cluster = blockwise and config is None and (main_grad is None or main_grad.dtype == out_dtype == torch.float32)
    if by_cluster and cluster_fp8_wgrad.unsuitable(dct, at, G, out_dtype) is None:
        bound = cluster_fp8_wgrad.bind(dct, at, offs, out_dtype)
        return run_with(lambda out: bound(dct, scale_dc, at, scale_a, offs, main_grad, out))
    config = config or default_config(blockwise, dct.device)
    if reason := illegal_tile(config.block_n, config.block_k, SCALE_BLOCK):
        raise ValueError(f"{config}: {reason}")
    dct_desc, at_desc = (
        TensorDescriptor.from_tensor(x, [side, SCALE_BLOCK])
        for x, side in ((dct, config.block_n), (at, config.block_k))
    )
    tiles = G * triton.cdiv(N, config.block_n) * triton.cdiv(K, config.block_k)
    launch = Launch(
        _fp8_wgrad_kernel,
        (min(tiles, worker_count(dct.device, config.per_sm)),),
        **launch_keywords(_fp8_wgrad_kernel, config, **of_groups(G), BLOCKWISE=blockwise, FAST_ACCUM=fast_accum),
    )

    return run_with(lambda out: launch(dct_desc, at_desc, scale_dc, scale_a, main_grad, out, offs, N, K))


def default_config(blockwise: bool, device: torch.device) -> Fp8WgradConfig:
    """Return a recipe's config, or the nearest one fitting the GPU's shared memory."""
    facts = device_of(device)
    if facts.vendor == "cpu":
        return CONFIGS["cpu"]

    def too_large(config: Fp8WgradConfig) -> str | None:
        shared = facts.buffers(config.num_stages, itemsize=1) * (config.block_n + config.block_k) * SCALE_BLOCK
        return None if shared <= facts.room(config.per_sm) else f"stages take {shared} bytes"

    return fitted(CONFIGS["blockwise" if blockwise else "rowwise"], too_large, "block_n", "block_k")


def fp8_wgrad_reference(
    dct: Tensor, scale_dc: Tensor, at: Tensor, scale_a: Tensor, offs: Tensor, main_grad: Tensor | None = None
) -> Tensor:  # [G, N, K] fp32
    """Return the same fp8 values' gradient in fp32."""
    dc, a = dequantize_groups(dct, scale_dc, offs), dequantize_groups(at, scale_a, offs)
    with without_tf32():
        gradients = torch.stack([left @ right.T for left, right in zip(dc, a, strict=True)])
    return gradients if main_grad is None else main_grad + gradients
