"""Grouped GEMM with four-bit weights on any GPU: backend `triton`.

    out[start_g:end_g] = a[start_g:end_g] @ w[g].T + bias[g]      a [M, K]   w [G, N, K] in formats.py   out [M, N]

One flat loop over all groups' tiles, as in grouped_gemm/flat.py, with the operands swapped: out.T = w @ a.T puts
the weights on the tensor cores' rows, and a tile may have 16 activation rows.

A step multiplies the codes' values, which 16 bits hold exactly, along one group's K at most. The step's sum is scaled
in fp32 and added. So weights are never rounded, fp8 activations become fp16, which holds them exactly, and scales per
128 along K cost nothing extra. Loads are masked, so any N and K are taken as stored.

On Hopper, hopper.py is faster: it reads weights laid out for the tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import INTERPRETER, Device, device_of
from groupbench.kernels.four_bit.formats import MIDDLE, NAN, Weights
from groupbench.kernels.grouped_gemm.experts import expert_of, expert_tiles, of_groups, zero_past
from groupbench.kernels.grouped_gemm.quantize import E4M3, SCALE_BLOCK
from groupbench.kernels.grouped_gemm.support import (
    group_ends,
    illegal_tile,
    interpreted,
    require_dense,
    require_runnable,
    require_tensors,
    worker_count,
)
from groupbench.kernels.grouped_gemm.tile_order import super_grouped
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal, problem_key
from groupbench.kernels.launch import Launch


@dataclass(frozen=True)
class FourBitConfig:
    """Tile sizes and launch options; a step has 64 along K, or 32 if groups have 32."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # tile rows of a super-group, see tile_order.py
    per_sm: int = 1


CONFIGS = {
    "decode": FourBitConfig(16, 64, num_warps=4, num_stages=4, per_sm=4),
    "few": FourBitConfig(32, 128, num_warps=4, num_stages=4, per_sm=2),
    "many": FourBitConfig(128, 128, num_warps=8, num_stages=3),
    "cpu": FourBitConfig(16, 64, num_warps=4, num_stages=1, group_m=2),
}


def candidates(mean_rows: float) -> list[FourBitConfig]:
    """Return the configs tuning tries, by mean rows per expert."""
    if mean_rows <= 32:
        rows = 16 if mean_rows <= 16 else 32
        return [
            FourBitConfig(rows, columns, 4, stages, per_sm=per_sm)
            for columns, per_sm in ((64, 4), (64, 3), (128, 2))
            for stages in (3, 4, 6)
        ]
    tiles = ((64, 128, 4, 3, 8, 2), (64, 128, 8, 3, 8, 1), (128, 128, 8, 3, 8, 1), (128, 128, 4, 3, 8, 1))
    return [FourBitConfig(*tile) for tile in tiles]


def illegal(config: FourBitConfig, dtype: torch.dtype, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot be compiled for a GPU, or None if it can."""
    return illegal_tile(config.block_m, config.block_n, 64, config.num_stages, torch.float16, device)


def default_config(M: int, G: int, device: Device) -> FourBitConfig:
    """Return an untuned problem's config, by the mean rows per expert."""
    if device.vendor == "cpu":
        return CONFIGS["cpu"]
    return CONFIGS["decode" if M <= 16 * G else "few" if M <= 48 * G else "many"]


def w4_key(M: int, w: Weights, dtype: torch.dtype) -> str:
    """Return a problem's tuned-config key."""
    return problem_key(M, w.G, w.N, w.K, str(w.fmt), "a8" if dtype == E4M3 else "a16")


def choose_config(M: int, w: Weights, dtype: torch.dtype, device: Device) -> FourBitConfig:
    """Return this problem's tuned config on this GPU, else the default."""
    default = default_config(M, w.G, device)
    if device.vendor == "cpu":
        return default
    key = w4_key(M, w, dtype)
    return first_legal(configs_in_order("w4", key, device, default, lambda config: illegal(config, dtype, device)))


@triton.jit
def _values(codes, zeros, FLOATING: tl.constexpr, DTYPE: tl.constexpr):
    """Return the codes' values before scaling, exact in DTYPE."""
    if FLOATING:
        # The bits of e2m1 at the lower end of fp16's exponent: 2^-14 of the value, subnormal numbers included.
        bits = ((codes & 8).to(tl.int16) << 12) | ((codes & 7).to(tl.int16) << 9)
        return (bits.to(tl.float16, bitcast=True) * 16384.0).to(DTYPE)
    return (codes.to(tl.int16) - zeros).to(DTYPE)


@triton.jit
def _w4_kernel(
    a_ptr,  # [M, K]
    scale_a_ptr,  # [M], or [M, K/128] with strides 1, scale_a_stride; read if SCALE_A
    codes_ptr,  # [G, N, WIDTH]
    scales_ptr,  # [G, N, GROUPS]
    zeros_ptr,  # the same; read if ZEROS
    bias_ptr,  # [G, N]; read if BIAS
    out_ptr,  # [M, N]
    offs_ptr,  # [G]
    M,
    N,
    K,
    WIDTH,
    GROUPS,
    a_stride,
    scale_a_stride,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    FLOATING: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE_A: tl.constexpr,  # 0: none, 1: a row has one, 2: every SCALE_BLOCK of K
    SCALE_BLOCK: tl.constexpr,
    E8M0_NAN: tl.constexpr,
    MIDDLE: tl.constexpr,
    DTYPE: tl.constexpr,  # of the products
    NUM_PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    starts, ends, counts, before = expert_tiles(offs_ptr, G, G_POW2, BLOCK_M)
    tiles_m = tl.sum(counts, 0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    halves = tl.arange(0, BLOCK_K // 2)
    offs_k = tl.arange(0, BLOCK_K)
    block_elements = tl.full((), 1, tl.int64) * scale_a_stride
    for tile in range(tl.program_id(0), tiles_m * tiles_n, NUM_PROGRAMS):
        tile_m, tile_n = super_grouped(tile, tiles_m, tiles_n, GROUP_M)
        g, start, size, row = expert_of(tile_m, starts, ends, counts, before, G_POW2, BLOCK_M)
        inside = row + tl.arange(0, BLOCK_M)
        rows = start + inside
        row_ok = inside < size
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        column_ok = columns < N
        of_weights = g.to(tl.int64) * N + columns
        code_ptrs = codes_ptr + of_weights[:, None] * WIDTH + halves[None, :]
        scale_ptrs = scales_ptr + of_weights * GROUPS
        a_ptrs = a_ptr + rows.to(tl.int64)[None, :] * a_stride + offs_k[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            group = k // GROUP
            pairs = tl.load(code_ptrs + k // 2, mask=column_ok[:, None] & (halves < WIDTH - k // 2)[None, :], other=0)
            scale = tl.load(scale_ptrs + group, mask=column_ok, other=0)
            zeros = MIDDLE
            if ZEROS:
                zeros = tl.load(zeros_ptr + of_weights * GROUPS + group, mask=column_ok, other=0).to(tl.int16)[:, None]
            if FLOATING:
                exponent = scale.to(tl.int32)
                scale = tl.where(exponent == 0, 0x400000, exponent << 23).to(tl.float32, bitcast=True)
                scale = tl.where(exponent == E8M0_NAN, float("nan"), scale)
            lower = _values(pairs & 15, zeros, FLOATING, DTYPE)
            upper = _values(pairs >> 4, zeros, FLOATING, DTYPE)
            w = tl.join(lower, upper).reshape(BLOCK_N, BLOCK_K)
            # Past K, a is zero and codes are finite.
            a = tl.load(a_ptrs + k, mask=row_ok[None, :] & (offs_k < K - k)[:, None], other=0.0).to(DTYPE)
            part = tl.dot(w, a) * scale.to(tl.float32)[:, None]
            if SCALE_A == 2:
                at = scale_a_ptr + block_elements * (k // SCALE_BLOCK) + rows
                part *= tl.load(at, mask=row_ok, other=0.0)[None, :]
            acc += part
        if SCALE_A == 1:
            acc *= tl.load(scale_a_ptr + rows, mask=row_ok, other=0.0)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + of_weights, mask=column_ok, other=0.0).to(tl.float32)[:, None]
        at = out_ptr + rows.to(tl.int64)[None, :] * N + columns[:, None]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=row_ok[None, :] & column_ok[:, None])
    zero_past(out_ptr, tl.load(offs_ptr + G - 1).to(tl.int32), M, N, N, NUM_PROGRAMS, BLOCK_N)


def prepare_w4(
    a: Tensor,  # [M, K] in 16 bits, or e4m3 with scale_a
    scale_a: Tensor | None,  # [M] fp32, or [M, ceil(K / 128)] with strides 1, any
    w: Weights,  # [G, N, K]
    offs: Tensor,  # [G], int32 or int64 end offsets
    bias: Tensor | None = None,  # [G, N]
    config: FourBitConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N], in a's dtype or, of e4m3, in bf16; rows past offs[-1] are zero
    """Check the operands; the returned callable allocates the output and launches once.

    The callable reads `offs` on the device, so it follows later changes to them. Raises ValueError for operands
    or a config the kernel cannot take.
    """
    require_w4(a, scale_a, w, offs, bias)
    run = bind_w4(a, scale_a, w, bias, config)
    return lambda: run(a, scale_a, offs)


def bind_w4(
    a: Tensor, scale_a: Tensor | None, w: Weights, bias: Tensor | None, config: FourBitConfig | None = None
) -> Callable[[Tensor, Tensor | None, Tensor], Tensor]:  # of a, scale_a and offs
    """Do as `prepare_w4` for checked operands; the callable takes activations and offsets like these."""
    (M, K), N = a.shape, w.N
    device = device_of(a.device)
    if config is not None and (reason := illegal(config, a.dtype, device)):
        raise ValueError(f"{config}: {reason}")
    config = config or choose_config(M, w, a.dtype, device)
    programs = worker_count(a.device, config.per_sm)
    out_dtype = a.dtype if scale_a is None else torch.bfloat16
    # Triton's interpreter truncates to bf16; a GPU rounds.
    stored = torch.float32 if interpreted() and out_dtype == torch.bfloat16 else out_dtype
    launch = Launch(
        _w4_kernel,
        (programs,),
        **launch_keywords(_w4_kernel, config, **of_groups(w.G), NUM_PROGRAMS=programs),
        FLOATING=w.fmt.floating,
        ZEROS=w.zeros is not None,
        BIAS=bias is not None,
        SCALE_A=0 if scale_a is None else scale_a.ndim,
        SCALE_BLOCK=SCALE_BLOCK,
        E8M0_NAN=NAN,
        MIDDLE=MIDDLE,
        DTYPE=tl.bfloat16 if a.dtype == torch.bfloat16 else tl.float16,
        GROUP=w.fmt.group,
        BLOCK_K=min(w.fmt.group, 64),
    )
    stride = 0 if scale_a is None or scale_a.ndim == 1 else scale_a.stride(1)

    def run(a: Tensor, scale_a: Tensor | None, offs: Tensor) -> Tensor:
        out = torch.empty(M, N, dtype=stored, device=a.device)
        if M and N:
            launch(
                a, offs if scale_a is None else scale_a, w.codes, w.scales, offs if w.zeros is None else w.zeros,
                offs if bias is None else bias, out, offs, M, N, K, w.codes.size(2), w.scales.size(2), a.stride(0),
                stride,
            )  # fmt: skip
        return out if stored == out_dtype else out.to(out_dtype)

    return run


def require_w4(a: Tensor, scale_a: Tensor | None, w: Weights, offs: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError or TypeError unless the operands fit together and have the layouts in formats.py."""
    require_tensors(a=a, offs=offs, codes=w.codes, scales=w.scales)
    parts = [w.codes, w.scales, *(x for x in (w.zeros, bias, scale_a) if x is not None)]
    if any(x.device != a.device for x in (*parts, offs)):
        raise ValueError("operands need one device")
    if not all(x.is_contiguous() for x in (w.codes, w.scales, *(x for x in (w.zeros, bias) if x is not None))):
        raise ValueError("packed weights and bias must be contiguous")
    if bias is not None and bias.shape != (w.G, w.N):
        raise ValueError(f"expected bias {(w.G, w.N)}, got {tuple(bias.shape)}")
    group_ends(a, a.new_empty(1).expand(w.G, w.K, w.N), offs)
    require_dense(offs)
    if a.stride(1) != 1 and a.size(1) > 1:
        raise ValueError("a needs stride 1 along K")
    if scale_a is None:
        require_runnable(a)
        if a.dtype == torch.float32:
            raise ValueError("activations are fp16, bf16 or, with scales, float8_e4m3fn, not torch.float32")
        return
    sizes = ((a.size(0),), (a.size(0), -(-w.K // SCALE_BLOCK)))
    if a.dtype != E4M3 or scale_a.dtype != torch.float32 or tuple(scale_a.shape) not in sizes:
        raise ValueError(
            f"expected {E4M3} with fp32 scales of {sizes[0]} or {sizes[1]}, got {a.dtype}, {scale_a.shape}"
        )
    if scale_a.stride(0) != 1 and a.size(0) > 1:
        raise ValueError("scale_a needs stride 1 over rows")
