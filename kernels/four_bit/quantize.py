"""Pack weights into four bits with one Triton kernel, by the formats and rules in formats.py.

A program packs a block: rows and groups along K. mxfp4's codes and scales equal the reference's bit by bit;
integers may differ where a quotient is halfway between two codes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.four_bit.formats import BIAS, MIDDLE, NAN, Format, Weights
from groupbench.kernels.grouped_gemm.support import require_device, require_tensors

ROWS = 16  # of a program


@triton.jit
def _pack(
    x_ptr,  # [R, K]
    codes_ptr,  # [R, WIDTH]
    scales_ptr,  # [R, GROUPS]
    zeros_ptr,  # the same, if ZERO_POINT
    R,
    K,
    WIDTH,
    GROUPS,
    FLOATING: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    BIAS: tl.constexpr,
    MIDDLE: tl.constexpr,
    E8M0_NAN: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    group = tl.program_id(1)
    inside = tl.arange(0, GROUP_POW2)
    columns = group * GROUP + inside
    row_ok = rows < R
    ok = row_ok[:, None] & (columns < K)[None, :] & (inside < GROUP)[None, :]
    x = tl.load(x_ptr + rows[:, None] * K + columns[None, :], mask=ok, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), 1)
    broken = tl.max((x != x).to(tl.int32), 1) > 0
    broken = broken | (amax == float("inf"))
    at = rows * GROUPS + group
    if FLOATING:
        # The exponent of the largest value less 2, the exponent of e2m1's largest; amax may be subnormal.
        bits = (amax.to(tl.int32, bitcast=True) >> 23) & 0xFF
        scale = tl.where(broken, E8M0_NAN, tl.maximum(bits - 2, 0))
        tl.store(scales_ptr + at, scale.to(tl.uint8), mask=row_ok)
        # 2^(BIAS - scale) in two factors, since it may be 2^127.
        exponent = tl.where(broken, 0, BIAS - scale)
        half = exponent // 2
        value = x * ((half + 127) << 23).to(tl.float32, bitcast=True)[:, None]
        value = value * ((exponent - half + 127) << 23).to(tl.float32, bitcast=True)[:, None]
        size = tl.abs(value)
        code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
        code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
        code += (size > 5.0).to(tl.int32)
        code = tl.where(value < 0, code | 8, code)
    else:
        if ZERO_POINT:
            low = tl.minimum(tl.min(x, 1), 0.0)
            step = (tl.maximum(tl.max(x, 1), 0.0) - low) * (1 / 15)
        else:
            low = amax
            step = amax * (1 / 7)
        # Round to bf16, ties to even, by hand: Triton's interpreter would truncate.
        bits = step.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        scale = bits.to(tl.float32, bitcast=True)
        tl.store(scales_ptr + at, tl.where(broken, 0x7FC0, bits >> 16).to(tl.int16), mask=row_ok)
        inverse = tl.where((scale == 0.0) | broken, 0.0, 1 / scale)
        zero = tl.full((ROWS,), MIDDLE, tl.float32)
        if ZERO_POINT:
            zero = tl.minimum(tl.floor(tl.where(broken, 0.0, -low) * inverse + 0.5), 15.0)
            tl.store(zeros_ptr + at, zero.to(tl.uint8), mask=row_ok)
        quotient = tl.where(broken[:, None], 0.0, x) * inverse[:, None]
        code = tl.minimum(tl.maximum(tl.floor(quotient + 0.5) + zero[:, None], 0.0), 15.0).to(tl.int32)
    code = tl.where(ok, code, 0)
    pairs = tl.reshape(code, (ROWS, GROUP_POW2 // 2, 2)) << (tl.arange(0, 2) * 4)[None, None, :]
    packed = tl.sum(pairs, 2)
    bytes_at = group * (GROUP // 2) + tl.arange(0, GROUP_POW2 // 2)
    bytes_ok = row_ok[:, None] & (bytes_at < WIDTH)[None, :] & (tl.arange(0, GROUP_POW2 // 2) < GROUP // 2)[None, :]
    tl.store(codes_ptr + rows[:, None] * WIDTH + bytes_at[None, :], packed.to(tl.uint8), mask=bytes_ok)


def prepare_quantize_w4(
    x: Tensor,  # [G, N, K] or [N, K], contiguous
    fmt: Format,
) -> Callable[[], Weights]:
    """Check the operand; the returned callable allocates the packed weights and launches once.

    Raises ValueError for an operand the kernel cannot take.
    """
    require_tensors(x=x)
    require_device(x.device)
    if x.ndim not in (2, 3) or not x.is_contiguous() or not x.is_floating_point() or not x.numel():
        raise ValueError(f"expected a contiguous x [G, N, K] of floating-point values, got {tuple(x.shape)}")
    if x.dtype == torch.bfloat16 and x.device.type == "cpu":
        x = x.float()  # the interpreter reads bf16 as integers
    *_, N, K = x.shape
    G, groups = x.numel() // (N * K), fmt.groups(K)

    bits = torch.uint8 if fmt.floating else torch.int16  # the kernel makes the bits of bf16 itself

    def run() -> Weights:
        codes = torch.empty(G, N, -(-K // 2), dtype=torch.uint8, device=x.device)
        scales = torch.empty(G, N, groups, dtype=torch.uint8 if fmt.floating else torch.bfloat16, device=x.device)
        zeros = torch.empty(G, N, groups, dtype=torch.uint8, device=x.device) if fmt.zero_point else None
        _pack[(triton.cdiv(G * N, ROWS), groups)](
            x, codes, scales.view(bits), scales if zeros is None else zeros, G * N, K, codes.size(2), groups,
            FLOATING=fmt.floating, ZERO_POINT=fmt.zero_point, BIAS=BIAS, MIDDLE=MIDDLE, E8M0_NAN=NAN,
            GROUP=fmt.group, GROUP_POW2=triton.next_power_of_2(fmt.group), ROWS=ROWS,
        )  # fmt: skip
        return Weights(fmt, K, codes, scales, zeros)

    return run
