"""Grouped GEMM in 16 bits with specialised warps, on Hopper: the kernel for flat.py's `specialized` configs.

    out[start_g:end_g] = a[start_g:end_g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

Power limits a Hopper GPU on large products: with tensor cores busy 96 % of the time, the kernel moving fewer bytes runs
at higher clocks and ends first. This kernel computes flat.py's tiles and saves bytes in two ways.

**Lockstep.** Every `lockstep` K steps the programs wait for each other, so one DRAM read serves all (lockstep.py).

**Tile order.** tile_order.serpentine walks blocks of an expert's tile rows, left to right and back, so programs running
together cover a block nearly square in bytes.

The roles follow fp8_specialized.py. One warp requests tiles by TMA. Two or three groups of four warps multiply, each 64
rows in a tile with 128 or 192 rows. A group skips its product if an expert ends before its rows. The tiles of a short
last wave are cut into parts of 64 rows if there are SMs for all parts.

    load      finds a tile's expert; waits for an empty stage; describes the tile in shared memory at its first stage;
              requests a [64, 64] for each group and b [64, columns of a tile]
    multiply  waits for a full stage; multiplies; gives back the stage before; stores the tile in parts of 64 or 128
              columns with flat.py's ragged TMA store

Three groups leave 160 registers to a thread, of which 128 are sums. ptxas refuses one wgmma of 256 columns there, so
each step has two of 128.

**Tiles of 192 columns** fit sizes like 2880 = 15 * 192, where twelve tiles of 256 would waste 6 % of the work. Shapes
in Triton are powers of two, so such a tile has a main part of 128 columns and a side of 64, with their own descriptors,
sums and wgmmas.

The kernel is written in Gluon, which has no interpreter: without a GPU, tests compile it but cannot run it.

Sources: CUTLASS's cooperative warp-specialised kernels; Triton's Gluon tutorials for the language.
docs/notes/kernels/grouped-gemm.md has the measurements behind lockstep.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import device_of
from groupbench.kernels.gluon_names import async_load, not_hopper
from groupbench.kernels.grouped_gemm import tile_order
from groupbench.kernels.grouped_gemm.experts import of_groups
from groupbench.kernels.grouped_gemm.flat_config import FlatConfig
from groupbench.kernels.grouped_gemm.gluon_tiles import (
    ROWS,
    barriers,
    get,
    halves,
    next_stage,
    put,
    ragged,
    running_sums,
    store_rows,
    tile_rows,
    zero_past,
)
from groupbench.kernels.grouped_gemm.lockstep import ARRIVALS, arrivals_before, keep_step
from groupbench.kernels.grouped_gemm.lockstep_counter import arrivals
from groupbench.kernels.grouped_gemm.support import worker_count
from groupbench.kernels.launch import Launch, Outputs, described

MOST_GROUPS = 256  # the loading warp counts their tiles in the few registers it has

# Four numbers in shared memory describe the tile of a stage: an expert's first row, its number of rows, the row within
# them, and 4 * column + groups of warps that have rows.
START, SIZE, ROW, COLUMN_AND_GROUPS = (gl.constexpr(place) for place in range(4))

# A Triton function that works on numbers alone, so it is valid Gluon too.
_serpentine = gluon.jit(tile_order.serpentine.fn)


@gluon.jit
def _tile(item, whole, tiles_n, last_items, offs_ptr, GROUPS: gl.constexpr, GROUP_M: gl.constexpr):
    """Return (expert, first row, row count, row within them, tile column, groups with rows)."""
    part = gl.where(item < whole, 0, (item - whole) % GROUPS)
    tile = gl.where(item < whole, item, whole + (item - whole) // GROUPS)
    last = last_items.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    done = last <= tile
    g = gl.sum(done.to(gl.int32), 0)
    start = gl.load(offs_ptr + g - 1, mask=g > 0, other=0).to(gl.int32)
    size = gl.load(offs_ptr + g).to(gl.int32) - start
    inside = tile - gl.max(gl.where(done, last, 0), 0)
    tile_m, tile_n = _serpentine(inside, gl.cdiv(size, GROUPS * ROWS), tiles_n, GROUP_M)
    row = tile_m * (GROUPS * ROWS) + part * ROWS
    most = gl.where(item < whole, GROUPS, 1)
    return g, start, size, row, tile_n, gl.minimum(gl.maximum(gl.cdiv(size - row, ROWS), 0), most)


@gluon.jit
def _load_b(desc, smem, ready, matrix, column, at_k, B_IS_NK: gl.constexpr):
    """Request a tile from an expert's weights."""
    tile = smem.reshape([1, smem.shape[0], smem.shape[1]])
    if B_IS_NK:
        async_load(desc, [matrix, column, at_k], ready, tile)
    else:
        async_load(desc, [matrix, at_k, column], ready, tile)


@gluon.jit
def _load(
    a_desc,
    b_desc,
    side_desc,
    memory,
    offs_ptr,
    arrivals_ptr,
    full_waves,
    whole,
    items,
    tiles_n,
    steps,
    SHARED_B: gl.constexpr,
    B_IS_NK: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    GROUP_M: gl.constexpr,
    LOCKSTEP: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    MAIN: gl.constexpr,
    SIDE: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    a_smem, b_smem, side_smem, full, empty, described, last_items = memory
    B_BYTES: gl.constexpr = b_desc.block_type.nbytes + (side_desc.block_type.nbytes if SIDE else 0)
    stage = 0
    phase = 1
    if LOCKSTEP:
        # Programs wait in full waves alone, which all of them take part in.
        reached = arrivals_before(arrivals_ptr, NUM_PROGRAMS)
        to_arrive = gl.minimum(full_waves * steps // LOCKSTEP, ARRIVALS)
        to_wait = to_arrive
        after = ARRIVALS - to_arrive
        until = LOCKSTEP
    for item in range(gl.program_id(0), items, NUM_PROGRAMS):
        g, start, size, row, tile_n, groups = _tile(item, whole, tiles_n, last_items, offs_ptr, GROUPS, GROUP_M)
        column = tile_n * (MAIN + SIDE)
        matrix = 0 if SHARED_B else g
        for step in range(steps):
            if LOCKSTEP:
                reached, until, to_arrive, to_wait = keep_step(
                    arrivals_ptr, reached, until, to_arrive, to_wait, LOCKSTEP, NUM_PROGRAMS
                )
            mbarrier.wait(empty.index(stage), phase)
            if step == 0:
                put(described, 4 * stage + START, start)
                put(described, 4 * stage + SIZE, size)
                put(described, 4 * stage + ROW, row)
                put(described, 4 * stage + COLUMN_AND_GROUPS, column * 4 + groups)
            ready = full.index(stage)
            at_k = step * BLOCK_K
            for group in gl.static_range(GROUPS + 1):
                mbarrier.expect(ready, B_BYTES + group * a_desc.block_type.nbytes, pred=groups == group)
            _load_b(b_desc, b_smem.index(stage), ready, matrix, column, at_k, B_IS_NK)
            if SIDE:
                _load_b(side_desc, side_smem.index(stage), ready, matrix, column + MAIN, at_k, B_IS_NK)
            for group in gl.static_range(GROUPS):
                a = a_smem.index(stage * GROUPS + group)
                async_load(a_desc, [start + row + group * ROWS, at_k], ready, a, pred=group < groups)
            stage, phase = next_stage(stage, phase, STAGES)
    if LOCKSTEP:
        gl.atomic_add(arrivals_ptr, after + to_arrive, sem="relaxed")


@gluon.jit
def _add_product(a, b, acc, step, B_IS_NK: gl.constexpr):
    """Start acc += a @ b, or acc = a @ b in the first step."""
    if B_IS_NK:
        b = b.permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=step > 0, is_async=True)


@gluon.jit
def _store(
    out_desc,
    out_smem,
    start,
    size,
    row,
    column,
    acc,  # [64, MAIN]
    side,  # [64, SIDE]
    FIRST: gl.constexpr,  # the first of this group's buffers
    BUFFERS: gl.constexpr,
    SIDE: gl.constexpr,
):
    """Store a group's tile rows in parts with as many columns as a buffer has."""
    WIDTH: gl.constexpr = out_smem.shape[2]
    PARTS: gl.constexpr = acc.shape[1] // WIDTH
    SECOND: gl.constexpr = FIRST + BUFFERS - 1
    left, right = halves(acc)
    if PARTS == 2:
        store_rows(out_desc, out_smem.index(FIRST), BUFFERS - 1, start, size, row, column, left)
        store_rows(out_desc, out_smem.index(SECOND), BUFFERS - 1, start, size, row, column + WIDTH, right)
    else:
        first, second = halves(left)
        third, fourth = halves(right)
        store_rows(out_desc, out_smem.index(FIRST), BUFFERS - 1, start, size, row, column, first)
        store_rows(out_desc, out_smem.index(SECOND), BUFFERS - 1, start, size, row, column + WIDTH, second)
        store_rows(out_desc, out_smem.index(FIRST), BUFFERS - 1, start, size, row, column + 2 * WIDTH, third)
        store_rows(out_desc, out_smem.index(SECOND), BUFFERS - 1, start, size, row, column + 3 * WIDTH, fourth)
    if SIDE:
        store_rows(out_desc, out_smem.index(FIRST), BUFFERS - 1, start, size, row, column + acc.shape[1], side)


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,  # this group of warps: 0 has the first 64 rows of a tile
    out_desc,
    memory,
    items,
    steps,
    B_IS_NK: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    MAIN: gl.constexpr,
    SIDE: gl.constexpr,
):
    a_smem, b_smem, side_smem, out_smem, full, empty, described = memory
    COLUMNS: gl.constexpr = MAIN if GROUPS == 2 or MAIN < 256 else MAIN // 2  # of one wgmma
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    BUFFERS: gl.constexpr = out_smem.shape[0] // GROUPS
    stage = 0
    phase = 0
    for _ in range(gl.program_id(0), items, NUM_PROGRAMS):
        mbarrier.wait(full.index(stage), phase)
        start = get(described, 4 * stage + START)
        size = get(described, 4 * stage + SIZE)
        row = get(described, 4 * stage + ROW) + GROUP * ROWS
        both = get(described, 4 * stage + COLUMN_AND_GROUPS)
        column = both // 4
        if both % 4 > GROUP:
            acc = gl.zeros([ROWS, MAIN], gl.float32, MMA)
            side = acc
            if SIDE:
                side = gl.zeros([ROWS, SIDE], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16]))
            before = 0
            for step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                a = a_smem.index(stage * GROUPS + GROUP)
                acc = _add_product(a, b_smem.index(stage), acc, step, B_IS_NK)
                if SIDE:
                    side = _add_product(a, side_smem.index(stage), side, step, B_IS_NK)
                    acc, side = warpgroup_mma_wait(2, deps=(acc, side))  # for the step before
                else:
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
                before = stage
                stage, phase = next_stage(stage, phase, STAGES)
            if SIDE:
                acc, side = warpgroup_mma_wait(0, deps=(acc, side))
            else:
                acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1)
            _store(out_desc, out_smem, start, size, row, column, acc, side, GROUP * BUFFERS, BUFFERS, SIDE)
        else:
            for _step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = next_stage(stage, phase, STAGES)
    tma.store_wait(0)


@gluon.jit
def _flat_specialized_kernel(
    a_desc,  # [M, K], tiles [64, BLOCK_K]
    b_desc,  # [G or 1, N, K] or [G or 1, K, N], tiles of one expert
    side_desc,  # the same for the side; unused without one
    out_desc,  # [M, N], ragged along M, tiles of 64 rows and 64 or 128 columns
    out_ptr,  # the same memory
    offs_ptr,  # [G]
    arrivals_ptr,  # lockstep.arrivals
    M,
    N,
    K,
    G: gl.constexpr,
    G_POW2: gl.constexpr,
    SHARED_B: gl.constexpr,
    B_IS_NK: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    GROUP_M: gl.constexpr,
    LOCKSTEP: gl.constexpr,  # steps between two waits; 0: none
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,  # of four warps, 64 rows each
    BUFFERS: gl.constexpr,  # of shared memory for each group's stores
    SIDE: gl.constexpr,  # columns of a tile's side, next to those of b_desc; 0 without a side
):
    BLOCK_M: gl.constexpr = ROWS * GROUPS
    MAIN: gl.constexpr = b_desc.block_type.shape[1 if B_IS_NK else 2]
    BLOCK_K: gl.constexpr = a_desc.block_type.shape[1]
    tiles_n = gl.cdiv(N, MAIN + SIDE)
    counts = tile_rows(offs_ptr, G, G_POW2, BLOCK_M) * tiles_n
    last_items = running_sums(counts)
    tiles = gl.sum(counts, 0)
    full_waves = tiles // NUM_PROGRAMS
    left = tiles % NUM_PROGRAMS
    cut = left * GROUPS <= NUM_PROGRAMS
    whole = gl.where(cut, tiles - left, tiles)
    items = gl.where(cut, tiles + left * (GROUPS - 1), tiles)
    steps = gl.cdiv(K, BLOCK_K)

    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * GROUPS, ROWS, BLOCK_K], a_desc.layout)
    B_TILE: gl.constexpr = [STAGES, MAIN, BLOCK_K] if B_IS_NK else [STAGES, BLOCK_K, MAIN]
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, B_TILE, SWIZZLED)
    if SIDE:
        SIDE_TILE: gl.constexpr = [STAGES, SIDE, BLOCK_K] if B_IS_NK else [STAGES, BLOCK_K, SIDE]
        side_smem = gl.allocate_shared_memory(b_desc.dtype, SIDE_TILE, SWIZZLED)
    else:
        side_smem = b_smem
    out_smem = gl.allocate_shared_memory(
        out_desc.dtype, [GROUPS * BUFFERS, ROWS, out_desc.block_type.shape[3]], SWIZZLED
    )
    described = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(STAGES, 1), barriers(STAGES, GROUPS)

    # The first partition gets the registers that the others leave. Three groups leave too few for a fourth that
    # multiplies: with `_load` last, a tile of 192 rows takes 10 to 20 % longer.
    for_load = (a_smem, b_smem, side_smem, full, empty, described, last_items)
    buffers = (a_smem, b_smem, side_smem, out_smem, full, empty, described)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, out_desc, buffers, items, steps, B_IS_NK, NUM_PROGRAMS, STAGES, GROUPS, MAIN, SIDE)),
                (_multiply, (1, out_desc, buffers, items, steps, B_IS_NK, NUM_PROGRAMS, STAGES, GROUPS, MAIN, SIDE)),
                (
                    _load,
                    (
                        a_desc, b_desc, side_desc, for_load, offs_ptr, arrivals_ptr, full_waves, whole, items, tiles_n,
                        steps, SHARED_B, B_IS_NK, NUM_PROGRAMS, GROUP_M, LOCKSTEP, STAGES, GROUPS, MAIN, SIDE, BLOCK_K,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (
                    _load,
                    (
                        a_desc, b_desc, side_desc, for_load, offs_ptr, arrivals_ptr, full_waves, whole, items, tiles_n,
                        steps, SHARED_B, B_IS_NK, NUM_PROGRAMS, GROUP_M, LOCKSTEP, STAGES, GROUPS, MAIN, SIDE, BLOCK_K,
                    ),
                ),
                (_multiply, (0, out_desc, buffers, items, steps, B_IS_NK, NUM_PROGRAMS, STAGES, GROUPS, MAIN, SIDE)),
                (_multiply, (1, out_desc, buffers, items, steps, B_IS_NK, NUM_PROGRAMS, STAGES, GROUPS, MAIN, SIDE)),
                (_multiply, (2, out_desc, buffers, items, steps, B_IS_NK, NUM_PROGRAMS, STAGES, GROUPS, MAIN, SIDE)),
            ],
            [4, 4, 4],
            [160, 160, 160],
        )  # fmt: skip

    zero_past(out_ptr, gl.load(offs_ptr + G - 1).to(gl.int32), M, N, N, NUM_PROGRAMS)


def unsuitable(G: int, device: torch.device) -> str | None:
    """Return why this kernel cannot run `G` groups on a device, or None if it can."""
    if G > MOST_GROUPS:
        return f"{G} groups are more than {MOST_GROUPS}"
    return not_hopper(device_of(device))


def prepare_specialized(
    a: Tensor,  # [M, K] in 16 bits, for TMA
    weights: Tensor,  # [G or 1, N, K] or [G or 1, K, N], for TMA
    offs: Tensor,  # [G]
    config: FlatConfig,  # specialized
    nk: bool,
    shared: bool,
    zero_rest: bool,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:  # [M, N], of operands like these
    """Make the descriptors; the returned callable allocates the output and launches once.

    `prepare_flat` must have checked the operands and the config, and the groups must not be `unsuitable`.
    """
    (M, K), G, N = a.shape, offs.numel(), weights.size(1 if nk else 2)
    swizzled = [gl.NVMMASharedLayout(128, 16, rank=rank) for rank in range(4)]
    groups = config.block_m // 64
    main = 1 << (config.block_n.bit_length() - 1)  # the largest power of two
    side = config.block_n - main

    def tiles_of_b(columns: int) -> Outputs[TensorDescriptor]:
        block = [1, columns, config.block_k] if nk else [1, config.block_k, columns]
        return described(TensorDescriptor.from_tensor, weights, block, swizzled[3])

    a_desc = described(TensorDescriptor.from_tensor, a, [64, config.block_k], swizzled[2])
    b_desc, side_desc = tiles_of_b(main), tiles_of_b(side or main)
    # Two groups have room for two buffers of 64 columns each, three for one of half the main part's.
    width, buffers = (64, 2) if groups == 2 else (main // 2, 1)
    programs = worker_count(a.device)
    counter = arrivals(a.device, programs)
    out_desc = Outputs(lambda out: ragged(out, [64, width]))
    launch = Launch(
        _flat_specialized_kernel,
        (programs,),
        **launch_keywords(_flat_specialized_kernel, config, **of_groups(G), SHARED_B=shared, B_IS_NK=nk),
        NUM_PROGRAMS=programs,
        GROUPS=groups,
        BUFFERS=buffers,
        SIDE=side,
    )

    dtype, device, zero_to = a.dtype, a.device, M if zero_rest else 0

    def run(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        out = torch.empty(M, N, dtype=dtype, device=device)
        launch(a_desc(a), b_desc(b), side_desc(b), out_desc(out), out, offs, counter, zero_to, N, K)
        return out

    return run
