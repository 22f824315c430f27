"""Grouped GEMM in 16 bits with clusters of two SMs, in CUDA C++ for Hopper: backend `cuda_cluster`.

    out[start_g:end_g] = a[start_g:end_g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

Power limits a Hopper GPU on large products, so the kernel that moves fewer bytes is faster. The two programs of a
cluster multiply 256 rows by 256 columns, 128 rows each. Each loads its own rows and half of the weights, and TMA
multicasts that half to both: a third less traffic from L2 than with tiles of 128 x 256 alone. Each step is one wgmma of
256 columns for each 64 rows, which reads the least shared memory per product.

Otherwise it follows flat_specialized.py: persistent programs, one warp that loads and two groups of four warps that
multiply, lockstep, serpentine order of tiles, and a ragged TMA store, which marks the output as the first to leave L2.
The rows at a group's end are shared out between both programs in parts of 64, and the tiles of a short last wave are
cut in two if there are clusters for all halves. Sums are added in the same order, so results are equal bit by bit.

The kernel is in cluster.cu. Without a GPU, tests compile it but cannot run it.

Sources: CUTLASS's multicast collectives (sm90_mma_tma_gmma_ss_warpspecialized) for the barriers across a cluster; the
PTX manual. Measurements are in docs/notes/kernels/clusters.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from groupbench.kernels.cuda_source import CudaKernel, compile_cuda, move_map, tensor_map, why_not_nvrtc
from groupbench.kernels.device import Device, device_of
from groupbench.kernels.grouped_gemm.support import (
    illegal_roles,
    no_tma,
    require_operands,
    stored_weights,
)
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal, tuning_key

DTYPES = (torch.bfloat16, torch.float16)
MOST_GROUPS = 256  # the kernel keeps their ends in shared memory
ROWS, COLUMNS, BLOCK_K = 256, 256, 64  # of a cluster's tile
THREADS = 384
BILLION = 1 << 30  # as in triton.tools.ragged_tma
STAGE_BYTES = (ROWS // 2 + COLUMNS) * BLOCK_K * 2
BUFFER_BYTES = 64 * 64 * 2
STATIC_BYTES = 3 * 1024  # barriers and the ends of groups


@dataclass(frozen=True)
class ClusterConfig:
    """Launch options of the cluster kernel; `illegal` decides which combinations run."""

    group_m: int = 8  # tile rows of a block, 256 rows each; see tile_order.serpentine
    lockstep: int = 16  # steps of K after which clusters wait for each other; 0: never
    stages: int = 4  # of operands in shared memory
    buffers: int = 2  # for the output of each group of warps


DEFAULT = ClusterConfig()


def candidates() -> list[ClusterConfig]:
    """Return the configs that tuning tries."""
    orders = [replace(DEFAULT, group_m=group_m) for group_m in (4, 6, 8, 12)]
    return [*orders, *(replace(DEFAULT, lockstep=lockstep) for lockstep in (0, 8))]


def illegal(config: ClusterConfig, dtype: torch.dtype, device: Device) -> str | None:
    """Return why the kernel cannot run a config in a dtype on a GPU, or None if it can."""
    if not device.hopper:
        return f"its instructions are Hopper's, and this GPU is {device.arch}"
    shared = config.stages * STAGE_BYTES + 2 * config.buffers * BUFFER_BYTES + STATIC_BYTES
    if shared > device.shared_bytes:
        return f"{config.stages} stages and {config.buffers} buffers take {shared} bytes of {device.shared_bytes}"
    if min(config.stages, config.buffers, config.group_m) < 1:
        return "stages, buffers and group_m must be at least 1"
    return illegal_roles(config.lockstep, dtype, device)


def choose_config(M: int, G: int, N: int, K: int, dtype: torch.dtype, device: Device, nk: bool) -> ClusterConfig:
    """Return this problem's tuned config on this GPU, else the default."""
    key = tuning_key(M, G, N, K, dtype, nk)
    return first_legal(configs_in_order("cluster", key, device, DEFAULT, lambda c: illegal(c, dtype, device)))


def source() -> str:
    """Return the kernel in CUDA C++."""
    return Path(__file__).with_name("cluster.cu").read_text()


def constants(
    config: ClusterConfig, dtype: torch.dtype, nk: bool, shared: bool, offsets: torch.dtype
) -> dict[str, object]:
    """Return the constants that the source needs, by name."""
    from groupbench.kernels.grouped_gemm import lockstep

    return {
        "B_IS_NK": int(nk),
        "SHARED_B": int(shared),
        "IS_BF16": int(dtype == torch.bfloat16),
        "OFFSET": "long long" if offsets == torch.int64 else "int",
        "GROUP_M": config.group_m,
        "LOCKSTEP": config.lockstep,
        "STAGES": config.stages,
        "BUFFERS": config.buffers,
        "MOST_GROUPS": MOST_GROUPS,
        **{name: getattr(lockstep, name).value for name in ("LEAD", "ARRIVALS", "POLLS")},
    }


def prepare_cluster(
    a: Tensor,  # [M, K] in 16 bits
    b: Tensor,  # [G, K, N]; weights stored as [G, N, K] come as a transposed view, one shared by all expanded
    offs: Tensor,  # [G], int32 or int64 end offsets
    config: ClusterConfig | None = None,
    trusted: bool = False,  # the caller vouches for shapes and offsets; checking them synchronises with the device
    zero_rest: bool = True,  # else rows past offs[-1], which may be most of them, stay uninitialised
) -> Callable[[], Tensor]:  # [M, N]; rows past offs[-1] are zero
    """Compile the kernel and describe the operands; the returned callable allocates the output and launches once.

    The callable reads `offs` on the device, so it follows later changes of its values. It must not be called by two
    threads at once. Raises ValueError for operands or a config that the kernel cannot take, OSError without NVRTC.
    """
    require_operands(a, b, offs, trusted)
    (M, K), (G, _, N) = a.shape, b.shape
    weights, nk, shared = stored_weights(b)
    if reason := unsuitable(a, weights, G, N):
        raise ValueError(reason)
    if M == 0 or N == 0 or K == 0:
        return lambda: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    device = device_of(a.device)
    config = config or choose_config(M, G, N, K, a.dtype, device, nk)
    if reason := illegal(config, a.dtype, device):
        raise ValueError(f"{config}: {reason}")
    from groupbench.kernels.grouped_gemm.lockstep import arrivals

    kernel = _kernel(config, a.dtype, nk, shared, offs.dtype, torch.cuda.current_device())
    a_map = tensor_map(a, [K, M], [a.stride(0)], [BLOCK_K, ROWS // 2])
    box = [BLOCK_K, COLUMNS // 2, 1] if nk else [64, BLOCK_K, 1]
    sizes = [weights.size(2), weights.size(1), weights.size(0)]
    b_map = tensor_map(weights, sizes, [weights.stride(1), max(weights.stride(0), weights.stride(1))], box)
    # An access names the end of a group's rows and the place before it, so that the hardware drops rows past the end.
    # Each call moves the map to its output.
    out_map = tensor_map(a, [N, BILLION, BILLION, BILLION + 1], [N, N, (1 << 34) - N], [64, 64, 1, 1])
    grid = device.sms // 2 * 2
    counter = arrivals(a.device, grid // 2)
    zero_to = M if zero_rest else 0

    def run() -> Tensor:
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        move_map(out_map, out)
        kernel(grid, THREADS, [a_map, b_map, out_map, out, offs, counter, G, zero_to, N, K])
        return out

    return run


def unsuitable(a: Tensor, weights: Tensor, G: int, N: int) -> str | None:
    """Return why the kernel cannot take these operands, or None if it can."""
    if a.dtype not in DTYPES:
        return f"the kernel multiplies float16 or bfloat16, not {a.dtype}"
    if G > MOST_GROUPS:
        return f"{G} groups are more than {MOST_GROUPS}"
    if a.device.type != "cuda":
        return "the kernel needs a Hopper GPU"
    return no_tma(N, a=a, b=weights) or why_not_nvrtc()


@cache
def _kernel(
    config: ClusterConfig, dtype: torch.dtype, nk: bool, shared: bool, offsets: torch.dtype, device: int
) -> CudaKernel:
    """Return the kernel, compiled once per process and loaded once per device."""
    cubin = _cubin(tuple(constants(config, dtype, nk, shared, offsets).items()))
    dynamic = config.stages * STAGE_BYTES + 2 * config.buffers * BUFFER_BYTES
    return CudaKernel(cubin, "cluster_kernel", dynamic)


@cache
def _cubin(named: tuple[tuple[str, object], ...]) -> bytes:
    return compile_cuda(source(), dict(named), "sm_90a")
