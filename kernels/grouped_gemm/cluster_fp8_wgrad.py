"""A grouped GEMM's weight gradient from fp8 with block-wise scales, with clusters of two SMs on Hopper.

    dW[g, n, k] = main_grad[g, n, k] + sum over g's blocks of 128 rows: scale_dc[n] scale_a[k] sum dc[m, n] a[m, k]

It has the operands of fp8_wgrad.py, which calls it, and the schedule of cluster_wgrad.py. A step is a block of 128
rows: its sums leave the tensor cores, and are multiplied by the scales of their row and column and added in fp32. That
takes two instructions for each sum of a step, about half of the time of the products. Two groups of warps share a tile
of 128 x 256, and one scales while the other multiplies.

The scales of a step come with its operands, by bulk copies into the same stage. Sums leave as 16-bit values by TMA, or
in fp32, added to `main_grad`, by the threads.

The kernel is in cluster_fp8_wgrad.cu and tiles.cuh. Without a GPU, tests compile it but cannot run it.
docs/notes/kernels/fp8.md has measurements.
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
    BUFFER_COLUMNS,
    BUFFER_ROWS,
    LONG,
    THREADS,
    ClusterConfig,
    block_k,
    constants,
    kernel,
    launch_counters,
)
from groupbench.kernels.grouped_gemm.quantize import E4M3
from groupbench.kernels.launch import Kept

DEFAULT = replace(LONG, buffers=1, lockstep=0)
_bound: Kept[Callable[..., None]] = Kept()


def scale_bytes(config: ClusterConfig) -> int:
    """Return the bytes of all stages' scales in shared memory."""
    return config.stages * (config.rows + config.columns) * 4


def illegal(config: ClusterConfig, device: Device) -> str | None:
    """Return why the kernel cannot run a config on a GPU, or None if it can."""
    if config.in_turns or config.parts_each > 1:
        return "a group of warps has 64 rows: a step's sums take registers too"
    shared = config.dynamic_bytes + scale_bytes(config) + cluster_tiles.STATIC_BYTES
    if shared > device.shared_bytes:
        return f"{config.stages} stages and {config.buffers} buffers take {shared} bytes of {device.shared_bytes}"
    return cluster_tiles.illegal(config, E4M3, device)


def unsuitable(dct: Tensor, at: Tensor, G: int, out_dtype: torch.dtype) -> str | None:
    """Return why the kernel cannot take operands [N, P] and [K, P] with G groups, or None if it can."""
    if dct.size(0) % 8 or at.size(0) % 8:
        return "N and K are not multiples of 8"
    if out_dtype not in (torch.float32, *cluster_tiles.DTYPES):
        return f"the gradient is in fp32 or 16 bits, not {out_dtype}"
    return cluster_tiles.unsuitable(at.size(0), G, dtypes=(E4M3,), a=dct, dc=at)


def named_constants(config: ClusterConfig, out_dtype: torch.dtype, offsets: torch.dtype) -> dict[str, object]:
    """Return the kernel's constants, by name."""
    return {
        **constants(config, E4M3, True, True, offsets),
        "IS_BF16": int(out_dtype != torch.float16),
        "BLOCK_SCALES": 1,
        "STORES_SUMS": int(out_dtype == torch.float32),
    }


def bind(
    dct: Tensor,  # [N, P] e4m3fn
    at: Tensor,  # [K, P] e4m3fn
    offs: Tensor,  # [G]
    out_dtype: torch.dtype,
) -> Callable[..., None]:  # of dct, scale_dc, at, scale_a, offs, main_grad or None, out [G, N, K]
    """Compile the kernel for operands like these, which are not `unsuitable`; the returned callable launches.

    `main_grad` is only for a gradient in fp32. Raises ValueError if the kernel does not fit on this GPU.
    """
    key = (dct.shape, dct.stride(), at.shape, at.stride(), offs.shape, offs.dtype, dct.get_device(), out_dtype)
    return _bound.get(key) or _bound.add(key, _bind(dct, at, offs, out_dtype))


def _bind(dct: Tensor, at: Tensor, offs: Tensor, out_dtype: torch.dtype) -> Callable[..., None]:
    config, device = DEFAULT, device_of(dct.device)
    if reason := illegal(config, device):
        raise ValueError(f"{config}: {reason}")
    (N, P), K, G = dct.shape, at.size(0), offs.numel()
    named = named_constants(config, out_dtype, offs.dtype)
    multiply = kernel("cluster_fp8_wgrad.cu", "cluster_fp8_wgrad_kernel", config, named, scale_bytes(config))
    along_m, along_n = config.tiles_along
    step = block_k(E4M3)
    dc_map = tensor_map(dct, [P, N], [dct.stride(0)], [step, config.rows // along_n])
    a_map = tensor_map(at, [P, K], [at.stride(0)], [step, config.columns // along_m])
    in_fp32 = out_dtype == torch.float32
    some = at.new_empty(8, dtype=torch.bfloat16 if in_fp32 else out_dtype)
    out_map = tensor_map(some, [K, N, G], [K, N * K], [BUFFER_COLUMNS, BUFFER_ROWS, 1])
    arguments = [dc_map, a_map, out_map, None, None, None, None, None, None, G, N, K, P // step]
    # The maps always move. A gradient in fp32 is stored without one, so there the map keeps its place.
    moving = (0, 1, 2, 3, 4, 5, 6, 7, 8) if in_fp32 else (0, 1, 2, 3, 4, 5, 7, 8)
    launch, target = multiply.bind(device.sms // 2 * 2, THREADS, arguments, moving), dct.device

    def run(
        dct: Tensor, scale_dc: Tensor, at: Tensor, scale_a: Tensor, offs: Tensor, main_grad: Tensor | None, out: Tensor
    ) -> None:
        mapped = some if in_fp32 else out
        sums = (main_grad.data_ptr() if main_grad is not None else 0, *([out.data_ptr()] if in_fp32 else []))
        launch(
            dct.data_ptr(), at.data_ptr(), mapped.data_ptr(), scale_dc.data_ptr(), scale_a.data_ptr(), *sums,
            offs.data_ptr(), launch_counters(target).data_ptr(),
        )  # fmt: skip

    return run
