"""Matrix-list products with two-SM clusters, in CUDA C++ for Hopper: backend `cuda_cluster`.

    c_g = a_g @ b_g        a_g [M_g, K_g]   b_g [K_g, N_g]   c_g [M_g, N_g]     g = 0..G-1

Tiles and schedules are cluster.py's (tiles.cuh). Persistent programs take tiles from one flat list,
which each makes on the device from the size table. Groups with the longest sums come first, so short
tiles fill the gaps at the end.

TMA reads the operands through each group's maps, in a table the host writes once, when the problem is prepared. A
map describes its matrix exactly, so elements past an edge are zeros, and a tile list needs no masks. Outputs are
new in each call, and their maps would have to be written each time. So warps store them by themselves, 16 bytes per
thread, and rows may have any number of columns.

The kernel is in cluster_mnk.cu and tiles.cuh. Without a GPU, tests compile it but cannot run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from groupbench.kernels.cuda_source import tensor_map, why_not_nvrtc
from groupbench.kernels.device import Device, device_of
from groupbench.kernels.grouped_gemm.cluster_tiles import (
    BOX,
    DTYPES,
    LONG,
    LONGEST,
    MOST_GROUPS,
    NARROW,
    SHORT,
    THREADS,
    ClusterConfig,
    block_k,
    constants,
    illegal,
    kernel,
    launch_counters,
)
from groupbench.kernels.grouped_gemm.mnk import (
    busy,
    config_key,
    leading,
    offsets_of,
    require_lists,
    unit_dim,
    why_not_tma,
    with_outputs,
)
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal

# Lockstep is for programs that sweep over one pair of operands.
FREE = tuple(replace(tile, lockstep=0) for tile in (LONG, LONGEST))
# Few rows and columns: more programs have a tile.
SMALL = ClusterConfig(64, 64, in_turns=True, shared="rows", lockstep=0, stages=8, buffers=1)
SQUARE = ClusterConfig(128, 128, in_turns=True, shared="rows", lockstep=0, stages=6, buffers=1)


def candidates() -> list[ClusterConfig]:
    """Return the configs tuning tries."""
    return [*FREE, SHORT, NARROW, SQUARE, SMALL, *(replace(tile, group_m=4) for tile in (FREE[0], SHORT))]


@dataclass(frozen=True)
class TileTime:
    """A config's speed.

    Attributes:
        tflops: Rate within tiles, all clusters together.
        tile_us: Time per tile apart from its sums, such as for its stores.
    """

    tflops: float
    tile_us: float


# Fitted to the times of all configs for 26 lists of 2 to 20 groups on an H200 (132 SMs): the config with the shortest
# predicted time takes 1.03 times as long as the fastest one (geometric mean; at most 1.17).
TIMES = {
    FREE[0]: TileTime(820, 1.1),
    SHORT: TileTime(820, 0.4),
    NARROW: TileTime(820, 0.4),
    SQUARE: TileTime(820, 0.8),
    SMALL: TileTime(420, 1.5),
}
FITTED_CLUSTERS = 66
STEP = block_k(torch.bfloat16)


def predicted_us(sizes: Sequence[tuple[int, int, int]], config: ClusterConfig, clusters: int) -> float:
    """Return when the last tile would end: longest sums first, each on the next free cluster. Sizes are (M, N, K)."""
    time, (along_m, along_n) = TIMES[config], config.tiles_along
    rows, columns = config.rows * along_m, config.columns * along_n
    us_of_k = 2 * rows * columns * FITTED_CLUSTERS / (time.tflops * 1e6)
    ends = [0.0] * clusters
    for M, N, K in sorted(sizes, key=lambda size: -size[2]):
        each, rest = divmod(-(-M // rows) * -(-N // columns), clusters)
        us = -(-K // STEP) * STEP * us_of_k + time.tile_us
        ends = sorted(end + each * us for end in ends)
        ends[:rest] = [end + us for end in ends[:rest]]
    return max(ends)


def default_config(group_a: Sequence[Tensor], group_b: Sequence[Tensor], device: Device) -> ClusterConfig:
    """Return an untuned problem's config, which has the shortest predicted time."""
    sizes = [(a.size(0), b.size(1), a.size(1)) for a, b in zip(group_a, group_b, strict=True)]
    return min(TIMES, key=lambda config: predicted_us(sizes, config, device.sms // 2))


def choose_config(group_a: Sequence[Tensor], group_b: Sequence[Tensor], device: Device) -> ClusterConfig:
    """Return this problem's tuned config on this GPU, else the default."""
    dtype, default = group_a[0].dtype, default_config(group_a, group_b, device)
    key = config_key(group_a, group_b)
    return first_legal(configs_in_order("cluster_mnk", key, device, default, lambda c: illegal(c, dtype, device)))


def unsuitable(group_a: Sequence[Tensor], group_b: Sequence[Tensor]) -> str | None:
    """Return why the kernel cannot take these groups, or None if it can."""
    like, groups = group_a[0], len(busy(group_a, group_b))
    if like.dtype not in DTYPES:
        return f"the kernel multiplies {' or '.join(map(str, DTYPES))}, not {like.dtype}"
    if groups > MOST_GROUPS:
        return f"{groups} groups are more than {MOST_GROUPS}"
    if like.device.type != "cuda" or not device_of(like.device).hopper:
        return "the kernel needs a Hopper GPU"
    return why_not_tma(group_a, group_b) or why_not_nvrtc()


def named_constants(config: ClusterConfig, dtype: torch.dtype, a_is_mk: bool, b_is_nk: bool) -> dict[str, object]:
    """Return the kernel's constants, by name."""
    steps = {"SHORT_STEPS": int(not a_is_mk or not b_is_nk), "WARPS_STORE": 1}
    return {**constants(config, dtype, a_is_mk, b_is_nk, torch.int32), **steps}


def prepare_mnk_cluster(
    group_a: Sequence[Tensor],  # G of [M_g, K_g] in 16 bits
    group_b: Sequence[Tensor],  # G of [K_g, N_g]
    config: ClusterConfig | None = None,
) -> Callable[[], tuple[Tensor, ...]]:  # G of [M_g, N_g], views of one buffer
    """Compile the kernel and write the tables; the returned callable allocates the outputs and launches once.

    It owns the tables: keep it as long as a CUDA graph that captured a call.

    Raises ValueError if groups do not fit together, and for
    operands or a config the kernel cannot take, OSError without NVRTC.
    """
    require_lists(group_a, group_b)
    if reason := unsuitable(group_a, group_b):
        raise ValueError(reason)
    order = busy(group_a, group_b)
    if not order:
        return with_outputs(group_a, group_b, None)
    device, dtype = device_of(group_a[0].device), group_a[0].dtype
    config = config or choose_config(group_a, group_b, device)
    if reason := illegal(config, dtype, device):
        raise ValueError(f"{config}: {reason}")
    a, b = ([group[g] for g in order] for group in (group_a, group_b))
    a_is_mk, b_is_nk = unit_dim(a) == 1, unit_dim(b) == 0
    named = named_constants(config, dtype, a_is_mk, b_is_nk)
    multiply = kernel("cluster_mnk.cu", "cluster_mnk_kernel", config, named)
    offsets = offsets_of(group_a, group_b)
    sizes = [
        word
        for g, x, y in zip(order, a, b, strict=True)
        for word in (offsets[g], x.size(0) | y.size(1) << 32, x.size(1))
    ]
    where = group_a[0].device
    maps_a, maps_b = operand_maps(a, b, config)
    table = torch.tensor(sizes, dtype=torch.int64, device=where)
    grid = device.sms // 2 * 2

    bound = multiply.bind(grid, THREADS, [maps_a, maps_b, table, None, None, len(order)], (3, 4))
    # The maps and the launch hold addresses only: the callable must own the tensors.
    kept = (*a, *b, maps_a, maps_b, table)

    def launch(out: Tensor) -> None:
        bound(out.data_ptr(), launch_counters(where).data_ptr())
        assert kept

    return with_outputs(group_a, group_b, launch)


def operand_maps(
    a: Sequence[Tensor],  # of [M_g, K_g]
    b: Sequence[Tensor],  # of [K_g, N_g]
    config: ClusterConfig,
) -> tuple[Tensor, Tensor]:  # [G, 16] int64 each
    """Return the maps of the operands on the device.

    A program loads its share of the rows or columns that the tiles of the cluster share. A kernel waits for as many
    bytes as the tiles have, so it never ends with an access of another size.
    """
    along_m, along_n = config.tiles_along
    step = block_k(a[0].dtype)
    return (
        _maps(a, 1, config.rows // along_n, step // along_n),
        _maps(b, 0, config.columns // along_m, step // along_m),
    )


def _maps(matrices: Sequence[Tensor], k: int, side: int, step: int) -> Tensor:  # [G, 16] int64
    """Return each matrix's map on the device.

    k     the K dimension
    side  rows or columns per access, if K is contiguous
    step  K per access, if it is not
    """
    unit = unit_dim(matrices) or 0
    box = [BOX, side if k == unit else step]
    words = [list(tensor_map(x, [x.size(unit), x.size(1 - unit)], [leading(x, unit)], box).words) for x in matrices]
    # Unsigned numbers of 64 bits, as torch's signed ones.
    signed = [[word - (1 << 64) if word >> 63 else word for word in row] for row in words]
    return torch.tensor(signed, dtype=torch.int64, device=matrices[0].device)
