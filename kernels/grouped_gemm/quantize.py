"""Quantisation to fp8 (e4m3fn, largest value 448), the step before a scaled grouped GEMM.

    amax  = max |x|           over a row, or over 128 columns of a row
    scale = amax * (1 / 448)  fp32; amax is at least 1e-12, so that zeros have a scale too
    q     = e4m3(x * (1 / scale)),  |q| <= 448          x is about q * scale

Two recipes. *Row-wise*: one scale per row, of activations [M] and of weights [G, N]. *Block-wise*, DeepSeek-V3's: one
per 128 columns of a row of activations, [M, K/128], and one per 128 x 128 of weights, [G, N/128, K/128]. Scales of
activations are stored column by column (strides 1, M): a tile of the GEMM reads 128 rows of one column.

A non-finite value affects only its row (or block): NaN makes the scale NaN, infinity makes it infinite, and the
quantised values are 0 or NaN, so the whole row dequantises to NaN. Nothing overflows: the rounding of scale and
quotient exceeds 448 by at most 2^-22 of it, which rounds back. (From 464 on, torch gives NaN or 448, by version and
device.)

Rounding is to nearest, ties to even: |q * scale - x| <= 2^-4 |x|, and 2^-10 scale for subnormal q (below 2^-6).

The gradient of weights sums over rows: for it, x is stored transposed, [K, P], with each group's rows from a multiple
of 128 on and one scale per 128 rows of a column, [P/128, K] (`quantize_groups_reference`; kernels in moe/quantize.py).

Rows of q start at multiples of 16 bytes for any K, as TMA requires, so q may be a view of a wider tensor.

Sources: scales of 1 x 128 and 128 x 128, DeepSeek-V3 report, section 3.3.2; 1e-12, torch's tests of scaled_mm.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.grouped_gemm import quantize_cuda
from groupbench.kernels.grouped_gemm.support import DTYPES, interpreted, require_device, require_tensors

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-12
SCALE_BLOCK = 128  # values per scale of the block-wise recipe, in K and, for weights, in N
ROW_BYTES = 16  # every row starts at a multiple of these bytes
WHOLE_ROW = 16384  # columns that one program keeps in registers
TILE_ROWS = 32  # rows of a program of the block-wise recipe


@triton.jit
def _e4m3(x, EMULATED: tl.constexpr):
    """Round |x| < 464 or NaN to e4m3; with EMULATED by hand, since Triton's interpreter makes 64 of 127."""
    if EMULATED:
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Add half of the last kept place, less one if that place is even; then change the exponent's bias, 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Subnormals are multiples of 2^-9: adding 2^23 rounds to them.
        subnormal = (tl.abs(x) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 15
        code = tl.where(magnitude < 0x3C800000, subnormal, normal)  # 2^-6
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
        y = (code | ((bits >> 24) & 0x80)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        y = x.to(tl.float8e4nv)
    return y


@triton.jit
def _amax(x, axis: tl.constexpr):
    """Return the largest |x| along an axis, or NaN if there is one; tl.max ignores NaN."""
    return tl.where(tl.max((x != x).to(tl.int32), axis) > 0, float("nan"), tl.max(tl.abs(x), axis))


@triton.jit
def _scale(amax, SMALLEST: tl.constexpr):
    """Return (scale, 1 / scale), rounded to the same bits as torch's."""
    scale = tl.where(amax < SMALLEST, SMALLEST, amax) * (1 / 448)
    return scale, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # [M, K]
    q_ptr,  # [M, K]
    scale_ptr,  # [M]
    x_stride,
    q_stride,
    K,
    WHOLE: tl.constexpr,  # K <= BLOCK_K: a row is read once
    BLOCK_K: tl.constexpr,
    SMALLEST: tl.constexpr,
    EMULATED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    if WHOLE:
        x = tl.load(x_ptr + row * x_stride + columns, mask=columns < K, other=0.0).to(tl.float32)
        scale, inverse = _scale(_amax(x, 0), SMALLEST)
        tl.store(q_ptr + row * q_stride + columns, _e4m3(x * inverse, EMULATED), mask=columns < K)
    else:
        largest = tl.zeros((BLOCK_K,), dtype=tl.float32)
        for first in range(0, K, BLOCK_K):
            x = tl.load(x_ptr + row * x_stride + first + columns, mask=first + columns < K, other=0.0).to(tl.float32)
            largest = tl.where((x != x) | (tl.abs(x) > largest), tl.abs(x), largest)  # NaN > largest is false: it stays
        scale, inverse = _scale(_amax(largest, 0), SMALLEST)
        for first in range(0, K, BLOCK_K):
            x = tl.load(x_ptr + row * x_stride + first + columns, mask=first + columns < K, other=0.0).to(tl.float32)
            y = _e4m3(x * inverse, EMULATED)
            tl.store(q_ptr + row * q_stride + first + columns, y, mask=first + columns < K)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _quantize_blocks_kernel(
    x_ptr,  # [M, K]
    q_ptr,  # [M, K]
    scale_ptr,  # [M, K/BLOCK_K], strides 1, M
    x_stride,
    q_stride,
    M,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SMALLEST: tl.constexpr,
    EMULATED: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    block = tl.program_id(1)
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < M)[:, None] & (columns < K)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    scale, inverse = _scale(_amax(x, 1), SMALLEST)
    y = _e4m3(x * inverse[:, None], EMULATED)
    tl.store(q_ptr + rows[:, None] * q_stride + columns[None, :], y, mask=inside)
    tl.store(scale_ptr + block.to(tl.int64) * M + rows, scale, mask=rows < M)


def prepare_quantize(x: Tensor, blockwise: bool) -> Callable[[], tuple[Tensor, Tensor]]:  # x [M, K] in fp32, bf16, fp16
    """Check x; the returned callable allocates and returns (q [M, K], scale [M] or, with `blockwise`, [M, K/128]).

    Raises TypeError for anything but a tensor, ValueError for an unsupported shape, stride, dtype or device.
    """
    require_tensors(x=x)
    if x.ndim != 2 or x.stride(1) != 1 or x.dtype not in DTYPES:
        raise ValueError(
            f"expected [M, K] with rows of stride 1 in one of {DTYPES}, got {tuple(x.shape)}, "
            f"strides {x.stride()}, {x.dtype}"
        )
    require_device(x.device)
    (M, K), emulated = x.shape, interpreted()
    block = min(triton.next_power_of_2(max(K, 1)), WHOLE_ROW)

    def run_rows() -> tuple[Tensor, Tensor]:
        q, scale = empty_fp8(M, K, x.device), torch.empty(M, dtype=torch.float32, device=x.device)
        if M:
            _quantize_rows_kernel[(M,)](
                x, q, scale, x.stride(0), q.stride(0), K, WHOLE=block >= K, BLOCK_K=block, SMALLEST=SMALLEST_AMAX,
                EMULATED=emulated, num_warps=max(1, min(8, block // 512)),
            )  # fmt: skip
        return q, scale

    def run_blocks() -> tuple[Tensor, Tensor]:
        q, scale = empty_fp8(M, K, x.device), _empty_scales(M, K, x.device)
        if q.numel():
            _quantize_blocks_kernel[(triton.cdiv(M, TILE_ROWS), triton.cdiv(K, SCALE_BLOCK))](
                x, q, scale, x.stride(0), q.stride(0), M, K, BLOCK_M=TILE_ROWS, BLOCK_K=SCALE_BLOCK,
                SMALLEST=SMALLEST_AMAX, EMULATED=emulated, num_warps=4,
            )  # fmt: skip
        return q, scale

    return run_blocks if blockwise else run_rows


def padded_rows(M: int, G: int) -> int:
    """Return the columns of a transposed operand: enough for M rows in G groups, each in whole blocks of 128."""
    return (triton.cdiv(M, SCALE_BLOCK) + G) * SCALE_BLOCK


@triton.jit
def _quantize_weights_kernel(
    w_ptr,  # [G, N, K]
    q_ptr,  # [G, N, K], and q_t_ptr [G, K, N]
    q_t_ptr,
    scale_ptr,  # [G, N/BLOCK, K/BLOCK], and scale_t_ptr [G, K/BLOCK, N/BLOCK]
    scale_t_ptr,
    N,
    K,
    q_stride,  # of rows of q and of q_t: a multiple of 16
    q_t_stride,
    BLOCK: tl.constexpr,
    SMALLEST: tl.constexpr,
    EMULATED: tl.constexpr,
):
    g = tl.program_id(2).to(tl.int64)
    block_n, block_k = tl.program_id(0), tl.program_id(1)
    n = block_n * BLOCK + tl.arange(0, BLOCK)
    k = block_k * BLOCK + tl.arange(0, BLOCK)
    inside = (n < N)[:, None] & (k < K)[None, :]
    w = tl.load(w_ptr + (g * N + n[:, None]) * K + k[None, :], mask=inside, other=0.0).to(tl.float32)
    scale, inverse = _scale(_amax(tl.reshape(w, (BLOCK * BLOCK,)), 0), SMALLEST)
    y = _e4m3(w * inverse, EMULATED)
    tl.store(q_ptr + (g * N + n[:, None]) * q_stride + k[None, :], y, mask=inside)
    tl.store(q_t_ptr + (g * K + k[None, :]) * q_t_stride + n[:, None], y, mask=inside)
    blocks_n, blocks_k = tl.num_programs(0), tl.num_programs(1)
    tl.store(scale_ptr + (g * blocks_n + block_n) * blocks_k + block_k, scale)
    tl.store(scale_t_ptr + (g * blocks_k + block_k) * blocks_n + block_n, scale)


def quantize_weights(
    w: Tensor,  # [G, N, K] contiguous
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # q [G, N, K], scale [G, N/128, K/128]; both again for [G, K, N]
    """Return the weights in fp8 with one scale per 128 x 128 values, and the same values transposed, for dgrad."""
    G, N, K = w.shape
    blocks_n, blocks_k = triton.cdiv(N, SCALE_BLOCK), triton.cdiv(K, SCALE_BLOCK)
    q, q_t = empty_fp8(G * N, K, w.device).unflatten(0, (G, N)), empty_fp8(G * K, N, w.device).unflatten(0, (G, K))
    scale = torch.empty(G, blocks_n, blocks_k, dtype=torch.float32, device=w.device)
    scale_t = torch.empty(G, blocks_k, blocks_n, dtype=torch.float32, device=w.device)
    if N % SCALE_BLOCK == 0 and quantize_cuda.unsuitable(w) is None:
        quantize_cuda.launch("weights_kernel", G * blocks_n * blocks_k, w, w, q, q_t, scale, scale_t, N, K)
        return q, scale, q_t, scale_t
    _quantize_weights_kernel[(blocks_n, blocks_k, G)](
        w, q, q_t, scale, scale_t, N, K, q.stride(1), q_t.stride(1), BLOCK=SCALE_BLOCK, SMALLEST=SMALLEST_AMAX,
        EMULATED=interpreted(), num_warps=8,
    )  # fmt: skip
    return q, scale, q_t, scale_t


# --- the same in torch ------------------------------------------------------------------------------------------------


def quantize_rows_reference(x: Tensor) -> tuple[Tensor, Tensor]:  # x [M, K]; q [M, K], scale [M]
    """Return x in fp8 and one scale per row."""
    scale = _scale_of(x.float().abs().amax(1) if x.size(1) else x.new_zeros(x.size(0)).float())
    return _quantized(x, 1 / scale[:, None]), scale


def quantize_blocks_reference(x: Tensor) -> tuple[Tensor, Tensor]:  # x [M, K]; q [M, K], scale [M, K/128]
    """Return x in fp8 and one scale per 128 columns of a row."""
    scale = _empty_scales(x.size(0), x.size(1), x.device)
    scale.copy_(_scale_of(_blocks(x, 1).amax((1, 3))))
    return _quantized(x, _spread(1 / scale, x.shape, 1)), scale


def quantize_weight_blocks_reference(x: Tensor) -> tuple[Tensor, Tensor]:  # x [N, K]; q [N, K], scale [N/128, K/128]
    """Return x in fp8 and one scale per 128 x 128 values."""
    scale = _scale_of(_blocks(x, SCALE_BLOCK).amax((1, 3)))
    return _quantized(x, _spread(1 / scale, x.shape, SCALE_BLOCK)), scale


def dequantize(q: Tensor, scale: Tensor) -> Tensor:
    """Return q [R, K] in fp32, times its scales: [R], [R, K/128] or, for weights, [R/128, K/128]."""
    if scale.ndim == 1:
        return q.float() * scale[:, None]
    return q.float() * _spread(scale, q.shape, 1 if scale.size(0) == q.size(0) else SCALE_BLOCK)


def quantize_groups_reference(
    x: Tensor,  # [M, K]
    offs: Tensor,  # [G]
    blockwise: bool = True,
) -> tuple[Tensor, Tensor]:  # q [K, P]; scale [P/128, K], or with one per column of a group [G, K]
    """Return x transposed, its groups padded to blocks of 128 rows, with scales per block or, row-wise, per group."""
    (M, K), G = x.shape, offs.numel()
    P = padded_rows(M, G)
    padded = x.new_zeros(P, K, dtype=torch.float32)
    scale = torch.ones(P // SCALE_BLOCK if blockwise else G, K, dtype=torch.float32, device=x.device)
    q = torch.zeros(K, P, dtype=torch.float32, device=x.device)
    first, start = 0, 0
    for g, end in enumerate(offs.tolist()):
        blocks = triton.cdiv(end - start, SCALE_BLOCK)
        rows, places = slice(first, first + blocks), slice(first * SCALE_BLOCK, (first + blocks) * SCALE_BLOCK)
        padded[places.start : places.start + end - start] = x[start:end].float()
        amax = padded[places].unflatten(0, (blocks, SCALE_BLOCK)).abs().amax(1)
        if blockwise:
            scale[rows] = _scale_of(amax)
            inverse = (1 / scale[rows]).repeat_interleave(SCALE_BLOCK, 0)
        else:
            scale[g] = _scale_of(amax.amax(0) if blocks else amax.new_zeros(K))
            inverse = 1 / scale[g]
        q[:, places] = (padded[places] * inverse).T
        first, start = first + blocks, end
    return q.to(E4M3), scale


def dequantize_groups(q: Tensor, scale: Tensor, offs: Tensor) -> list[Tensor]:  # G of [K, padded rows] fp32
    """Return each group's part of q [K, P] times its scales, [P/128, K] or [G, K]."""
    groups, first, start = [], 0, 0
    for g, end in enumerate(offs.tolist()):
        last = first + triton.cdiv(end - start, SCALE_BLOCK)
        part = q[:, first * SCALE_BLOCK : last * SCALE_BLOCK].float()
        blockwise = scale.size(0) * SCALE_BLOCK == q.size(1)
        groups.append(
            part * (scale[first:last].T.repeat_interleave(SCALE_BLOCK, 1) if blockwise else scale[g][:, None])
        )
        first, start = last, end
    return groups


def empty_fp8(rows: int, columns: int, device: torch.device | str) -> Tensor:
    """Return an uninitialised e4m3 tensor [rows, columns], each row at a multiple of 16 bytes."""
    stride = triton.cdiv(max(columns, 1), ROW_BYTES) * ROW_BYTES
    return torch.empty(rows, stride, dtype=E4M3, device=device)[:, :columns]


def _empty_scales(M: int, K: int, device: torch.device) -> Tensor:  # [M, K/128], strides 1, M
    return torch.empty(triton.cdiv(K, SCALE_BLOCK), M, dtype=torch.float32, device=device).t()


def _scale_of(amax: Tensor) -> Tensor:
    return amax.clamp_min(SMALLEST_AMAX) * (1 / E4M3_MAX)  # by a constant: torch divides by one otherwise on a GPU


def _quantized(x: Tensor, inverse: Tensor) -> Tensor:
    q = empty_fp8(x.size(0), x.size(1), x.device)
    return q.copy_(x.float() * inverse)


def _blocks(x: Tensor, rows: int) -> Tensor:
    """Return |x| in blocks of rows x 128, padded with zeros: [R/rows, rows, K/128, 128]."""
    (R, K), columns = x.shape, SCALE_BLOCK
    padded = torch.nn.functional.pad(x.float().abs(), (0, -K % columns, 0, -R % rows))
    return padded.view(triton.cdiv(R, rows), rows, triton.cdiv(K, columns), columns)


def _spread(scale: Tensor, shape: torch.Size, rows: int) -> Tensor:
    """Return a scale for each element of `shape`."""
    return scale.repeat_interleave(rows, 0).repeat_interleave(SCALE_BLOCK, 1)[: shape[0], : shape[1]]
