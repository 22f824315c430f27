"""Matrix products with few rows and columns and a long K, cut along K so that every SM has work: split-K.

    out = a @ b        a [M, K]   b [K, N]   out [M, N]

An output of 16 x 16 is one tile, and one thread block reads at a hundredth of the GPU's bandwidth. Split-K gives each
tile to S programs, each with its own stretch of K:

    partial[t, s] = a[rows of t, stretch s] @ b[stretch s, columns of t]        in fp32, [BLOCK_M, BLOCK_N]
    out[t]        = partial[t, 0] + partial[t, 1] + ... + partial[t, S - 1]

One main loop, and three ways to add the partials:

  fixup         one launch. Each program leaves its partial in a slot of a workspace; then the last `adders` programs of
                the tile add a slice of it each, all partials in the order of s, so the result is the same to the bit.
  two_launches  partials by one kernel, sums by another, in a fixed order too. The second launch costs 1 to 2 us while
                the whole product takes 6, though it is launched early (programmatic dependent launch).
  atomic        partials are added in fp32, in the order of their arrival, to an output of zeros. It needs no workspace,
                but the last bits differ from run to run.

slots.py explains how an adder knows that a partial has arrived, and how it waits.

Adders wait, so the programs they wait for have to run. A single adder is the last program of its tile: the previous
ones have started and do not wait. That holds in the interpreter too, where programs run one after the other. Several
adders wait for each other: they are launched as a cooperative grid, which the driver starts as a whole or refuses.

Up to 16 rows with weights stored as [N, K] have a main loop of their own on Hopper: stream.py.

Splitting after Helion's examples/split_k_barrier.py, which puts a grid-wide barrier between partials and sums
(helion_barrier.py); peers that wait for each other after stream-K (Osama et al., arXiv 2301.03598).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.device import INTERPRETER, Device, device_of, fitted
from groupbench.kernels.grouped_gemm.support import can_chain, illegal_tile, interpreted
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, problem_key
from groupbench.kernels.launch import Launch
from groupbench.kernels.masks import masked_if
from groupbench.kernels.split_k.problem import require_product
from groupbench.kernels.split_k.slots import (
    EMPTY,
    await_sum,
    chunk,
    most_adders,
    poll,
    poll_operands,
    polled_at_once,
    store_slot,
    store_sum,
)
from groupbench.kernels.split_k.splits import LARGE_BYTES, MAX_SPLITS, even_splits, legal_splits
from groupbench.kernels.variants import Gluon, Variant, first_that_runs


@dataclass(frozen=True)
class SplitKConfig:
    """A tile, the number of programs that share one, and how many of them add the partials.

    Attributes:
        splits: Programs per tile; at most as many as K has blocks (legal_splits).
        adders: Programs of a tile that add a slice of it each: a power of two. With more than one, all programs have to
            be on the GPU at once.
        streamed: B goes through registers, not through num_stages buffers, and is marked for the L2 to drop first.
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int = 4
    num_stages: int = 4
    adders: int = 1
    streamed: bool = False


def choose_config(M: int, N: int, K: int, dtype: torch.dtype, sms: int) -> SplitKConfig:
    """Return the config for a problem and a number of SMs by a rule, measured on an H100 with operands in DRAM.

    large     operands of LARGE_BYTES or more
    block_m   M's next power of two, 16 to 64 (128 from M = 65 on): rows past M cost tensor-core work, no bandwidth
    block_n   as few columns as the tensor cores take: few programs share a tile, and their partials are small. With
              large operands, reading A from the L2 counts too, once for each column of tiles. Hence 32 columns, more
              if there are more than two tiles per SM, and 64 if B is streamed
    streamed  large, and up to 16 rows, whose block of A is small compared with B's. B, read once, then displaces only
              itself in the L2: neither data that the caller may need again nor lines to be written back. Writing these
              back costs DRAM bandwidth: 5 to 8 % with an L2 full of another kernel's stores
    splits    as many programs as SMs (even_splits); two per SM if B is streamed, since one block of each is in flight
    block_k   128: rows of 256 bytes. Six stages of it put more in flight than the 20 KiB that an SM of an H100 needs
              (3.35 TB/s times 0.8 us)
    """
    wide = dtype.itemsize == 4  # IEEE fp32 runs on FMA units, which read registers: smaller tiles
    large = (M + N) * K * dtype.itemsize >= LARGE_BYTES
    block_m = min(max(triton.next_power_of_2(M), 16), 128 if M > 64 and not wide else 64)
    streamed = large and block_m == 16 and N >= 64 and not wide
    if block_m == 128:
        block_n = min(max(triton.next_power_of_2(N), 16), 128)
    elif streamed:
        block_n = 64
    else:
        block_n = _narrow_block_n(M, N, block_m, sms, wide, large)
    block_k, num_stages = _depth(block_m, block_n, wide, streamed)
    block_k = min(block_k, max(triton.next_power_of_2(K), 16))
    splits = legal_splits(even_splits(sms * (2 if streamed else 1) // _tiles(M, N, block_m, block_n)), K, block_k)
    adders = most_adders(block_m * block_n, splits)
    num_warps = 8 if block_m * block_n >= 128 * 128 else 4
    return SplitKConfig(block_m, block_n, block_k, splits, num_warps, num_stages, adders, streamed)


def _narrow_block_n(M: int, N: int, block_m: int, sms: int, wide: bool, large: bool) -> int:
    """Return few columns of a tile, and more while there are more than two tiles per SM."""
    block_n = 32 if large and N > 16 else 16
    while not wide and block_n < 128 and _tiles(M, N, block_m, block_n) > 2 * sms:
        block_n *= 2
    return block_n


def _depth(block_m: int, block_n: int, wide: bool, streamed: bool) -> tuple[int, int]:
    """Return (block_k, num_stages) for a tile."""
    if wide:
        return 32 if block_m * block_n >= 2048 else 64, 3
    if block_m * block_n >= 64 * 128:
        return 64, 4
    return 128, 3 if streamed else 6 if block_m + block_n <= 128 else 4


def interpreter_config(M: int, K: int) -> SplitKConfig:
    """Return the config for Triton's interpreter: large blocks, since it is slow per operation, and a single adder."""
    return SplitKConfig(16 if M <= 16 else 32, 32, 64, legal_splits(5, K, 64), num_stages=1)


def illegal(config: SplitKConfig, K: int, dtype: torch.dtype, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot run on a GPU, or None if it can."""
    if config.splits != legal_splits(config.splits, K, config.block_k):
        blocks = triton.cdiv(K, config.block_k)
        return f"splits={config.splits}: 1 to {legal_splits(MAX_SPLITS, K, config.block_k)} for {blocks} blocks of K"
    adders, elements = config.adders, config.block_m * config.block_n
    if not 1 <= adders <= config.splits or adders & (adders - 1) or elements % adders:
        return f"adders={adders}: a power of two, 1 to {config.splits} of {config.splits} programs"
    return illegal_tile(config.block_m, config.block_n, config.block_k, config.num_stages, dtype, device)


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
    STREAMED: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K: no mask along K
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the partial product [BLOCK_M, BLOCK_N] of one split, in fp32; stretches of K differ by at most a block."""
    blocks = tl.cdiv(K, BLOCK_K)
    first = (blocks * split) // SPLITS
    last = (blocks * (split + 1)) // SPLITS
    k = tl.arange(0, BLOCK_K)
    one = tl.full((), 1, tl.int64)  # offsets may pass 2**31
    step_a = one * stride_ak * BLOCK_K
    step_b = one * stride_bk * BLOCK_K
    a_ptrs = a_ptr + first * step_a + row[:, None] * (one * stride_am) + k[None, :] * (one * stride_ak)
    b_ptrs = b_ptr + first * step_b + k[:, None] * (one * stride_bk) + col[None, :] * (one * stride_bn)
    # Masks are free: they become the byte counts of asynchronous copies, which fill the rest with zeros.
    row_ok = (row < M)[:, None]
    col_ok = (col < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if STREAMED:
        # Triton 3.6 and 3.7 drop a load's eviction policy when they make it an asynchronous copy. Therefore the next
        # block of B waits in registers; blocks of A, which is small, are copied as below.
        ok = col_ok if EVEN_K else col_ok & (k < K - first * BLOCK_K)[:, None]
        b = tl.load(b_ptrs, mask=ok, other=0.0, eviction_policy="evict_first")
        for block in tl.range(first, last):
            left = K - block * BLOCK_K
            a = tl.load(a_ptrs, mask=row_ok if EVEN_K else row_ok & (k < left)[None, :], other=0.0)
            b_ptrs += step_b
            ok = masked_if(block + 1 < last, col_ok if EVEN_K else col_ok & (k < left - BLOCK_K)[:, None])
            next_b = tl.load(b_ptrs, mask=ok, other=0.0, eviction_policy="evict_first")
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            a_ptrs += step_a
            b = next_b
    else:
        for block in tl.range(first, last):
            left = K - block * BLOCK_K
            a = tl.load(a_ptrs, mask=row_ok if EVEN_K else row_ok & (k < left)[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=col_ok if EVEN_K else col_ok & (k < left)[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            a_ptrs += step_a
            b_ptrs += step_b
    return acc


# Values of MODE: add a partial in this launch, leave it in its slot, or add it to the output atomically.
FIXUP: tl.constexpr = tl.constexpr(0)
LEAVE: tl.constexpr = tl.constexpr(1)
ATOMIC: tl.constexpr = tl.constexpr(2)


@triton.jit
def _split_k_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    out_ptr,  # [M, N]; with ATOMIC, fp32 zeros
    slots_ptr,  # [tiles, SPLITS, BLOCK_M, BLOCK_N] fp32 as int32; EMPTY with FIXUP, unused by ATOMIC or one split
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    MODE: tl.constexpr,
    SPLITS: tl.constexpr,
    ADDERS: tl.constexpr,
    POLL: tl.constexpr,
    POLL_OPERANDS: tl.constexpr,
    POLLED: tl.constexpr,
    PDL: tl.constexpr,
    STREAMED: tl.constexpr,
    EVEN_K: tl.constexpr,
    ONE_ROW: tl.constexpr,  # M fits one tile
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute the partial product of program (tile, split), and with FIXUP a slice of the sum if it is an adder.

    Tiles are the first dimension of the grid: programs that run together share a stretch of A through the L2.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    if ONE_ROW:  # saves a division before the first load
        first_row = 0
        first_col = tile * BLOCK_N
    else:
        tiles_n = tl.cdiv(N, BLOCK_N)
        first_row = (tile // tiles_n) * BLOCK_M
        first_col = (tile % tiles_n) * BLOCK_N
    row = first_row + tl.arange(0, BLOCK_M)
    col = first_col + tl.arange(0, BLOCK_N)
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N
    PART: tl.constexpr = SLOT // ADDERS
    my_slots = slots_ptr
    if MODE != ATOMIC and SPLITS > 1:
        my_slots += tile.to(tl.int64) * (SPLITS * SLOT)
    if MODE == FIXUP and SPLITS > 1:
        # The slot is EMPTY already. Written again, its lines are in the L2 when an adder reads them, not in DRAM.
        tl.store(my_slots + split * SLOT + tl.arange(0, SLOT), tl.full((SLOT,), EMPTY, dtype=tl.int32))
    acc = _multiply(
        a_ptr, b_ptr, row, col, split, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
        SPLITS, STREAMED, EVEN_K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if MODE == ATOMIC:
        at = out_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
        tl.atomic_add(at, acc, mask=(row < M)[:, None] & (col < N)[None, :], sem="relaxed")
    elif SPLITS == 1:
        at = out_ptr + row.to(tl.int64)[:, None] * N + col[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(row < M)[:, None] & (col < N)[None, :])
    else:
        if MODE == FIXUP:
            tl.debug_barrier()  # another thread may have written EMPTY where this one writes a sum
        store_slot(my_slots + split * SLOT, acc, M - first_row, BLOCK_M, BLOCK_N)
        adder = split - (SPLITS - ADDERS)
        if MODE == FIXUP:  # noqa: SIM102 (a constant, then a value)
            if adder >= 0:
                if POLLED:
                    if first_row + adder * PART // BLOCK_N < M:  # the slice has rows of the output
                        await_sum(
                            out_ptr, my_slots, adder * PART, first_row, first_col, M, N, POLL, POLL_OPERANDS, POLLED,
                            SPLITS, BLOCK_M, BLOCK_N, PART, CHUNK,
                        )  # fmt: skip
                else:
                    store_sum(
                        out_ptr, my_slots, adder * PART, first_row, first_col, M, N,
                        True, SPLITS, BLOCK_M, BLOCK_N, PART, CHUNK,
                    )  # fmt: skip


@triton.jit
def _sum_kernel(
    slots_ptr,  # [tiles, SPLITS, BLOCK_M, BLOCK_N] fp32 as int32
    out_ptr,  # [M, N]
    M,
    N,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Add PART elements of a tile: program (tile, part)."""
    if PDL:
        tl.extra.cuda.gdc_wait()  # until the previous kernel has ended and its stores are visible
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    my_slots = slots_ptr + tile.to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N)
    first_row = (tile // tiles_n) * BLOCK_M
    first_col = (tile % tiles_n) * BLOCK_N
    store_sum(
        out_ptr, my_slots, tl.program_id(1) * PART, first_row, first_col, M, N,
        False, SPLITS, BLOCK_M, BLOCK_N, PART, CHUNK,
    )  # fmt: skip


def tile_count(M: int, N: int, config: SplitKConfig) -> int:
    """Return the number of tiles of an output [M, N]."""
    return _tiles(M, N, config.block_m, config.block_n)


def _tiles(M: int, N: int, block_m: int, block_n: int) -> int:
    return int(triton.cdiv(M, block_m) * triton.cdiv(N, block_n))


def _slot_elements(M: int, N: int, config: SplitKConfig) -> int:
    """Return the number of elements of the workspace: for each tile a partial of every split."""
    return tile_count(M, N, config) * config.splits * config.block_m * config.block_n if config.splits > 1 else 0


def prepare_fixup(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [K, N], any strides
    config: SplitKConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """Allocate the workspace; the returned callable allocates the output and launches once, in the mode fixup.

    Calls on one callable share a workspace: make them on one stream. Raises ValueError for operands or a config that
    cannot run. A call raises RuntimeError if several adders need more programs at once than the GPU holds.
    """
    M, N, chosen = _checked(a, b, config)
    if chosen is None:
        return lambda: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    if config is not None:
        return _fixup(a, b, config)
    name = "default" if _tuned(a, b) is None else "tuned"
    one_adder = replace(chosen, adders=1)  # never waits for a program that cannot start
    return first_that_runs(
        "split_k",
        [
            Variant("stream", partial(_stream, a, b), _why_not_stream(a, b), (a.dtype, a.shape, b.shape, a.device)),
            Variant(f"tiled, {name} config", partial(_fixup, a, b, chosen), None, (chosen, a.dtype, a.device)),
            Variant("tiled, one adder", partial(_fixup, a, b, one_adder)),
        ],
    )


def _fixup(a: Tensor, b: Tensor, config: SplitKConfig) -> Callable[[], Tensor]:
    """Run `prepare_fixup` with a config that is known to be legal."""
    M, N = a.size(0), b.size(1)
    slots = torch.full((_slot_elements(M, N, config),), EMPTY.value, dtype=torch.int32, device=a.device)
    launch = _launcher(a, b, config, FIXUP)

    def run() -> Tensor:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        launch(out, slots)
        return out

    return run


def _stream(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    from groupbench.kernels.split_k import stream

    return stream.prepare_stream(a, b)


def _why_not_stream(a: Tensor, b: Tensor) -> str | None:
    """Return why stream.py cannot be imported or cannot take a and b, or None if it can."""
    return Gluon(f"{__package__}.stream", a, b).why_not()


def prepare_two_launches(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [K, N], any strides
    config: SplitKConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """Prepare a call of two launches: the returned callable allocates, computes the partials and adds them.

    Raises ValueError for operands or a config that cannot run.
    """
    M, N, config = _checked(a, b, config)
    if config is None:
        return lambda: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    early = config.splits > 1 and can_chain(a.device)
    launch = _launcher(a, b, config, LEAVE, early)
    elements = _slot_elements(M, N, config)
    tile = config.block_m * config.block_n
    part = min(256, tile)  # of a tile: more programs, each with more partials in flight
    grid = (tile_count(M, N, config), tile // part)
    constants = {"SPLITS": config.splits, "PDL": early, "PART": part, "CHUNK": chunk(config.splits, part)}
    constants |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n}
    options = {"num_warps": 4} | ({"launch_pdl": True} if early else {})
    add = Launch(_sum_kernel, grid, **constants, **options)

    def run() -> Tensor:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        partials = torch.empty(elements, dtype=torch.float32, device=a.device).view(torch.int32)
        launch(out, partials)
        if config.splits > 1:
            add(partials, out, M, N)
        return out

    return run


def prepare_atomic(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [K, N], any strides
    config: SplitKConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """Prepare a call with atomic adds: the returned callable adds all partials to an fp32 output of zeros.

    It returns the output in a's dtype. The last bits differ from run to run. Raises ValueError for operands or a config
    that cannot run.
    """
    M, N, config = _checked(a, b, config)
    if config is None:
        return lambda: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    launch = _launcher(a, b, config, ATOMIC)

    def run() -> Tensor:
        out = torch.zeros(M, N, dtype=torch.float32, device=a.device)
        launch(out, None)
        return out.to(a.dtype)  # no copy if that is fp32

    return run


def _launcher(
    a: Tensor, b: Tensor, config: SplitKConfig, mode: tl.constexpr, early: bool = False
) -> Callable[[Tensor, Tensor | None], None]:
    """Return a function that launches `_split_k_kernel` on (out, slots); `early` if the next launch may overlap it."""
    (M, K), N = a.shape, b.size(1)
    grid = (tile_count(M, N, config), config.splits)
    compiled = device_of(a.device).vendor == "cuda" and not interpreted()  # polls are written in PTX
    constants = kernel_constants(config, M, K, mode.value, compiled) | {"PDL": early}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if mode is FIXUP and config.adders > 1 and a.device.type == "cuda":
        options["launch_cooperative_grid"] = True  # all or none: no program waits for one that cannot start

    launch = Launch(_split_k_kernel, grid, **constants, **options)
    return lambda out, slots: launch(a, b, out, slots, M, N, K, *a.stride(), *b.stride())


def kernel_constants(config: SplitKConfig, M: int, K: int, mode: int, compiled: bool = True) -> dict[str, object]:
    """Return the compile-time constants of `_split_k_kernel`."""
    part = config.block_m * config.block_n // config.adders
    slots = chunk(config.splits, part)
    polls = compiled and mode == FIXUP.value and config.splits > 1 and part >= 4
    polled = polled_at_once(slots, part, config.num_warps) if polls else 0
    return {
        "MODE": mode,
        "SPLITS": config.splits,
        "ADDERS": config.adders,
        "POLL": poll(polled),
        "POLL_OPERANDS": poll_operands(polled),
        "POLLED": polled,
        "PDL": False,
        "STREAMED": config.streamed,
        "EVEN_K": K % config.block_k == 0,
        "ONE_ROW": config.block_m >= M,
        "PRECISION": "ieee",  # TF32 would leave fp32 operands fp16's mantissa
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "CHUNK": slots,
    }


def _checked(a: Tensor, b: Tensor, config: SplitKConfig | None) -> tuple[int, int, SplitKConfig | None]:
    """Return (M, N, config), the config None if there is nothing to multiply; raise ValueError if it cannot run."""
    require_product(a, b)
    (M, K), N = a.shape, b.size(1)
    if M == 0 or N == 0 or K == 0:
        return M, N, None
    if config is None:
        return M, N, _tuned(a, b) or default_config(M, N, K, a.dtype, device_of(a.device))
    if reason := illegal(config, K, a.dtype, device_of(a.device)):
        raise ValueError(f"{config}: {reason}")
    return M, N, config


def default_config(M: int, N: int, K: int, dtype: torch.dtype, device: Device) -> SplitKConfig:
    """Return `choose_config`'s config for a problem, or the nearest one that fits the GPU."""
    if device.vendor == "cpu":
        return interpreter_config(M, K)

    def fit(config: SplitKConfig) -> SplitKConfig:
        """Return the config with as many splits and adders as the tile may have."""
        splits = legal_splits(config.splits, K, config.block_k)
        adders = min(config.adders, most_adders(config.block_m * config.block_n, splits))
        return replace(config, splits=splits, adders=adders)

    rule = choose_config(M, N, K, dtype, device.sms)
    return fit(fitted(rule, lambda config: illegal(fit(config), K, dtype, device)))


def config_key(M: int, N: int, K: int, dtype: torch.dtype) -> str:
    """Return a problem's key in files of tuned configs."""
    return problem_key(M, 1, N, K, str(dtype).removeprefix("torch."))


def _tuned(a: Tensor, b: Tensor) -> SplitKConfig | None:
    """Return this problem's tuned config on this GPU, or None if no file has one that is legal here."""
    (M, K), N, device = a.shape, b.size(1), device_of(a.device)
    if device.vendor == "cpu":
        return None
    default = default_config(M, N, K, a.dtype, device)
    configs = configs_in_order(
        "split_k", config_key(M, N, K, a.dtype), device, default, lambda c: illegal(c, K, a.dtype, device)
    )
    name, config, reason = configs[0]
    return config if name == "tuned" and reason is None else None
