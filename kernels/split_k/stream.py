"""Split-K for up to 16 rows and weights stored as [N, K], on Hopper: tiled.prepare_fixup runs it if it can.

    out = a @ b        a [M <= 16, K]   b [K, N], stored as [N, K]   out [M, N]

Such a product is one read of b, and takes the time of that read from DRAM. tiled.py's main loop is slower because the
warps of a program wait for each other at each block of K, through which all of b passes in shared memory. Here no warp
waits for another before its sum is done:

  a warp has its own 64 or 128 of each block of K, and all columns of the tile, so it shares nothing of a or b
  b goes from DRAM to the registers of mma.sync. Eight lanes read one line of 128 bytes, four rows at a time, and swap
    half of the values with the lane that is 4 away: then a lane has the elements that the instruction expects of it
  the warps' sums meet in shared memory at the end, in the order of warps; those of programs in slots (slots.py)

The instruction expects from lane 4 g + t row g and some elements of K that depend on t alone. These may be any, as long
as a and b agree (`k_width` 8: the 16 bytes that a lane loads at once). A load of such 16 bytes would use 64 of the 128
bytes of a line, which costs up to a third more time. Rows g and g + 1 are therefore read as whole lines:

    lanes 0-3: row 0, bytes 0-63      4-7: row 0, bytes 64-127        first load
          0-3: row 1, bytes 0-63      4-7: row 1, bytes 64-127        second
          0-3: row 0, all             4-7: row 1, all                 after the swap

b is marked for the L2 to drop first (tiled.py explains why), so next to nothing of it stays there.

Values wait in registers as pairs, in int32. Triton 3.6 and 3.7 unpack and repack 16-bit values that a loop carries,
which waits for loads too early.

The kernel is written in Gluon, Triton's language below the tile, which can specify layouts of registers. Gluon has no
interpreter: without a GPU, tests compile the kernel but cannot run it. The reference is problem.split_k_reference.

Sources: the free order of K is that of Marlin and of FlashInfer's decoding kernels; slots and adders are slots.py's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from groupbench.kernels.device import device_of
from groupbench.kernels.gluon_names import barrier, not_hopper
from groupbench.kernels.launch import Launch
from groupbench.kernels.split_k.slots import EMPTY, NAN, chunk, most_adders, poll, poll_operands, polled_at_once
from groupbench.kernels.split_k.splits import LARGE_BYTES, even_splits, legal_splits

ROWS = 16  # of a tile of mma.sync
LINE_K = 64  # 16-bit elements of a line of 128 bytes
SHORT_K = 8192
ALIGNED = 16  # bytes; addresses and strides must be multiples of it


@dataclass(frozen=True)
class StreamConfig:
    """A tile of 16 rows, and the division of K.

    Attributes:
        block_n: Columns of a tile: 16 or 32.
        warp_k: Elements of K that a warp reads at once: LINE_K or twice that.
        splits: Programs per tile.
        adders: Programs of a tile that add a slice of it each: a power of two; a slice has at least 4 elements.
    """

    block_n: int
    warp_k: int
    splits: int
    num_warps: int
    adders: int = 1

    @property
    def block_k(self) -> int:
        """Return the elements of K that all warps of a program read at once."""
        return self.warp_k * self.num_warps


def choose_stream(M: int, N: int, K: int, sms: int) -> StreamConfig:
    """Return the config for a problem by a rule that was measured on an H100 with operands in DRAM.

    block_n   16: twice as many columns take twice the registers, and two programs per SM hide each other's ends
    large     8 warps with a line of 256 bytes each, so 32 KB of b are in flight. No split if there is a tile for each
              SM: slots cost 1 us, and reading a from the L2 in more programs costs less. If two programs share an SM
              and K is short, lines of 128 bytes: more steps, and less of b in the last one, with no loads in flight
    small     as many programs as SMs, and few warps: sums of warps and of programs take most of the time
    adders    as many as possible with 32 elements each; with 16, if a thread would wait for more than 32 bytes
    """
    tiles = triton.cdiv(N, 16)
    if (M + N) * K * 2 >= LARGE_BYTES:
        num_warps = 8
        warp_k = LINE_K if tiles > sms and K < SHORT_K else 2 * LINE_K
    else:
        share = triton.cdiv(K * tiles, sms)  # elements of K per program
        num_warps = min(max(triton.next_power_of_2(share // LINE_K), 4), 8)
        warp_k = 2 * LINE_K if share >= 2 * LINE_K * num_warps else LINE_K
    splits = legal_splits(even_splits(sms // tiles), K, warp_k * num_warps)
    adders = most_adders(ROWS * 16, splits)
    part = ROWS * 16 // adders
    if 2 * adders <= splits and polled_at_once(chunk(splits, part), part, num_warps) > 2:
        adders *= 2
    return StreamConfig(16, warp_k, splits, num_warps, adders)


def illegal_stream(config: StreamConfig, K: int) -> str | None:
    """Return why a config cannot run, or None if it can."""
    if config.block_n not in (16, 32):
        return f"block_n={config.block_n}: 16 or 32"
    if config.num_warps not in (1, 2, 4, 8, 16):
        return f"num_warps={config.num_warps}: a power of two, 1 to 16"
    if config.warp_k not in (LINE_K, 2 * LINE_K):
        return f"warp_k={config.warp_k}: {LINE_K} or {2 * LINE_K}"
    if config.splits != legal_splits(config.splits, K, config.block_k):
        return f"splits={config.splits}: too many for {triton.cdiv(K, config.block_k)} blocks of K"
    adders = config.adders
    if not 1 <= adders <= config.splits or adders & (adders - 1) or ROWS * config.block_n // adders < 4:
        return f"adders={adders}: a power of two, 1 to {config.splits}, with at least 4 elements each"
    return None


def unsuitable(a: Tensor, b: Tensor) -> str | None:
    """Return why this kernel cannot take a [M, K] and b [K, N], or None if it can."""
    if reason := not_hopper(device_of(a.device)):
        return reason
    if a.dtype not in (torch.bfloat16, torch.float16):
        return f"{a.dtype} is not 16 bits"
    if a.size(0) > ROWS:
        return f"{a.size(0)} rows: more than {ROWS}"
    if a.stride(1) != 1 or b.stride(0) != 1:
        return "a or b is not contiguous along K"
    rows = a.stride(0), b.stride(1)
    if a.size(1) % ALIGNED or any(x.data_ptr() % ALIGNED for x in (a, b)) or any(2 * x % ALIGNED for x in rows):
        return f"K, an address or a stride is not a multiple of {ALIGNED} bytes"
    if max(rows) * 32 >= 2**31 or a.size(1) >= 2**30:
        return "offsets within a tile pass 32 bits"
    return None


@gluon.constexpr_function
def _line_layout(rows, pairs, warps):
    """Return the layout in which pairs [warps, rows, pairs] are read.

    A lane reads 16 bytes, eight lanes a line, rows 0 2 4 6, then 1 3 5 7. Each entry of registers, lanes and warps is
    one bit of their number: the position of the element with this bit alone.
    """
    registers = [[0, 0, 1], [0, 0, 2], [0, 1, 0]]
    registers += [[0, 8 << i, 0] for i in range((rows // 8).bit_length() - 1)]
    registers += [[0, 0, 32 << i] for i in range((pairs // 32).bit_length() - 1)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[1 << i, 0, 0] for i in range(warps.bit_length() - 1)], [], [warps, rows, pairs]
    )


@gluon.constexpr_function
def _quad_layout(slots, quads, warps, polled):
    """Return the layout of [slots, quads]: neighbouring lanes read neighbouring 16 bytes, a thread `polled` slots."""
    lanes = min(32, quads)
    across = min(warps, max(1, quads // lanes))
    return gl.BlockedLayout([polled, 1], [32 // lanes, lanes], [warps // across, across], [1, 0])


@gluon.jit
def _load(ptrs, rows_ok, k, left, EVEN_ROWS: gl.constexpr, EVEN_K: gl.constexpr, POLICY: gl.constexpr):
    """Load pairs, with zeros past the edges. A mask costs registers, which are zeroed before each load."""
    if EVEN_ROWS and EVEN_K:
        return gl.load(ptrs, eviction_policy=POLICY)
    elif EVEN_K:
        return gl.load(ptrs, mask=rows_ok, other=0, eviction_policy=POLICY)
    elif EVEN_ROWS:
        return gl.load(ptrs, mask=k < left, other=0, eviction_policy=POLICY)
    else:
        return gl.load(ptrs, mask=rows_ok & (k < left), other=0, eviction_policy=POLICY)


@gluon.jit
def _halves(pairs, dtype: gl.constexpr):
    """Return [W, rows, n] pairs as [W, rows, 2 n] 16-bit values, without moving data."""
    both = gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16))
    return both.reshape([pairs.shape[0], pairs.shape[1], 2 * pairs.shape[2]]).to(dtype, bitcast=True)


@gluon.jit
def _add_slots(
    out_ptr,
    slots_ptr,
    first,
    first_col,
    M,
    N,
    POLL: gl.constexpr,
    POLL_OPERANDS: gl.constexpr,
    POLLED: gl.constexpr,
    SPLITS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLOT: gl.constexpr,
    PART: gl.constexpr,
    CHUNK: gl.constexpr,
):
    """Write the sum of PART elements of all slots, in their order, from the tile's element `first` on: await_sum."""
    QUADS: gl.constexpr = PART // 4
    BY_QUAD: gl.constexpr = _quad_layout(CHUNK, QUADS, gl.num_warps(), POLLED)
    quad = gl.arange(0, QUADS, gl.SliceLayout(0, BY_QUAD))[None, :]
    quad = gl.where((first + quad * 4) // BLOCK_N < M, quad, 0)
    sum0 = gl.zeros([QUADS], gl.float32, gl.SliceLayout(0, BY_QUAD))
    sum1 = sum0
    sum2 = sum0
    sum3 = sum0
    for start in range(0, SPLITS, CHUNK):
        slot = start + gl.arange(0, CHUNK, gl.SliceLayout(1, BY_QUAD))[:, None]
        real = slot < SPLITS
        ptrs = slots_ptr + gl.where(real, slot, SPLITS - 1) * SLOT + first + quad * 4
        x0, x1, x2, x3 = gl.inline_asm_elementwise(
            POLL, POLL_OPERANDS, [ptrs], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=POLLED
        )
        one = gl.full([CHUNK, QUADS], EMPTY, gl.int32, BY_QUAD)
        empty = gl.join(gl.join(one, one), gl.join(one, one)).reshape([CHUNK, PART])
        slots = start + gl.arange(0, CHUNK, gl.SliceLayout(1, empty.type.layout))[:, None]
        at = first + gl.arange(0, PART, gl.SliceLayout(0, empty.type.layout))[None, :]
        barrier()  # several threads may wait for the same bytes
        gl.store(slots_ptr + slots * SLOT + at, empty, mask=(slots < SPLITS) & (at // BLOCK_N < M))
        sum0 += gl.sum(gl.where(real, x0.to(gl.float32, bitcast=True), 0.0), 0)
        sum1 += gl.sum(gl.where(real, x1.to(gl.float32, bitcast=True), 0.0), 0)
        sum2 += gl.sum(gl.where(real, x2.to(gl.float32, bitcast=True), 0.0), 0)
        sum3 += gl.sum(gl.where(real, x3.to(gl.float32, bitcast=True), 0.0), 0)
    total = gl.join(gl.join(sum0, sum2), gl.join(sum1, sum3)).reshape([PART])
    at = first + gl.arange(0, PART, total.type.layout)
    row = at // BLOCK_N
    col = first_col + at % BLOCK_N
    gl.store(out_ptr + row.to(gl.int64) * N + col, total.to(out_ptr.dtype.element_ty), mask=(row < M) & (col < N))


@gluon.jit
def _stream_kernel(
    a_ptr,  # [M, K]
    b_ptr,  # [N, K]
    out_ptr,  # [M, N]
    slots_ptr,  # [tiles, SPLITS, ROWS, BLOCK_N] fp32 as int32, EMPTY; no elements with one split
    M,
    N,
    K,
    stride_a,
    stride_b,
    SPLITS: gl.constexpr,
    ADDERS: gl.constexpr,
    POLL: gl.constexpr,
    POLL_OPERANDS: gl.constexpr,
    POLLED: gl.constexpr,
    CHUNK: gl.constexpr,
    EVEN_M: gl.constexpr,
    EVEN_N: gl.constexpr,
    EVEN_K: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WARP_K: gl.constexpr,
):
    """Compute the partial product of program (tile, split), and a slice of the sum if it is an adder."""
    W: gl.constexpr = gl.num_warps()
    PAIRS: gl.constexpr = WARP_K // 2
    BLOCK_K: gl.constexpr = W * WARP_K
    SLOT: gl.constexpr = ROWS * BLOCK_N
    dtype: gl.constexpr = b_ptr.dtype.element_ty
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [W, 1, 1], [1, 16, 8])  # the warps are a dimension of batches
    A_OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)  # [W, ROWS, WARP_K]
    B_OPERAND: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)  # [W, WARP_K, BLOCK_N]
    A_LINES: gl.constexpr = _line_layout(ROWS, PAIRS, W)
    B_LINES: gl.constexpr = _line_layout(BLOCK_N, PAIRS, W)
    tile = gl.program_id(0)
    split = gl.program_id(1)
    first_col = tile * BLOCK_N
    blocks = gl.cdiv(K, BLOCK_K)
    first = (blocks * split) // SPLITS
    steps = (blocks * (split + 1)) // SPLITS - first
    k0 = first * BLOCK_K

    # Offsets are in pairs.
    b_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, B_LINES)))[:, None, None]
    b_k = b_warp * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(0, gl.SliceLayout(1, B_LINES)))[None, None, :]
    col = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, B_LINES)))[None, :, None]
    a_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, A_LINES)))[:, None, None]
    a_k = a_warp * PAIRS + gl.arange(0, PAIRS, gl.SliceLayout(0, gl.SliceLayout(1, A_LINES)))[None, None, :]
    row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, A_LINES)))[None, :, None]
    pair: gl.constexpr = gl.pointer_type(gl.int32)
    b_ptrs = (b_ptr + (first_col.to(gl.int64) * stride_b + k0)).to(pair, bitcast=True) + (col * (stride_b // 2) + b_k)
    a_ptrs = (a_ptr + k0).to(pair, bitcast=True) + (row * (stride_a // 2) + a_k)
    col_ok = col < N - first_col
    row_ok = row < M
    left = (K - k0) // 2
    b_pairs = _load(b_ptrs, col_ok, b_k, left, EVEN_N, EVEN_K, "evict_first")
    a_pairs = _load(a_ptrs, row_ok, a_k, left, EVEN_M, EVEN_K, "")

    my_slots = slots_ptr
    if SPLITS > 1:
        # The slot is EMPTY already. Written again, its lines are in the L2 when an adder reads them, not in DRAM.
        my_slots += tile.to(gl.int64) * (SPLITS * SLOT)
        EACH: gl.constexpr = min(4, max(1, SLOT // (32 * W)))
        IN_TURN: gl.constexpr = gl.BlockedLayout([EACH], [32], [W], [0])
        gl.store(my_slots + split * SLOT + gl.arange(0, SLOT, IN_TURN), gl.full([SLOT], EMPTY, gl.int32, IN_TURN))

    acc = gl.zeros([W, ROWS, BLOCK_N], gl.float32, MMA)
    for _ in range(1, steps):
        b_ptrs += BLOCK_K // 2
        a_ptrs += BLOCK_K // 2
        left -= BLOCK_K // 2
        b = gl.convert_layout(_halves(b_pairs, dtype).permute((0, 2, 1)), B_OPERAND)
        b_pairs = _load(b_ptrs, col_ok, b_k, left, EVEN_N, EVEN_K, "evict_first")
        a = gl.convert_layout(_halves(a_pairs, dtype), A_OPERAND)
        a_pairs = _load(a_ptrs, row_ok, a_k, left, EVEN_M, EVEN_K, "")
        acc = mma_v2(a, b, acc)
    b = gl.convert_layout(_halves(b_pairs, dtype).permute((0, 2, 1)), B_OPERAND)
    acc = mma_v2(gl.convert_layout(_halves(a_pairs, dtype), A_OPERAND), b, acc)

    # Through shared memory, so that a thread has the sums of all warps for its elements.
    VEC: gl.constexpr = min(4, max(1, SLOT // (32 * W)))
    ACROSS: gl.constexpr = min(32, BLOCK_N // VEC)
    BY_ELEMENT: gl.constexpr = gl.BlockedLayout([W, 1, VEC], [1, 32 // ACROSS, ACROSS], [1, W, 1], [2, 1, 0])
    sums = gl.allocate_shared_memory(gl.float32, acc.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    sums.store(acc)
    total = gl.sum(sums.load(BY_ELEMENT), 0)
    r = gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(0, BY_ELEMENT)))[:, None]
    c = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(0, BY_ELEMENT)))[None, :]
    if SPLITS == 1:
        at = out_ptr + r.to(gl.int64) * N + (first_col + c)
        gl.store(at, total.to(out_ptr.dtype.element_ty), mask=(r < M) & (c < N - first_col))
    else:
        bits = total.to(gl.int32, bitcast=True)
        gl.store(my_slots + split * SLOT + r * BLOCK_N + c, gl.where(bits == EMPTY, NAN, bits), mask=r < M)
        PART: gl.constexpr = SLOT // ADDERS
        first_element = (split - (SPLITS - ADDERS)) * PART
        if (first_element >= 0) & (first_element // BLOCK_N < M):
            _add_slots(
                out_ptr, my_slots, first_element, first_col, M, N, POLL, POLL_OPERANDS, POLLED,
                SPLITS, BLOCK_N, SLOT, PART, CHUNK,
            )  # fmt: skip


def stream_constants(config: StreamConfig, M: int, N: int, K: int) -> dict[str, object]:
    """Return the compile-time constants of `_stream_kernel`."""
    part = ROWS * config.block_n // config.adders
    slots = chunk(config.splits, part)
    polled = polled_at_once(slots, part, config.num_warps)
    return {
        "SPLITS": config.splits,
        "ADDERS": config.adders,
        "POLL": poll(polled),
        "POLL_OPERANDS": poll_operands(polled),
        "POLLED": polled,
        "CHUNK": slots,
        "EVEN_M": M == ROWS,
        "EVEN_N": N % config.block_n == 0,
        "EVEN_K": K % config.block_k == 0,
        "ROWS": ROWS,
        "BLOCK_N": config.block_n,
        "WARP_K": config.warp_k,
    }


def prepare_stream(
    a: Tensor,  # [M, K]
    b: Tensor,  # [K, N], stored as [N, K]
    config: StreamConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """Allocate the workspace; the returned callable allocates the output and launches once, as tiled.prepare_fixup's.

    The operands must not be `unsuitable`. Raises ValueError for a config that cannot run. A call raises RuntimeError if
    several adders need more programs at once than the GPU holds.
    """
    (M, K), N = a.shape, b.size(1)
    if config is None:
        config = choose_stream(M, N, K, device_of(a.device).sms)
    if reason := illegal_stream(config, K):
        raise ValueError(f"{config}: {reason}")
    grid = (triton.cdiv(N, config.block_n), config.splits)
    elements = grid[0] * config.splits * ROWS * config.block_n if config.splits > 1 else 0
    slots = torch.full((elements,), EMPTY.value, dtype=torch.int32, device=a.device)
    constants = stream_constants(config, M, N, K)
    options: dict[str, object] = {"num_warps": config.num_warps}
    if config.adders > 1:
        options["launch_cooperative_grid"] = True  # all or none: no program waits for one that cannot start
    launch = Launch(_stream_kernel, grid, **constants, **options)

    def run() -> Tensor:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        launch(a, b, out, slots, M, N, K, a.stride(0), b.stride(1))
        return out

    return run
