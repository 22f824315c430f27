"""Gradient of a grouped GEMM's weights with specialised warps, on Hopper: wgrad.py's configs with `specialized`.

    out[g] = x[rows of g]^T @ y[rows of g]        x [M, P]   y [M, Q]   ->   out [G, P, Q]

The names, the schedules and the ragged reads are those of wgrad.py. The order of tiles within a group is
tile_order.serpentine. flat_specialized.py explains the roles. Two or three groups of four warps multiply, each 64 rows
of a tile of 128 x 256 or 192 x 256.

    load      takes the next tile; waits for an empty stage; describes the tile in shared memory at its first stage;
              requests x [64, 64] for each group of warps and y [64, 256]
    multiply  waits for a full stage; multiplies; gives back the stage before; stores the tile by quarters or halves

A tile of a group of a few hundred rows takes as long to write as to compute. Here the loads of the next tiles go on
while a tile is written. The sums leave through shared memory: by quarters through two buffers for each of two groups of
warps, by halves through one buffer for each of three. Halves need fewer synchronisations: with quarters, three groups
take 0.5 to 2 % longer.

**Tiles of 192 rows** read 22 % fewer bytes per product from L2 than those of 128. As in flat_specialized.py, three
groups of warps leave too few registers for a wgmma of 256 columns, so each step has two of 128.

The schedule decides what is gained:

    static    with `lockstep`, neighbouring programs compute neighbouring tiles, and one read of DRAM serves them
              (lockstep.py). Programs may have different numbers of steps. One that has finished adds the arrivals that
              the others still wait for.
    dynamic   without lockstep: uneven groups cost more than the reads. Steps of 32 rows waste less at a group's end.

A group without rows takes one step of zeros, since rows past its last are read as zeros.

The kernel is written in Gluon, which has no interpreter: without a GPU, tests compile it but cannot run it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import device_of
from groupbench.kernels.gluon_names import async_load, async_store, not_hopper
from groupbench.kernels.grouped_gemm import tile_order
from groupbench.kernels.grouped_gemm.gluon_tiles import (
    ROWS,
    barriers,
    get,
    halves,
    next_stage,
    put,
    ragged,
    to_ragged_indices,
)
from groupbench.kernels.grouped_gemm.lockstep import ARRIVALS, arrivals_before, keep_step
from groupbench.kernels.grouped_gemm.lockstep_counter import arrivals
from groupbench.kernels.grouped_gemm.support import worker_count
from groupbench.kernels.grouped_gemm.wgrad_config import WgradConfig
from groupbench.kernels.launch import Launch, Outputs, described

# Four numbers in shared memory describe the tile of a stage; no steps end the program.
EXPERT, ROW, COLUMN_AND_GROUPS, STEPS = (gl.constexpr(place) for place in range(4))

# A Triton function that works on numbers alone, so it is valid Gluon too.
_serpentine = gluon.jit(tile_order.serpentine.fn)


@gluon.jit
def _load(
    x_desc,
    y_desc,
    x_smem,
    y_smem,
    full,
    empty,
    described,
    offs_ptr,
    plan_ptr,
    arrivals_ptr,
    G,
    P,
    Q,
    DYNAMIC: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    GROUP_P: gl.constexpr,
    LOCKSTEP: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    stage = 0
    phase = 1
    if LOCKSTEP:
        reached = arrivals_before(arrivals_ptr, NUM_PROGRAMS)
        to_arrive = ARRIVALS + 0
        to_wait = ARRIVALS + 0
        until = LOCKSTEP
    tiles_p = gl.cdiv(P, GROUPS * ROWS)
    tiles_q = gl.cdiv(Q, BLOCK_Q)
    tiles = tiles_p * tiles_q
    item = gl.program_id(0)
    while item < G * tiles:
        g = item // tiles
        following = item + NUM_PROGRAMS
        if DYNAMIC:
            following = gl.atomic_add(plan_ptr, 1, sem="relaxed")
            g = gl.load(plan_ptr + 1 + g)
        start = gl.load(offs_ptr + g - 1, mask=g > 0, other=0).to(gl.int32)
        size = gl.load(offs_ptr + g).to(gl.int32) - start
        tile_p, tile_q = _serpentine(item % tiles, tiles_p, tiles_q, GROUP_P)
        row = tile_p * (GROUPS * ROWS)
        column = tile_q * BLOCK_Q
        groups = gl.minimum(gl.cdiv(P - row, ROWS), GROUPS)
        steps = gl.maximum(gl.cdiv(size, BLOCK_M), 1)
        for step in range(steps):
            if LOCKSTEP:
                reached, until, to_arrive, to_wait = keep_step(
                    arrivals_ptr, reached, until, to_arrive, to_wait, LOCKSTEP, NUM_PROGRAMS
                )
            mbarrier.wait(empty.index(stage), phase)
            if step == 0:
                put(described, 4 * stage + EXPERT, g)
                put(described, 4 * stage + ROW, row)
                put(described, 4 * stage + COLUMN_AND_GROUPS, column * 4 + groups)
                put(described, 4 * stage + STEPS, steps)
            ready = full.index(stage)
            for group in gl.static_range(1, GROUPS + 1):
                mbarrier.expect(
                    ready, y_desc.block_type.nbytes + group * x_desc.block_type.nbytes, pred=groups == group
                )
            billion, end, inside = to_ragged_indices(start, size, step * BLOCK_M)
            y = y_smem.index(stage)
            async_load(y_desc, [billion, end, inside, column], ready, y.reshape([1, 1, BLOCK_M, BLOCK_Q]))
            for group in gl.static_range(GROUPS):
                x = x_smem.index(stage * GROUPS + group)
                at = [billion, end, inside, row + group * ROWS]
                async_load(x_desc, at, ready, x.reshape([1, 1, BLOCK_M, ROWS]), pred=group < groups)
            stage, phase = next_stage(stage, phase, STAGES)
        item = following
    mbarrier.wait(empty.index(stage), phase)
    put(described, 4 * stage + STEPS, 0)
    mbarrier.arrive(full.index(stage), count=1)
    if LOCKSTEP:
        gl.atomic_add(arrivals_ptr, to_arrive, sem="relaxed")


@gluon.jit
def _store(out_desc, smem, PENDING: gl.constexpr, g, row, column, tile):
    """Write some columns of a group of warps' rows through `smem`.

    Args:
        PENDING: Stores that may still read other buffers.
    """
    tma.store_wait(PENDING)
    smem.store(tile.to(smem.dtype))
    fence_async_shared()
    async_store(out_desc, [g, row, column], smem.reshape([1, smem.shape[0], smem.shape[1]]))


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,  # this group of warps: 0 has the first 64 rows of a tile
    out_desc,
    x_smem,
    y_smem,
    out_smem,
    full,
    empty,
    described,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK_Q: gl.constexpr,
):
    COLUMNS: gl.constexpr = BLOCK_Q if GROUPS == 2 else BLOCK_Q // 2  # of one wgmma
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    WIDTH: gl.constexpr = out_smem.shape[2]
    BUFFERS: gl.constexpr = out_smem.shape[0] // GROUPS
    FIRST: gl.constexpr = GROUP * BUFFERS
    stage = 0
    phase = 0
    mbarrier.wait(full.index(stage), phase)
    steps = get(described, 4 * stage + STEPS)
    while steps > 0:
        g = get(described, 4 * stage + EXPERT)
        row = get(described, 4 * stage + ROW) + GROUP * ROWS
        both = get(described, 4 * stage + COLUMN_AND_GROUPS)
        column = both // 4
        if both % 4 > GROUP:
            acc = gl.zeros([ROWS, BLOCK_Q], gl.float32, MMA)
            before = 0
            for step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                x = x_smem.index(stage * GROUPS + GROUP).permute((1, 0))
                acc = warpgroup_mma(x, y_smem.index(stage), acc, use_acc=step > 0, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))  # for the step before
                mbarrier.arrive(empty.index(before), count=1, pred=step > 0)
                before = stage
                stage, phase = next_stage(stage, phase, STAGES)
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index(before), count=1)
            left, right = halves(acc)
            if BUFFERS == 1:
                _store(out_desc, out_smem.index(FIRST), 0, g, row, column, left)
                _store(out_desc, out_smem.index(FIRST), 0, g, row, column + WIDTH, right)
            else:
                first, second = halves(left)
                third, fourth = halves(right)
                _store(out_desc, out_smem.index(FIRST), 1, g, row, column, first)
                _store(out_desc, out_smem.index(FIRST + 1), 1, g, row, column + WIDTH, second)
                _store(out_desc, out_smem.index(FIRST), 1, g, row, column + 2 * WIDTH, third)
                _store(out_desc, out_smem.index(FIRST + 1), 1, g, row, column + 3 * WIDTH, fourth)
        else:
            for _step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = next_stage(stage, phase, STAGES)
        mbarrier.wait(full.index(stage), phase)
        steps = get(described, 4 * stage + STEPS)
    tma.store_wait(0)


@gluon.jit
def _wgrad_specialized_kernel(
    x_desc,  # [M, P], ragged along M, tiles [BLOCK_M, 64]
    y_desc,  # [M, Q], ragged along M, tiles [BLOCK_M, BLOCK_Q]
    out_desc,  # [G, P, Q], tiles of one group, 64 rows and a quarter or half of a tile's columns
    offs_ptr,  # [G]
    plan_ptr,  # [1 + G], see wgrad._plan_kernel; unused by the static schedule
    arrivals_ptr,  # lockstep.arrivals
    G,
    P,
    Q,
    DYNAMIC: gl.constexpr,
    NUM_PROGRAMS: gl.constexpr,
    GROUP_P: gl.constexpr,
    LOCKSTEP: gl.constexpr,  # steps between two waits; 0: none
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,  # of four warps that multiply 64 rows each: 2 or 3
):
    BLOCK_M: gl.constexpr = y_desc.block_type.shape[2]
    BLOCK_Q: gl.constexpr = y_desc.block_type.shape[3]
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * GROUPS, BLOCK_M, ROWS], SWIZZLED)
    y_smem = gl.allocate_shared_memory(y_desc.dtype, [STAGES, BLOCK_M, BLOCK_Q], SWIZZLED)
    BUFFERS: gl.constexpr = 2 if GROUPS == 2 else 1  # for each group's stores
    WIDTH: gl.constexpr = out_desc.block_type.shape[2]
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [GROUPS * BUFFERS, ROWS, WIDTH], SWIZZLED)
    described = gl.allocate_shared_memory(gl.int32, [4 * STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, empty = barriers(STAGES, 1), barriers(STAGES, GROUPS)
    # The first partition gets the registers that the others leave; flat_specialized.py says why the order differs.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, out_desc, x_smem, y_smem, out_smem, full, empty, described, STAGES, GROUPS, BLOCK_Q)),
                (_multiply, (1, out_desc, x_smem, y_smem, out_smem, full, empty, described, STAGES, GROUPS, BLOCK_Q)),
                (
                    _load,
                    (
                        x_desc, y_desc, x_smem, y_smem, full, empty, described, offs_ptr, plan_ptr, arrivals_ptr,
                        G, P, Q, DYNAMIC, NUM_PROGRAMS, GROUP_P, LOCKSTEP, STAGES, GROUPS, BLOCK_Q, BLOCK_M,
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
                        x_desc, y_desc, x_smem, y_smem, full, empty, described, offs_ptr, plan_ptr, arrivals_ptr,
                        G, P, Q, DYNAMIC, NUM_PROGRAMS, GROUP_P, LOCKSTEP, STAGES, GROUPS, BLOCK_Q, BLOCK_M,
                    ),
                ),
                (_multiply, (0, out_desc, x_smem, y_smem, out_smem, full, empty, described, STAGES, GROUPS, BLOCK_Q)),
                (_multiply, (1, out_desc, x_smem, y_smem, out_smem, full, empty, described, STAGES, GROUPS, BLOCK_Q)),
                (_multiply, (2, out_desc, x_smem, y_smem, out_smem, full, empty, described, STAGES, GROUPS, BLOCK_Q)),
            ],
            [4, 4, 4],
            [160, 160, 160],
        )  # fmt: skip


def unsuitable(device: torch.device) -> str | None:
    """Return why this kernel cannot run on a device, or None if it can."""
    return not_hopper(device_of(device))


def prepare_specialized(
    x: Tensor,  # [M, P] in 16 bits, for TMA
    y: Tensor,  # [M, Q], likewise
    offs: Tensor,  # [G]
    config: WgradConfig,  # specialized
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Make the descriptors; the returned function launches once: x, y and offs, out [G, P, Q], the schedule's plan.

    `wgrad_launcher` must have checked the operands and the config, and the device must not be `unsuitable`.
    """
    P, Q, G = x.size(1), y.size(1), offs.numel()
    groups = config.block_p // 64
    x_desc = described(ragged, x, [config.block_m, 64])
    y_desc = described(ragged, y, [config.block_m, config.block_q])
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    programs = worker_count(x.device)
    counter = arrivals(x.device, programs)
    block_out = [1, 64, config.block_q // (4 if groups == 2 else 2)]
    out_desc = Outputs(lambda out: TensorDescriptor.from_tensor(out, block_out, layout))
    launch = Launch(
        _wgrad_specialized_kernel,
        (programs,),
        **launch_keywords(_wgrad_specialized_kernel, config, NUM_PROGRAMS=programs, GROUPS=groups),
    )
    return lambda x, y, offs, out, plan: launch(x_desc(x), y_desc(y), out_desc(out), offs, plan, counter, G, P, Q)
