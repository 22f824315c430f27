"""Grouped GEMM over G separate matrices, found through a pointer table: backend `triton_pointer`.

    C_g = A_g @ B_g        A_g [M_g, K_g]   B_g [K_g, N_g]   C_g [M_g, N_g]     g = 0..G-1

Every group has separate M, N and K, and matrices may be anywhere in memory, so nothing is packed or copied. A table on
the device holds one row per group. The schedule is static and made on the device. All groups' tiles are numbered
consecutively, and a program takes tile `program_id`, then every `num_programs`-th tile. It finds a tile's group by
walking the table, and never has to walk back.

Layout. A and B may have any leading dimension. The direction of unit stride is the same for all A (and for all B) and
is a compile-time constant, since the compiler can vectorise loads only along a stride that it knows to be 1. B may be
[N, K] weights seen through a transpose. The outputs follow each other in one buffer, and the table holds element
offsets into it: a call allocates once and launches once, and copies nothing to the device.

The schedule follows Triton's tutorial 08-grouped-gemm. Beyond it: masks at every edge (the tutorial takes full tiles
only), strides and transposed B, a super-grouped tile order, 64-bit addresses, alignment that is measured instead of
asserted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import INTERPRETER, Device, device_of, fitted, halved
from groupbench.kernels.grouped_gemm.mnk import require_lists
from groupbench.kernels.grouped_gemm.support import illegal_tile, worker_count
from groupbench.kernels.grouped_gemm.tile_order import super_grouped
from groupbench.kernels.launch import Launch
from groupbench.kernels.variants import by_config, first_that_runs

# One table row: 64 bytes, two memory sectors. Leading dimensions are in elements, addresses in bytes.
#
#     A address | B address | C offset | M | N | K | lda | ldb
FIELDS = tl.constexpr(8)
AT_A, AT_B, AT_C, AT_M, AT_N, AT_K, AT_LDA, AT_LDB = (tl.constexpr(place) for place in range(8))


@dataclass(frozen=True)
class PointerConfig:
    """The pointer kernels' tile sizes and launch options."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int  # tile rows of a super-group, see tile_order.py
    num_warps: int
    num_stages: int
    programs_per_sm: int = 1


CONFIGS = {
    # 128x256 with 8 warps keeps 128 accumulators per thread and reads a quarter less than 128x128 for each product. On
    # an H100 it takes 0.70 ms at 4 x 4096^3 in bf16, and 128x128 takes 0.94 ms. A fourth stage gains nothing.
    "cuda": PointerConfig(128, 256, 64, group_m=8, num_warps=8, num_stages=3),
    # IEEE fp32 runs on FMA units, not tensor cores. The tiles are smaller because registers hold the operands too.
    "cuda_fp32": PointerConfig(64, 64, 32, group_m=8, num_warps=4, num_stages=3),
    # The interpreter's cost depends on the number of operations, not of elements: large enough for few tiles, small
    # enough for ragged ones.
    "cpu": PointerConfig(32, 32, 32, group_m=2, num_warps=4, num_stages=1),
}


def illegal(config: PointerConfig, dtype: torch.dtype, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot be compiled for a GPU, or None if it can."""
    return illegal_tile(config.block_m, config.block_n, config.block_k, config.num_stages, dtype, device)


def fit(config: PointerConfig, dtype: torch.dtype, device: Device) -> PointerConfig:
    """Return the config, or the nearest one fitting the GPU's shared memory."""
    return fitted(config, lambda smaller: illegal(smaller, dtype, device))


def default_config(device: Device, dtype: torch.dtype) -> PointerConfig:
    """Return the config for a dtype, shrunk until it fits the device's shared memory."""
    if device.vendor == "cpu":
        return CONFIGS["cpu"]
    return fit(CONFIGS["cuda_fp32" if dtype == torch.float32 else "cuda"], dtype, device)


@triton.jit
def _pointer_kernel(
    table_ptr,  # [G, FIELDS] int64
    c_ptr,  # [sum(M_g * N_g)]
    G,
    A_K_UNIT: tl.constexpr,  # A has unit stride along K, else along M
    B_N_UNIT: tl.constexpr,  # B has unit stride along N, else along K
    ALIGN: tl.constexpr,  # elements: divides every address, leading dimension and size along a unit stride
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    dtype = c_ptr.dtype.element_ty
    ALIGN_BYTES: tl.constexpr = ALIGN * dtype.primitive_bitwidth // 8
    offs_k = tl.arange(0, BLOCK_K)
    tile = tl.program_id(0)
    first = 0  # number of the first tile of group g
    for g in range(G):
        row = table_ptr + g * FIELDS
        M = tl.load(row + AT_M).to(tl.int32)
        # The compiler does not know the alignment of values from memory: without these hints every load would be one
        # element wide. They include the sizes along a unit stride, since a mask that ends at an odd element splits a
        # vector.
        N = tl.multiple_of(tl.load(row + AT_N).to(tl.int32), [ALIGN])
        if not A_K_UNIT:
            M = tl.multiple_of(M, [ALIGN])
        tiles_m = tl.cdiv(M, BLOCK_M)
        tiles_n = tl.cdiv(N, BLOCK_N)
        end = first + tiles_m * tiles_n
        while tile < end:
            a_ptr = tl.multiple_of(tl.load(row + AT_A).to(tl.pointer_type(dtype)), [ALIGN_BYTES])
            b_ptr = tl.multiple_of(tl.load(row + AT_B).to(tl.pointer_type(dtype)), [ALIGN_BYTES])
            c_offset = tl.multiple_of(tl.load(row + AT_C), [ALIGN])
            K = tl.load(row + AT_K).to(tl.int32)
            if A_K_UNIT or not B_N_UNIT:
                K = tl.multiple_of(K, [ALIGN])
            lda = tl.multiple_of(tl.load(row + AT_LDA), [ALIGN])
            ldb = tl.multiple_of(tl.load(row + AT_LDB), [ALIGN])

            tile_m, tile_n = super_grouped(tile - first, tiles_m, tiles_n, GROUP_M)
            offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            m_ok = offs_m < M
            n_ok = offs_n < N
            # lda and ldb are int64, so the products below cannot overflow.
            if A_K_UNIT:
                a_ptrs = a_ptr + offs_m[:, None] * lda + offs_k[None, :]
                a_step = BLOCK_K
            else:
                a_ptrs = a_ptr + offs_m[:, None] + offs_k[None, :] * lda
                a_step = BLOCK_K * lda
            if B_N_UNIT:
                b_ptrs = b_ptr + offs_k[:, None] * ldb + offs_n[None, :]
                b_step = BLOCK_K * ldb
            else:
                b_ptrs = b_ptr + offs_k[:, None] + offs_n[None, :] * ldb
                b_step = BLOCK_K

            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for k in range(0, K, BLOCK_K):
                # The K tail must be zero on both sides: memory past it may be NaN, and 0 * NaN is NaN.
                k_ok = offs_k < K - k
                a = tl.load(a_ptrs, mask=m_ok[:, None] & k_ok[None, :], other=0.0)
                b = tl.load(b_ptrs, mask=k_ok[:, None] & n_ok[None, :], other=0.0)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
                a_ptrs += a_step
                b_ptrs += b_step

            c_ptrs = c_ptr + c_offset + offs_m[:, None].to(tl.int64) * N + offs_n[None, :]
            tl.store(c_ptrs, acc.to(dtype), mask=m_ok[:, None] & n_ok[None, :])
            tile += tl.num_programs(0)
        first = end


def prepare_pointer(
    group_a: Sequence[Tensor],  # G of [M_g, K_g]
    group_b: Sequence[Tensor],  # G of [K_g, N_g]
    config: PointerConfig | None = None,
) -> Callable[[], list[Tensor]]:  # G of [M_g, N_g], views of one buffer
    """Build the table and compile; the returned callable allocates the output buffer and launches once.

    Raises ValueError for misfitting groups, and for unsupported operands or configs.
    """
    run = _prepare(group_a, group_b, config)
    shapes = [(a.size(0), b.size(1)) for a, b in zip(group_a, group_b, strict=True)]
    numels = [m * n for m, n in shapes]
    return lambda: [c.view(shape) for c, shape in zip(run().split(numels), shapes, strict=True)]


def prepare_pointer_packed(
    group_a: Sequence[Tensor],  # G of [M_g, K_g]
    group_b: Sequence[Tensor],  # G of [K_g, N], one N for all
    config: PointerConfig | None = None,
) -> Callable[[], Tensor]:  # [sum(M_g), N]
    """Run `prepare_pointer` for groups with equal N; their outputs are one matrix's rows.

    Raises ValueError as `prepare_pointer` does, and if N differs between groups.
    """
    run = _prepare(group_a, group_b, config)
    columns = {b.size(1) for b in group_b}
    if len(columns) > 1:
        raise ValueError(f"a packed output needs one N for all groups, got {sorted(columns)}")
    shape = (sum(a.size(0) for a in group_a), columns.pop())
    return lambda: run().view(shape)


def _prepare(
    group_a: Sequence[Tensor], group_b: Sequence[Tensor], config: PointerConfig | None
) -> Callable[[], Tensor]:  # [sum(M_g * N_g)]
    """Check the operands; the returned callable computes all groups, one after another in a flat tensor."""
    require_lists(group_a, group_b)
    device, dtype = group_a[0].device, group_a[0].dtype
    facts = device_of(device)
    if config is not None:
        if reason := illegal(config, dtype, facts):
            raise ValueError(f"{config}: {reason}")
        return _prepare_with(group_a, group_b, config)
    configs = [(name, default_config(of, dtype), None) for name, of in (("default", facts), ("small", halved(facts)))]
    variants = by_config("", configs, partial(_prepare_with, group_a, group_b), (dtype, device))
    return first_that_runs("pointer", variants)


def _prepare_with(group_a: Sequence[Tensor], group_b: Sequence[Tensor], config: PointerConfig) -> Callable[[], Tensor]:
    """Run `_prepare` for checked groups and config."""
    device, dtype = group_a[0].device, group_a[0].dtype
    matrices_a, a_k_unit = _one_direction(group_a)
    matrices_b, b_n_unit = _one_direction(group_b)
    rows: list[list[int]] = []
    total, tiles, align = 0, 0, 16 // dtype.itemsize
    for a, b in zip(matrices_a, matrices_b, strict=True):
        m, k = a.shape
        n = b.size(1)
        lda, ldb = a.stride(0 if a_k_unit else 1), b.stride(0 if b_n_unit else 1)
        rows.append([a.data_ptr(), b.data_ptr(), total, m, n, k, lda, ldb])
        align = gcd(align, n, lda, ldb, a.data_ptr() // dtype.itemsize, b.data_ptr() // dtype.itemsize)
        align = gcd(align, 0 if a_k_unit else m, k if a_k_unit or not b_n_unit else 0)  # gcd(x, 0) is x
        total += m * n
        tiles += triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    # The table holds addresses only: the callable must own the matrices, and any copies made for their layout.
    operands = list(zip(matrices_a, matrices_b, strict=True))
    grid = (min(tiles, worker_count(device, config.programs_per_sm)),)
    launch = Launch(
        _pointer_kernel,
        grid,
        A_K_UNIT=a_k_unit,
        B_N_UNIT=b_n_unit,
        ALIGN=align,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        **launch_keywords(_pointer_kernel, config),
    )

    def run() -> Tensor:
        out = torch.empty(total, dtype=dtype, device=device)
        if tiles:
            launch(table, out, len(operands))
        return out

    if device.type == "cuda":
        run()  # compiles
    return run


def _one_direction(matrices: Sequence[Tensor]) -> tuple[list[Tensor], bool]:
    """Return the matrices with unit stride along one dimension, and whether that is dimension 1; copy if need be."""
    for dim in (1, 0):
        # The stride of a dimension of one element is never used, so its value does not matter.
        if all(matrix.stride(dim) == 1 or matrix.size(dim) <= 1 for matrix in matrices):
            return list(matrices), dim == 1
    return [matrix.contiguous() for matrix in matrices], True
