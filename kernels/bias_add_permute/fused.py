"""Grouped GEMM with bias, elementwise operand and permuted store in one launch: backend `triton_fused`.

    f = permute((a @ b.T + d) * e)  for each group        maths and layout: problem.py

Each of as many programs as there are SMs, times `per_sm`, takes every NUM_PROGRAMS-th tile of the tiles of all groups,
and finds the tile's group by counting the groups whose tiles end before it. A row of a table on the device (`FIELDS`)
has the group's addresses, strides and sizes: operands lie anywhere in memory, and every group has sizes of its own. The
product, the bias and the operand e meet in registers, in fp32, and are rounded once.

What bounds it is bytes, as long as K is a few hundred: with e, 4 bytes of 16-bit traffic for each 2 K operations. So:

Store. f's innermost dimension is M2, that of the rows. The address of an element is a sum of a part by row and a part
by column, so a tile may lie across any of the five dimensions; where it has M2 rows and columns of one n0, it is one
run of memory. The product is made transposed, b @ a.T, so that the rows are in registers what they are in f; the
compiler stores 16 bytes a thread along them. What takes the way through shared memory is e, which lies by columns.

Loads. A tile's e may be asked for before its product is begun (`early`), which takes registers; else another program
on the same SM has to keep the memory busy meanwhile. e is read once, and so the first that L2 drops.

Masks stand at every edge that some group has; `EVEN_*` says that none has it, and then none stands there.

Sources: the problem, Composable Kernel's example 28_grouped_gemm_bias_e_permute (see problem.py); the table of
pointers, Triton's tutorial 08-grouped-gemm; the order of tiles, its tutorial 03.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.bias_add_permute.problem import Group, require_problem
from groupbench.kernels.grouped_gemm.support import SHARED_MEMORY_BYTES, illegal_tile, worker_count
from groupbench.kernels.grouped_gemm.tile_order import super_grouped
from groupbench.kernels.grouped_gemm.tuned import problem_key, tuned_config

# One table row. Addresses are in bytes, strides in elements, f_offset in elements of the one buffer of all outputs.
FIELDS = (
    *("a_address", "b_address", "d_address", "e_address", "f_offset"),
    *("a_stride_m", "a_stride_k", "b_stride_n", "b_stride_k", "d_stride_n", "e_stride_m", "e_stride_n"),
    *("M1", "M2", "N0", "N1", "M", "N", "K", "first_tile"),
)


@dataclass(frozen=True)
class FusedConfig:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # tile rows of a super-group, see tile_order.py
    early: bool = False  # ask for e before the product
    per_sm: int = 1  # programs an SM, in turns over all tiles; 0: as many programs as tiles
    registers: int | None = None  # at most so many a thread, for room for another program; None: as ptxas likes


# For problems that nobody tuned.
CONFIGS = {
    # Two programs an SM, for which 16 warps of 128 registers leave room: one loads or multiplies while the other
    # stores. 128 columns are the example's N1, and 128 rows half of its M2: runs of 256 bytes, and the other half is
    # the next tile. 256 x 128 would read a quarter less of a and b from L2, and have nothing to do while it stores.
    "none": FusedConfig(128, 128, 64, num_warps=8, num_stages=3, per_sm=2, registers=128),
    # The same, with registers for e: 4 warps of 255.
    "operand": FusedConfig(128, 128, 64, num_warps=4, num_stages=3, per_sm=2),
    # IEEE fp32 goes through FMA units, which read registers.
    "fp32": FusedConfig(64, 64, 32, num_warps=4, num_stages=3, per_sm=2),
    # Triton's interpreter pays by operation, hardly by element.
    "cpu": FusedConfig(32, 32, 32, num_warps=4, num_stages=1, group_m=2),
    "cpu_early": FusedConfig(32, 32, 32, num_warps=4, num_stages=1, group_m=2, early=True),
}


def candidates(op: str) -> list[FusedConfig]:
    """What tuning tries for 16-bit dtypes: few enough to compile and time in a minute, and none spills (test_compile).

    An SM has 65,536 registers: 4 warps with 255 each go twice, with 168 three times, 8 warps twice with 128.
    """
    square = FusedConfig(128, 128, 64, 4, 3, per_sm=2)
    slim = FusedConfig(128, 64, 64, 4, 3, per_sm=3, registers=168)
    found = [
        square,
        replace(square, group_m=4),
        replace(square, group_m=16),
        replace(square, num_stages=2, per_sm=0),
        FusedConfig(128, 128, 64, 8, 3),
        FusedConfig(256, 128, 64, 8, 3),
        FusedConfig(256, 128, 64, 8, 3, per_sm=0),
        FusedConfig(128, 256, 64, 8, 3),
        slim,
        replace(slim, num_stages=2, per_sm=0),
    ]
    if op == "none":
        both = FusedConfig(128, 128, 64, 8, 3, per_sm=2, registers=128)
        return [*found, both, replace(both, per_sm=0)]
    early = FusedConfig(128, 128, 64, 8, 3, early=True)
    return [*found, early, replace(slim, early=True), replace(slim, early=True, num_stages=2, per_sm=0)]


def illegal(config: FusedConfig, dtype: torch.dtype) -> str | None:
    """Why a config cannot be compiled for Hopper, or None where it can."""
    reason = illegal_tile(config.block_m, config.block_n, config.block_k, config.num_stages, dtype)
    if reason is not None:
        return reason
    stages = config.num_stages * (config.block_m + config.block_n) * config.block_k * dtype.itemsize
    shared = max(stages, config.block_m * config.block_n * dtype.itemsize)  # e and the result pass where stages were
    if shared > SHARED_MEMORY_BYTES // max(config.per_sm, 1):
        return f"stages and the tile take {shared} bytes of {SHARED_MEMORY_BYTES // max(config.per_sm, 1)}"
    return None


def choose_config(groups: Sequence[Group], op: str) -> FusedConfig:
    """The tuned config of this problem on this GPU, else one by what there is to read."""
    a = groups[0].a
    if a.device.type == "cpu":
        return CONFIGS["cpu"]
    if a.dtype == torch.float32:
        return CONFIGS["fp32"]
    tuned = tuned_config("bias_add_permute", config_key(groups, op), a.device)
    if tuned is not None:
        return FusedConfig(**tuned)
    return CONFIGS["none" if op == "none" else "operand"]


def config_key(groups: Sequence[Group], op: str) -> str:
    """All groups' rows, the largest N and K; groups of other sizes, but the same sums, share a config."""
    M = sum(group.a.size(0) for group in groups)
    N, K = (max(group.b.size(dim) for group in groups) for dim in (0, 1))
    return problem_key(M, len(groups), N, K, str(groups[0].a.dtype).removeprefix("torch."), op)


@triton.jit
def _load(pointers, row_ok, column_ok, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr):
    """A tile, zero where a row or a column is none; row_ok [R, 1], column_ok [1, C]."""
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
    """No [M, N] operand is read twice."""
    if EVEN_M and EVEN_N:
        return tl.load(e_ptrs, eviction_policy="evict_first")
    else:
        return tl.load(e_ptrs, mask=m_ok & n_ok, other=0.0, eviction_policy="evict_first")


@triton.jit
def _fused_kernel(
    table_ptr,  # [G, len(FIELDS)] int64
    ends_ptr,  # [G] int32, how many tiles there are up to each group's last
    out_ptr,  # all outputs, one after the other
    tiles,  # of all groups
    OP: tl.constexpr,  # "mul", "add" or "none"
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    NUM_FIELDS: tl.constexpr,
    A_UNIT: tl.constexpr,  # a has unit stride along K in every group
    B_UNIT: tl.constexpr,  # b along K
    E_UNIT: tl.constexpr,  # e along N
    ALIGN_K: tl.constexpr,  # elements: divides K and all addresses and strides of a and b that go with it
    ALIGN_M: tl.constexpr,  # divides M2 and the outputs' offsets
    ALIGN_N: tl.constexpr,  # divides N, and addresses and strides of e
    EVEN_M: tl.constexpr,  # every M is a multiple of BLOCK_M
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EARLY: tl.constexpr,
):
    dtype = out_ptr.dtype.element_ty
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    groups = tl.arange(0, G_POW2)
    ends = tl.load(ends_ptr + groups, mask=groups < G, other=2147483647)
    offs_k = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), tiles, NUM_PROGRAMS):
        g = tl.sum((ends <= tile).to(tl.int32), 0)
        row = table_ptr + g * NUM_FIELDS
        # Values from memory carry no alignment; without these promises every access would be one element wide.
        a_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(dtype)), [ALIGN_K * SIZE])
        b_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(dtype)), [ALIGN_K * SIZE])
        d_ptr = tl.load(row + 2).to(tl.pointer_type(dtype))
        f_ptr = out_ptr + tl.multiple_of(tl.load(row + 4), [ALIGN_M])
        a_stride_m = tl.multiple_of(tl.load(row + 5), [ALIGN_K])
        b_stride_n = tl.multiple_of(tl.load(row + 7), [ALIGN_K])
        d_stride_n = tl.load(row + 9)
        M1 = tl.load(row + 12).to(tl.int32)
        M2 = tl.multiple_of(tl.load(row + 13).to(tl.int32), [ALIGN_M])
        N0 = tl.load(row + 14).to(tl.int32)
        N1 = tl.load(row + 15).to(tl.int32)
        M = tl.multiple_of(tl.load(row + 16).to(tl.int32), [ALIGN_M])
        N = tl.multiple_of(tl.load(row + 17).to(tl.int32), [ALIGN_N])
        K = tl.multiple_of(tl.load(row + 18).to(tl.int32), [ALIGN_K])
        first_tile = tl.load(row + 19).to(tl.int32)

        tile_m, tile_n = super_grouped(tile - first_tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
        offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        m_ok = (offs_m < M)[None, :]
        n_ok = (offs_n < N)[:, None]
        a_ptrs = a_ptr + offs_m[:, None] * a_stride_m  # strides are int64, and so no product overflows
        b_ptrs = b_ptr + offs_n[:, None] * b_stride_n
        if A_UNIT:
            a_ptrs += offs_k[None, :]
            a_step = tl.full((), BLOCK_K, tl.int64)
        else:
            a_stride_k = tl.load(row + 6)
            a_ptrs += offs_k[None, :] * a_stride_k
            a_step = BLOCK_K * a_stride_k
        if B_UNIT:
            b_ptrs += offs_k[None, :]
            b_step = tl.full((), BLOCK_K, tl.int64)
        else:
            b_stride_k = tl.load(row + 8)
            b_ptrs += offs_k[None, :] * b_stride_k
            b_step = BLOCK_K * b_stride_k
        if OP != "none":
            e_ptr = tl.multiple_of(tl.load(row + 3).to(tl.pointer_type(dtype)), [ALIGN_N * SIZE])
            e_stride_m = tl.multiple_of(tl.load(row + 10), [ALIGN_N])
            e_ptrs = e_ptr + (offs_m * e_stride_m)[None, :]
            if E_UNIT:
                e_ptrs += offs_n[:, None]
            else:
                e_ptrs += (offs_n * tl.load(row + 11))[:, None]
            if EARLY:
                e = _load_e(e_ptrs, m_ok, n_ok, EVEN_M, EVEN_N)

        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            k_ok = offs_k[None, :] < K - k
            a = _load(a_ptrs, (offs_m < M)[:, None], k_ok, EVEN_M, EVEN_K)
            b = _load(b_ptrs, n_ok, k_ok, EVEN_N, EVEN_K)
            acc = tl.dot(b, a.T, acc, input_precision=PRECISION)
            a_ptrs += a_step
            b_ptrs += b_step

        d = tl.load(d_ptr + offs_n * d_stride_n, mask=offs_n < N, other=0.0).to(tl.float32)
        acc += d[:, None]
        if OP != "none":
            if not EARLY:
                e = _load_e(e_ptrs, m_ok, n_ok, EVEN_M, EVEN_N)
            if OP == "mul":
                acc *= e.to(tl.float32)
            else:
                acc += e.to(tl.float32)

        slab = N1.to(tl.int64) * M2  # elements of one (m0, n0, m1)
        block_m = offs_m // M2
        from_m = block_m // M1 * (N0 * M1 * slab) + block_m % M1 * slab + offs_m % M2
        from_n = offs_n // N1 * (M1 * slab) + offs_n % N1 * M2.to(tl.int64)
        f_ptrs = f_ptr + from_m[None, :] + from_n[:, None]
        if EVEN_M and EVEN_N:
            tl.store(f_ptrs, acc.to(dtype))
        else:
            tl.store(f_ptrs, acc.to(dtype), mask=m_ok & n_ok)


def prepare_fused(
    groups: Sequence[Group],
    op: str = "mul",
    config: FusedConfig | None = None,
) -> Callable[[], tuple[Tensor, ...]]:  # G of [M0, N0, M1, N1, M2], views of one buffer
    """Build the table and compile; the callable allocates the buffer and launches once.

    Operands are read where they are at each call. Fast are unit strides along K of every a and b, and along N of every
    e, and addresses and strides that are multiples of 16 bytes; others are right. Raises ValueError where the groups do
    not fit the op, the device or each other.
    """
    require_problem(groups, op)
    config = config or choose_config(groups, op)
    first = groups[0].a
    device, dtype = first.device, first.dtype
    if reason := illegal(config, dtype):
        raise ValueError(f"{config}: {reason}")
    rows: list[list[int]] = []
    ends: list[int] = []
    offset = 0
    for group in groups:
        start = ends[-1] if ends else 0
        rows.append(_table_row(group, offset, start))
        offset += prod(group.permuted)
        (M, N), blocks = (group.a.size(0), group.b.size(0)), (config.block_m, config.block_n)
        ends.append(start + triton.cdiv(M, blocks[0]) * triton.cdiv(N, blocks[1]))
    if ends[-1] >= 2**31:
        raise ValueError(f"{ends[-1]} tiles are more than 32 bits count")
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    tile_ends = torch.tensor(ends, dtype=torch.int32, device=device)
    constants = _constants(groups, config)
    programs = ends[-1] if config.per_sm == 0 else min(ends[-1], worker_count(device, config.per_sm))
    shapes, sizes = [group.permuted for group in groups], [prod(group.permuted) for group in groups]
    # The table knows addresses only: the callable must own the operands.
    operands = tuple(groups)

    def run() -> tuple[Tensor, ...]:
        out = torch.empty(offset, dtype=dtype, device=device)
        if programs:
            _fused_kernel[(programs,)](
                table,
                tile_ends,
                out,
                ends[-1],
                OP=op,
                G=len(operands),
                G_POW2=triton.next_power_of_2(len(operands)),
                NUM_FIELDS=len(FIELDS),
                PRECISION="ieee" if dtype == torch.float32 else "tf32",
                NUM_PROGRAMS=programs,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                BLOCK_K=config.block_k,
                GROUP_M=config.group_m,
                EARLY=config.early,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                **({} if config.registers is None or device.type == "cpu" else {"maxnreg": config.registers}),
                **constants,
            )
        return tuple(part.view(shape) for part, shape in zip(out.split(sizes), shapes, strict=True))

    if device.type == "cuda":
        run()  # compiles
    return run


def _table_row(group: Group, offset: int, first_tile: int) -> list[int]:
    """One group's `FIELDS`."""
    a, b, d, e = group.a, group.b, group.d, group.e
    strides = [*a.stride(), *b.stride(), *d.stride(), *(e.stride() if e is not None else (0, 0))]
    addresses = [a.data_ptr(), b.data_ptr(), d.data_ptr(), e.data_ptr() if e is not None else 0]
    return [*addresses, offset, *strides, *group.m[1:], *group.n, a.size(0), b.size(0), a.size(1), first_tile]


def _constants(groups: Sequence[Group], config: FusedConfig) -> dict[str, int | bool]:
    """What the kernel is compiled for: where strides are 1, what divides addresses and sizes, where no edge is cut."""
    busy = [group for group in groups if prod(group.permuted)] or list(groups)
    itemsize = busy[0].a.element_size()

    def unit(matrices: Sequence[Tensor]) -> bool:
        # The stride of a dimension of one element is never used, whatever torch says it is.
        return all(x.stride(1) == 1 or x.size(1) <= 1 for x in matrices)

    def align(matrices: Sequence[Tensor]) -> int:
        of_each = (gcd(x.data_ptr() // itemsize, x.size(1), x.stride(0)) for x in matrices)
        return gcd(16 // itemsize, *of_each)

    def even(sizes: Sequence[int], block: int) -> bool:
        return all(size % block == 0 for size in sizes)

    a, b = [group.a for group in busy], [group.b for group in busy]
    e = [group.e for group in busy if group.e is not None]
    return {
        "A_UNIT": unit(a),
        "B_UNIT": unit(b),
        "E_UNIT": unit(e),
        "ALIGN_K": align([*a, *b]),
        "ALIGN_M": gcd(16 // itemsize, *(group.m[2] for group in busy)),
        "ALIGN_N": gcd(align(e), *(group.b.size(0) for group in busy)),
        "EVEN_M": even([group.a.size(0) for group in busy], config.block_m),
        "EVEN_N": even([group.b.size(0) for group in busy], config.block_n),
        "EVEN_K": even([group.a.size(1) for group in busy], config.block_k),
    }
