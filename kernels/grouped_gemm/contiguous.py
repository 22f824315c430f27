"""Grouped GEMM over row blocks with one expert each: backend `triton_contiguous`.

    out[r] = a[r] @ w[e(r)].T        a [M, K]   w [E, N, K]   out [M, N]

The row space is cut into `group_size_m` rows a block, and a block names the expert for all rows. A tile fits into a
block, so it needs one weight matrix and finds it with a single load. A program takes every `num_programs`-th tile from
one flat list, in super-grouped order.

Ragged groups do not end at block borders. Preparation pads each group to whole blocks without copying the data: it
builds a row map, padded row -> row of `a` and `out`, with -1 for padding.

    group sizes 3, 0, 5;  group_size_m = 4:     block experts   0        2        2
                                                row map         0 1 2 -  3 4 5 6  7 - - -

A is loaded through the map and the result is stored through it. A padded copy would write and read all of A's rows on
every step. The map costs four bytes per row, read once per tile. These loads compute an address for every row anyway.
Padding rows load zeros and store nothing. The output is therefore dense, and padding neither produces nor receives a
NaN. If all groups fill their blocks, the kernel has no map, and the code for it is compiled away.

The weights are addressed by strides: [E, N, K] as checkpoints store them, or a transposed view on [E, K, N], both
without copies.

The design follows gpu-mode/triton-tutorials, lesson 5, by Less Wright (Meta) and Adnan Hoque (IBM). Changes: the expert
is loaded once per tile instead of in each step over K; sizes are run-time values, so a new row count needs no
compilation; strides; the row map; and a tile order that starts every column of tiles at its first row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import INTERPRETER, Device, device_of, fitted, halved
from groupbench.kernels.grouped_gemm.support import group_ends, illegal_tile, require_runnable, worker_count
from groupbench.kernels.grouped_gemm.tile_order import super_grouped
from groupbench.kernels.variants import by_config, first_that_runs


@dataclass(frozen=True)
class ContiguousConfig:
    """The contiguous kernel's tile sizes and launch options. Raises ValueError unless block_m divides group_size_m."""

    block_m: int
    block_n: int
    block_k: int
    super_group_m: int  # tile rows of a super-group, see tile_order.py
    num_warps: int
    num_stages: int
    group_size_m: int = 128  # rows of a block
    programs_per_sm: int = 1

    def __post_init__(self) -> None:
        if self.group_size_m % self.block_m:
            raise ValueError(
                f"block_m={self.block_m} must divide group_size_m={self.group_size_m}: a tile has one expert"
            )


CONFIGS = {
    # MoE dispatchers pad to 128 rows. On an H100 at 4 x 4096^3 in bf16: 0.69 ms, against 0.79 ms with
    # 128x128 tiles, and 0.70 ms with the super-groups of 32 rows of tiles that the tutorial found best.
    "cuda": ContiguousConfig(128, 256, 64, super_group_m=8, num_warps=8, num_stages=4),
    # IEEE fp32 runs on FMA units, not tensor cores. The tiles are smaller because registers hold the operands too.
    "cuda_fp32": ContiguousConfig(64, 64, 32, super_group_m=32, num_warps=4, num_stages=3),
    # The interpreter's cost depends on the number of operations, not of elements. Two tiles per block, so that tests
    # distinguish tile from block.
    "cpu": ContiguousConfig(32, 32, 32, super_group_m=2, num_warps=4, num_stages=1, group_size_m=64),
}


def illegal(config: ContiguousConfig, dtype: torch.dtype, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot be compiled for a GPU, or None if it can."""
    return illegal_tile(config.block_m, config.block_n, config.block_k, config.num_stages, dtype, device)


def default_config(device: Device, dtype: torch.dtype) -> ContiguousConfig:
    """Return the config for a dtype, shrunk until it fits the device's shared memory."""
    if device.vendor == "cpu":
        return CONFIGS["cpu"]
    config = CONFIGS["cuda_fp32" if dtype == torch.float32 else "cuda"]
    return fitted(config, lambda smaller: illegal(smaller, dtype, device))


@triton.jit
def _contiguous_kernel(
    a_ptr,  # [M, K]
    w_ptr,  # [E, N, K]
    out_ptr,  # [M, N]
    block_experts_ptr,  # [rows / GROUP_SIZE_M]
    row_map_ptr,  # [rows], or None: the identity
    rows,  # padded rows, a multiple of GROUP_SIZE_M
    N,
    K,
    stride_am,
    stride_ak,
    stride_we,
    stride_wn,
    stride_wk,
    stride_om,
    stride_block,
    HAS_MAP: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K: the loop needs no mask along K
    PRECISION: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUPER_GROUP_M: tl.constexpr,
):
    tiles_m = rows // BLOCK_M
    tiles_n = tl.cdiv(N, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        tile_m, tile_n = super_grouped(tile, tiles_m, tiles_n, SUPER_GROUP_M)
        first_row = tile_m * BLOCK_M
        expert = tl.load(block_experts_ptr + (first_row // GROUP_SIZE_M) * stride_block).to(tl.int64)

        row = first_row + tl.arange(0, BLOCK_M)
        if HAS_MAP:
            row = tl.load(row_map_ptr + row)
        # Constants fold: without a map and with an even K, the loop loads A without any mask.
        row_ok = (row >= 0) | (not HAS_MAP)
        row = row.to(tl.int64)  # row * stride passes 2**31 where M * K does
        offs_n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        n_ok = offs_n < N

        a_ptrs = a_ptr + row[:, None] * stride_am + offs_k[None, :] * stride_ak
        w_ptrs = w_ptr + expert * stride_we
        w_ptrs += offs_k[:, None] * stride_wk + offs_n[None, :] * stride_wn
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            k_ok = (offs_k < K - k) | EVEN_K
            a = tl.load(a_ptrs, mask=row_ok[:, None] & k_ok[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=k_ok[:, None] & n_ok[None, :], other=0.0)
            acc = tl.dot(a, w, acc, input_precision=PRECISION)
            a_ptrs += BLOCK_K * stride_ak
            w_ptrs += BLOCK_K * stride_wk

        out_ptrs = out_ptr + row[:, None] * stride_om + offs_n[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & n_ok[None, :])


def launch_contiguous(
    a: Tensor,  # [M, K], any strides
    w: Tensor,  # [E, N, K], any strides
    block_experts: Tensor,  # [blocks], int32 or int64, any stride
    row_map: Tensor | None,  # [blocks * group_size_m] int32, -1 for padding; None: the identity
    config: ContiguousConfig,
) -> Tensor:  # [M, N]; rows that the map does not name are left as allocated
    """Allocate the output and launch, without any checks."""
    (M, K), N = a.shape, w.size(1)
    out = torch.empty(M, N, dtype=a.dtype, device=a.device)
    rows = block_experts.numel() * config.group_size_m
    tiles = rows // config.block_m * triton.cdiv(N, config.block_n)
    if tiles == 0:
        return out
    _contiguous_kernel[(min(tiles, worker_count(a.device, config.programs_per_sm)),)](
        a,
        w,
        out,
        block_experts,
        row_map,
        rows,
        N,
        K,
        *a.stride(),
        *w.stride(),
        out.stride(0),
        block_experts.stride(0),
        HAS_MAP=row_map is not None,
        EVEN_K=K % config.block_k == 0,
        PRECISION="ieee" if a.dtype == torch.float32 else "tf32",
        **launch_keywords(_contiguous_kernel, config),
    )
    return out


def grouped_gemm_contiguous(
    a: Tensor,  # [M, K], M a multiple of group_size_m
    w: Tensor,  # [E, N, K], any strides
    expert_indices: Tensor,  # [M], int32 or int64; all rows of a block name the same expert
    config: ContiguousConfig | None = None,
) -> Tensor:  # [M, N]
    """Return every row of a times the expert's weights: the tutorial's interface.

    Only the expert index of each block's first row is read. Raises ValueError for misfitting shapes, rows not filling
    whole blocks, and unsupported operands or configs.
    """
    config = _legal(a, w, config)
    if a.ndim != 2 or w.ndim != 3 or a.size(1) != w.size(2):
        raise ValueError(f"expected a [M, K] and w [E, N, K], got {tuple(a.shape)} and {tuple(w.shape)}")
    if expert_indices.shape != (a.size(0),) or a.size(0) % config.group_size_m:
        raise ValueError(
            f"need an expert index for each of {a.size(0)} rows (got {tuple(expert_indices.shape)}), "
            f"and rows in whole blocks of group_size_m={config.group_size_m}"
        )
    return launch_contiguous(a, w, expert_indices[:: config.group_size_m], None, config)


def prepare_contiguous(
    a: Tensor,  # [M, K], any strides
    w: Tensor,  # [E, N, K], any strides
    offs: Tensor,  # [E], int32 or int64 end offsets
    config: ContiguousConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]; rows past offs[-1] are zero
    """Cut the groups into blocks; the returned callable allocates the output and launches once.

    `offs` is read here, on the host: later changes to it have no effect. Raises ValueError for unsupported operands or
    configs.
    """
    is_default, config = config is None, _legal(a, w, config)
    if not is_default:
        return _prepare_with(a, w, offs, config)
    small = default_config(halved(device_of(a.device)), a.dtype)
    configs = [("default", config, None), ("small", small, None)]
    return first_that_runs(
        "contiguous", by_config("", configs, partial(_prepare_with, a, w, offs), (a.dtype, a.device))
    )


def prepare_blocks(
    a: Tensor,  # [M, K]
    w: Tensor,  # [E, N, K], any strides
    experts: Sequence[int],  # of each block of rows
    rows: int,  # of a block, M in all
    config: ContiguousConfig | None = None,
) -> Callable[[], Tensor]:  # [M, N]
    """Return the call for rows whose blocks are of any experts, such as `block % E`: no map, no padding.

    Raises ValueError for operands, blocks or a config that the kernel cannot take.
    """
    if len(experts) * rows != a.size(0):
        raise ValueError(f"{len(experts)} blocks of {rows} rows are not the {a.size(0)} rows of a")
    config = config or default_config(device_of(a.device), a.dtype)
    config = _legal(a, w, replace(config, block_m=gcd(config.block_m, rows), group_size_m=rows))
    block_experts = torch.tensor(experts, dtype=torch.int32, device=a.device)
    return lambda: launch_contiguous(a, w, block_experts, None, config)


def _prepare_with(a: Tensor, w: Tensor, offs: Tensor, config: ContiguousConfig) -> Callable[[], Tensor]:
    """Run `prepare_contiguous` with a legal config."""
    ends = group_ends(a, w.transpose(1, 2) if w.ndim == 3 else w, offs)
    size = config.group_size_m
    experts: list[int] = []
    row_map: list[int] = []
    for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        blocks = triton.cdiv(end - start, size)
        experts += [expert] * blocks
        row_map += [*range(start, end), *[-1] * (start + blocks * size - end)]
    block_experts = torch.tensor(experts, dtype=torch.int32, device=a.device)
    padded = len(row_map) > ends[-1]
    map_on_device = torch.tensor(row_map, dtype=torch.int32, device=a.device) if padded else None

    def run() -> Tensor:
        out = launch_contiguous(a, w, block_experts, map_on_device, config)
        if ends[-1] < out.size(0):
            out[ends[-1] :].zero_()
        return out

    if a.device.type == "cuda":
        run()  # compiles
    return run


def _legal(a: Tensor, w: Tensor, config: ContiguousConfig | None) -> ContiguousConfig:
    """Return the config, or the default; raise ValueError if the kernel cannot take it or the operands."""
    require_runnable(a, w)
    device = device_of(a.device)
    config = config or default_config(device, a.dtype)
    if reason := illegal(config, a.dtype, device):
        raise ValueError(f"{config}: {reason}")
    return config
