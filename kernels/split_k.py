"""Matrix products with few rows and columns and a long K, cut along K so that every SM has work: split-K.

    out = a @ b        a [M, K]   b [K, N]   out [M, N]

An output of 16 x 16 is one tile, and one thread block reads at a hundredth of the GPU's bandwidth. Split-K gives each
tile to S programs, each with its own stretch of K:

    partial[t, s] = a[rows of t, stretch s] @ b[stretch s, columns of t]        in fp32, [BLOCK_M, BLOCK_N]
    out[t]        = partial[t, 0] + partial[t, 1] + ... + partial[t, S - 1]

Three ways to add the partials, over one main loop:

  fixup         one launch. Each program leaves its partial in a slot of a workspace; then the last `adders` programs of
                the tile add a slice of it each, all partials in the order of s, so the result is the same to the bit.
  two_launches  partials by one kernel, sums by another, in a fixed order too, and what the second launch costs: 1 to
                2 us where the whole product takes 6, though it is launched early (programmatic dependent launch).
  atomic        partials are added to an output of zeros as they come, in fp32. No workspace, and no order: sums of the
                same numbers differ in their last bits from run to run.

How an adder of the fixup knows that a partial is there: an element of a slot is EMPTY, a NaN that no sum gives, until
its value replaces it, and the adder reads until none is, and leaves EMPTY behind for the next call, or the next replay
of a CUDA graph. A counter would cost a fence, an atomic and one more round trip to the L2 after the last store (an
H100: 1 us of 7); here every 4-byte element says for itself that it has come, so their order does not matter. NCCL's LL
protocol sends a flag with each word in the same way.

A program writes EMPTY to its slot, which is EMPTY, as soon as it begins: else an adder's first look at it goes to DRAM,
where a call since has sent it, and that look is what all of the tile wait for. A thread waits for its own 16 bytes of
slots (`poll`). Both together halve what sums cost, on an H100 from 2 us to 1.

Adders wait, so what they wait for has to run. One adder is the last program of its tile: those before it have started
and wait for nobody, which is so in the interpreter, too, where programs run one after the other. Several adders wait
for each other: they are launched as a cooperative grid, which the driver starts as a whole or refuses.

Up to 16 rows beside weights stored as [N, K] have a main loop of their own on Hopper: split_k_stream.py.

Splitting after Helion's examples/split_k_barrier.py, which puts a grid-wide barrier between partials and sums
(split_k_helion.py); peers that wait for each other after stream-K (Osama et al., arXiv 2301.03598).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.grouped_gemm.support import can_chain, illegal_tile, interpreted, unsupported


@dataclass(frozen=True)
class SplitKConfig:
    """A tile, how many programs share one, and how many of them add the partials.

    splits    programs a tile; no more than K has blocks (legal_splits)
    adders    programs of a tile that add a slice of it each: a power of two. All programs have to be on the GPU at once
              where it is more than one
    streamed  B goes through registers, marked as what the L2 may drop first, and not through num_stages buffers
    """

    block_m: int
    block_n: int
    block_k: int
    splits: int
    num_warps: int = 4
    num_stages: int = 4
    adders: int = 1
    streamed: bool = False


MAX_SPLITS = 1024
SUM_ELEMENTS = 8192  # partials that are loaded at once: 64 registers of a thread, all in flight together
MIN_SLICE = 32  # elements that an adder takes: a line of the L2, 128 bytes of a slot
# Bytes of operands from which a product is bound by DRAM; below, by the latency of its steps.
LARGE_BYTES = 16 << 20


def choose_config(M: int, N: int, K: int, dtype: torch.dtype, sms: int) -> SplitKConfig:
    """The rule, from the problem and the number of SMs; measured on an H100, operands in DRAM.

    large     operands of LARGE_BYTES
    block_m   M's next power of two, 16 to 64 (128 from M = 65 on): rows past M cost tensor-core work, no bandwidth
    block_n   as few columns as the tensor cores take: few programs share a tile, and their partials are small. Where
              the operands are large, A's way from the L2 counts: it is read once for each column of tiles. So 32
              columns, more where two tiles an SM are passed, and 64 where B is streamed
    streamed  large, and up to 16 rows, whose block of A is small beside B's. What is read once then takes the place
              of itself in the L2, and neither of what the caller may need again nor of lines to be written back, which
              cost DRAM bandwidth: 5 to 8 % with an L2 full of another kernel's stores
    splits    as many programs as SMs (even_splits); two programs an SM where B is streamed, since one block of each is
              under way
    block_k   128: rows of 256 bytes, and six stages of it are more under way than the 20 KiB that an SM of an H100
              wants (3.35 TB/s times 0.8 us)
    """
    wide = dtype.itemsize == 4  # IEEE fp32 goes through FMA units, which read registers: smaller tiles
    large = (M + N) * K * dtype.itemsize >= LARGE_BYTES
    block_m = min(max(triton.next_power_of_2(M), 16), 128 if M > 64 and not wide else 64)
    streamed = large and block_m == 16 and N >= 64 and not wide
    if block_m == 128:
        block_n = min(max(triton.next_power_of_2(N), 16), 128)
    elif streamed:
        block_n = 64
    else:
        block_n = 32 if large and N > 16 else 16
        while not wide and block_n < 128 and _tiles(M, N, block_m, block_n) > 2 * sms:
            block_n *= 2
    if wide:
        block_k, num_stages = 32 if block_m * block_n >= 2048 else 64, 3
    elif block_m * block_n >= 64 * 128:
        block_k, num_stages = 64, 4
    else:
        block_k, num_stages = 128, 3 if streamed else 6 if block_m + block_n <= 128 else 4
    block_k = min(block_k, max(triton.next_power_of_2(K), 16))
    splits = legal_splits(even_splits(sms * (2 if streamed else 1) // _tiles(M, N, block_m, block_n)), K, block_k)
    adders = most_adders(block_m * block_n, splits)
    num_warps = 8 if block_m * block_n >= 128 * 128 else 4
    return SplitKConfig(block_m, block_n, block_k, splits, num_warps, num_stages, adders, streamed)


def most_adders(elements: int, splits: int) -> int:
    """Programs among which a tile of so many elements is shared: a power of two, no more than there are."""
    return max(1, min(1 << (splits.bit_length() - 1), elements // MIN_SLICE))


def interpreter_config(M: int, N: int, K: int) -> SplitKConfig:
    """For Triton's interpreter, which pays by operation and hardly by element, and where nobody can wait for others."""
    return SplitKConfig(16 if M <= 16 else 32, 32, 64, legal_splits(5, K, 64), num_stages=1)


def even_splits(splits: int) -> int:
    """A power of two where one is at most a tenth less: 33 slots are loaded as 64, in twice the time of 32."""
    power = 1 << (splits.bit_length() - 1) if splits else 0
    return power if 10 * power >= 9 * splits else splits


def legal_splits(splits: int, K: int, block_k: int) -> int:
    """The nearest number of splits that leaves a block of K to each."""
    return max(1, min(splits, triton.cdiv(K, block_k), MAX_SPLITS))


def illegal(config: SplitKConfig, K: int, dtype: torch.dtype) -> str | None:
    """Why a config cannot run, or None where it can."""
    if config.splits != legal_splits(config.splits, K, config.block_k):
        blocks = triton.cdiv(K, config.block_k)
        return f"splits={config.splits}: 1 to {min(blocks, MAX_SPLITS)} for {blocks} blocks of K"
    adders, elements = config.adders, config.block_m * config.block_n
    if not 1 <= adders <= config.splits or adders & (adders - 1) or elements % adders:
        return f"adders={adders}: a power of two, 1 to {config.splits} of {config.splits} programs"
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
    STREAMED: tl.constexpr,
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
    if STREAMED:
        # Triton 3.6 and 3.7 drop a load's eviction policy where they make it an asynchronous copy. So the block of B
        # that comes next waits in registers; those of A, which is small, are copied as below.
        ok = col_ok if EVEN_K else col_ok & (k < K - first * BLOCK_K)[:, None]
        b = tl.load(b_ptrs, mask=ok, other=0.0, eviction_policy="evict_first")
        for block in tl.range(first, last):
            left = K - block * BLOCK_K
            a = tl.load(a_ptrs, mask=row_ok if EVEN_K else row_ok & (k < left)[None, :], other=0.0)
            b_ptrs += step_b
            ok = col_ok & (block + 1 < last) if EVEN_K else col_ok & (k < left - BLOCK_K)[:, None] & (block + 1 < last)
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


# A slot's element until its partial comes: a NaN, by its bits, that no instruction gives; theirs is 0x7FFFFFFF.
EMPTY: tl.constexpr = tl.constexpr(-1)
NAN: tl.constexpr = tl.constexpr(0x7FFFFFFF)


MOST_POLLED = 4  # times 16 bytes that a thread asks for at once


def poll(units: int) -> str:
    """PTX that reads `units` times 16 bytes of a thread until none of their words is EMPTY.

    A loop of Triton's goes on for all threads or for none, and asks by a sum over all of them, with three barriers each
    time. This one goes on for those whose words have not come.
    """
    if not units:
        return ""
    words = [f"${i}" for i in range(4 * units)]
    loads = [
        f"ld.relaxed.gpu.global.v4.b32 {{{', '.join(words[i::units])}}}, [${4 * units + i}];" for i in range(units)
    ]
    tests = [f"setp.eq.or.s32 empty, {word}, -1, empty;" for word in words[1:]]
    first = f"setp.eq.s32 empty, {words[0]}, -1;"
    return "\n".join(["{ .reg .pred empty;", "AGAIN:", *loads, first, *tests, "@empty bra AGAIN; }"])


def poll_operands(units: int) -> str:
    """Of `poll`: first words, second, third and fourth words of each 16 bytes, then addresses."""
    return ",".join(["=&r"] * (4 * units) + ["l"] * units)


@triton.jit
def _store_slot(slot_ptr, acc, rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Leave the first `rows` rows of a partial in a slot of the workspace, as bits."""
    r = tl.arange(0, BLOCK_M)[:, None]
    c = tl.arange(0, BLOCK_N)[None, :]
    bits = acc.to(tl.int32, bitcast=True)
    bits = tl.where(bits == EMPTY, NAN, bits)
    tl.store(slot_ptr + r * BLOCK_N + c, bits, mask=r < rows)


@triton.jit
def _store_sum(
    out_ptr,
    slots_ptr,
    first,
    first_row,
    first_col,
    M,
    N,
    WAIT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write PART elements of a tile of the output, from the tile's element `first` on: the sum of its slots.

    CHUNK slots at a time, an order that depends on their number alone. WAIT: read until they are there, leave EMPTY.
    """
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N
    at = first + tl.arange(0, PART)
    row = first_row + at // BLOCK_N
    col = first_col + at % BLOCK_N
    ok = (row < M) & (col < N)
    total = tl.zeros((PART,), dtype=tl.float32)
    for start in tl.range(0, SPLITS, CHUNK):
        slot = (start + tl.arange(0, CHUNK))[:, None]
        ptrs = slots_ptr + slot * SLOT + at[None, :]
        mask = (slot < SPLITS) & ok[None, :]
        # Volatile: from the L2, where the other SMs' stores arrive, each time anew.
        bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
        if WAIT:
            while tl.max((bits == EMPTY).to(tl.int32)) > 0:
                bits = tl.load(ptrs, mask=mask, other=0, volatile=True)
            tl.store(ptrs, tl.full((CHUNK, PART), EMPTY, dtype=tl.int32), mask=(slot < SPLITS) & (row < M)[None, :])
        total += tl.sum(bits.to(tl.float32, bitcast=True), 0)
    tl.store(out_ptr + row.to(tl.int64) * N + col, total.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def _await_sum(
    out_ptr,
    slots_ptr,
    first,
    first_row,
    first_col,
    M,
    N,
    POLL: tl.constexpr,
    POLL_OPERANDS: tl.constexpr,
    POLLED: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """`_store_sum` that waits, where each thread waits for its own 16 bytes of a slot alone: `poll`."""
    SLOT: tl.constexpr = BLOCK_M * BLOCK_N
    QUADS: tl.constexpr = PART // 4
    quad = tl.arange(0, QUADS)[None, :]
    # Rows past M are in no slot, and a slot that is none is never filled: whose these were waits for another's.
    quad = tl.where(first_row + (first + quad * 4) // BLOCK_N < M, quad, 0)
    at = first + tl.arange(0, PART)
    row = first_row + at // BLOCK_N
    col = first_col + at % BLOCK_N
    sum0 = tl.zeros((QUADS,), dtype=tl.float32)
    sum1 = tl.zeros((QUADS,), dtype=tl.float32)
    sum2 = tl.zeros((QUADS,), dtype=tl.float32)
    sum3 = tl.zeros((QUADS,), dtype=tl.float32)
    for start in tl.range(0, SPLITS, CHUNK):
        slot = (start + tl.arange(0, CHUNK))[:, None]
        real = slot < SPLITS
        ptrs = slots_ptr + tl.where(real, slot, SPLITS - 1) * SLOT + first + quad * 4
        x0, x1, x2, x3 = tl.inline_asm_elementwise(
            POLL, POLL_OPERANDS, [ptrs], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=POLLED
        )
        tl.debug_barrier()  # several threads may wait for the same bytes
        mask = real & (row < M)[None, :]
        tl.store(slots_ptr + slot * SLOT + at[None, :], tl.full((CHUNK, PART), EMPTY, dtype=tl.int32), mask=mask)
        sum0 += tl.sum(tl.where(real, x0.to(tl.float32, bitcast=True), 0.0), 0)
        sum1 += tl.sum(tl.where(real, x1.to(tl.float32, bitcast=True), 0.0), 0)
        sum2 += tl.sum(tl.where(real, x2.to(tl.float32, bitcast=True), 0.0), 0)
        sum3 += tl.sum(tl.where(real, x3.to(tl.float32, bitcast=True), 0.0), 0)
    total = tl.join(tl.join(sum0, sum2), tl.join(sum1, sum3)).reshape(PART)
    tl.store(out_ptr + row.to(tl.int64) * N + col, total.to(out_ptr.dtype.element_ty), mask=(row < M) & (col < N))


# What becomes of a partial.
FIXUP: tl.constexpr = tl.constexpr(0)
LEAVE: tl.constexpr = tl.constexpr(1)
ATOMIC: tl.constexpr = tl.constexpr(2)


@triton.jit
def _split_k_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [K, N]
    out_ptr,  # [M, N]; with ATOMIC, fp32 zeros
    slots_ptr,  # [tiles, SPLITS, BLOCK_M, BLOCK_N] fp32 as int32; EMPTY with FIXUP, none with ATOMIC or one split
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
    """Program (tile, split), tiles first: programs that run together share a stretch of A and meet it in the L2."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    split = tl.program_id(1)
    if ONE_ROW:  # of tiles: a division less before the first load
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
        # It is EMPTY already. Written again, its lines are in the L2 when an adder reads them, and not in DRAM.
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
        _store_slot(my_slots + split * SLOT, acc, M - first_row, BLOCK_M, BLOCK_N)
        adder = split - (SPLITS - ADDERS)
        if MODE == FIXUP:  # noqa: SIM102 (a constant, then a value)
            if adder >= 0:
                if POLLED:
                    if first_row + adder * PART // BLOCK_N < M:  # a slice of rows that are there
                        _await_sum(
                            out_ptr, my_slots, adder * PART, first_row, first_col, M, N, POLL, POLL_OPERANDS, POLLED,
                            SPLITS, BLOCK_M, BLOCK_N, PART, CHUNK,
                        )  # fmt: skip
                else:
                    _store_sum(
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
    """Program (tile, part) adds PART elements of a tile."""
    if PDL:
        tl.extra.cuda.gdc_wait()  # until the kernel before has ended and its stores can be seen
    tile = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    my_slots = slots_ptr + tile.to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N)
    first_row = (tile // tiles_n) * BLOCK_M
    first_col = (tile % tiles_n) * BLOCK_N
    _store_sum(
        out_ptr, my_slots, tl.program_id(1) * PART, first_row, first_col, M, N,
        False, SPLITS, BLOCK_M, BLOCK_N, PART, CHUNK,
    )  # fmt: skip


def polled_at_once(slots: int, part: int, num_warps: int) -> int:
    """Times 16 bytes that a thread waits for together, of `part` elements of each of so many slots."""
    return max(1, min(MOST_POLLED, slots * part // 4 // (32 * num_warps)))


def chunk(splits: int, elements: int) -> int:
    """Slots that are loaded together where `elements` of each are: no more than there are to add."""
    return int(max(1, min(triton.next_power_of_2(splits), SUM_ELEMENTS // elements)))


def tile_count(M: int, N: int, config: SplitKConfig) -> int:
    return _tiles(M, N, config.block_m, config.block_n)


def _tiles(M: int, N: int, block_m: int, block_n: int) -> int:
    return int(triton.cdiv(M, block_m) * triton.cdiv(N, block_n))


def _slot_elements(M: int, N: int, config: SplitKConfig) -> int:
    """Elements of the workspace: for each tile a partial of every split."""
    return tile_count(M, N, config) * config.splits * config.block_m * config.block_n if config.splits > 1 else 0


def prepare_fixup(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [K, N], any strides
    config: SplitKConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """One launch a call. Calls of one callable share its workspace: they belong on one stream, one after the other.

    Raises ValueError for operands or a config that cannot run. A call raises RuntimeError where several adders need
    more programs at once than the GPU holds.
    """
    if config is None and (stream := _stream(a, b)):
        return stream
    M, N, config = _checked(a, b, config)
    if config is None:
        return lambda: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    slots = torch.full((_slot_elements(M, N, config),), EMPTY.value, dtype=torch.int32, device=a.device)
    launch = _launcher(a, b, config, FIXUP)

    def run() -> Tensor:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        launch(out, slots)
        return out

    return run


def _stream(a: Tensor, b: Tensor) -> Callable[[], Tensor] | None:
    """split_k_stream.py's callable, or None where it cannot take a and b."""
    require_product(a, b)
    try:
        from groupbench.kernels import split_k_stream
    except ImportError:  # Gluon is experimental: another Triton's may be another
        return None
    if interpreted() or min(*a.shape, *b.shape) == 0 or split_k_stream.unsuitable(a, b):
        return None
    return split_k_stream.prepare_stream(a, b)


def prepare_two_launches(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [K, N], any strides
    config: SplitKConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """Partials, then sums. Raises ValueError for operands or a config that cannot run."""
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

    def run() -> Tensor:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        partials = torch.empty(elements, dtype=torch.float32, device=a.device).view(torch.int32)
        launch(out, partials)
        if config.splits > 1:
            _sum_kernel[grid](partials, out, M, N, **constants, **options)
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
        launch(out, None)
        return out.to(a.dtype)  # itself, where that is fp32

    return run


def _launcher(
    a: Tensor, b: Tensor, config: SplitKConfig, mode: tl.constexpr, early: bool = False
) -> Callable[[Tensor, Tensor | None], None]:
    """Launches `_split_k_kernel` on (out, slots); `early` where the next kernel is launched before it has ended."""
    (M, K), N = a.shape, b.size(1)
    grid = (tile_count(M, N, config), config.splits)
    compiled = a.device.type == "cuda" and not interpreted()
    constants = kernel_constants(config, M, K, mode.value, compiled) | {"PDL": early}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if mode is FIXUP and config.adders > 1 and a.device.type == "cuda":
        options["launch_cooperative_grid"] = True  # all at once or not at all: nobody waits for who cannot start

    def launch(out: Tensor, slots: Tensor | None) -> None:
        _split_k_kernel[grid](a, b, out, slots, M, N, K, *a.stride(), *b.stride(), **constants, **options)

    return launch


def kernel_constants(config: SplitKConfig, M: int, K: int, mode: int, compiled: bool = True) -> dict[str, object]:
    """What `_split_k_kernel` is compiled for, besides types, warps and stages."""
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
