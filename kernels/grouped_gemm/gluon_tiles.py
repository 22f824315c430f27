"""Shared parts of the Gluon kernels: how roles talk in shared memory, how a tile leaves, and which rows are zero."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools import ragged_tma

from groupbench.kernels.gluon_names import async_store

# A Triton function that works on numbers alone, so it is valid Gluon too.
to_ragged_indices = gluon.jit(ragged_tma.to_ragged_indices.fn)


ROWS = gl.constexpr(64)  # of a tile, for each group of warps: the least that wgmma multiplies


@gluon.jit
def add(x, y):
    return x + y


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the stage after this one, and the barriers' phase."""
    stage += 1
    wrapped = stage == STAGES
    return gl.where(wrapped, 0, stage), phase ^ wrapped.to(gl.int32)


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return mbarriers in shared memory, each with so many arrivals per phase."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def tile_rows(offs_ptr, G: gl.constexpr, G_POW2: gl.constexpr, BLOCK_M: gl.constexpr):
    """Return every expert's tile rows, [G_POW2]."""
    experts = gl.arange(0, G_POW2, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    real = experts < G
    ends = gl.load(offs_ptr + experts, mask=real, other=0).to(gl.int32)
    starts = gl.load(offs_ptr + experts - 1, mask=real & (experts > 0), other=0).to(gl.int32)
    return gl.where(real, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)


@gluon.jit
def running_sums(counts):
    """Return inclusive sums over `counts` in shared memory, for all roles' warps."""
    sums = gl.allocate_shared_memory(gl.int32, counts.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums.store(gl.associative_scan(counts, 0, add))
    return sums


@gluon.jit
def put(numbers, at, value):
    """Write a number to shared memory [n, 1]."""
    numbers.index(at).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])))


@gluon.jit
def get(numbers, at):
    """Read a number from shared memory [n, 1]."""
    return gl.max(numbers.index(at).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def halves(x):
    """Return the left and right halves of a tile's columns."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@gluon.jit
def store_rows(out_desc, smem, PENDING: gl.constexpr, start, size, row, column, tile):
    """Write a tile through `smem` at `row` of an expert's rows; the hardware drops those past them, as in flat.py.

    Args:
        PENDING: Stores that may still read other buffers.
    """
    tma.store_wait(PENDING)
    smem.store(tile.to(smem.dtype))
    fence_async_shared()
    billion, end, inside = to_ragged_indices(start, size, row)
    async_store(out_desc, [billion, end, inside, column], smem.reshape([1, 1, smem.shape[0], smem.shape[1]]))


@gluon.jit
def zero_past(out_ptr, owned, M, N, out_stride, NUM_PROGRAMS: gl.constexpr):
    """Set rows owned..M of out [M, N] to zero, as experts.py does: they belong to no expert."""
    WIDTH: gl.constexpr = 1024
    WIDE: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    columns = gl.arange(0, WIDTH, WIDE)
    nothing = gl.zeros([WIDTH], out_ptr.dtype.element_ty, WIDE)
    for row in range(owned + gl.program_id(0), M, NUM_PROGRAMS):
        for first in range(0, N, WIDTH):
            at = out_ptr + row * out_stride.to(gl.int64) + first + columns
            gl.store(at, nothing, mask=first + columns < N)


def ragged(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Return triton.tools.ragged_tma's descriptor with Gluon's layout: each access names the row to cut off at."""
    descriptor = ragged_tma.create_ragged_descriptor(x, block)
    layout = gl.NVMMASharedLayout(min(2 * block[1], 128), 16, rank=4)
    return TensorDescriptor(x, descriptor.shape, descriptor.strides, descriptor.block_shape, layout)
