"""The config for four-bit weights on Hopper: the legal ones, and an untuned problem's.

With up to about 24 rows per expert, memory limits the kernel, and the config follows the rows: on 104 problems, it took
1.03 times as long as the fastest of 34. With more rows, it has the shortest predicted time:

    time = hypot(columns of an SM * (K * (unpack + rows * product) + rows * rest), traffic / bandwidth)

A tile's weights are unpacked once, whatever its rows, so it should hold an expert's rows, and an expert's last tile
should not be mostly empty. Fitted to 196 problems on an H200 (2026-12-01; seven weight shapes in three formats, means
of 26 to 1,500 rows, with the time of each of 80 configs). The predicted config takes 1.02 to 1.04 times as long as the
fastest (geometric means by kind of product; at most 1.27). Held-out halves: 1.02 to 1.05.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import triton

from groupbench.kernels.device import KNOWN, Device
from groupbench.kernels.four_bit.formats import Weights
from groupbench.kernels.four_bit.layout import BLOCK_N, Blocks
from groupbench.kernels.grouped_gemm.predict import BANDWIDTH, tiles_of_rows
from groupbench.kernels.grouped_gemm.support import fits
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal, problem_key

OTHER_BYTES = 1536  # of shared memory: barriers, tables, alignment
MOST_WORKERS = 8  # on an SM
MOST_THREADS = 1024  # of a program, in CUDA
MOST_FEW = 64  # rows of activations that are loaded by eights
MOST_SUMS = {2: 128, 3: 96}  # of a thread, for workers that have an SM to themselves and claim registers
K_BYTES = 128  # of a block's activations
OF_FEW_ROWS = (  # blocks, depth, stages, per_sm, workers
    (1, 4, 4, 2, 2), (1, 4, 3, 2, 2), (1, 4, 2, 3, 2), (1, 4, 2, 2, 2), (1, 3, 4, 2, 2), (2, 4, 2, 2, 2),
    (1, 2, 5, 2, 2), (1, 5, 3, 2, 2), (1, 5, 2, 3, 2), (1, 5, 2, 2, 2), (1, 4, 2, 2, 3), (1, 5, 2, 2, 3),
    (1, 4, 4, 1, 4), (1, 8, 2, 1, 4), (2, 4, 2, 1, 4), (1, 2, 5, 1, 4), (1, 4, 3, 1, 6),
)  # fmt: skip


@dataclass(frozen=True)
class HopperConfig:
    """The kernel's launch options; `illegal` decides which combinations run."""

    rows: int  # of activations in a tile
    blocks: int = 1  # of 64 rows of weights for each group of warps
    depth: int = 1  # blocks along K in a stage
    stages: int = 6
    per_sm: int = 1
    workers: int = 2  # groups of four warps that multiply
    group_m: int = 8  # tile rows of a block; see tile_order.serpentine

    @property
    def threads(self) -> int:
        """A program's threads; alone on an SM, four warps give up registers to those multiplying."""
        return self.workers * 128 + (128 if self.per_sm == 1 and self.workers in (2, 3) else 32)

    def stage_bytes(self, w: Blocks) -> int:
        """A stage's shared memory."""
        used = self.depth * (self.rows * K_BYTES + self.workers * self.blocks * w.blocks.size(-1))
        return -(-used // 1024) * 1024

    def dynamic_bytes(self, w: Blocks) -> int:
        """Shared memory for stages and buffers."""
        buffers = self.workers * (1 if self.per_sm > 1 else 2)
        return self.stages * self.stage_bytes(w) + buffers * min(self.rows, 16) * 128


# The fastest for their rows, with up to 16 and 32 rows and with more.
FEW_ROWS = (
    HopperConfig(16, depth=5, stages=2, per_sm=3, group_m=1), HopperConfig(32, depth=4, stages=3, per_sm=2, group_m=1),
)  # fmt: skip
FEW_ROWS_FP8 = tuple(HopperConfig(rows, depth=4, stages=2, workers=4, group_m=1) for rows in (16, 32))
MANY_ROWS = (
    HopperConfig(32, depth=8, stages=2, workers=4, group_m=1),
    HopperConfig(48, depth=5, stages=2, per_sm=2, group_m=1),
    HopperConfig(64, depth=4, stages=2, per_sm=2, group_m=1),
    *(HopperConfig(rows, depth=2, stages=4, workers=3) for rows in (80, 96, 144, 160)),
    *(HopperConfig(rows, blocks=2, stages=8) for rows in (112, 128)),
    *(HopperConfig(rows) for rows in (192, 224)),
    HopperConfig(256, stages=5),
)
MANY_ROWS_FP8 = (
    HopperConfig(32, depth=4, stages=2, per_sm=2, group_m=1),
    HopperConfig(48, stages=8, workers=4),
    *(HopperConfig(rows, depth=2, stages=4, workers=3) for rows in (80, 96, 128, 144, 160)),
    *(HopperConfig(rows, blocks=2) for rows in (64, 128)),
    *(HopperConfig(rows) for rows in (112, 128)),
    HopperConfig(256, stages=5),
)


@dataclass(frozen=True)
class _Speed:
    """Times of an SM for a column of the output, in us."""

    unpack: float  # the value of one of its weights
    product: float  # of one weight and one activation
    rest: float  # of a row, whatever K is


# Fitted as above, for bf16 activations, fp8, and fp8 whose groups of weights scale their own sums.
_BF16, _FP8, _FP8_BY_GROUP = (
    _Speed(1.45e-5, 2.47e-7, 9.9e-5), _Speed(1.35e-5, 1.06e-7, 1.79e-4), _Speed(1.02e-5, 2.02e-7, 2.45e-4),
)  # fmt: skip
_WIDE = 0.9  # of the time, for three workers, or for two blocks each


def groups_that_fit(G: int) -> int:
    """Return for how many groups the kernel is compiled: it keeps two numbers for each in shared memory."""
    return max(64, triton.next_power_of_2(G))


def candidates(mean_rows: float) -> list[HopperConfig]:
    """Return the configs tuning tries, by mean rows per expert."""
    few = [HopperConfig(rows, *fields, group_m=1) for rows in (16, 32) for fields in OF_FEW_ROWS]
    many = list(dict.fromkeys((*MANY_ROWS, *MANY_ROWS_FP8)))
    return few if mean_rows <= 16 else [*few, *many] if mean_rows <= 32 else many


def _scaled_by_group(w: Blocks, scaled_by_block: bool) -> bool:
    """Return whether each group along K scales its own sums, which are as many again."""
    return w.fp8 and (scaled_by_block or not w.fmt.floating)


def illegal(config: HopperConfig, w: Blocks, scaled_by_block: bool, device: Device) -> str | None:
    """Return why the kernel cannot run a config on a GPU, or None if it can.

    scaled_by_block  fp8 activations have a scale per 128 along K
    """
    if not device.hopper:
        return f"its instructions are Hopper's, and this GPU is {device.arch}"
    if config.rows not in (8, *range(16, 257, 16)):
        return f"a tile has 8 rows or a multiple of 16 up to 256, not {config.rows}"
    sums = config.rows // 2 * config.blocks * (2 if _scaled_by_group(w, scaled_by_block) else 1)
    if sums > (MOST_SUMS.get(config.workers, 64) if config.per_sm == 1 else 64):
        return f"{sums} sums of a thread do not fit in its registers"
    if min(config.blocks, config.depth, config.stages - 1, config.group_m) < 1 or config.per_sm not in (1, 2, 3, 4):
        return "blocks, depth and group_m must be at least 1, stages at least 2, per_sm 1 to 4"
    if not 1 <= config.workers * config.per_sm <= MOST_WORKERS or config.threads > MOST_THREADS:
        return f"workers must be at least 1, on an SM at most {MOST_WORKERS}, and threads at most {MOST_THREADS}"
    shared = config.dynamic_bytes(w) + 8 * groups_that_fit(w.G) + OTHER_BYTES
    if shared > device.room(config.per_sm):
        return f"{config.stages} stages take {shared} bytes of {device.room(config.per_sm)}"
    return None


def predicted_us(config: HopperConfig, M: int, w: Blocks, scaled_by_block: bool, device: Device) -> float:
    """Return a product's predicted time in us, besides its start."""
    blocks = config.workers * config.blocks
    at_a_time, tile = (blocks, BLOCK_N) if config.rows <= MOST_FEW else (1, blocks * BLOCK_N)
    programs = device.sms * config.per_sm * at_a_time
    waves = math.ceil(tiles_of_rows(M, w.G, config.rows) * math.ceil(w.N / tile) / programs)
    speed = _BF16 if not w.fp8 else _FP8_BY_GROUP if _scaled_by_group(w, scaled_by_block) else _FP8
    of_column = w.K * (speed.unpack + config.rows * speed.product) + config.rows * speed.rest
    columns = waves * config.per_sm * at_a_time * tile * (_WIDE if config.workers == 3 or config.blocks == 2 else 1.0)
    traffic = w.nbytes + M * (w.K * (1 if w.fp8 else 2) + 2 * w.N)
    bandwidth = BANDWIDTH * (device.gb_per_s or KNOWN["sm_90"].gb_per_s) * 1e3
    return math.hypot(columns * of_column, traffic / bandwidth)


def _legal(config: HopperConfig, w: Blocks, scaled_by_block: bool, device: Device) -> Iterator[HopperConfig]:
    """Yield the config with as many of its stages as fit, if any."""
    stages = (replace(config, stages=number) for number in range(config.stages, 1, -1))
    yield from [each for each in stages if illegal(each, w, scaled_by_block, device) is None][:1]


def default_config(M: int, w: Blocks, scaled_by_block: bool, device: Device) -> HopperConfig:
    """Return an untuned problem's config."""
    mean, many = M / w.G, MANY_ROWS_FP8 if w.fp8 else MANY_ROWS
    if fits(mean, 32):
        of_rows = FEW_ROWS_FP8 if w.fp8 else FEW_ROWS
        many = of_rows[:1] if fits(mean, 16) else of_rows[1:]
    for configs in (many, candidates(mean)):  # with many groups, a few stages take too much memory
        if legal := [each for config in configs for each in _legal(config, w, scaled_by_block, device)]:
            return min(legal, key=lambda config: predicted_us(config, M, w, scaled_by_block, device))
    return many[0]


def config_key(M: int, w: Blocks | Weights, fp8: bool) -> str:
    """Return a problem's tuned-config key."""
    return problem_key(M, w.G, w.N, w.K, str(w.fmt), "a8" if fp8 else "a16")


def choose_config(M: int, w: Blocks, scaled_by_block: bool, device: Device) -> HopperConfig:
    """Return this problem's tuned config on this GPU, else the default."""
    default = default_config(M, w, scaled_by_block, device)
    key = config_key(M, w, w.fp8)
    return first_legal(
        configs_in_order("w4_hopper", key, device, default, lambda c: illegal(c, w, scaled_by_block, device))
    )
