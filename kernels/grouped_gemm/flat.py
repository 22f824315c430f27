"""Grouped GEMM as one flat loop over all groups' tiles: backend `triton_flat`.

    out[start_g:end_g] = a[start_g:end_g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

One launch, no host sync. There are as many programs as SMs. Each takes every NUM_PROGRAMS-th tile and finds the rows'
expert from the offsets alone: every expert's tiles are counted once, and a tile's expert is the number of experts whose
tiles end before it (a sum over G, no search). Offsets may change between calls, and between CUDA-graph replays.

A and B are read by the tensor memory accelerator (TMA) through descriptors made once. A's tile may run into the next
expert's rows. B's is clipped at each expert's N and K, since the expert is a separate dimension. A *ragged* output
descriptor drops the results for other experts' rows, so the hardware masks and no instruction does. The hardware fills
both K tails with zeros.

Tiles of half the rows (`halves`) avoid work on rows past an expert's last one, which is up to a third of all work with
a hundred small experts. They also spread a last wave with less than half the SMs busy.

With few rows per expert, the kernel swaps the operands. out.T = b.T @ a.T puts N on wgmma's 64 rows, and lets a tile
have as few as 16 rows of A.

flat_pointers.py has the same loop with pointers, for operands TMA cannot read: on a GPU before Hopper, or with
addresses or strides other than multiples of 16 bytes. With many rows per expert, on Hopper, configs are `specialized`:
flat_specialized.py computes the same tiles with specialised warps.

Sources: the persistent matmul with flattened loop and ragged store of triton_kernels (triton-lang/triton); the order of
tiles, Triton's tutorial 03; swapped operands for small M, as DeepGEMM and FlashInfer have for Hopper.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import INTERPRETER, Device, device_of, fitted
from groupbench.kernels.grouped_gemm.experts import expert_of, expert_tiles, of_groups, zero_past
from groupbench.kernels.grouped_gemm.flat_config import FlatConfig
from groupbench.kernels.grouped_gemm.flat_pointers import grouped_gemm_pointers
from groupbench.kernels.grouped_gemm.predict import Tile, limited_by_power, product_us
from groupbench.kernels.grouped_gemm.support import (
    fits,
    illegal_roles,
    illegal_tile,
    no_tma,
    require_operands,
    size_class,
    stored_weights,
    worker_count,
)
from groupbench.kernels.grouped_gemm.tile_order import super_grouped
from groupbench.kernels.grouped_gemm.tuned import (
    configs_in_order,
    first_legal,
    tune_here,
    tuned_configs,
    tunes_here,
    tuning_key,
)
from groupbench.kernels.launch import Launch, Outputs, described
from groupbench.kernels.variants import Gluon, Variant, first_that_runs, specialized_or_not

# For shapes without a tuned config. configs/flat_h100.json has the measurements, on an H100 over the shapes of
# TritonBench and of MoE layers.
CONFIGS = {
    # Memory-bound: bytes in flight decide. 16 rows waste the least of a tile when an expert has few rows.
    "decode": FlatConfig(16, 128, 128, num_warps=4, num_stages=4, swap=True),
    "decode_32": FlatConfig(32, 128, 128, num_warps=4, num_stages=4, swap=True),
    "small": FlatConfig(64, 128, 64, num_warps=4, num_stages=5),
    "pair": FlatConfig(128, 128, 64, num_warps=4, num_stages=3, split_store=True, per_sm=2),
    # 128 x 256 keeps 128 accumulators per thread of 8 warps; the split store makes room for its fourth stage.
    "large": FlatConfig(128, 256, 64, num_warps=8, num_stages=4, split_store=True),
    # With hundreds of experts the kernel is memory-bound, and the split store takes 1.3 to 1.5 times as long. Without
    # it, no registers spill.
    "many": FlatConfig(128, 256, 64, num_warps=8, num_stages=3),
    # Products of many waves are limited by the GPU's power, and flat_specialized.py moves the fewest bytes.
    "specialized": FlatConfig(128, 256, 64, num_warps=4, num_stages=4, specialized=True, lockstep=16),
    # For N whose last tile of 256 columns would be mostly empty.
    "specialized_192": FlatConfig(192, 192, 64, num_warps=4, num_stages=4, specialized=True, lockstep=16),
    # IEEE fp32 runs on FMA units, which read registers.
    "fp32": FlatConfig(64, 64, 32, num_warps=4, num_stages=3),
    # The cost in Triton's interpreter depends on the number of operations, not of elements.
    "cpu": FlatConfig(32, 32, 32, num_warps=4, num_stages=1, group_m=2, flatten=False),
    "cpu_swap": FlatConfig(16, 32, 32, num_warps=4, num_stages=1, group_m=2, swap=True, flatten=False),
    "cpu_halves": FlatConfig(32, 32, 32, num_warps=4, num_stages=1, group_m=2, flatten=False, halves=True),
}


def candidates(mean_rows: float) -> list[FlatConfig]:
    """Return the tuning candidates for 16-bit dtypes, by an expert's mean rows."""
    swapped = [FlatConfig(32, 128, block_k, 4, stages, swap=True) for block_k, stages in ((128, 4), (64, 5))]
    if fits(mean_rows, 16):
        tiles = [(16, 128, 128, 4, 4), (16, 64, 128, 4, 5), (16, 128, 64, 4, 5), (16, 256, 64, 8, 4)]
        return [FlatConfig(*tile, swap=True) for tile in tiles] + swapped
    if mean_rows <= 96:
        straight = [(64, 128, 64, 4, 5), (64, 256, 64, 8, 4), (64, 128, 128, 4, 3), (64, 256, 64, 4, 4)]
        return [*swapped, *[FlatConfig(*tile) for tile in straight], CONFIGS["pair"]]
    wide = [FlatConfig(128, 256, 64, 8, 4, group_m, split_store=True) for group_m in (4, 8, 16)]
    many = [replace(CONFIGS["many"], group_m=group_m) for group_m in (8, 16)]
    halves = [replace(config, flatten=False, halves=True) for config in (CONFIGS["large"], CONFIGS["many"])]
    large = [*wide, *many, *halves, replace(CONFIGS["large"], flatten=False)]
    large += [CONFIGS["pair"]]
    special = CONFIGS["specialized"]
    taller = replace(special, block_m=192, num_stages=3)
    large += [special, replace(special, group_m=16), taller, replace(taller, group_m=12), CONFIGS["specialized_192"]]
    return large + ([FlatConfig(128, 128, 64, 4, 4), FlatConfig(64, 256, 64, 4, 4)] if mean_rows <= 600 else [])


def illegal(config: FlatConfig, dtype: torch.dtype, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot be compiled for a GPU with TMA, or None if it can."""
    if config.specialized:
        return _illegal_specialized(config, dtype, device)
    reason = illegal_tile(config.block_m, config.block_n, config.block_k, config.num_stages, dtype, device)
    if reason is not None:
        return reason
    stages = device.buffers(config.num_stages) * (config.block_m + config.block_n) * config.block_k
    store = config.block_m * config.block_n // (2 if config.split_store else 1)
    shared = (stages + store) * dtype.itemsize
    if shared > device.room(config.per_sm):
        return f"{config.num_stages} stages and the output tile take {shared} bytes of {device.room(config.per_sm)}"
    if config.halves and (config.flatten or config.block_m < 32):
        return "halves has two inner loops, which do not flatten, and half a tile needs at least 16 rows"
    if config.swap and config.split_store:
        return "a swapped tile is stored whole"
    return None


def _illegal_specialized(config: FlatConfig, dtype: torch.dtype, device: Device) -> str | None:
    tile = (config.block_m, config.block_n, config.block_k, config.num_stages)
    if tile not in ((128, 256, 64, 4), (192, 256, 64, 3), (192, 192, 64, 4)):
        return "specialized has tiles of 128 x 256 x 64 or 192 x 192 x 64 in 4 stages, or of 192 x 256 x 64 in 3"
    if (config.num_warps, config.per_sm) != (4, 1) or config.swap or config.split_store or config.halves:
        return "specialized has groups of 4 warps, one program per SM, and no swap, split_store or halves"
    return illegal_roles(config.lockstep, dtype, device)


def default_config(M: int, G: int, dtype: torch.dtype, device: Device) -> FlatConfig:
    """Return the config for the mean rows per expert, or the nearest one fitting the GPU's shared memory."""
    if device.vendor == "cpu":
        return CONFIGS["cpu_swap" if M <= 8 * G else "cpu"]
    if dtype == torch.float32:
        name = "fp32"
    else:
        classes = ((16, "decode"), (32, "decode_32"), (64, "small"), (128, "pair"))
        name = size_class(M / G, classes, "large" if G <= 64 else "many")
    return fitted(CONFIGS[name], lambda config: illegal(config, dtype, device))


def predicted_us(config: FlatConfig, M: int, G: int, N: int, K: int, device: Device) -> float:
    """Return a product's predicted time in us."""
    start, rest = (7.9, 0.9) if config.specialized else (6.4, 1.5)
    tile = Tile(config.block_m, config.block_n, config.per_sm, start, rest)
    # With fewer rows, loads and not products limit the loop.
    tile = tile if config.block_m >= 128 else replace(tile, rest_us=2.2, rate=0.47)
    return product_us(tile, M, G, N, K, device)


def configs_for(
    M: int, G: int, N: int, K: int, dtype: torch.dtype, device: Device, nk: bool
) -> list[tuple[str, FlatConfig, str | None]]:
    """Return (name, config, why it is illegal here): tuned, by predicted time, and the default."""
    default = default_config(M, G, dtype, device)
    if device.vendor == "cpu" or dtype == torch.float32:
        return [("default", default, None)]
    key = tuning_key(M, G, N, K, dtype, nk)
    configs = configs_in_order("flat", key, device, default, lambda config: illegal(config, dtype, device))
    if device.hopper and not fits(M / G, 64):
        plain = "large" if G <= 64 else "many"
        # A weight of 2 bytes takes 2 FLOPs per row of its expert. If memory limits experts with few rows, lockstep
        # slows the others down too: on an H100, by up to 17 % with 256 rows on average.
        roles = ("specialized", "specialized_192") if device.ridge < M / G else ()
        names = ("small", "pair", plain, *roles)
        if limited_by_power(M, N, K):  # tiles of 256 columns read fewer bytes, unless their last one is mostly empty
            names = roles[math.ceil(N / 192) * 192 <= 0.95 * math.ceil(N / 256) * 256 :][:1] or (plain,)
        ranked = sorted((CONFIGS[name] for name in names), key=lambda c: predicted_us(c, M, G, N, K, device))
        configs[-1:-1] = [("predicted", config, illegal(config, dtype, device)) for config in ranked]
    return configs


def choose_config(M: int, G: int, N: int, K: int, dtype: torch.dtype, device: Device, nk: bool) -> FlatConfig:
    """Return this problem's tuned config on this GPU, else the default for the mean rows per expert."""
    return first_legal(configs_for(M, G, N, K, dtype, device, nk))


@triton.jit
def store_rows(desc, start, size, row, column, tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write a tile at `row` of an expert's rows start..start + size; the hardware drops rows past them.

    triton.tools.ragged_tma has this as `store_ragged`, which Triton's interpreter cannot run.
    """
    billion, end, inside = to_ragged_indices(start, size, row)
    desc.store([billion, end, inside, column], tile.reshape(1, 1, ROWS, COLUMNS))


@triton.jit
def _product(
    a_desc,
    b_desc,
    row,
    matrix,
    column,
    steps,
    B_IS_NK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
):
    """Return the fp32 tile [BLOCK_M, BLOCK_N] of a @ b[matrix], transposed with SWAP."""
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(steps):
        a = a_desc.load([row, step * BLOCK_K])
        if B_IS_NK:
            b_nk = b_desc.load([matrix, column, step * BLOCK_K]).reshape(BLOCK_N, BLOCK_K)
            if SWAP:
                acc = tl.dot(b_nk, a.T, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(a, b_nk.T, acc, input_precision=PRECISION)
        else:
            b_kn = b_desc.load([matrix, step * BLOCK_K, column]).reshape(BLOCK_K, BLOCK_N)
            if SWAP:
                acc = tl.dot(b_kn.T, a.T, acc, input_precision=PRECISION)
            else:
                acc = tl.dot(a, b_kn, acc, input_precision=PRECISION)
    return acc


@triton.jit
def store_tile(
    desc,
    start,
    size,
    row,
    column,
    acc,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
):
    """Write a finished fp32 tile at `row` of an expert's rows: transposed back with SWAP, halved with SPLIT_STORE."""
    if SWAP:
        store_rows(desc, start, size, row, column, acc.to(DTYPE).T, BLOCK_M, BLOCK_N)
    elif SPLIT_STORE:
        halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        store_rows(desc, start, size, row, column, left.to(DTYPE), BLOCK_M, BLOCK_N // 2)
        store_rows(desc, start, size, row, column + BLOCK_N // 2, right.to(DTYPE), BLOCK_M, BLOCK_N // 2)
    else:
        store_rows(desc, start, size, row, column, acc.to(DTYPE), BLOCK_M, BLOCK_N)


@triton.jit
def _whole_tile(
    a_desc, b_desc, out_desc, start, size, row, column, matrix, steps,
    B_IS_NK: tl.constexpr, PRECISION: tl.constexpr, DTYPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SWAP: tl.constexpr, SPLIT_STORE: tl.constexpr,
):  # fmt: skip
    """Compute and write the tile at an expert's `row`."""
    acc = _product(a_desc, b_desc, start + row, matrix, column, steps,
                   B_IS_NK, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, SWAP)  # fmt: skip
    store_tile(out_desc, start, size, row, column, acc, DTYPE, BLOCK_M, BLOCK_N, SWAP, SPLIT_STORE)


@triton.jit
def _flat_kernel(
    a_desc,  # [M, K], tiles [BLOCK_M, BLOCK_K]
    a_half_desc,  # the same, tiles [BLOCK_M // 2, BLOCK_K]; read only with HALVES
    b_desc,  # [G or 1, N, K] or [G or 1, K, N], tiles of one expert
    out_desc,  # [M, N], ragged along M
    out_ptr,  # the same memory
    offs_ptr,  # [G]
    M,
    N,
    K,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    SHARED_B: tl.constexpr,
    B_IS_NK: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    SWAP: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    FLATTEN: tl.constexpr,
    HALVES: tl.constexpr,
):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    HALF: tl.constexpr = BLOCK_M // 2
    starts, ends, counts, before = expert_tiles(offs_ptr, G, G_POW2, BLOCK_M)
    tiles_m = tl.sum(counts, 0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    steps = tl.cdiv(K, BLOCK_K)
    items = tiles_m * tiles_n
    whole = items
    if HALVES:  # half tiles share out a last wave that fills less than half of the GPU
        last = items % NUM_PROGRAMS
        if 2 * last <= NUM_PROGRAMS:
            whole = items - last
            items += last
    for item in tl.range(tl.program_id(0), items, NUM_PROGRAMS, flatten=FLATTEN):
        tile = item
        half = 0
        if HALVES:
            tile = tl.where(item < whole, item, (item + whole) // 2)
            half = tl.where(item < whole, 0, (item - whole) % 2)
        tile_m, tile_n = super_grouped(tile, tiles_m, tiles_n, GROUP_M)
        g, start, size, row = expert_of(tile_m, starts, ends, counts, before, G_POW2, BLOCK_M)
        column = tile_n * BLOCK_N
        matrix = 0 if SHARED_B else g
        if HALVES:
            row += half * HALF
            if (item >= whole) | (size - row <= HALF):
                acc_half = _product(a_half_desc, b_desc, start + row, matrix, column, steps,
                                    B_IS_NK, PRECISION, HALF, BLOCK_N, BLOCK_K, SWAP)  # fmt: skip
                # Not by TMA: Triton would allocate a buffer for this kind of store too, and shared memory is full.
                rows = row + tl.arange(0, HALF)
                columns_here = column + tl.arange(0, BLOCK_N)
                at = out_ptr + (start + rows).to(tl.int64)[:, None] * N + columns_here[None, :]
                result = acc_half.T if SWAP else acc_half
                tl.store(at, result.to(DTYPE), mask=(rows < size)[:, None] & (columns_here < N)[None, :])
            else:
                _whole_tile(a_desc, b_desc, out_desc, start, size, row, column, matrix, steps,
                            B_IS_NK, PRECISION, DTYPE, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, SPLIT_STORE)  # fmt: skip
        else:
            _whole_tile(a_desc, b_desc, out_desc, start, size, row, column, matrix, steps,
                        B_IS_NK, PRECISION, DTYPE, BLOCK_M, BLOCK_N, BLOCK_K, SWAP, SPLIT_STORE)  # fmt: skip
    zero_past(out_ptr, tl.load(offs_ptr + G - 1).to(tl.int32), M, N, N, NUM_PROGRAMS, BLOCK_N)


def prepare_flat(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]; weights stored as [G, N, K] come as a transposed view, one shared by all expanded
    offs: Tensor,  # [G], int32 or int64 end offsets
    config: FlatConfig | None = None,
    trusted: bool = False,  # the caller vouches for shapes and offsets; checking them synchronises with the device
    zero_rest: bool = True,  # else rows past offs[-1], which may be most of them, stay uninitialised
) -> Callable[[], Tensor]:  # [M, N]; rows past offs[-1] are zero
    """Make the descriptors; the returned callable allocates the output and launches once.

    The callable reads `offs` on the device and follows later changes. If TMA cannot read the operands, the same loop
    reads by pointers (flat_pointers.py) and ignores `config`. Raises ValueError for unsupported operands or configs.
    """
    require_operands(a, b, offs, trusted)
    a, b = a.resolve_neg(), b.resolve_neg()
    run = bind_flat(a, b, offs, config, zero_rest)
    return lambda: run(a, b, offs)


def bind_flat(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]
    offs: Tensor,  # [G]
    config: FlatConfig | None = None,
    zero_rest: bool = True,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Do as `prepare_flat` for checked operands; the callable takes operands like these.

    Their shapes, strides and dtypes must be equal, and their addresses multiples of 16 if these are. It may be called
    from any thread.
    """
    (M, K), (G, _, N) = a.shape, b.shape
    if M == 0 or N == 0 or K == 0:
        return lambda a, b, offs: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    weights, nk, shared = stored_weights(b)
    without_tma, device = no_tma(N, a=a, b=weights), device_of(a.device)
    if config is None and without_tma is None and a.dtype.itemsize == 2 and tunes_here(a.device):
        config = _tuned_here(a, b, offs, nk, zero_rest)
    if config is not None and (reason := illegal(config, a.dtype, device)):
        raise ValueError(f"{config}: {reason}")
    of_a, of_b = (a.shape, a.stride()), (b.shape, b.stride())

    def by_pointers(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return grouped_gemm_pointers(a.as_strided(*of_a), b.as_strided(*of_b), offs, zero_rest)

    pointers = Variant("pointers", lambda: by_pointers)
    if without_tma is not None:
        return first_that_runs("flat", [Variant("tma", pointers.prepare, without_tma), pointers])

    specialized = Gluon(f"{__package__}.flat_specialized", G, a.device)

    def by_tma(config: FlatConfig) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        prepare = specialized.prepare if config.specialized else _prepare_tma
        return prepare(a, weights, offs, config, nk, shared, zero_rest)

    if config is not None:
        return by_tma(config)
    variants = specialized_or_not(
        "tma",
        configs_for(M, G, N, K, a.dtype, device, nk),
        by_tma,
        specialized,
        (a.dtype, a.device, nk, shared, G),
    )
    return first_that_runs("flat", [*variants, pointers])


def _prepare_tma(
    a: Tensor,  # [M, K]
    weights: Tensor,  # [G or 1, N, K] or [G or 1, K, N]
    offs: Tensor,  # [G]
    config: FlatConfig,  # legal
    nk: bool,
    shared: bool,
    zero_rest: bool,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:  # of operands like these
    """Make the descriptors, for operands TMA can read."""
    (M, K), G, N = a.shape, offs.numel(), weights.size(1 if nk else 2)
    block_b = [1, config.block_n, config.block_k] if nk else [1, config.block_k, config.block_n]
    a_desc = described(TensorDescriptor.from_tensor, a, [config.block_m, config.block_k])
    b_desc = described(TensorDescriptor.from_tensor, weights, block_b)
    block_out = [config.block_m, config.block_n // (2 if config.split_store else 1)]
    half = [config.block_m // 2, config.block_k]
    a_half_desc = described(TensorDescriptor.from_tensor, a, half) if config.halves else None
    out_desc = Outputs(lambda out: create_ragged_descriptor(out, block_out))
    programs = worker_count(a.device, config.per_sm)
    launch = Launch(
        _flat_kernel,
        (programs,),
        **launch_keywords(_flat_kernel, config, **of_groups(G), SHARED_B=shared, B_IS_NK=nk, PRECISION="ieee"),
        NUM_PROGRAMS=programs,
    )

    dtype, device, zero_to = a.dtype, a.device, M if zero_rest else 0
    shape, strides = (M, N), (N, 1)

    def run(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        out = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        at, to = a.data_ptr(), out.data_ptr()
        of_a = (at,) if a_half_desc is None else (at, at)
        if not launch.again(*of_a, b.data_ptr(), to, to, offs.data_ptr()):
            a_half = None if a_half_desc is None else a_half_desc(a)
            launch(a_desc(a), a_half, b_desc(b), out_desc(out), out, offs, zero_to, N, K)
        return out

    return run


def _tuned_here(a: Tensor, b: Tensor, offs: Tensor, nk: bool, zero_rest: bool) -> FlatConfig | None:
    """Search for a config if no file has one for this problem; return None if a file does."""
    (M, K), (G, _, N) = a.shape, b.shape
    key, device = tuning_key(M, G, N, K, a.dtype, nk), device_of(a.device)
    if key in tuned_configs("flat", device.name, any_triton=False):
        return None
    tried = [config for config in candidates(M / G) if illegal(config, a.dtype, device) is None]
    return tune_here("flat", key, device, tried, lambda c: prepare_flat(a, b, offs, c, True, zero_rest))
