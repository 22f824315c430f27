"""Grouped GEMM in 16 bits with clusters of two SMs, in CUDA C++ for Hopper: backend `cuda_cluster`.

    out[start_g:end_g] = a[start_g:end_g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

Power limits a Hopper GPU on large products, so the kernel that moves fewer bytes and issues fewer instructions is
faster. A cluster's two programs multiply neighbouring tiles. Each loads half the shared operand, and TMA multicasts it
to both.

cluster_tiles.py describes the tiles and the multiplying warp groups' schedules.

Otherwise it follows flat_specialized.py: persistent programs, one warp that loads, lockstep, serpentine order of tiles,
and a ragged TMA store, which marks the output as the first to leave L2. Each warp stores separate rows, so no warp
group waits for the slowest. The rows at a group's end are shared out in parts of 64, and the tiles of a short last wave
are cut in two if there are clusters for all halves. Sums are added in the same order, so results are equal bit by bit.

The kernel is in cluster.cu and tiles.cuh. Without a GPU, tests compile it but cannot run it.

Sources: CUTLASS's multicast collectives (sm90_mma_tma_gmma_ss_warpspecialized) for the barriers across a cluster, and
its ping-pong kernel for groups of warps that take turns; the PTX manual. docs/notes/kernels/clusters.md has
measurements.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from groupbench.kernels.cuda_source import tensor_map
from groupbench.kernels.device import Device, device_of
from groupbench.kernels.grouped_gemm import cluster_tiles
from groupbench.kernels.grouped_gemm.cluster_tiles import (
    BOX,
    BUFFER_COLUMNS,
    BUFFER_ROWS,
    LONGEST,
    THREADS,
    TILES,
    ClusterConfig,
    block_k,
    constants,
    kernel,
    launch_counters,
    predicted,
    ragged_map,
    unsuitable,
)
from groupbench.kernels.grouped_gemm.predict import limited_by_power, product_us
from groupbench.kernels.grouped_gemm.support import require_operands, stored_weights
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal, tuning_key


def illegal(config: ClusterConfig, dtype: torch.dtype, device: Device) -> str | None:
    """Return why the kernel cannot run a config in a dtype on a GPU, or None if it can."""
    if config.from_end:
        return "all tiles take as long, so from_end has no use"
    return cluster_tiles.illegal(config, dtype, device)


def predicted_us(config: ClusterConfig, M: int, G: int, N: int, K: int, device: Device) -> float:
    """Return a product's predicted time in us."""
    return product_us(predicted(config, rest_us=0.4, rest_us_in_turns=0.0), M, G, N, K, device)


def default_config(M: int, G: int, N: int, K: int, device: Device) -> ClusterConfig:
    """Return an untuned problem's config, which has the shortest predicted time. In 8 bits, K counts half."""
    if limited_by_power(M, N, K) and M > 1024 * G and K > 6144:
        return LONGEST
    return min(TILES, key=lambda config: predicted_us(config, M, G, N, K, device))


def choose_config(M: int, G: int, N: int, K: int, dtype: torch.dtype, device: Device, nk: bool) -> ClusterConfig:
    """Return this problem's tuned config on this GPU, else the default."""
    key = tuning_key(M, G, N, K, dtype, nk)
    default = default_config(M, G, N, K, device)
    return first_legal(configs_in_order("cluster", key, device, default, lambda c: illegal(c, dtype, device)))


def named_constants(
    config: ClusterConfig, dtype: torch.dtype, nk: bool, shared: bool, offsets: torch.dtype
) -> dict[str, object]:
    """Return the kernel's constants, by name."""
    return {**constants(config, dtype, True, nk, offsets), "SHARED_B": int(shared)}


def prepare_cluster(
    a: Tensor,  # [M, K] in 16 bits
    b: Tensor,  # [G, K, N]; weights stored as [G, N, K] come as a transposed view, one shared by all expanded
    offs: Tensor,  # [G], int32 or int64 end offsets
    config: ClusterConfig | None = None,
    trusted: bool = False,  # the caller vouches for shapes and offsets; checking them synchronises with the device
    zero_rest: bool = True,  # else rows past offs[-1], which may be most of them, stay uninitialised
) -> Callable[[], Tensor]:  # [M, N]; rows past offs[-1] are zero
    """Compile the kernel and describe the operands; the returned callable allocates the output and launches once.

    The callable reads `offs` on the device and follows later changes. It may be called from any thread. Raises
    ValueError for unsupported operands or configs, OSError without NVRTC.
    """
    require_operands(a, b, offs, trusted)
    a, b = a.resolve_neg(), b.resolve_neg()
    run = bind_cluster(a, b, offs, config, zero_rest)
    return lambda: run(a, b, offs)


def bind_cluster(
    a: Tensor,  # [M, K]
    b: Tensor,  # [G, K, N]
    offs: Tensor,  # [G]
    config: ClusterConfig | None = None,
    zero_rest: bool = True,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Do as `prepare_cluster` for checked operands; the callable takes operands like these.

    Their shapes, strides and dtypes must be equal, and their addresses multiples of 16. It may be called from any
    thread.
    """
    (M, K), (G, _, N) = a.shape, b.shape
    weights, nk, shared = stored_weights(b)
    if reason := unsuitable(N, G, a=a, b=weights):
        raise ValueError(reason)
    if M == 0 or N == 0 or K == 0:
        return lambda a, b, offs: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    config = config or choose_config(M, G, N, K, a.dtype, device_of(a.device), nk)
    return launcher(a, weights, nk, shared, offs, config, zero_rest=zero_rest)


def launcher(
    a: Tensor,  # [M, K]
    weights: Tensor,  # [G, N, K] if `nk`, else [G, K, N]; [1, ...] if `shared`
    nk: bool,
    shared: bool,
    offs: Tensor,  # [G]
    config: ClusterConfig,
    scales: tuple[Tensor, Tensor] | None = None,  # [M] and [G, N], of fp8
    zero_rest: bool = True,
) -> Callable[..., Tensor]:  # of a, weights, offs and the scales, if any; [M, N], in bf16 if scaled
    """Compile the kernel for checked operands; the returned callable allocates the output and launches.

    It takes operands like these. Raises ValueError for an unsupported config.
    """
    device = device_of(a.device)
    if reason := illegal(config, a.dtype, device):
        raise ValueError(f"{config}: {reason}")
    (M, K), G, N = a.shape, offs.numel(), weights.size(1 if nk else 2)
    out_dtype = torch.bfloat16 if scales else a.dtype
    named = named_constants(config, a.dtype, nk, shared, offs.dtype)
    multiply = kernel("cluster.cu", "cluster_kernel", config, named)
    # Each program loads its share of the rows or columns that the tiles of the cluster share.
    along_m, along_n = config.tiles_along
    step = block_k(a.dtype)
    a_map = tensor_map(a, [K, M], [a.stride(0)], [step, config.rows // along_n])
    box = [step, config.columns // along_m, 1] if nk else [BOX, step // along_m, 1]
    sizes = [weights.size(2), weights.size(1), weights.size(0)]
    b_map = tensor_map(weights, sizes, [weights.stride(1), max(weights.stride(0), weights.stride(1))], box)
    some = a.new_empty(BUFFER_COLUMNS, dtype=out_dtype)
    out_map = ragged_map(some, N, N, [BUFFER_COLUMNS, BUFFER_ROWS])  # each call moves it to its output
    grid = device.sms // 2 * 2
    target, zero_to = a.device, M if zero_rest else 0
    arguments = [a_map, b_map, out_map, None, None, None, None, None, G, zero_to, N, K]
    moving = (0, 1, 2, 3, *((4, 5) if scales else ()), 6, 7)
    launch = multiply.bind(grid, THREADS, arguments, moving)
    shape, strides = (M, N), (N, 1)

    def run(a: Tensor, b: Tensor, offs: Tensor, *scales: Tensor) -> Tensor:
        out = torch.empty_strided(shape, strides, dtype=out_dtype, device=target)
        to, scaled = out.data_ptr(), [scale.data_ptr() for scale in scales]
        launch(a.data_ptr(), b.data_ptr(), to, to, *scaled, offs.data_ptr(), launch_counters(target).data_ptr())
        return out

    return run
