"""Configs, constants and tensor maps for the CUDA C++ kernels computing grouped products. See tiles.cuh.

A product is out = a @ b, with a [M, K] and b [K, N] for each group. Two groups, each with four warps, multiply. There
are two schedules:

    together   the groups share a tile of 128 x 256 or 256 x 192. It reads the fewest bytes per product, which counts if
               K is long
    in turns   each group has a tile of its own, 192 x 128 or 128 x 192, and one stores while the other multiplies. That
               hides the stores, which counts if K is short, and small groups waste fewer rows

A cluster takes the next tile when it is free, so the last tiles end together even if costs differ. With lockstep,
clusters sharing operands read them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from groupbench.kernels.cuda_source import CudaKernel, TensorMap, compile_cuda, tensor_map, why_not_nvrtc
from groupbench.kernels.device import Device
from groupbench.kernels.grouped_gemm import lockstep_counter
from groupbench.kernels.grouped_gemm.predict import Tile
from groupbench.kernels.grouped_gemm.quantize import E4M3
from groupbench.kernels.grouped_gemm.support import illegal_lockstep, no_tma
from groupbench.kernels.hopper_source import instructions

DTYPES = (torch.bfloat16, torch.float16)  # of operands without scales
MOST_GROUPS = 256  # the kernels keep their ends in shared memory
PART, STEP_BYTES = 64, 128  # rows of a part, and bytes of K in a step; see tiles.cuh
BOX = 64  # rows or columns of an operand whose K is not contiguous, for one access
MOST_SUMS = 192  # of a thread
THREADS = 384
MOST_FROM_END = 7  # of eight clusters
STREAM_PER_THREAD = 2  # cudaStreamPerThread
BILLION = 1 << 30  # as in triton.tools.ragged_tma
BUFFER_ROWS, BUFFER_COLUMNS = 16, 64
STATIC_BYTES = 3 * 1024  # barriers, the plan, two numbers of each group


@dataclass(frozen=True)
class ClusterConfig:
    """The cluster kernel's launch options; `illegal` decides which combinations run."""

    rows: int = 128  # of a program's tile
    columns: int = 256
    in_turns: bool = False  # each of the two groups of warps has a tile of its own, and they take turns
    shared: str = "columns"  # by the tiles of a cluster: "columns" or "rows"
    group_m: int = 8  # tile rows of a block, those of a cluster's tile; see tile_order.serpentine
    lockstep: int = 8  # steps of K after which clusters wait for each other; 0: never
    from_end: int = 0  # how many of every eight clusters take tiles from the end of the order
    stages: int = 4  # of operands in shared memory
    buffers: int = 2  # for the output of each warp

    @property
    def parts_each(self) -> int:
        """Parts with 64 rows per warp group."""
        return self.rows // (PART if self.in_turns else 2 * PART)

    @property
    def dynamic_bytes(self) -> int:
        """Shared memory for the stages and buffers."""
        stage = (self.rows + self.columns) * STEP_BYTES
        return self.stages * stage + 8 * self.buffers * BUFFER_ROWS * BUFFER_COLUMNS * 2

    @property
    def tiles_along(self) -> tuple[int, int]:
        """A cluster's tiles along the rows and along the columns."""
        return (2, 1) if self.shared == "columns" else (1, 2)


LONG = ClusterConfig()
LONGEST = ClusterConfig(256, 192, shared="rows", stages=3, buffers=3)
SHORT = ClusterConfig(192, 128, in_turns=True, shared="rows", lockstep=0, stages=5, buffers=1)
NARROW = ClusterConfig(128, 192, in_turns=True, lockstep=0, stages=5, buffers=1)
TILES = (LONG, LONGEST, SHORT, NARROW)


def predicted(config: ClusterConfig, rest_us: float, rest_us_in_turns: float) -> Tile:
    """Return a config's tile and speed, with the time for a cluster's tile apart from products (see predict.py)."""
    along_m, along_n = config.tiles_along
    rest = rest_us_in_turns if config.in_turns else rest_us
    return Tile(config.rows * along_m, config.columns * along_n, per_sm=0.5, start_us=8.5, rest_us=rest)


def candidates() -> list[ClusterConfig]:
    """Return the tuning candidates."""
    orders = ((LONG, (8,)), (LONGEST, (8, 12)), (SHORT, (8, 16)), (NARROW, (8, 12)))
    return [
        replace(tile, group_m=group_m, lockstep=lockstep)
        for tile, most in orders
        for group_m in most
        for lockstep in (0, 8)
    ]


def illegal(config: ClusterConfig, dtype: torch.dtype, device: Device) -> str | None:
    """Return why the kernel cannot run a config in a dtype on a GPU, or None if it can."""
    if not device.hopper:
        return f"its instructions are Hopper's, and this GPU is {device.arch}"
    if config.shared not in ("columns", "rows"):
        return f'a cluster shares "columns" or "rows", not {config.shared!r}'
    parts, columns = config.parts_each, config.columns
    if config.rows != parts * (1 if config.in_turns else 2) * PART or columns % 64 or not 64 <= columns <= 256:
        return f"a tile of {config.rows} x {columns} does not consist of parts of 64 rows and 64 columns"
    if parts < 1 or parts * columns // 2 > MOST_SUMS or config.rows > 256:
        return f"{parts} parts of {columns} columns do not fit in the registers of a group of warps"
    if min(config.stages, config.buffers, config.group_m) < 1:
        return "stages, buffers and group_m must be at least 1"
    if not 0 <= config.from_end <= MOST_FROM_END:
        return f"from_end is 0 to {MOST_FROM_END}"
    shared = config.dynamic_bytes + STATIC_BYTES
    if shared > device.shared_bytes:
        return f"{config.stages} stages and {config.buffers} buffers take {shared} bytes of {device.shared_bytes}"
    if dtype not in (*DTYPES, E4M3):
        return f"the kernel multiplies float16, bfloat16 or float8_e4m3fn, not {dtype}"
    return illegal_lockstep(config.lockstep)


def block_k(dtype: torch.dtype) -> int:
    """Return K's elements per step."""
    return STEP_BYTES // dtype.itemsize


def unsuitable(columns: int, G: int, dtypes: Sequence[torch.dtype] = DTYPES, **operands: Tensor) -> str | None:
    """Return why a kernel cannot take these operands with G groups, or None if it can.

    Args:
        columns: Of the output, which has 16 bits.
        dtypes: That the kernel takes.
    """
    some = next(iter(operands.values()))
    if some.dtype not in dtypes:
        return f"the kernel multiplies {' or '.join(str(dtype) for dtype in dtypes)}, not {some.dtype}"
    if G > MOST_GROUPS:
        return f"{G} groups are more than {MOST_GROUPS}"
    if some.device.type != "cuda":
        return "the kernel needs a Hopper GPU"
    return no_tma(columns * 2 // some.element_size(), **operands) or why_not_nvrtc()


def source(name: str, columns: int) -> str:
    """Return a kernel's CUDA C++, a file in this folder, for tiles with this many columns."""
    here = Path(__file__)
    return instructions(range(BOX, columns + 1, BOX)) + "".join(
        here.with_name(file).read_text() for file in ("tiles.cuh", name)
    )


def constants(
    config: ClusterConfig, dtype: torch.dtype, a_is_mk: bool, b_is_nk: bool, offsets: torch.dtype
) -> dict[str, object]:
    """Return every kernel's constants, by name.

    Args:
        a_is_mk, b_is_nk: Whether K is contiguous in the operand.
        offsets: Dtype of the end offsets.
    """
    along_m, along_n = config.tiles_along
    return {
        "A_IS_MK": int(a_is_mk),
        "B_IS_NK": int(b_is_nk),
        "TRANSPOSE_A": int(not a_is_mk),
        "TRANSPOSE_B": int(not b_is_nk),
        "IS_BF16": int(dtype != torch.float16),
        "IS_FP8": int(dtype == E4M3),
        "OFFSET": "long long" if offsets == torch.int64 else "int",
        "PARTS_EACH": config.parts_each,
        "COLUMNS": config.columns,
        "TAKE_TURNS": int(config.in_turns),
        "CLUSTER_M": along_m,
        "CLUSTER_N": along_n,
        "GROUP_M": config.group_m,
        "LOCKSTEP": config.lockstep,
        "FROM_END": config.from_end,
        "SHORT_STEPS": int(not a_is_mk and not b_is_nk),
        "STAGES": config.stages,
        "BUFFERS": config.buffers,
        "MOST_GROUPS": MOST_GROUPS,
        "BLOCK_SCALES": 0,
        "STORES_SUMS": 0,
        "WARPS_STORE": 0,
        **{name: getattr(lockstep_counter, name) for name in ("LEAD", "ARRIVALS", "POLLS")},
    }


def kernel(
    name: str, function: str, config: ClusterConfig, named: Mapping[str, object], scale_bytes: int = 0
) -> CudaKernel:
    """Return a kernel from a file with constants, compiled once per process and loaded once per device.

    Args:
        scale_bytes: Of the scales of all stages, in shared memory.
    """
    return _kernel(name, function, config, tuple(named.items()), scale_bytes, torch.cuda.current_device())


@cache
def _kernel(
    name: str,
    function: str,
    config: ClusterConfig,
    named: tuple[tuple[str, object], ...],
    scale_bytes: int,
    device: int,
) -> CudaKernel:
    return CudaKernel(_cubin(name, config.columns, named), function, config.dynamic_bytes + scale_bytes)


@cache
def _cubin(name: str, columns: int, named: tuple[tuple[str, object], ...]) -> bytes:
    return compile_cuda(source(name, columns), dict(named), "sm_90a")


def launch_counters(device: torch.device) -> Tensor:
    """Return a launch's counters on the current stream, [2], int64: tiles, and steps for lockstep.

    They are 0 before and after a launch. Launches that may overlap must not share them: each stream has a pair, and so
    has each launch captured or on the thread's stream, a handle for many streams.
    """
    stream = current_stream(device)
    if stream == STREAM_PER_THREAD or torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int64, device=device)
    return _counters(device, stream)


def current_stream(device: torch.device) -> int:
    """Return a device's current stream handle."""
    return int(torch._C._cuda_getCurrentRawStream(device.index))


@cache
def _counters(device: torch.device, stream: int) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def ragged_map(tensor: Tensor, columns: int, stride: int, box: Sequence[int]) -> TensorMap:
    """Return the map for grouped rows: [rows, columns], `stride` elements from row to row.

    Args:
        box: Columns and rows of an access.

    An access names the end of a group's rows and the place before it: the hardware reads zeros for rows past the end
    and does not write them: (column, BILLION - rows of the group + row, end, BILLION).
    """
    sizes = [columns, BILLION, BILLION, BILLION + 1]
    return tensor_map(tensor, sizes, [stride, stride, (1 << 34) - stride], [*box, 1, 1])
