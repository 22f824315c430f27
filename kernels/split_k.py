"""Matrix products with few rows and columns and a long K, cut along K so that every SM has work: split-K.

    out = a @ b        a [M, K]   b [K, N]   out [M, N]

An output of 16 x 16 is one tile, and one thread block reads at a hundredth of the GPU's bandwidth. Split-K gives each
tile to S programs, each with its own stretch of K:

    partial[t, s] = a[rows of t, stretch s] @ b[stretch s, columns of t]        in fp32, [BLOCK_M, BLOCK_N]
    out[t]        = partial[t, 0] + partial[t, 1] + ... + partial[t, S - 1]

Three ways to add the partials, over one main loop:

  fixup         one launch. Each program leaves its partial in a workspace and counts itself in; whoever comes last adds
                all of them, in the order of s. Who is last differs from run to run, what is added in which order does
                not: the result is the same to the bit. The last one sets the counter back to zero, so that the next
                call, or the next replay of a CUDA graph, finds it as the first did.
  two_launches  partials by one kernel, sums by another, in a fixed order too, and what the second launch costs: 2 to
                3 us where the whole product takes 5.
  atomic        partials are added to an output of zeros as they come, in fp32. No workspace, and no order: sums of the
                same numbers differ in their last bits from run to run.

With many splits, one program that reads all partials of a tile takes longer than the product did: 132 partials of
16 x 16 are 135 KB, about 2 us for one SM. So with more than `fan_in` the sum has two steps: the last of each fan_in
neighbours adds theirs, and the last of those adds the groups' sums.

The fixup after stream-K (Osama et al., arXiv 2301.03598), whose peers wait for each other; here nobody waits, so any
number of programs may run at once, in any order, in the interpreter too. Splitting after Helion's
examples/split_k_barrier.py, which puts a grid-wide barrier between partials and sums (split_k_helion.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.grouped_gemm.support import illegal_tile, interpreted, unsupported


@dataclass(frozen=True)
class SplitKConfig:
    """A tile, how many programs share one, and how their partials are added.

    splits  programs a tile; no more than K has blocks (legal_splits)
    fan_in  how many partials one program adds; with more splits than that, in two steps
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int = 4
    num_stages: int = 4
    fan_in: int = 32


MAX_SPLITS = 1024  # two steps of 32 partials
SUM_ELEMENTS = 8192  # partials that are loaded at once: 64 registers of a thread, all in flight together
# Bytes of operands from which two programs a SM pay: below, each SM's share is in flight after one program's prologue.
TWO_PER_SM_BYTES = 32 << 20


def choose_config(M: int, N: int, K: int, dtype: torch.dtype, sms: int) -> SplitKConfig:
    """The rule, from the problem and the number of SMs.

    block_m  M's next power of two, 16 to 64 (128 from M = 65 on): rows past M cost tensor-core work, no bandwidth
    block_n  64, or N's next power of two where that is less (128 beside 128 rows)
    splits   as many programs as run at once: one a SM, or two where the operands are large (TWO_PER_SM_BYTES)
    both     halved down to 32 as long as the operands are small and a tile has more than 32 programs: partials, of
             which there is one a program, shrink by four where the operands, from the L2, are read twice
    block_k  so that a stage holds 16 to 32 KiB: with three stages or more 50 KiB a program are under way, and an H100
             wants about 20 KiB a SM (3.35 TB/s times 0.8 us)
    """
    wide = dtype.itemsize == 4
    block_m = min(max(triton.next_power_of_2(M), 16), 128 if M > 64 and not wide else 64)
    block_n = min(max(triton.next_power_of_2(N), 16), 128 if block_m == 128 else 64)
    large = (M + N) * K * dtype.itemsize >= TWO_PER_SM_BYTES
    programs = sms * (2 if large else 1)
    while not large and programs > 32 * _tiles(M, N, block_m, block_n) and max(block_m, block_n) > 32:
        if block_m >= block_n:
            block_m //= 2
        else:
            block_n //= 2
    if wide:
        # IEEE fp32 goes through FMA units, which read registers: smaller tiles.
        block_k = 32 if block_m * block_n >= 2048 else 64
    else:
        block_k = 256 if block_m + block_n <= 32 else 128 if block_m + block_n <= 128 else 64
    block_k = min(block_k, max(triton.next_power_of_2(K), 16))
    num_stages = 3 if block_m >= 64 or wide else 5  # below 64 rows Triton keeps a buffer less than stages
    splits = legal_splits(programs // _tiles(M, N, block_m, block_n), K, block_k)
    # One step for up to 40 partials; else two, the second as short as the first or shorter.
    fan_in = max(splits, 2) if splits <= 40 else 16 if splits <= 256 else 32
    num_warps = 8 if block_m * block_n >= 128 * 128 else 4
    return SplitKConfig(block_m, block_n, block_k, splits, num_warps, num_stages, fan_in)


def interpreter_config(M: int, N: int, K: int) -> SplitKConfig:
    """For Triton's interpreter, which pays by operation and hardly by element: few programs, both steps of the sum."""
    return SplitKConfig(16 if M <= 16 else 32, 32, 64, legal_splits(5, K, 64), num_stages=1, fan_in=3)


def legal_splits(splits: int, K: int, block_k: int) -> int:
    """The nearest number of splits that leaves a block of K to each."""
    return max(1, min(splits, triton.cdiv(K, block_k), MAX_SPLITS))


def illegal(config: SplitKConfig, K: int, dtype: torch.dtype) -> str | None:
    """Why a config cannot run, or None where it can."""
    if config.splits != legal_splits(config.splits, K, config.block_k):
        blocks = triton.cdiv(K, config.block_k)
        return f"splits={config.splits}: 1 to {min(blocks, MAX_SPLITS)} for {blocks} blocks of K"
    if config.fan_in < 2 or config.fan_in**2 < config.splits:
        return f"fan_in={config.fan_in}: {config.splits} partials need two steps of at least their square root"
    return illegal_tile(config.block_m, config.block_n, config.block_k, config.num_stages, dtype)


@triton.jit
def _multiply(
    a_ptr,
    b_ptr,
    row,
    col,
    split,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    SPLITS: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K: no mask along K
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The partial product [BLOCK_M, BLOCK_N] of one split, in fp32; stretches of K differ by one block at most."""
    blocks = tl.cdiv(K, BLOCK_K)
    first = (blocks * split) // SPLITS
    last = (blocks * (split + 1)) // SPLITS
    k = tl.arange(0, BLOCK_K)
    one = tl.full((), 1, tl.int64)  # offsets pass 2**31 where an operand has as many elements
    step_a = one * stride_ak * BLOCK_K
    step_b = one * stride_bk * BLOCK_K
    a_ptrs = a_ptr + first * step_a + row[:, None] * (one * stride_am) + k[None, :] * (one * stride_ak)
    b_ptrs = b_ptr + first * step_b + k[:, None] * (one * stride_bk) + col[None, :] * (one * stride_bn)
    # Masks cost nothing: they become the byte counts of asynchronous copies, which fill the rest with zeros.
    row_ok = (row < M)[:, None]
    col_ok = (col < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in tl.range(first, last):
        if EVEN_K:
            a = tl.load(a_ptrs, mask=row_ok, other=0.0)
            b = tl.load(b_ptrs, mask=col_ok, other=0.0)
        else:
            left = K - block * BLOCK_K
            a = tl.load(a_ptrs, mask=row_ok & (k < left)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=col_ok & (k < left)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += step_a
        b_ptrs += step_b
    return acc


@triton.jit
def _store_slot(slot_ptr, acc, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Leave a tile's first `rows` rows in a slot of the workspace, [BLOCK_M, BLOCK_N]."""
    r = tl.arange(0, BLOCK_M)
    at = slot_ptr + r[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(at, acc, mask=(r < rows)[:, None])


@triton.jit
def _sum_slots(slots_ptr, count, at, ok, SLOT: tl.constexpr, CHUNK: tl.constexpr):
    """Elements `at` of `count` slots added up, CHUNK slots at a time: an order that depends on `count` alone."""
    s = tl.arange(0, CHUNK)
    total = tl.zeros(at.shape, dtype=tl.float32)
    for first in tl.range(0, count, CHUNK):
        slot = (first + s)[:, None]
        # From the L2, where the other SMs' stores are; an L1 may hold what was there before.
        part = tl.load(
            slots_ptr + slot * SLOT + at[None, :], mask=(slot < count) & ok[None, :], other=0.0, cache_modifier=".cg"
        )
        total += tl.sum(part, 0)
    return total


@triton.jit
def _arrive(counter_ptr, expected):
    """Count this program in; whether it is the last of those expected, which sees what all others have stored.

    The barrier puts the stores of all threads in front of the one thread's atomic, whose release and acquire order them
    for other SMs. The last one sets the counter back.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def _store_sum(
    out_ptr,
    slots_ptr,
    count,
    first_row,
    first_col,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write a tile of the output: the sum of `count` slots."""
    at = tl.arange(0, BLOCK_M * BLOCK_N)
    row = first_row + at // BLOCK_N
    col = first_col + at % BLOCK_N
    ok = (row < M) & (col < N)
    total = _sum_slots(slots_ptr, count, at, ok, BLOCK_M * BLOCK_N, CHUNK)
    tl.store(out_ptr + row.to(tl.int64) * N + col, total.to(out_ptr.dtype.element_ty), mask=ok)


# What becomes of a partial.
FIXUP: tl.constexpr = tl.constexpr(0)
LEAVE: tl.constexpr = tl.constexpr(1)
ATOMIC: tl.constexpr = tl.constexpr(2)


@triton.jit
def _split_k_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    out_ptr,  # [M, N]; with ATOMIC, fp32 zeros
    slots_ptr,  # [tiles, SPLITS + groups, BLOCK_M, BLOCK_N] fp32; not with ATOMIC or one split
    counters_ptr,  # [tiles, groups + 1], zeros; with FIXUP
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    MODE: tl.constexpr,
    SPLITS: tl.constexpr,
    FAN_IN: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (tile, split), tiles first: programs that run together share a stretch of A and meet it in the L2."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_n
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    first_row = (tile // tiles_n) * BLOCK_M
    first_col = (tile % tiles_n) * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_M)
    col = first_col + tl.arange(0, BLOCK_N)
    acc = _multiply(
        a_ptr, b_ptr, row, col, split, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
        SPLITS, EVEN_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if MODE == ATOMIC:
        at = out_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
        tl.atomic_add(at, acc, mask=(row < M)[:, None] & (col < N)[None, :], sem="relaxed")
    elif SPLITS == 1:
        at = out_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])
    else:
        SLOT: tl.constexpr = BLOCK_M * BLOCK_N
        GROUPS: tl.constexpr = (SPLITS + FAN_IN - 1) // FAN_IN
        my_slots = slots_ptr + tile.to(tl.int64) * ((SPLITS + GROUPS) * SLOT)
        _store_slot(my_slots + split * SLOT, acc, M - first_row, BLOCK_M, BLOCK_N)
        if MODE == FIXUP:
            my_counters = counters_ptr + tile * (GROUPS + 1)
            if GROUPS == 1:
                if _arrive(my_counters, SPLITS):
                    _store_sum(out_ptr, my_slots, SPLITS, first_row, first_col, M, N, BLOCK_M, BLOCK_N, CHUNK)
            else:
                group = split // FAN_IN
                members = tl.minimum(SPLITS - group * FAN_IN, FAN_IN)
                if _arrive(my_counters + 1 + group, members):
                    at = tl.arange(0, SLOT)
                    ok = first_row + at // BLOCK_N < M
                    first_slot = my_slots + group * (FAN_IN * SLOT)
                    total = _sum_slots(first_slot, members, at, ok, SLOT, CHUNK)
                    tl.store(my_slots + (SPLITS + group) * SLOT + at, total, mask=ok)
                    if _arrive(my_counters, GROUPS):
                        sums = my_slots + SPLITS * SLOT
                        _store_sum(out_ptr, sums, GROUPS, first_row, first_col, M, N, BLOCK_M, BLOCK_N, CHUNK)


@triton.jit
def _sum_kernel(
    slots_ptr,  # [tiles, SPLITS + groups, BLOCK_M, BLOCK_N] fp32
    out_ptr,  # [M, N]
    M,
    N,
    SPLITS: tl.constexpr,
    FAN_IN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Program (tile, part) adds PART elements of a tile, groups of FAN_IN first: the order that the fixup has."""
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N
    GROUPS: tl.constexpr = (SPLITS + FAN_IN - 1) // FAN_IN
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    at = tl.program_id(1) * PART + tl.arange(0, PART)
    row = (tile // tiles_n) * BLOCK_M + at // BLOCK_N
    col = (tile % tiles_n) * BLOCK_N + at % BLOCK_N
    ok = (row < M) & (col < N)
    my_slots = slots_ptr + tile.to(tl.int64) * ((SPLITS + GROUPS) * SLOT)
    if GROUPS == 1:
        total = _sum_slots(my_slots, SPLITS, at, ok, SLOT, CHUNK)
    else:
        total = tl.zeros((PART,), dtype=tl.float32)
        for group in tl.range(0, GROUPS):
            members = tl.minimum(SPLITS - group * FAN_IN, FAN_IN)
            total += _sum_slots(my_slots + group * (FAN_IN * SLOT), members, at, ok, SLOT, CHUNK)
    tl.store(out_ptr + row.to(tl.int64) * N + col, total.to(out_ptr.dtype.element_ty), mask=ok)


def chunk(config: SplitKConfig, elements: int) -> int:
    """Slots that are loaded together where `elements` of each are: no more than there are to add."""
    most = triton.next_power_of_2(min(config.splits, config.fan_in))
    return max(1, min(most, SUM_ELEMENTS // elements))


def tile_count(M: int, N: int, config: SplitKConfig) -> int:
    return _tiles(M, N, config.block_m, config.block_n)


def _tiles(M: int, N: int, block_m: int, block_n: int) -> int:
    return int(triton.cdiv(M, block_m) * triton.cdiv(N, block_n))


def _slot_elements(M: int, N: int, config: SplitKConfig) -> int:
    """Elements of the workspace: for each tile a partial of every split, and a sum of every group of fan_in."""
    if config.splits == 1:
        return 0
    slots = config.splits + triton.cdiv(config.splits, config.fan_in)
    return tile_count(M, N, config) * slots * config.block_m * config.block_n


def prepare_fixup(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [K, N], any strides
    config: SplitKConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """One launch a call. Calls of one callable share its counters: they belong on one stream, one after the other.

    Raises ValueError for operands or a config that cannot run.
    """
    M, N, config = _checked(a, b, config)
    if config is None:
        return lambda: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    groups = triton.cdiv(config.splits, config.fan_in)
    counters = torch.zeros(tile_count(M, N, config), groups + 1, dtype=torch.int32, device=a.device)
    launch = _launcher(a, b, config, FIXUP)
    slots = _slot_elements(M, N, config)

    def run() -> Tensor:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        launch(out, torch.empty(slots, dtype=torch.float32, device=a.device), counters)
        return out

    return run


def prepare_two_launches(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [K, N], any strides
    config: SplitKConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """Partials, then sums. Raises ValueError for operands or a config that cannot run."""
    M, N, config = _checked(a, b, config)
    if config is None:
        return lambda: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    launch = _launcher(a, b, config, LEAVE)
    slots = _slot_elements(M, N, config)
    tile = config.block_m * config.block_n
    part = min(256, tile)  # of a tile: more programs, each with more partials in flight
    grid = (tile_count(M, N, config), tile // part)
    constants = {"SPLITS": config.splits, "FAN_IN": config.fan_in, "PART": part, "CHUNK": chunk(config, part)}
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}

    def run() -> Tensor:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        partials = torch.empty(slots, dtype=torch.float32, device=a.device)
        launch(out, partials, None)
        if config.splits > 1:
            _sum_kernel[grid](partials, out, M, N, **constants, num_warps=4)
        return out

    return run


def prepare_atomic(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [K, N], any strides
    config: SplitKConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """An output of zeros in fp32 that all programs add to, then a's dtype. Not the same to the bit from run to run.

    Raises ValueError for operands or a config that cannot run.
    """
    M, N, config = _checked(a, b, config)
    if config is None:
        return lambda: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    launch = _launcher(a, b, config, ATOMIC)

    def run() -> Tensor:
        out = torch.zeros(M, N, dtype=torch.float32, device=a.device)
        launch(out, None, None)
        return out.to(a.dtype)  # itself, where that is fp32

    return run


def _launcher(
    a: Tensor, b: Tensor, config: SplitKConfig, mode: tl.constexpr
) -> Callable[[Tensor, Tensor | None, Tensor | None], None]:
    """Launches `_split_k_kernel` on (out, slots, counters)."""
    (M, K), N = a.shape, b.size(1)
    grid = (tile_count(M, N, config) * config.splits,)
    constants = kernel_constants(config, K, mode.value)

    def launch(out: Tensor, slots: Tensor | None, counters: Tensor | None) -> None:
        _split_k_kernel[grid](
            a, b, out, slots, counters, M, N, K, *a.stride(), *b.stride(),
            **constants, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    return launch


def kernel_constants(config: SplitKConfig, K: int, mode: int) -> dict[str, object]:
    """What `_split_k_kernel` is compiled for, besides types, warps and stages."""
    return {
        "MODE": mode,
        "SPLITS": config.splits,
        "FAN_IN": config.fan_in,
        "EVEN_K": K % config.block_k == 0,
        "PRECISION": "ieee",  # TF32 would leave fp32 operands fp16's mantissa
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "CHUNK": chunk(config, config.block_m * config.block_n),
    }


def _checked(a: Tensor, b: Tensor, config: SplitKConfig | None) -> tuple[int, int, SplitKConfig | None]:
    """(M, N, config), the config None where there is nothing to multiply. Raises ValueError."""
    require_product(a, b)
    (M, K), N = a.shape, b.size(1)
    if M == 0 or N == 0 or K == 0:
        return M, N, None
    if config is None:
        config = default_config(a, b)
    if reason := illegal(config, K, a.dtype):
        raise ValueError(f"{config}: {reason}")
    return M, N, config


def default_config(a: Tensor, b: Tensor) -> SplitKConfig:
    """What `choose_config` says for these operands on their device."""
    (M, K), N = a.shape, b.size(1)
    if a.device.type == "cpu":
        return interpreter_config(M, N, K)
    return choose_config(M, N, K, a.dtype, torch.cuda.get_device_properties(a.device).multi_processor_count)


def require_product(a: Tensor, b: Tensor) -> None:
    """Raise ValueError unless a [M, K] and b [K, N] fit together and can be multiplied here."""
    if a.ndim != 2 or b.ndim != 2 or a.size(1) != b.size(0):
        raise ValueError(f"expected a [M, K] and b [K, N], got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype != b.dtype or a.device != b.device:
        raise ValueError(f"a and b need one dtype and one device: {a.dtype} on {a.device}, {b.dtype} on {b.device}")
    if reason := unsupported(a.dtype, interpreted()):
        raise ValueError(reason)
    if a.device.type == "cpu" and not interpreted():
        raise ValueError("CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported")


def split_k_reference(
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N]
    splits: int = 1,
) -> Tensor:  # [M, N] fp64
    """The same product by stretches of K, in fp64."""
    stretches = torch.arange(a.size(1), device=a.device).tensor_split(splits)
    parts = [a[:, stretch].double() @ b[stretch].double() for stretch in stretches]
    return torch.stack(parts).sum(0)
