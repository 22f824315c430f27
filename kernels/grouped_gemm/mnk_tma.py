"""Matrix-list products by TMA, with descriptors made on the device: backend `triton_tma`.

    c_g = a_g @ b_g        a_g [M_g, K_g]   b_g [K_g, N_g]   c_g [M_g, N_g]     g = 0..G-1

The schedule is pointer.py's: all groups' tiles are numbered consecutively, and a program takes every
`num_programs`-th tile. Loads differ. A program reaching a group makes two descriptors from the table row, and the
tensor memory accelerator (TMA) reads both operands through them. It clips at the group's own edges and fills with
zeros, so the loop over K has no masks and no addresses. The output is stored through pointers, whose masks allow
for any N.

The idea is from the TMA variant in Triton's tutorial 08-grouped-gemm. It makes descriptors for the outputs too, and
takes operands in one layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.device import INTERPRETER, Device, device_of, fitted, halved
from groupbench.kernels.grouped_gemm.mnk import (
    busy,
    leading,
    offsets_of,
    require_lists,
    unit_dim,
    why_not_tma,
    with_outputs,
)
from groupbench.kernels.grouped_gemm.support import illegal_tile, worker_count
from groupbench.kernels.grouped_gemm.tile_order import super_grouped
from groupbench.kernels.launch import Launch
from groupbench.kernels.variants import Variant, first_that_runs

FIELDS = ("a_address", "b_address", "c_offset", "M", "N", "K", "lda", "ldb")  # of a row of the table, [G, 8] int64


@dataclass(frozen=True)
class MnkConfig:
    """The kernel's tile sizes and launch options."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # tile rows of a super-group, see tile_order.py


CONFIGS = {
    "large": MnkConfig(128, 256, 64, num_warps=8, num_stages=4),
    "small": MnkConfig(64, 128, 64, num_warps=4, num_stages=4),
    # IEEE fp32 runs on FMA units, which read registers.
    "fp32": MnkConfig(64, 64, 32, num_warps=4, num_stages=3),
    # The cost in Triton's interpreter depends on the number of operations, not of elements.
    "cpu": MnkConfig(32, 32, 32, num_warps=4, num_stages=1, group_m=2),
}
WAVES = 2  # of large tiles from which on they are faster: fewer bytes count for more than SMs without a tile


def illegal(config: MnkConfig, dtype: torch.dtype, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot be compiled for a GPU, or None if it can."""
    return illegal_tile(config.block_m, config.block_n, config.block_k, config.num_stages, dtype, device)


def default_config(group_a: Sequence[Tensor], group_b: Sequence[Tensor], device: Device) -> MnkConfig:
    """Return the config for a tile count, shrunk until it fits the device's shared memory."""
    dtype = group_a[0].dtype
    if device.vendor == "cpu":
        return CONFIGS["cpu"]
    large = CONFIGS["large"]
    outputs = sum(a.size(0) * b.size(1) for a, b in zip(group_a, group_b, strict=True))
    many = outputs >= WAVES * device.sms * large.block_m * large.block_n
    name = "fp32" if dtype == torch.float32 else "large" if many else "small"
    return fitted(CONFIGS[name], lambda config: illegal(config, dtype, device))


@triton.jit
def _mnk_kernel(
    table_ptr,  # [G, 8] int64, columns as in FIELDS
    c_ptr,  # the buffer of all outputs
    G,
    A_K_UNIT: tl.constexpr,  # A has unit stride along K, else along M
    B_N_UNIT: tl.constexpr,  # B has unit stride along N, else along K
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    dtype = c_ptr.dtype.element_ty
    STEP: tl.constexpr = 128 // dtype.primitive_bitwidth  # elements in 16 bytes
    tile = tl.program_id(0)
    first = 0  # number of the first tile of group g
    for g in range(G):
        row = table_ptr + g * 8
        M = tl.load(row + 3).to(tl.int32)
        N = tl.load(row + 4).to(tl.int32)
        tiles_m = tl.cdiv(M, BLOCK_M)
        tiles_n = tl.cdiv(N, BLOCK_N)
        end = first + tiles_m * tiles_n
        if tile < end:
            K = tl.load(row + 5).to(tl.int32)
            a_ptr = tl.multiple_of(tl.load(row).to(tl.pointer_type(dtype)), [16])
            b_ptr = tl.multiple_of(tl.load(row + 1).to(tl.pointer_type(dtype)), [16])
            lda = tl.multiple_of(tl.load(row + 6), [STEP])
            ldb = tl.multiple_of(tl.load(row + 7), [STEP])
            if A_K_UNIT:
                a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [lda, 1], [BLOCK_M, BLOCK_K])
            else:
                a_desc = tl.make_tensor_descriptor(a_ptr, [K, M], [lda, 1], [BLOCK_K, BLOCK_M])
            if B_N_UNIT:
                b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [ldb, 1], [BLOCK_K, BLOCK_N])
            else:
                b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [ldb, 1], [BLOCK_N, BLOCK_K])
            c_group = c_ptr + tl.multiple_of(tl.load(row + 2), [STEP])
            while tile < end:
                tile_m, tile_n = super_grouped(tile - first, tiles_m, tiles_n, GROUP_M)
                at_m = tile_m * BLOCK_M
                at_n = tile_n * BLOCK_N
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                for k in range(0, K, BLOCK_K):
                    a = a_desc.load([at_m, k]) if A_K_UNIT else a_desc.load([k, at_m]).T
                    b = b_desc.load([k, at_n]) if B_N_UNIT else b_desc.load([at_n, k]).T
                    acc = tl.dot(a, b, acc, input_precision=PRECISION)
                offs_m = at_m + tl.arange(0, BLOCK_M)
                offs_n = at_n + tl.arange(0, BLOCK_N)
                c_ptrs = c_group + offs_m[:, None].to(tl.int64) * N + offs_n[None, :]
                tl.store(c_ptrs, acc.to(dtype), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])
                tile += tl.num_programs(0)
        first = end


def prepare_mnk_tma(
    group_a: Sequence[Tensor],  # G of [M_g, K_g]
    group_b: Sequence[Tensor],  # G of [K_g, N_g]
    config: MnkConfig | None = None,
) -> Callable[[], tuple[Tensor, ...]]:  # G of [M_g, N_g], views of one buffer
    """Build the table and compile; the returned callable allocates the outputs and launches once.

    A call sets Triton's allocator to `torch.empty`, for the descriptors. Raises ValueError if groups do not fit
    together, for operands TMA cannot read (`mnk.why_not_tma`) and for a config the GPU cannot take.
    """
    require_lists(group_a, group_b)
    if reason := why_not_tma(group_a, group_b):
        raise ValueError(reason)
    device, dtype = device_of(group_a[0].device), group_a[0].dtype
    if config is not None:
        if reason := illegal(config, dtype, device):
            raise ValueError(f"{config}: {reason}")
        return _prepare_with(group_a, group_b, config)
    configs = {
        "default": default_config(group_a, group_b, device),
        "small": default_config(group_a, group_b, halved(device)),
    }
    return first_that_runs(
        "mnk_tma",
        [
            Variant(f"{name} config", partial(_prepare_with, group_a, group_b, config), None, (config, dtype))
            for name, config in configs.items()
        ],
    )


def _prepare_with(
    group_a: Sequence[Tensor], group_b: Sequence[Tensor], config: MnkConfig
) -> Callable[[], tuple[Tensor, ...]]:
    """Run `prepare_mnk_tma` for checked groups and a checked config."""
    device, dtype = group_a[0].device, group_a[0].dtype
    order = busy(group_a, group_b)
    operands = [(group_a[g], group_b[g]) for g in order]  # the table holds addresses only: the callable must own them
    a_unit, b_unit = (unit_dim(group) for group in zip(*operands, strict=True)) if operands else (1, 1)
    offsets = offsets_of(group_a, group_b)
    rows = [
        [a.data_ptr(), b.data_ptr(), offsets[g], *a.shape, b.size(1), leading(a, a_unit or 0), leading(b, b_unit or 0)]
        for g, (a, b) in zip(order, operands, strict=True)
    ]
    for row in rows:
        row[4], row[5] = row[5], row[4]  # M, N, K
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    tiles = sum(triton.cdiv(a.size(0), config.block_m) * triton.cdiv(b.size(1), config.block_n) for a, b in operands)
    launch = Launch(
        _mnk_kernel,
        (min(tiles, worker_count(device)),),
        A_K_UNIT=a_unit == 1,
        B_N_UNIT=b_unit == 1,
        PRECISION="ieee" if dtype == torch.float32 else "tf32",
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )

    def multiply(out: Tensor) -> None:
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=device))
        launch(table, out, len(operands))

    run = with_outputs(group_a, group_b, multiply if operands else None)
    if device.type == "cuda":
        run()  # compiles
    return run
