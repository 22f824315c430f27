"""A grouped GEMM's weight gradient with clusters of two SMs, in CUDA C++ for Hopper: backend `cuda_cluster`.

    a [M, K]   dc [M, N]   ->   db [G, K, N]        stored as [G, K, N], or as [G, N, K] if the weights are

With weights stored as [G, N, K] the operands change places, as in wgrad.py. In the kernel they are x [M, P] and y [M,
Q], and out[g] = x^T @ y. cluster_tiles.py describes the tiles and their schedules. A gradient is summed over a group's
rows, a few hundred in fine-grained experts. Then a tile takes as long to write as to compute, and warp groups in turns
hide one behind the other.

Both operands are read through maps ragged along M: rows past a group's last are read as zeros, and the last step
multiplies only the group's 16s of rows. Tiles follow each other group by group, large groups first, so small tiles fill
the gaps at the end. If some clusters start at the end of the order, small groups, whose tiles wait for stores, are
computed next to large ones, which wait for products.

The kernel is in cluster_wgrad.cu and tiles.cuh. Without a GPU, tests compile it but cannot run it.
docs/notes/kernels/clusters.md has measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from groupbench.kernels.cuda_source import tensor_map
from groupbench.kernels.device import Device, device_of
from groupbench.kernels.grouped_gemm import cluster_tiles
from groupbench.kernels.grouped_gemm.cluster_tiles import (
    BOX,
    BUFFER_COLUMNS,
    BUFFER_ROWS,
    LONG,
    LONGEST,
    NARROW,
    SHORT,
    THREADS,
    TILES,
    ClusterConfig,
    block_k,
    constants,
    illegal,
    kernel,
    launch_counters,
    predicted,
    ragged_map,
    unsuitable,
)
from groupbench.kernels.grouped_gemm.predict import gradient_us, limited_by_power
from groupbench.kernels.grouped_gemm.support import gradient_layout, require_gradient_operands, zero_gradient
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal, tuning_key


def candidates() -> list[ClusterConfig]:
    """Return the tuning candidates."""
    mixed = ((LONG, (1,)), (SHORT, (1,)), (NARROW, (1, 2, 3)))
    return [
        *cluster_tiles.candidates(),
        *(replace(tile, lockstep=0, from_end=from_end) for tile, most in mixed for from_end in most),
    ]


def predicted_us(config: ClusterConfig, M: int, G: int, P: int, Q: int, device: Device) -> float:
    """Return the predicted time in us."""
    return gradient_us(predicted(config, rest_us=1.0, rest_us_in_turns=0.7), M, G, P, Q, device)


def default_config(M: int, G: int, N: int, K: int, device: Device, nk: bool) -> ClusterConfig:
    """Return an untuned problem's config, which has the shortest predicted time."""
    if limited_by_power(M, N, K) and M > 2048 * G:
        return LONGEST
    P, Q = (N, K) if nk else (K, N)
    return min(TILES, key=lambda config: predicted_us(config, M, G, P, Q, device))


def choose_config(M: int, G: int, N: int, K: int, dtype: torch.dtype, device: Device, nk: bool) -> ClusterConfig:
    """Return this problem's tuned config on this GPU, else the default."""
    key = tuning_key(M, G, N, K, dtype, nk)
    default = default_config(M, G, N, K, device, nk)
    return first_legal(configs_in_order("cluster_wgrad", key, device, default, lambda c: illegal(c, dtype, device)))


def prepare_cluster_wgrad(
    a: Tensor,  # [M, K] in 16 bits
    dc: Tensor,  # [M, N], likewise
    offs: Tensor,  # [G], int32 or int64 end offsets
    nk: bool = False,  # the weights, and so their gradient, are stored as [G, N, K]
    config: ClusterConfig | None = None,
) -> Callable[[], Tensor]:  # [G, K, N], a transposed view with `nk`; zero for a group without rows
    """Compile the kernel and describe the operands; the returned callable allocates the output and launches once.

    The callable reads `offs` on the device and follows later changes. Rows past offs[-1] are not read. It may be called
    from any thread. Raises ValueError for unsupported operands or configs, OSError without NVRTC.
    """
    require_gradient_operands(a, dc, offs, trusted=False)
    a, dc = a.resolve_neg(), dc.resolve_neg()
    run = bind_cluster_wgrad(a, dc, offs, nk, config)
    return lambda: run(a, dc, offs)


def bind_cluster_wgrad(
    a: Tensor,  # [M, K]
    dc: Tensor,  # [M, N]
    offs: Tensor,  # [G]
    nk: bool = False,
    config: ClusterConfig | None = None,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Do as `prepare_cluster_wgrad` for checked operands; the callable takes operands like these.

    Their shapes, strides and dtypes must be equal, and their addresses multiples of 16. It may be called from any
    thread.
    """
    (M, K), N, G = a.shape, dc.size(1), offs.numel()
    x, y = (dc, a) if nk else (a, dc)
    P, Q = x.size(1), y.size(1)
    if reason := unsuitable(Q, G, a=a, dc=dc):
        raise ValueError(reason)

    if M == 0 or N == 0 or K == 0:
        return zero_gradient(G, K, N, nk)
    device = device_of(a.device)
    config = config or choose_config(M, G, N, K, a.dtype, device, nk)
    if reason := illegal(config, a.dtype, device):
        raise ValueError(f"{config}: {reason}")
    named = constants(config, a.dtype, False, False, offs.dtype)
    multiply = kernel("cluster_wgrad.cu", "cluster_wgrad_kernel", config, named)
    # Each program loads its share of the rows or columns that the tiles of the cluster share.
    along_m, along_n = config.tiles_along
    step = block_k(a.dtype)
    x_map = ragged_map(x, P, x.stride(0), [BOX, step // along_n])
    y_map = ragged_map(y, Q, y.stride(0), [BOX, step // along_m])
    # Each call moves it to its output.
    out_map = tensor_map(a, [Q, P, G], [Q, P * Q], [BUFFER_COLUMNS, BUFFER_ROWS, 1])
    arguments = [x_map, y_map, out_map, None, None, G, P, Q]
    launch = multiply.bind(device.sms // 2 * 2, THREADS, arguments, (0, 1, 2, 3, 4))
    dtype, target, (shape, strides) = a.dtype, a.device, gradient_layout(G, K, N, nk)

    def run(a: Tensor, dc: Tensor, offs: Tensor) -> Tensor:
        x, y = (dc, a) if nk else (a, dc)
        out = torch.empty_strided(shape, strides, dtype=dtype, device=target)
        counters = launch_counters(target)
        launch(x.data_ptr(), y.data_ptr(), out.data_ptr(), offs.data_ptr(), counters.data_ptr())
        return out

    return run
