"""The fused kernel with specialised warps: fused.py runs it on Hopper if TMA can read a, b and e.

    f = permute((a @ b.T + d) * e)  for each group        maths and layout: problem.py

A tile of 128 x 128, with K of 64 to 256, takes about as long to multiply as to store. Two programs on an SM that do one
after the other, as in fused.py, read 32 KB from the L2 for each 64 of K in addition to their stores, and keep the DRAM
busy for four fifths of the time. Here one program has an SM to itself, and the warps meet at barriers in shared memory:

    load a    one warp: takes a sweep, publishes it to the others, and requests its 128 rows of a once for all its tiles
    load b    one warp: requests b's tiles, 128 columns by 64 of K
    load e    one warp: requests e's tiles, each into the buffer through which the output leaves
    multiply  two groups of four warps, which take tiles alternately: multiplies, adds the bias, applies e, stores

One group stores while the other multiplies. Each has all the tile's sums, in 128 registers per thread. A tile reads 16
KB from the L2 for each 64 of K, since a's rows are in shared memory already.

Sweeps. They are fused.py's, long ones first. Programs take them dynamically, by incrementing a counter. With an equal
number of tiles assigned to each program beforehand, the first program was done after 0.8 of the last one's time, since
not all SMs reach the memory equally fast. Which program takes a sweep does not change any output bit. A table row
describes a sweep completely. The first warp passes it on through shared memory one sweep ahead, so no warp waits for
it.

Turns. Both groups wait for the stages of b, each for those of its tiles, and a barrier distinguishes phases by one bit:
a group that came two phases early would pass. So a group multiplies only after the other one has seen the last stage of
the previous tile.

Descriptors. A loading warp makes its TMA descriptor when it comes to another group, in two places alternately. Loads
through the last descriptor may still be under way, so it is not touched. Loads through the one before must have
arrived.

The output. The product is transposed, b @ a.T, as in fused.py. It is rounded and goes through shared memory
(`stmatrix`), from where a thread takes 16 bytes of a line and stores them as fused.py does. A TMA store of the same
buffer is slower (80 % of copy bandwidth compared with 83), since it cannot mark the data for the L2 to drop first. Sums
and rounding are fused.py's, so results are bitwise equal.

The kernel is written in Gluon; grouped_gemm/fp8_specialized.py explains why. Gluon has no interpreter: without a GPU,
tests compile the kernel but cannot run it.

Sources: the problem, problem.py's; groups of warps that multiply alternately, CUTLASS's "ping-pong" kernels; Triton's
Gluon tutorials for the language.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from groupbench.kernels.bias_add_permute import plan
from groupbench.kernels.bias_add_permute.problem import Group
from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import device_of
from groupbench.kernels.gluon_names import async_load, not_hopper, reinterpret
from groupbench.kernels.grouped_gemm.gluon_tiles import barriers
from groupbench.kernels.grouped_gemm.support import worker_count
from groupbench.kernels.launch import Launch

# Shared memory: 64 KB of a, 96 KB of b, 64 KB of e and the output.
CONFIG = plan.FusedConfig(128, 128, 64, num_warps=4, num_stages=6, tma=True)
A_TILES = 4  # tiles of block_k columns that fit into a's buffer
MOST_K = A_TILES * CONFIG.block_k
LEAST_TILES = 7  # per program: the plain kernel is faster at 5.8, by 3 to 12 %, this one at 7.8, by 5 to 11

# One row of the table describes a sweep: its group's fields, then its own. A warp reads 32 values at once.
FIELDS = (*plan.FIELDS, "group", "first_m", "first_n", "end_n")
WIDTH = 32
NO_SWEEP = [-1 if name == "group" else 0 for name in FIELDS]
_PLACES = gl.constexpr(FIELDS)  # a constexpr: kernels may use no other globals, since Triton caches them compiled


@gluon.constexpr_function
def _at(name):
    for i, field in enumerate(_PLACES.value):
        if field == name:
            return i
    raise KeyError(name)


@gluon.jit
def _field(ring, name: gl.constexpr):
    """Return an int64 from the row in shared memory."""
    values = reinterpret(ring, gl.int64, [ring.shape[0], 1], ring.type.layout)
    return gl.max(values.index(_at(name)).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _size(ring, name: gl.constexpr):
    return _field(ring, name).to(gl.int32)


@gluon.jit
def _read(row, name: gl.constexpr):
    """Return an int64 from a row in global memory."""
    return gl.load(row + _at(name))


@gluon.jit
def _publish(sweeps_ptr, sweep, ring, ring_full):
    """Copy a table row for the other warps; return (row, group), the group -1 after the last sweep."""
    WIDTH: gl.constexpr = ring.shape[0]
    row = sweeps_ptr + sweep * WIDTH
    ring.store(gl.load(row + gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))))
    mbarrier.arrive(ring_full, count=1)
    return row, _read(row, "group")


@gluon.jit
def _descriptor(address, rows, columns, stride, smem):
    """Return a TMA descriptor for a [rows, columns] matrix, read by tiles with smem's shape."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    ptr = address.to(gl.pointer_type(smem.dtype))
    return tma.make_tensor_descriptor(
        ptr, [rows.to(gl.int32), columns.to(gl.int32)], [stride, 1], [smem.shape[1], smem.shape[2]], LAYOUT
    )


@gluon.jit
def _await_requested(full, turn, begun):
    """Wait for the loads requested before turn `begun`, unless a stage's next use has waited for them already."""
    STAGES: gl.constexpr = full.shape[0]
    for past in range(gl.maximum(turn - STAGES, 0), begun):
        mbarrier.wait(full.index(past % STAGES), (past // STAGES) & 1)


@gluon.jit
def _request(desc, row, column, smem, full, empty, turn):
    """Request a tile as soon as the stage is empty; elements past an edge are zero."""
    STAGES: gl.constexpr = smem.shape[0]
    stage = turn % STAGES
    mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    async_load(desc, [row, column], full.index(stage), smem.index(stage))


@gluon.jit
def _load_a(sweeps_ptr, taken_ptr, a_smem, a_full, a_empty, ring, ring_full, ring_empty):
    BLOCK_K: gl.constexpr = a_smem.shape[2]
    turn = 0
    begun = 0
    published = 0
    row, now = _publish(sweeps_ptr, gl.program_id(0), ring, ring_full)
    while now >= 0:
        for _ in gl.static_range(2):  # two places for a descriptor
            if now >= 0:
                group = now
                K = _read(row, "K").to(gl.int32)
                _await_requested(a_full, turn, begun)
                desc = _descriptor(_read(row, "a_address"), _read(row, "M"), K, _read(row, "a_stride_m"), a_smem)
                begun = turn
                while now == group:
                    first_m = _read(row, "first_m").to(gl.int32)
                    for k in range(0, K, BLOCK_K):
                        _request(desc, first_m, k, a_smem, a_full, a_empty, turn)
                        turn += 1
                    mbarrier.wait(ring_empty, published & 1)
                    published += 1
                    sweep = gl.num_programs(0) + gl.atomic_add(taken_ptr, 1, sem="relaxed")
                    row, now = _publish(sweeps_ptr, sweep, ring, ring_full)


@gluon.jit
def _load_b(b_smem, full, empty, ring, ring_full, ring_empty):
    BLOCK_N: gl.constexpr = b_smem.shape[1]
    BLOCK_K: gl.constexpr = b_smem.shape[2]
    turn = 0
    begun = 0
    sweeps_read = 0
    mbarrier.wait(ring_full, 0)
    now = _field(ring, "group")
    while now >= 0:
        for _ in gl.static_range(2):
            if now >= 0:
                group = now
                K = _size(ring, "K")
                _await_requested(full, turn, begun)
                desc = _descriptor(_field(ring, "b_address"), _field(ring, "N"), K, _field(ring, "b_stride_n"), b_smem)
                begun = turn
                while now == group:
                    first_n, end_n = _size(ring, "first_n"), _size(ring, "end_n")
                    mbarrier.arrive(ring_empty, count=1)
                    for n in range(first_n, end_n, BLOCK_N):
                        for k in range(0, K, BLOCK_K):
                            _request(desc, n, k, b_smem, full, empty, turn)
                            turn += 1
                    sweeps_read += 1
                    mbarrier.wait(ring_full, sweeps_read & 1)
                    now = _field(ring, "group")


@gluon.jit
def _load_e(e_smem, full, empty, ring, ring_full, ring_empty):
    BLOCK_N: gl.constexpr = e_smem.shape[2]
    turn = 0
    begun = 0
    sweeps_read = 0
    mbarrier.wait(ring_full, 0)
    now = _field(ring, "group")
    while now >= 0:
        for _ in gl.static_range(2):
            if now >= 0:
                group = now
                _await_requested(full, turn, begun)
                desc = _descriptor(
                    _field(ring, "e_address"), _field(ring, "M"), _field(ring, "N"), _field(ring, "e_stride_m"), e_smem
                )
                begun = turn
                while now == group:
                    first_m, first_n, end_n = _size(ring, "first_m"), _size(ring, "first_n"), _size(ring, "end_n")
                    mbarrier.arrive(ring_empty, count=1)
                    for n in range(first_n, end_n, BLOCK_N):
                        _request(desc, first_m, n, e_smem, full, empty, turn)
                        turn += 1
                    sweeps_read += 1
                    mbarrier.wait(ring_full, sweeps_read & 1)
                    now = _field(ring, "group")


@gluon.jit
def _give_back(empty, turn, steps):
    for past in range(turn, turn + steps):
        mbarrier.arrive(empty.index(past % empty.shape[0]), count=1)


@gluon.jit
def _multiply(
    SIDE: gl.constexpr,  # 0 or 1: the number of the group and of its buffer
    out_ptr,
    memory,  # buffers and barriers
    OP: gl.constexpr,
    EVEN: gl.constexpr,
    WHOLE_M: gl.constexpr,
    WHOLE_N: gl.constexpr,
):
    a_smem, b_smem, e_smem, a_full, a_empty, b_full, b_empty, e_full, e_empty, turns, ring, ring_full, ring_empty = (
        memory
    )
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    A_TILES: gl.constexpr = a_smem.shape[0]
    STAGES: gl.constexpr = b_smem.shape[0]
    BLOCK_M: gl.constexpr = a_smem.shape[1]
    BLOCK_N: gl.constexpr = b_smem.shape[1]
    BLOCK_K: gl.constexpr = b_smem.shape[2]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    MMA_N: gl.constexpr = gl.SliceLayout(1, MMA)
    # 16 bytes per thread, 256 per line.
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_M, BLOCK_M // 8], [4, 1], [1, 0])
    range_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LINES))
    range_n = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LINES))
    e_buffer = e_smem.index(SIDE)
    out_buffer = reinterpret(e_buffer, dtype, [BLOCK_N, BLOCK_M], e_buffer.type.layout)
    a_turn = 0  # counts a's tiles, b_turn b's, including those of the other group
    b_turn = 0
    done = 0  # tiles of both groups
    own_tiles = 0
    sweeps_read = 0
    mbarrier.wait(ring_full, 0)
    while _field(ring, "group") >= 0:
        d_ptr = _field(ring, "d_address").to(gl.pointer_type(dtype))
        d_stride_n = _field(ring, "d_stride_n")
        f_offset = _field(ring, "f_offset")
        M1, N0, N1 = _size(ring, "M1"), _size(ring, "N0"), _size(ring, "N1")
        N, K = _size(ring, "N"), _size(ring, "K")
        # The compiler does not know the alignment of values from memory: without these hints every store would be one
        # element wide. A call's result cannot take a hint, but that of `to` can.
        M2 = gl.multiple_of(_field(ring, "M2").to(gl.int32), [8])
        M = gl.multiple_of(_field(ring, "M").to(gl.int32), [8])
        first_m = gl.multiple_of(_field(ring, "first_m").to(gl.int32), [BLOCK_M])
        first_n, end_n = _size(ring, "first_n"), _size(ring, "end_n")
        mbarrier.arrive(ring_empty, count=1)
        steps = gl.cdiv(K, BLOCK_K)
        tiles = gl.cdiv(end_n - first_n, BLOCK_N)
        slab = N1.to(gl.int64) * M2  # elements of one (m0, n0, m1)
        if WHOLE_M:
            block = first_m // M2
            from_m = f_offset + block // M1 * (N0 * (M1 * slab)) + block % M1 * slab + first_m % M2
            f_ptrs = out_ptr + gl.multiple_of(from_m, [8]) + range_m[None, :]
        else:
            block_m = (first_m + range_m) // M2
            from_m = f_offset + block_m // M1 * (N0 * (M1 * slab)) + block_m % M1 * slab + (first_m + range_m) % M2
            f_ptrs = out_ptr + gl.max_contiguous(gl.multiple_of(from_m, [8]), [8])[None, :]

        for past in range(a_turn, a_turn + steps):
            mbarrier.wait(a_full.index(past % A_TILES), (past // A_TILES) & 1)
        first_tile = (done + SIDE) % 2
        if first_tile >= tiles:
            _give_back(a_empty, a_turn, steps)
        for tile in range(first_tile, tiles, 2):
            n = first_n + tile * BLOCK_N
            offs_n = n + gl.arange(0, BLOCK_N, MMA_N)
            d = gl.load(d_ptr + offs_n * d_stride_n, mask=offs_n < N, other=0.0)
            acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, MMA)
            at = b_turn + tile * steps
            mbarrier.wait(turns.index(SIDE), (own_tiles + 1 - SIDE) & 1)
            for step in range(steps):
                mbarrier.wait(b_full.index(at % STAGES), (at // STAGES) & 1)
                a = a_smem.index((a_turn + step) % A_TILES)
                acc = warpgroup_mma(b_smem.index(at % STAGES), a.permute((1, 0)), acc, use_acc=step > 0, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))  # for the previous step
                mbarrier.arrive(b_empty.index((at - 1) % STAGES), count=1, pred=step > 0)
                at += 1
            mbarrier.arrive(turns.index(1 - SIDE), count=1)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(b_empty.index((at - 1) % STAGES), count=1)
            if tile + 2 >= tiles:
                _give_back(a_empty, a_turn, steps)

            acc += d.to(gl.float32)[:, None]
            if OP != "none":
                mbarrier.wait(e_full.index(SIDE), own_tiles & 1)
                e = e_buffer.permute((1, 0)).load(MMA).to(gl.float32)
                if OP == "mul":
                    acc *= e
                else:
                    acc += e
            own_tiles += 1
            out_buffer.store(acc.to(dtype))
            lines = out_buffer.load(LINES)
            if OP != "none":
                fence_async_shared()
                mbarrier.arrive(e_empty.index(SIDE), count=1)
            if WHOLE_N:
                from_n = n // N1 * (M1 * slab) + (n % N1) * M2.to(gl.int64)
                to_ptrs = f_ptrs + gl.multiple_of(from_n, [8]) + (range_n * M2.to(gl.int64))[:, None]
            else:
                line_n = n + range_n
                to_ptrs = f_ptrs + (line_n // N1 * (M1 * slab) + line_n % N1 * M2.to(gl.int64))[:, None]
            if EVEN:
                gl.store(to_ptrs, lines, cache_modifier=".cs")
            else:
                inside = (first_m + range_m < M)[None, :] & (n + range_n < N)[:, None]
                gl.store(to_ptrs, lines, mask=inside, cache_modifier=".cs")
        a_turn += steps
        b_turn += tiles * steps
        done += tiles
        sweeps_read += 1
        mbarrier.wait(ring_full, sweeps_read & 1)


@gluon.jit
def _fused_specialized_kernel(
    sweeps_ptr,  # [sweeps + programs, WIDTH] int64: FIELDS; the last rows end the programs
    taken_ptr,  # [1] int32: zero
    out_ptr,  # all outputs, one after the other
    OP: gl.constexpr,  # "mul", "add" or "none"
    WIDTH: gl.constexpr,
    EVEN: gl.constexpr,  # every M is a multiple of BLOCK_M, every N of BLOCK_N
    WHOLE_M: gl.constexpr,  # every M2 is a multiple of BLOCK_M
    WHOLE_N: gl.constexpr,  # every N1 is a multiple of BLOCK_N
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    A_TILES: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    a_smem = gl.allocate_shared_memory(dtype, [A_TILES, BLOCK_M, BLOCK_K], SWIZZLED)
    b_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], SWIZZLED)
    e_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_M, BLOCK_N], SWIZZLED)
    ring = gl.allocate_shared_memory(gl.int64, [WIDTH], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    a_full, a_empty = barriers(A_TILES, 1), barriers(A_TILES, 2)
    b_full, b_empty = barriers(STAGES, 1), barriers(STAGES, 1)
    turns = barriers(2, 1)
    # Only if e is loaded. The compiler reuses the memory of a barrier that no warp waits for. The hardware may still
    # write the barrier's state there: on an H200 that several processes shared, into TMA descriptors.
    e_full = turns if OP == "none" else barriers(2, 1)
    e_empty = turns if OP == "none" else barriers(2, 1)
    READERS: gl.constexpr = 3 if OP == "none" else 4
    ring_full, ring_empty = barriers(1, 1).index(0), barriers(1, READERS).index(0)
    memory = (
        a_smem, b_smem, e_smem, a_full, a_empty, b_full, b_empty, e_full, e_empty, turns, ring, ring_full, ring_empty,
    )  # fmt: skip
    for_a = (sweeps_ptr, taken_ptr, a_smem, a_full, a_empty, ring, ring_full, ring_empty)
    for_b = (b_smem, b_full, b_empty, ring, ring_full, ring_empty)
    for_e = (e_smem, e_full, e_empty, ring, ring_full, ring_empty)
    # After the roles: the warps of all but the first, and their threads' registers; the first gets the rest.
    if OP == "none":
        gl.warp_specialize(
            [
                (_multiply, (0, out_ptr, memory, OP, EVEN, WHOLE_M, WHOLE_N)),
                (_multiply, (1, out_ptr, memory, OP, EVEN, WHOLE_M, WHOLE_N)),
                (_load_a, for_a),
                (_load_b, for_b),
            ],
            [4, 1, 1],
            [224, 56, 56],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, out_ptr, memory, OP, EVEN, WHOLE_M, WHOLE_N)),
                (_multiply, (1, out_ptr, memory, OP, EVEN, WHOLE_M, WHOLE_N)),
                (_load_a, for_a),
                (_load_b, for_b),
                (_load_e, for_e),
            ],
            [4, 1, 1, 1],
            [224, 56, 56, 56],
        )


def unsuitable(groups: Sequence[Group]) -> str | None:
    """Return why this kernel cannot take groups checked by `prepare_fused`, or None if it can."""
    a = groups[0].a
    if reason := not_hopper(device_of(a.device)):
        return reason
    if a.dtype.itemsize != 2:
        return f"{a.dtype} is not a 16-bit dtype"
    if not plan.tma_reads(groups):
        return "TMA cannot read all of a, b and e"
    busy = [group for group in groups if prod(group.permuted)]
    if any(group.m[2] % 8 for group in busy):
        return "an M2 is not a multiple of 16 bytes"
    if any(group.a.size(1) > MOST_K for group in busy):
        return f"a K is longer than {MOST_K}"
    if plan.tiles_of(groups, CONFIG) < LEAST_TILES * worker_count(a.device):
        return f"there are fewer than {LEAST_TILES} tiles per program"
    return None


def prepare_specialized(
    groups: Sequence[Group],
    op: str,
) -> Callable[[], tuple[Tensor, ...]]:  # G of [M0, N0, M1, N1, M2], views of one buffer
    """Build the table and compile; the returned callable allocates the buffer and launches.

    `prepare_fused` must have checked the groups, and they must not be `unsuitable`. A call also zeroes the counter by
    which programs take sweeps.
    """
    device, dtype = groups[0].a.device, groups[0].a.dtype
    shapes = [group.permuted for group in groups]
    sizes = [prod(shape) for shape in shapes]
    offsets = [0, *accumulate(sizes)]
    group_rows = [plan.table_row(group, offset) for group, offset in zip(groups, offsets, strict=False)]
    sweeps = plan.sweeps(groups, CONFIG, worker_count(device))
    programs = min(worker_count(device), len(sweeps))
    # Each program takes one row past the last sweep, which ends it.
    rows = [*([*group_rows[g], g, *rest] for g, *rest in sweeps), *([NO_SWEEP] * programs)]
    table = torch.zeros(len(rows), WIDTH, dtype=torch.int64)
    table[:, : len(FIELDS)] = torch.tensor(rows)
    table = table.to(device)
    constants = plan.constants_of(groups, CONFIG)
    # The table holds addresses only: the callable must own the operands.
    operands = tuple(groups)
    launch = Launch(
        _fused_specialized_kernel,
        (programs,),
        OP=op,
        WIDTH=WIDTH,
        EVEN=constants["EVEN_M"] and constants["EVEN_N"],
        WHOLE_M=constants["WHOLE_M"],
        WHOLE_N=constants["WHOLE_N"],
        A_TILES=A_TILES,
        **launch_keywords(_fused_specialized_kernel, CONFIG),
    )

    def run() -> tuple[Tensor, ...]:
        out = torch.empty(offsets[len(operands)], dtype=dtype, device=device)
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
        launch(table, torch.zeros(1, dtype=torch.int32, device=device), out)
        return tuple(part.view(shape) for part, shape in zip(out.split(sizes), shapes, strict=True))

    run()  # compiles
    return run
