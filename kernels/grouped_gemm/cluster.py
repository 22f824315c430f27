"""Grouped GEMM in 16 bits with clusters of two SMs, in CUDA C++ for Hopper: backend `cuda_cluster`.

    out[start_g:end_g] = a[start_g:end_g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

Power limits a Hopper GPU on large products, so the kernel that moves fewer bytes and issues fewer instructions is
faster. The two programs of a cluster multiply neighbouring tiles. Each loads half of the operand that both tiles share,
and TMA multicasts it to both.

Two groups of four warps multiply. There are two schedules:

    together   the groups share a tile of 128 x 256 or 256 x 192. It reads the fewest bytes per product, which counts if
               K is long
    in turns   each group has a tile of its own, 192 x 128 or 128 x 192, and one stores while the other multiplies. That
               hides the stores, which counts if K is short, and small groups waste fewer rows

Otherwise it follows flat_specialized.py: persistent programs, one warp that loads, lockstep, serpentine order of tiles,
and a ragged TMA store, which marks the output as the first to leave L2. Each warp stores its own rows, so no group of
warps waits for its slowest. The rows at a group's end are shared out in parts of 64, and the tiles of a short last wave
are cut in two if there are clusters for all halves. Sums are added in the same order, so results are equal bit by bit.

The kernel is in cluster.cu and tiles.cuh. Without a GPU, tests compile it but cannot run it.

Sources: CUTLASS's multicast collectives (sm90_mma_tma_gmma_ss_warpspecialized) for the barriers across a cluster, and
its ping-pong kernel for groups of warps that take turns; the PTX manual. docs/notes/kernels/clusters.md has
measurements.
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
from groupbench.kernels.hopper_source import instructions

DTYPES = (torch.bfloat16, torch.float16)
MOST_GROUPS = 256  # the kernel keeps their ends in shared memory
PART, BLOCK_K = 64, 64  # rows of a part, and of K; see tiles.cuh
MOST_SUMS = 192  # of a thread
THREADS = 384
BILLION = 1 << 30  # as in triton.tools.ragged_tma
BUFFER_ROWS, BUFFER_COLUMNS = 16, 64
STATIC_BYTES = 3 * 1024  # barriers and the ends of groups


@dataclass(frozen=True)
class ClusterConfig:
    """Launch options of the cluster kernel; `illegal` decides which combinations run."""

    rows: int = 128  # of a program's tile
    columns: int = 256
    in_turns: bool = False  # each of the two groups of warps has a tile of its own, and they take turns
    shared: str = "weights"  # what the tiles of a cluster share: "weights" or "rows"
    group_m: int = 8  # tile rows of a block, those of a cluster's tile; see tile_order.serpentine
    lockstep: int = 16  # steps of K after which clusters wait for each other; 0: never
    stages: int = 4  # of operands in shared memory
    buffers: int = 2  # for the output of each warp

    @property
    def parts_each(self) -> int:
        """Parts of 64 rows that a group of warps multiplies."""
        return self.rows // (PART if self.in_turns else 2 * PART)

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory of the stages and buffers."""
        stage = (self.rows + self.columns) * BLOCK_K * 2
        return self.stages * stage + 8 * self.buffers * BUFFER_ROWS * BUFFER_COLUMNS * 2


LONG = ClusterConfig()
LONGEST = ClusterConfig(256, 192, shared="rows", stages=3, buffers=3)
SHORT = ClusterConfig(192, 128, in_turns=True, shared="rows", group_m=16, stages=5, buffers=1)
NARROW = ClusterConfig(128, 192, in_turns=True, stages=5, buffers=1)


def default_config(M: int, G: int, K: int) -> ClusterConfig:
    """Return the config of an untuned problem: tiles in turns hide the stores unless K is long."""
    few, many = M < 64 * G, M > 1024 * G
    return LONG if few or (many and K > 6144) else SHORT


def candidates() -> list[ClusterConfig]:
    """Return the configs that tuning tries."""
    orders = ((LONG, (4, 6, 8, 12)), (LONGEST, (6, 8, 12)), (SHORT, (8, 12, 16, 20)), (NARROW, (6, 8, 12)))
    return [
        *(replace(tile, group_m=group_m) for tile, most in orders for group_m in most),
        *(replace(tile, lockstep=lockstep) for tile, _ in orders for lockstep in (0, 8)),
    ]


def illegal(config: ClusterConfig, dtype: torch.dtype, device: Device) -> str | None:
    """Return why the kernel cannot run a config in a dtype on a GPU, or None if it can."""
    if not device.hopper:
        return f"its instructions are Hopper's, and this GPU is {device.arch}"
    if config.shared not in ("weights", "rows"):
        return f'a cluster shares "weights" or "rows", not {config.shared!r}'
    parts, columns = config.parts_each, config.columns
    if config.rows != parts * (1 if config.in_turns else 2) * PART or columns % 64 or not 64 <= columns <= 256:
        return f"a tile of {config.rows} x {columns} does not consist of parts of 64 rows and 64 columns"
    if parts < 1 or parts * columns // 2 > MOST_SUMS or config.rows > 256:
        return f"{parts} parts of {columns} columns do not fit in the registers of a group of warps"
    if min(config.stages, config.buffers, config.group_m) < 1:
        return "stages, buffers and group_m must be at least 1"
    shared = config.dynamic_bytes + STATIC_BYTES
    if shared > device.shared_bytes:
        return f"{config.stages} stages and {config.buffers} buffers take {shared} bytes of {device.shared_bytes}"
    return illegal_roles(config.lockstep, dtype, device)


def choose_config(M: int, G: int, N: int, K: int, dtype: torch.dtype, device: Device, nk: bool) -> ClusterConfig:
    """Return this problem's tuned config on this GPU, else the default."""
    key = tuning_key(M, G, N, K, dtype, nk)
    default = default_config(M, G, K)
    return first_legal(configs_in_order("cluster", key, device, default, lambda c: illegal(c, dtype, device)))


def source(columns: int) -> str:
    """Return the kernel in CUDA C++, for tiles of a number of columns."""
    here = Path(__file__)
    return instructions(columns) + "".join(here.with_name(name).read_text() for name in ("tiles.cuh", "cluster.cu"))


def constants(
    config: ClusterConfig, dtype: torch.dtype, nk: bool, shared: bool, offsets: torch.dtype
) -> dict[str, object]:
    """Return the constants that the source needs, by name."""
    from groupbench.kernels.grouped_gemm import lockstep

    return {
        "A_IS_MK": 1,
        "B_IS_NK": int(nk),
        "TRANSPOSE_A": 0,
        "TRANSPOSE_B": int(not nk),
        "SHARED_B": int(shared),
        "IS_BF16": int(dtype == torch.bfloat16),
        "OFFSET": "long long" if offsets == torch.int64 else "int",
        "PARTS_EACH": config.parts_each,
        "COLUMNS": config.columns,
        "TAKE_TURNS": int(config.in_turns),
        "CLUSTER_M": 2 if config.shared == "weights" else 1,
        "CLUSTER_N": 2 if config.shared == "rows" else 1,
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
    # Each program loads its share of what the cluster shares.
    by_row, by_column = (1, 2) if config.shared == "weights" else (2, 1)
    a_map = tensor_map(a, [K, M], [a.stride(0)], [BLOCK_K, config.rows // by_row])
    box = [BLOCK_K, config.columns // by_column, 1] if nk else [64, BLOCK_K // by_column, 1]
    sizes = [weights.size(2), weights.size(1), weights.size(0)]
    b_map = tensor_map(weights, sizes, [weights.stride(1), max(weights.stride(0), weights.stride(1))], box)
    # An access names the end of a group's rows and the place before it, so that the hardware drops rows past the end.
    # Each call moves the map to its output.
    out_map = tensor_map(
        a, [N, BILLION, BILLION, BILLION + 1], [N, N, (1 << 34) - N], [BUFFER_COLUMNS, BUFFER_ROWS, 1, 1]
    )
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
    cubin = _cubin(config.columns, tuple(constants(config, dtype, nk, shared, offsets).items()))
    return CudaKernel(cubin, "cluster_kernel", config.dynamic_bytes)


@cache
def _cubin(columns: int, named: tuple[tuple[str, object], ...]) -> bytes:
    return compile_cuda(source(columns), dict(named), "sm_90a")
