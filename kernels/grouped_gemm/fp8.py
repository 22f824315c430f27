"""Grouped GEMM in scaled fp8 (e4m3fn), flat.py's persistent kernel with scales: backend `triton_flat`.

    row-wise     out[m, n] = scale_a[m] scale_b[g, n]  sum_k a[m, k] b[g, n, k]                   m in the rows of g
    block-wise   out[m, n] = sum_j scale_a[m, j] scale_b[g, n/128, j]  sum_k a[m, k] b[g, n, k]   k in block j of 128

    a [M, K]   b [G, N, K]   out [M, N] in bf16 or fp16; rows past offs[-1] are zero

Schedule, TMA loads and the ragged store follow flat.py: one launch, offsets read on the device. wgmma takes fp8 only
with K innermost in both operands, so weights are [G, N, K]. N and K may be any size: TMA fills elements past them with
zeros, and the output's rows are padded to 16 bytes.

Row-wise scales are applied in the epilogue, by one multiplication of the finished tile. Block-wise scales change every
128 of K. Each block's product is computed separately, scaled, and added by FMA units. That takes a second set of
accumulators, hence tiles of 128 x 128 instead of 128 x 256, and the tensor cores rest during this time. Tiles are at
most 128 columns wide: one scale of the weights serves all columns of a block.

Accumulation. Hopper's tensor cores align the products of 32 of K and the sum so far to the largest, keep 13 bits of
each and truncate the rest (DeepSeek-V3 report, section 3.5.2). In a model of that, the product of standard normal
values is off by 0.13 % RMS at K = 4096 and 0.3 % at 16384, compared with 0.17 % for the rounding to bf16. The product
of uniform values in [0, 1), whose sums only grow, is off by 7 and 25 %. `fast_accum=True` accepts this error, as
torch's flag does. By default, as in torch, CUTLASS and DeepGEMM, the sum of each 128 of K is added in fp32 (0.01 and
0.06 %). This again takes twice the accumulators. Block-wise scaling always does so.

With many rows per expert, on Hopper, configs are `specialized`: fp8_specialized.py computes the same product with
specialised warps, so that the tensor cores multiply while sums are promoted.

Sources: flat.py's; promotion every 128 of K and both recipes, DeepSeek-V3 and DeepGEMM; the epilogue of torchao's and
FBGEMM's row-wise kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import INTERPRETER, Device, device_of, fitted, halved
from groupbench.kernels.grouped_gemm.experts import expert_of, expert_tiles, of_groups, zero_past
from groupbench.kernels.grouped_gemm.flat import store_tile
from groupbench.kernels.grouped_gemm.fp8_config import SPECIALIZED, Fp8Config
from groupbench.kernels.grouped_gemm.quantize import E4M3, SCALE_BLOCK, dequantize
from groupbench.kernels.grouped_gemm.reference import without_tf32
from groupbench.kernels.grouped_gemm.support import (
    TMA_BYTES,
    fits,
    group_ends,
    illegal_tile,
    interpreted,
    require_dense,
    require_device,
    require_tensors,
    size_class,
    worker_count,
)
from groupbench.kernels.grouped_gemm.tile_order import super_grouped
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal, problem_key
from groupbench.kernels.launch import Kept, Launch, Outputs
from groupbench.kernels.variants import Gluon, first_that_runs, specialized_or_not

OUT_DTYPES = (torch.bfloat16, torch.float16)
ROWWISE, ROWWISE_FAST, BLOCKWISE = MODES = ("rowwise", "rowwise_fast", "blockwise")


SPECIALIZED_ROWS = 4
"""Mean rows from which the specialised kernel is the fastest with block-wise scales (H200, 2026-11-30): applying them
takes longer than reading the operands."""

# By mode and size class; tuned configs are in configs/fp8_<gpu>.json. Registers and shared memory were checked for all
# configs of this file (Triton 3.7.1, sm_90): only the specialised kernel spills (docs/explanation/kernels). "plain" is
# for operands that the specialised kernel cannot take.
FEW_ROWS = {
    "decode": Fp8Config(32, 128, 128, num_warps=4, num_stages=6, swap=True),
    "small": Fp8Config(64, 128, 128, num_warps=4, num_stages=5),
}
CONFIGS: dict[str, dict[str, Fp8Config]] = {
    ROWWISE: {
        **FEW_ROWS,
        "large": SPECIALIZED,
        "plain": Fp8Config(128, 128, 128, num_warps=8, num_stages=4),
    },
    ROWWISE_FAST: {
        **FEW_ROWS,
        "large": SPECIALIZED,
        "plain": Fp8Config(128, 256, 128, num_warps=8, num_stages=4, split_store=True),
    },
    BLOCKWISE: {
        "decode": Fp8Config(16, 128, 128, num_warps=4, num_stages=6, swap=True),
        "large": SPECIALIZED,
        "plain": Fp8Config(128, 128, 128, num_warps=8, num_stages=5, flatten=False),
    },
}
# The cost in Triton's interpreter depends on the number of operations, not of elements. K of a block is 128, as for
# promotion and scales.
CPU = Fp8Config(32, 128, 128, num_warps=4, num_stages=1, group_m=2, flatten=False)
CPU_SWAP = Fp8Config(16, 128, 128, num_warps=4, num_stages=1, group_m=2, swap=True, flatten=False)


def candidates(mode: str, mean_rows: float) -> list[Fp8Config]:
    """Return the tuning candidates, by an expert's mean rows."""
    small = [Fp8Config(64, 128, 128, 4, stages) for stages in (4, 5)]
    if fits(mean_rows, 32):
        rows = 16 if fits(mean_rows, 16) else 32
        tiles = [(rows, 128, 128, 4, 6), (rows, 64, 128, 4, 8)]
        if mode == ROWWISE_FAST:
            tiles.append((rows, 128, 256, 4, 4))
        specialized = [SPECIALIZED] if mean_rows >= SPECIALIZED_ROWS else []
        return [*[Fp8Config(*tile, swap=True) for tile in tiles], small[1], *specialized]
    if mean_rows <= 96:
        return [*small, Fp8Config(32, 128, 128, 4, 6, swap=True), SPECIALIZED]
    if mode == ROWWISE_FAST:
        wide = [Fp8Config(128, 256, 128, 8, 4, group_m, split_store=True) for group_m in (8, 16)]
        large = [*wide, replace(wide[0], flatten=False), Fp8Config(128, 256, 128, 8, 3)]
    else:
        large = [Fp8Config(128, 128, 128, 8, 4, group_m) for group_m in (8, 16)]
        large += [Fp8Config(128, 128, 128, 8, 5, flatten=False), Fp8Config(64, 128, 128, 4, 4, per_sm=2)]
        large += [Fp8Config(64, 256, 128, 8, 4)] if mode == ROWWISE else []
    large += [replace(SPECIALIZED, group_m=group_m) for group_m in (8, 16)]
    return large + (small[1:] if mean_rows <= 600 else [])


def illegal(config: Fp8Config, mode: str, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot be compiled for a GPU with TMA, or None if it can."""
    reason = illegal_tile(config.block_m, config.block_n, config.block_k)
    if reason is not None:
        return reason
    if config.specialized:
        if replace(config, group_m=8) != SPECIALIZED:
            return "the specialised kernel has tiles of 128 x 256 x 128, four stages and groups of four warps"
        return None
    store = config.block_m * config.block_n // (2 if config.split_store else 1)
    buffers = device.buffers(config.num_stages, itemsize=1)
    shared = buffers * (config.block_m + config.block_n) * config.block_k + 2 * store
    if config.split_store and device.sums_in_tensor_memory:
        shared += store  # sums come from tensor memory, and half a tile passes through shared memory a second time
    if shared > device.room(config.per_sm):
        return f"{config.num_stages} stages and the output tile take {shared} bytes of {device.room(config.per_sm)}"
    if config.swap and config.split_store:
        return "a swapped tile is stored whole"
    if mode != ROWWISE_FAST and config.block_k != SCALE_BLOCK:
        return f"block_k={config.block_k}: sums are scaled or promoted every {SCALE_BLOCK} of K"
    if mode == BLOCKWISE and config.block_n > SCALE_BLOCK:
        return f"block_n={config.block_n}: a tile has one scale of the weights, which is that of {SCALE_BLOCK} columns"
    return None


def configs_for(mode: str, M: int, G: int, N: int, K: int, device: Device) -> list[tuple[str, Fp8Config, str | None]]:
    """Return (name, config, why it is illegal here) by preference: tuned, by mean rows per expert, plain, small."""
    if device.vendor == "cpu":
        return [("default", CPU_SWAP if M <= 8 * G else CPU, None)]

    def legal(config: Fp8Config) -> str | None:
        return illegal(config, mode, device)

    default = fitted(CONFIGS[mode][_size_class(mode, M / G)], legal)
    configs = configs_in_order("fp8", problem_key(M, G, N, K, mode), device, default, legal)
    plain = fitted(CONFIGS[mode]["plain"], legal)
    least = fitted(CONFIGS[mode]["plain"], lambda config: illegal(config, mode, halved(device)))
    return [*configs, ("plain", plain, legal(plain)), ("small", least, legal(least))]


def _size_class(mode: str, mean_rows: float) -> str:
    """Return the name of an untuned problem's config."""
    if mode == BLOCKWISE:
        return "decode" if mean_rows < SPECIALIZED_ROWS else "large"
    return size_class(mean_rows, ((32, "decode"), (64, "small")), "large")


def choose_config(mode: str, M: int, G: int, N: int, K: int, device: Device) -> Fp8Config:
    """Return this problem's tuned config on this GPU, else the first legal one of `configs_for`."""
    return first_legal(configs_for(mode, M, G, N, K, device))


@triton.jit
def _fp8_kernel(
    a_desc,  # [M, K], tiles [BLOCK_M, BLOCK_K]
    b_desc,  # [G, N, K], tiles of one expert
    scale_a_ptr,  # [M]; block-wise [M, K/SCALE_BLOCK], strides 1, scale_a_stride
    scale_b_ptr,  # [G, N]; block-wise [G, N/SCALE_BLOCK, K/SCALE_BLOCK]
    out_desc,  # [M, N], ragged along M
    out_ptr,  # the same memory
    offs_ptr,  # [G]
    M,
    N,
    K,
    scale_a_stride,
    out_stride,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,  # 0: row-wise
    FAST_ACCUM: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    starts, ends, counts, before = expert_tiles(offs_ptr, G, G_POW2, BLOCK_M)
    tiles_m = tl.sum(counts, 0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    block_elements = tl.full((), 1, tl.int64) * scale_a_stride
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, NUM_PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = super_grouped(tile, tiles_m, tiles_n, GROUP_M)
        g, start, size, row = expert_of(tile_m, starts, ends, counts, before, G_POW2, BLOCK_M)
        column = tile_n * BLOCK_N
        rows = start + row + tl.arange(0, BLOCK_M)
        if SWAP:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(steps):
            a = a_desc.load([start + row, step * BLOCK_K])
            b = b_desc.load([g, column, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
            if SCALE_BLOCK:
                # Rows of another expert get its scales: the store cuts them off.
                scales_a = tl.load(scale_a_ptr + step * block_elements + rows, mask=rows < M, other=0.0)
                blocks = g.to(tl.int64) * tl.cdiv(N, SCALE_BLOCK) + column // SCALE_BLOCK
                scales = scales_a * tl.load(scale_b_ptr + blocks * steps + step)
                if SWAP:
                    acc += tl.dot(b, a.T) * scales[None, :]
                else:
                    acc += tl.dot(a, b.T) * scales[:, None]
            elif FAST_ACCUM:
                if SWAP:
                    acc = tl.dot(b, a.T, acc)
                else:
                    acc = tl.dot(a, b.T, acc)
            # Not by max_num_imprecise_acc: with it ptxas serialises the wgmma instructions (Triton 3.7.1).
            elif SWAP:
                acc += tl.dot(b, a.T)
            else:
                acc += tl.dot(a, b.T)
        if not SCALE_BLOCK:
            columns = column + tl.arange(0, BLOCK_N)
            scales_a = tl.load(scale_a_ptr + rows, mask=rows < M, other=0.0)
            scales_b = tl.load(scale_b_ptr + g.to(tl.int64) * N + columns, mask=columns < N, other=0.0)
            if SWAP:
                acc = acc * scales_b[:, None] * scales_a[None, :]
            else:
                acc = acc * scales_a[:, None] * scales_b[None, :]
        store_tile(out_desc, start, size, row, column, acc, DTYPE, BLOCK_M, BLOCK_N, SWAP, SPLIT_STORE)
    zero_past(out_ptr, tl.load(offs_ptr + G - 1).to(tl.int32), M, N, out_stride, NUM_PROGRAMS, BLOCK_N)


def prepare_fp8(
    a: Tensor,  # [M, K] e4m3fn
    scale_a: Tensor,  # [M] fp32; block-wise [M, K/128] with strides 1, any
    b: Tensor,  # [G, N, K] e4m3fn
    scale_b: Tensor,  # [G, N] fp32; block-wise [G, N/128, K/128], contiguous
    offs: Tensor,  # [G], int32 or int64 end offsets
    fast_accum: bool = False,  # leave sums in the tensor cores' short accumulators; row-wise only
    out_dtype: torch.dtype = torch.bfloat16,
    config: Fp8Config | None = None,
    trusted: bool = False,  # the caller vouches for the offsets; checking them synchronises with the device
) -> Callable[[], Tensor]:  # [M, N]; rows are padded to 16 bytes, so it may be a view
    """Make the descriptors; the returned callable allocates the output and launches once.

    The callable reads `offs` on the device and follows later changes. The scales' dimensions select the recipe. Raises
    ValueError if an operand is not as above, or if TMA cannot read it: rows must start at multiples of 16 bytes, see
    `quantize.empty_fp8`.
    """
    mode = require_scaled(a, scale_a, b, scale_b, fast_accum, out_dtype)
    require_dense(offs) if trusted else group_ends(a, b.transpose(1, 2), offs)
    (M, K), (G, N, _) = a.shape, b.shape
    if M == 0 or N == 0 or K == 0:
        return lambda: torch.zeros(M, N, dtype=out_dtype, device=a.device)
    device = device_of(a.device)
    if config is not None and (reason := illegal(config, mode, device)):
        raise ValueError(f"{config}: {reason}")
    a, b = _for_tma("a", a), _for_tma("b", b)

    specialized = Gluon(f"{__package__}.fp8_specialized", b)

    def prepare(config: Fp8Config) -> Callable[[], Tensor]:
        by = specialized.prepare if config.specialized else _prepare_plain
        return by(a, scale_a, b, scale_b, offs, fast_accum, out_dtype, config)

    if config is not None:
        return prepare(config)
    variants = specialized_or_not(
        "plain",
        configs_for(mode, M, G, N, K, device),
        prepare,
        specialized,
        (mode, out_dtype, a.device, G),
    )
    return first_that_runs("fp8", variants)


_bound: Kept[tuple[Callable[..., Tensor] | None]] = Kept()


def bind_blockwise(
    a: Tensor, scale_a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype
) -> Callable[..., Tensor] | None:  # of a, scale_a, b, scale_b, offs
    """Return a launch for checked operands of this class, or None if their config is not specialised.

    The class has shapes, strides and dtypes. Further calls prepare nothing, which saves time on the host.
    """
    key = (
        a.shape, a.stride(), scale_a.stride(), b.shape, b.stride(), offs.dtype, out_dtype, a.get_device(),
        (a.data_ptr() | b.data_ptr()) % TMA_BYTES,
    )  # fmt: skip
    kept = _bound.get(key)
    if kept is None:
        (M, K), (G, N, _) = a.shape, b.shape
        config = choose_config(BLOCKWISE, M, G, N, K, device_of(a.device))
        specialized = Gluon(f"{__package__}.fp8_specialized", b)
        if not config.specialized or specialized.why_not() or key[-1]:
            return _bound.add(key, (None,))[0]
        from groupbench.kernels.grouped_gemm.fp8_specialized import bind_specialized

        kept = _bound.add(key, (bind_specialized(a, scale_a, b, False, out_dtype, config),))
    return kept[0]


def _prepare_plain(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offs: Tensor,
    fast_accum: bool,
    out_dtype: torch.dtype,
    config: Fp8Config,
) -> Callable[[], Tensor]:
    """Run `prepare_fp8` with this file's kernel, for checked operands and config."""
    (M, K), (G, N, _) = a.shape, b.shape
    a_desc = TensorDescriptor.from_tensor(a, [config.block_m, config.block_k])
    b_desc = TensorDescriptor.from_tensor(b, [1, config.block_n, config.block_k])
    block_out = [config.block_m, config.block_n // (2 if config.split_store else 1)]
    programs = worker_count(a.device, config.per_sm)
    # Triton's interpreter truncates to bf16; a GPU rounds.
    stored_dtype = torch.float32 if interpreted() else out_dtype
    padded = triton.cdiv(N, 8) * 8
    out_desc = Outputs(lambda out: create_ragged_descriptor(out, block_out))
    launch = Launch(
        _fp8_kernel,
        (programs,),
        **launch_keywords(_fp8_kernel, config, **of_groups(G), NUM_PROGRAMS=programs, FAST_ACCUM=fast_accum),
        SCALE_BLOCK=SCALE_BLOCK if scale_a.ndim == 2 else 0,
    )

    def run() -> Tensor:
        out = torch.empty(M, padded, dtype=stored_dtype, device=a.device)[:, :N]
        launch(a_desc, b_desc, scale_a, scale_b, out_desc(out), out, offs, M, N, K, scale_a.stride(-1), padded)
        return out.to(out_dtype)

    return run


def grouped_gemm_fp8_reference(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor
) -> Tensor:  # [M, N] fp32
    """Return the same fp8 values' scaled product in fp32, so quantisation does not count as an error."""
    out = torch.zeros(a.size(0), b.size(1), dtype=torch.float32, device=a.device)
    start = 0
    with without_tf32():
        for g, end in enumerate(offs.tolist()):
            if end > start:
                out[start:end] = dequantize(a[start:end], scale_a[start:end]) @ dequantize(b[g], scale_b[g]).T
            start = end
    return out


def _for_tma(name: str, x: Tensor) -> Tensor:
    """Return `x` with TMA's strides; raise ValueError if rows are not aligned.

    A size-1 dimension's stride is arbitrary in torch, but TMA checks it.
    """
    *outer, inner = x.stride()
    outer = [TMA_BYTES if size == 1 else stride for size, stride in zip(x.shape, outer, strict=False)]
    if (inner != 1 and x.size(-1) > 1) or x.data_ptr() % TMA_BYTES or any(stride % TMA_BYTES for stride in outer):
        raise ValueError(
            f"{name}'s rows do not start at multiples of {TMA_BYTES} bytes (strides {x.stride()}), as TMA requires: "
            "see quantize.empty_fp8"
        )
    return x.as_strided(x.shape, (*outer, 1))


def require_scaled(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, fast_accum: bool, out_dtype: torch.dtype
) -> str:
    """Return the operands' mode; raise ValueError if they do not fit together.

    Raises TypeError for anything but tensors.
    """
    require_tensors(a=a, scale_a=scale_a, b=b, scale_b=scale_b)
    if a.dtype != E4M3 or b.dtype != E4M3 or scale_a.dtype != torch.float32 or scale_b.dtype != torch.float32:
        raise ValueError(
            f"expected {E4M3} with float32 scales, got {a.dtype}, {b.dtype}, {scale_a.dtype}, {scale_b.dtype}"
        )
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype={out_dtype} is not one of {', '.join(map(str, OUT_DTYPES))}")
    if a.ndim != 2 or b.ndim != 3 or a.size(1) != b.size(2):
        raise ValueError(f"expected a [M, K] and b [G, N, K], got {tuple(a.shape)} and {tuple(b.shape)}")
    mode = _recipe(a, scale_a, b, scale_b)
    if len({x.device for x in (a, scale_a, b, scale_b)}) > 1:
        raise ValueError("operands and scales need one device")
    require_device(a.device)
    if fast_accum and mode == BLOCKWISE:
        raise ValueError("fast_accum has no meaning block-wise: sums of 128 are scaled and added in fp32")
    return ROWWISE_FAST if fast_accum else mode


def _recipe(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> str:
    """Return ROWWISE or BLOCKWISE, from the scales' shapes; raise ValueError for neither."""
    (M, K), (G, N, _) = a.shape, b.shape
    blocks_n, blocks_k = triton.cdiv(N, SCALE_BLOCK), triton.cdiv(K, SCALE_BLOCK)
    recipes = {ROWWISE: ((M,), (G, N)), BLOCKWISE: ((M, blocks_k), (G, blocks_n, blocks_k))}
    mode = BLOCKWISE if scale_a.ndim == 2 else ROWWISE
    if (scale_a.shape, scale_b.shape) != recipes[mode]:
        raise ValueError(
            f"scales {tuple(scale_a.shape)} and {tuple(scale_b.shape)} of a [{M}, {K}] and b [{G}, {N}, {K}] are "
            "neither " + " nor ".join(f"{name} {shapes[0]} and {shapes[1]}" for name, shapes in recipes.items())
        )
    if (scale_a.stride(0) != 1 and M > 1) or not scale_b.is_contiguous():
        raise ValueError("scale_a needs stride 1 over rows, scale_b contiguous memory")
    return mode
