"""Grouped GEMM with bias, elementwise operand and permuted store in one launch: backend `triton_fused`.

    f = permute((a @ b.T + d) * e)  for each group        maths and layout: problem.py

A program *sweeps*: it takes BLOCK_M rows in one group, looks up the group's addresses, strides and sizes in a table on
the device (`FIELDS`), and walks tiles with BLOCK_N columns. Operands may be anywhere in memory, and every group has
separate sizes. The product, the bias and the operand e meet in registers, in fp32, and are rounded once.

As long as K is a few hundred, the kernel is bound by memory: with e, it moves 4 bytes of 16-bit traffic for each 2 K
operations. The layout of f costs nothing: its stores alone run at 0.96 of the bandwidth of a fill, and with e at 0.96
of a copy's. The cost is waiting, since a tile has only two to four K steps, and about as much work after them.
Hence:

Sweeps. The software pipeline treats the loops over tiles and over K as one (`flatten`), which needs K before the outer
one begins: a tile's first loads run while the last tile is stored. A sweep reads the table once for all tiles, and
computes the divisions for rows in f once too. A sweep is as long as a program's share among the remaining tiles, at
most a whole tile row: long ones first, and short ones when the last programs wait for each other.

Store. f's innermost dimension is M2, that of the rows. An element's address is a row part plus a column part, so a tile
may extend over any of the five dimensions. If it has M2 rows and columns of one n0, it is one run of memory. The
product is computed transposed, b @ a.T, so rows in registers have f's order. The compiler then stores 16 bytes per
thread along them, and marks them for L2 to drop first, which keeps a and b there.

Loads. The tensor memory accelerator (TMA) reads a, b and e if addresses and strides allow it (`tma_reads`), through
descriptors made by a program from the table row. TMA needs no registers for addresses, and it puts e into shared
memory, from which e is read transposed. Making descriptors takes about as long as half a tile. Problems with few tiles
a program therefore load through pointers, like all operands TMA cannot read. Pointers have masks at an edge if some
group's sizes do not divide by the block; with `EVEN_*` all do, and the mask is compiled away.

Two programs run on an SM: one loads or multiplies while the other stores.

On Hopper, fused_specialized.py computes the same with specialised warps, a tenth faster, if its tiles fit and TMA can
read the operands. The kernel here runs otherwise, and always if a config is given.

Sources: the problem, Composable Kernel's example 28_grouped_gemm_bias_e_permute (see problem.py); the table of
pointers, Triton's tutorial 08-grouped-gemm; shares of the remaining work, guided self-scheduling (Polychronopoulos and
Kuck, 1987).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.bias_add_permute.plan import (
    FIELDS,
    FusedConfig,
    constants_of,
    sweeps,
    table_row,
    tiles_of,
    tma_reads,
)
from groupbench.kernels.bias_add_permute.problem import Group, require_problem
from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import INTERPRETER, Device, device_of, fitted, halved
from groupbench.kernels.grouped_gemm.support import illegal_tile, worker_count
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal, problem_key
from groupbench.kernels.launch import Launch
from groupbench.kernels.variants import Gluon, Variant, by_config, first_that_runs

# For problems without a tuned config. Percentages are of copy bandwidth, on an H100, for Composable Kernel's example in
# bf16.
CONFIGS = {
    # Two programs of 4 warps, each with up to 255 registers per thread: 78 %. 256 x 128 alone on an SM reads a quarter
    # less of a and b from L2, but computes nothing while it stores: 71 %. 128 x 64, three programs on an SM: 65 %.
    "none": FusedConfig(128, 128, 64, num_warps=4, num_stages=3, per_sm=2, tma=True),
    # e's tile is in shared memory together with the stages, which are half as long: 83 %.
    "operand": FusedConfig(128, 128, 32, num_warps=4, num_stages=4, per_sm=2, tma=True),
    # Few tiles per program, or no TMA: with 8 tiles per program 58 %, and 68 % with e; by TMA 53 % and 66 %. Half the
    # columns, since addresses and a tile of e take registers.
    "pointers": FusedConfig(128, 64, 64, num_warps=4, num_stages=3, per_sm=2),
    # IEEE fp32 runs on FMA units, which read registers.
    "fp32": FusedConfig(64, 64, 32, num_warps=4, num_stages=3, per_sm=2),
    # The cost in Triton's interpreter depends on the number of operations, not of elements.
    "cpu": FusedConfig(32, 32, 32, num_warps=4, num_stages=1),
    "cpu_tma": FusedConfig(32, 32, 32, num_warps=4, num_stages=1, tma=True),
}
TILES_FOR_TMA = 16  # per program: pointers are faster at 8 tiles, by 4 to 10 %, and TMA at 87, by 5 to 10 %


def candidates(op: str) -> list[FusedConfig]:
    """Return the 16-bit tuning candidates: they compile and run in a minute, and none spills (test_compile).

    An SM has 65,536 registers. They hold two programs of 4 warps with 255 registers per thread, three with 168, and two
    programs of 8 warps with 128.
    """
    slim = FusedConfig(128, 64, 64, 4, 2, per_sm=3, tma=True, registers=168)
    configs = [
        slim,
        replace(slim, num_warps=8, registers=80),
        FusedConfig(64, 128, 32, 4, 4, per_sm=3, tma=True, registers=168),
        CONFIGS["pointers"],
        FusedConfig(64, 64, 64, 4, 3, per_sm=3),
    ]
    if op == "none":
        best = CONFIGS["none"]
        configs += [best, replace(best, block_k=32, num_stages=6), replace(best, tma=False)]
        configs += [FusedConfig(256, 128, 64, 8, 3, tma=True)]
        return [*configs, FusedConfig(128, 128, 64, 8, 2, per_sm=2, tma=True, registers=128)]
    return [*configs, CONFIGS["operand"], replace(CONFIGS["operand"], block_k=64, num_stages=2)]


def illegal(config: FusedConfig, dtype: torch.dtype, op: str, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot be compiled for a GPU, or None if it can."""
    reason = illegal_tile(config.block_m, config.block_n, config.block_k, config.num_stages, dtype, device)
    if reason is not None:
        return reason
    buffers = device.buffers(config.num_stages)
    stages = buffers * (config.block_m + config.block_n) * config.block_k * dtype.itemsize
    tile = config.block_m * config.block_n * dtype.itemsize
    # By TMA, e takes a whole tile. The result passes through up to 8 KiB with 4 warps, 32 KiB with 8 (Triton
    # 3.7.1).
    through = tile if config.tma and op != "none" else min(tile, 8192 if config.num_warps <= 4 else 32768)
    room = device.room(config.per_sm)
    if stages + through > room:
        return f"stages and the tile take {stages + through} bytes of {room}"
    return None


def configs_for(groups: Sequence[Group], op: str, device: Device) -> list[tuple[str, FusedConfig, str | None]]:
    """Return (name, config, why it does not run here): tuned if any, default, pointers, and a small one."""
    a, reads = groups[0].a, tma_reads(groups)
    if device.vendor == "cpu":
        return [("default", CONFIGS["cpu_tma" if reads else "cpu"], None)]

    def legal(config: FusedConfig) -> str | None:
        return illegal(config, a.dtype, op, device)

    def fit(name: str) -> FusedConfig:
        return fitted(CONFIGS[name], legal)

    if a.dtype == torch.float32:
        return [("default", fit("fp32"), None)]
    config = fit("none" if op == "none" else "operand")
    many = tiles_of(groups, config) >= TILES_FOR_TMA * device.sms * config.per_sm
    default = config if many and reads else fit("pointers")

    def unfit(config: FusedConfig) -> str | None:
        return "TMA cannot read all of a, b and e" if config.tma and not reads else legal(config)

    small = fitted(CONFIGS["pointers"], lambda config: illegal(config, a.dtype, op, halved(device)))
    configs = configs_in_order("bias_add_permute", config_key(groups, op), device, default, unfit)
    return [*configs, ("pointers", fit("pointers"), None), ("small", small, None)]


def choose_config(groups: Sequence[Group], op: str, device: Device) -> FusedConfig:
    """Return this problem's tuned config on this GPU, else the default."""
    return first_legal(configs_for(groups, op, device))


def config_key(groups: Sequence[Group], op: str) -> str:
    """Return a problem's key in the files: all groups' rows, the largest N and K.

    Problems whose groups differ, but whose key is equal, share a config.
    """
    M = sum(group.a.size(0) for group in groups)
    N, K = (max(group.b.size(dim) for group in groups) for dim in (0, 1))
    return problem_key(M, len(groups), N, K, str(groups[0].a.dtype).removeprefix("torch."), op)


@triton.jit
def _load(pointers, row_ok, column_ok, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """Load a tile, with zeros past the edges; row_ok [R, 1], column_ok [1, C]."""
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(pointers)
    elif EVEN_ROWS:
        return tl.load(pointers, mask=column_ok, other=0.0)
    elif EVEN_COLUMNS:
        return tl.load(pointers, mask=row_ok, other=0.0)
    else:
        return tl.load(pointers, mask=row_ok & column_ok, other=0.0)


@triton.jit
def _load_e(e_ptrs, m_ok, n_ok, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr):
    """Load a tile of e. L2 may drop it first, since it is read only once."""
    if EVEN_M and EVEN_N:
        return tl.load(e_ptrs, eviction_policy="evict_first")
    else:
        return tl.load(e_ptrs, mask=m_ok & n_ok, other=0.0, eviction_policy="evict_first")


# Places of a row's fields: the order is that of `plan.FIELDS`. A kernel can use only globals that are constexpr.
AT_A, AT_B, AT_D, AT_E, AT_F = (tl.constexpr(place) for place in range(5))  # addresses, and the offset of the output
AT_A_STRIDE_M, AT_A_STRIDE_K, AT_B_STRIDE_N, AT_B_STRIDE_K = (tl.constexpr(place) for place in range(5, 9))
AT_D_STRIDE_N, AT_E_STRIDE_M, AT_E_STRIDE_N = (tl.constexpr(place) for place in range(9, 12))
AT_M1, AT_M2, AT_N0, AT_N1, AT_M, AT_N, AT_K = (tl.constexpr(place) for place in range(12, 19))
GROUP, FIRST_M, FIRST_N, END_N = (tl.constexpr(place) for place in range(4))  # of a sweep


@triton.jit
def _fused_kernel(  # noqa: C901 - most branches are decided when it is compiled
    table_ptr,  # [G, len(FIELDS)] int64
    sweeps_ptr,  # [programs, 4] int32: group, first row, first column, end of columns
    out_ptr,  # all outputs, one after the other
    OP: tl.constexpr,  # "mul", "add" or "none"
    NUM_FIELDS: tl.constexpr,
    TMA: tl.constexpr,  # TMA reads a, b and e
    A_UNIT: tl.constexpr,  # a has unit stride along K in every group
    B_UNIT: tl.constexpr,  # b along K
    E_UNIT: tl.constexpr,  # e along N
    ALIGN_K: tl.constexpr,  # elements: divides K and all addresses and strides of a and b that go with it
    ALIGN_M: tl.constexpr,  # divides M2 and the outputs' offsets
    ALIGN_N: tl.constexpr,  # divides N, and addresses and strides of e
    EVEN_M: tl.constexpr,  # every M is a multiple of BLOCK_M
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    WHOLE_M: tl.constexpr,  # every M2 is a multiple of BLOCK_M: the rows of a tile have one m0 and one m1
    WHOLE_N: tl.constexpr,  # every N1 is a multiple of BLOCK_N
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    sweep = sweeps_ptr + tl.program_id(0) * 4  # numbers of a sweep
    row = table_ptr + tl.load(sweep + GROUP) * NUM_FIELDS
    # The compiler does not know the alignment of values from memory: without these hints every access would be one
    # element wide.
    first_m = tl.multiple_of(tl.load(sweep + FIRST_M), [BLOCK_M])
    first_n = tl.multiple_of(tl.load(sweep + FIRST_N), [BLOCK_N])
    end_n = tl.load(sweep + END_N)
    a_ptr = tl.multiple_of(tl.load(row + AT_A).to(tl.pointer_type(dtype)), [ALIGN_K * SIZE])
    b_ptr = tl.multiple_of(tl.load(row + AT_B).to(tl.pointer_type(dtype)), [ALIGN_K * SIZE])
    d_ptr = tl.load(row + AT_D).to(tl.pointer_type(dtype))
    f_ptr = out_ptr + tl.multiple_of(tl.load(row + AT_F), [ALIGN_M])
    a_stride_m = tl.multiple_of(tl.load(row + AT_A_STRIDE_M), [ALIGN_K])
    b_stride_n = tl.multiple_of(tl.load(row + AT_B_STRIDE_N), [ALIGN_K])
    d_stride_n = tl.load(row + AT_D_STRIDE_N)
    M1 = tl.load(row + AT_M1).to(tl.int32)
    M2 = tl.multiple_of(tl.load(row + AT_M2).to(tl.int32), [ALIGN_M])
    N0 = tl.load(row + AT_N0).to(tl.int32)
    N1 = tl.load(row + AT_N1).to(tl.int32)
    M = tl.multiple_of(tl.load(row + AT_M).to(tl.int32), [ALIGN_M])
    N = tl.multiple_of(tl.load(row + AT_N).to(tl.int32), [ALIGN_N])
    K = tl.multiple_of(tl.load(row + AT_K).to(tl.int32), [ALIGN_K])
    # At least one step, of zeros if K is 0: the compiler then knows that each tile has a last step.
    steps = tl.maximum(tl.cdiv(K, BLOCK_K), 1)
    tl.assume(steps > 0)

    offs_k = tl.arange(0, BLOCK_K)
    offs_m = first_m + tl.arange(0, BLOCK_M)
    range_n = tl.arange(0, BLOCK_N)
    m_ok = (offs_m < M)[None, :]
    if TMA:
        a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [a_stride_m, 1], [BLOCK_M, BLOCK_K])
        b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [b_stride_n, 1], [BLOCK_N, BLOCK_K])
    else:
        a_ptrs = a_ptr + offs_m[:, None] * a_stride_m  # strides are int64, so products do not overflow
        b_ptrs = b_ptr + range_n[:, None] * b_stride_n
        if A_UNIT:
            a_stride_k = tl.full((), 1, tl.int64)
            a_ptrs += offs_k[None, :]
        else:
            a_stride_k = tl.load(row + AT_A_STRIDE_K)
            a_ptrs += offs_k[None, :] * a_stride_k
        if B_UNIT:
            b_stride_k = tl.full((), 1, tl.int64)
            b_ptrs += offs_k[None, :]
        else:
            b_stride_k = tl.load(row + AT_B_STRIDE_K)
            b_ptrs += offs_k[None, :] * b_stride_k
    if OP != "none":
        e_ptr = tl.multiple_of(tl.load(row + AT_E).to(tl.pointer_type(dtype)), [ALIGN_N * SIZE])
        e_stride_m = tl.multiple_of(tl.load(row + AT_E_STRIDE_M), [ALIGN_N])
        if TMA:
            e_desc = tl.make_tensor_descriptor(e_ptr, [M, N], [e_stride_m, 1], [BLOCK_M, BLOCK_N])
        else:
            e_ptrs = e_ptr + (offs_m * e_stride_m)[None, :]
            if E_UNIT:
                e_stride_n = tl.full((), 1, tl.int64)
                e_ptrs += range_n[:, None]
            else:
                e_stride_n = tl.load(row + AT_E_STRIDE_N)
                e_ptrs += (range_n * e_stride_n)[:, None]

    # Hinted again: Triton does not know that the remainder of two multiples of 8 is one too.
    slab = N1.to(tl.int64) * M2  # elements of one (m0, n0, m1); first in products of sizes, which pass 2**31
    if WHOLE_M:
        block = first_m // M2
        from_m = block // M1 * (N0 * (M1 * slab)) + block % M1 * slab + first_m % M2
        f_ptrs = f_ptr + tl.multiple_of(from_m, [ALIGN_M]) + tl.arange(0, BLOCK_M)[None, :]
    else:
        block_m = offs_m // M2
        from_m = block_m // M1 * (N0 * (M1 * slab)) + block_m % M1 * slab + offs_m % M2
        f_ptrs = f_ptr + from_m[None, :]
    if WHOLE_N:
        n1 = first_n % N1
        from_n = tl.multiple_of(first_n // N1 * (M1 * slab) + n1 * M2.to(tl.int64), [ALIGN_M])
        f_ptrs += (range_n * M2.to(tl.int64))[:, None]

    for n in tl.range(first_n, end_n, BLOCK_N, flatten=True):
        n_ok = (n + range_n < N)[:, None]
        d = tl.load(d_ptr + (n + range_n) * d_stride_n, mask=n + range_n < N, other=0.0)
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for step in range(steps):
            k = step * BLOCK_K
            if TMA:  # zeros past every edge
                a = a_desc.load([first_m, k])
                b = b_desc.load([n, k])
            else:
                k_ok = offs_k[None, :] < K - k
                a = _load(a_ptrs + k * a_stride_k, (offs_m < M)[:, None], k_ok, EVEN_M, EVEN_K)
                b = _load(b_ptrs + (n * b_stride_n + k * b_stride_k), n_ok, k_ok, EVEN_N, EVEN_K)
            acc = tl.dot(b, a.T, acc, input_precision=PRECISION)

        acc += d.to(tl.float32)[:, None]
        if OP != "none":
            if TMA:
                e = e_desc.load([first_m, n]).T
            else:
                e = _load_e(e_ptrs + n * e_stride_n, m_ok, n_ok, EVEN_M, EVEN_N)
            if OP == "mul":
                acc *= e.to(tl.float32)
            else:
                acc += e.to(tl.float32)

        if WHOLE_N:
            to_ptrs = f_ptrs + from_n
            n1 += BLOCK_N
            from_n += BLOCK_N * M2.to(tl.int64)
            from_n += tl.where(n1 >= N1, (M1 - 1) * slab, 0)  # the next n0 is M1 slabs further
            n1 = tl.where(n1 >= N1, 0, n1)
        else:
            offs_n = n + range_n
            to_ptrs = f_ptrs + (offs_n // N1 * (M1 * slab) + offs_n % N1 * M2.to(tl.int64))[:, None]
        if EVEN_M and EVEN_N:
            tl.store(to_ptrs, acc.to(dtype), cache_modifier=".cs")
        else:
            tl.store(to_ptrs, acc.to(dtype), mask=m_ok & n_ok, cache_modifier=".cs")


def prepare_fused(
    groups: Sequence[Group],
    op: str = "mul",
    config: FusedConfig | None = None,
) -> Callable[[], tuple[Tensor, ...]]:  # G of [M0, N0, M1, N1, M2], views of one buffer
    """Build the tables and compile; the returned callable allocates the buffer and launches once.

    Each call reads the operands in place. Any strides are correct. The kernel is fast if every a and b has unit stride
    along K, every e along N, and all addresses and strides are multiples of 16 bytes. If TMA reads the operands, a call
    sets Triton's allocator to `torch.empty`, for the descriptors. Without a config, Hopper runs fused_specialized.py if
    the groups fit. Raises ValueError for groups misfitting the op, the device or each other, and for an illegal config.
    """
    require_problem(groups, op)
    device, dtype = device_of(groups[0].a.device), groups[0].a.dtype
    if config is not None:
        if reason := illegal(config, dtype, op, device):
            raise ValueError(f"{config}: {reason}")
        return _prepare_with(groups, op, config)
    gluon = Gluon(f"{__package__}.fused_specialized", groups)
    variants = [Variant("specialized", partial(gluon.prepare, groups, op), gluon.why_not())]
    variants += by_config("plain, ", configs_for(groups, op, device), partial(_prepare_with, groups, op), (op, dtype))
    return first_that_runs("bias_add_permute", variants)


def _prepare_with(groups: Sequence[Group], op: str, config: FusedConfig) -> Callable[[], tuple[Tensor, ...]]:
    """Run `prepare_fused` with this file's kernel, for checked groups and config."""
    device, dtype = groups[0].a.device, groups[0].a.dtype
    shapes = [group.permuted for group in groups]
    sizes = [prod(shape) for shape in shapes]
    offsets = [0, *accumulate(sizes)]
    # The last offset is the end; no group starts there.
    rows = [table_row(group, offset) for group, offset in zip(groups, offsets, strict=False)]
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    planned = torch.tensor(
        sweeps(groups, config, worker_count(device, config.per_sm)), dtype=torch.int32, device=device
    )
    tma = config.tma and tma_reads(groups)
    constants = constants_of(groups, config)
    # The table holds addresses only: the callable must own the operands.
    operands = tuple(groups)
    launch = Launch(
        _fused_kernel,
        (len(planned),),
        OP=op,
        NUM_FIELDS=len(FIELDS),
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        **launch_keywords(_fused_kernel, config, TMA=tma),
        **({} if config.registers is None or device.type == "cpu" else {"maxnreg": config.registers}),
        **constants,
    )

    def run() -> tuple[Tensor, ...]:
        out = torch.empty(offsets[len(operands)], dtype=dtype, device=device)
        if tma:
            triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
        if len(planned):
            launch(table, planned, out)
        return tuple(part.view(shape) for part, shape in zip(out.split(sizes), shapes, strict=True))

    if device.type == "cuda":
        run()  # compiles
    return run
