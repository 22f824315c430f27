"""Grouped GEMM in Helion over a tile list made on the GPU: backend `helion_worklist`.

    out[start_g:end_g] = a[start_g:end_g] @ b[g]        a [M, K]   b [G, K, N]   out [M, N]

Two launches, no host sync. The first, a tiny Triton kernel, writes the group, first row and group end for each tile
with block_m rows. The tile count stays on the device; the host allocates the list by an upper bound (M / block_m + G).
In the second, written in Helion, each of as many workers as there are SMs takes every W-th tile of the list times the
columns. Offsets may change between calls, and between CUDA-graph replays.

The main loop is fast because it has no mask. wgmma reads its operands from shared memory, where the tensor memory
accelerator (TMA) puts them, and a mask would take them through registers first. A's tile may run into the next group's
rows, and the results for these rows are not stored. TMA itself clips the K and N tails, since the group is a separate
dimension in B's descriptor.

Helion masks a product's operands along K unless it sees an existing mask. It also turns a load whose rows start at a
number from the device into a gather. Two measures prevent both, in Helion 1.5.0 and 1.5.1: an identity between load and
product, which Helion does not look through, and a loop over K that ends at a multiple of its tile.

With few rows per group, the kernel swaps the operands: out.T = b.T @ a.T puts N on wgmma's 64 rows.

The same kernel loads by masked pointers if TMA cannot read the operands: on a GPU before Hopper, with addresses or
strides that are not multiples of 16 bytes, with matrices smaller than a tile, and in the interpreter.

Sources: the list of tiles, Helion's pretuned_kernels/grouped_gemm_deepgemm (for Blackwell, its list made by the
caller); the order of tiles, Triton's tutorial 03; swapped operands, as in `triton_flat`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import helion
import helion.language as hl
import torch
import triton
import triton.language as tl
from helion import Config  # a field of WorklistConfig has the module's name
from torch import Tensor

from groupbench.kernels.device import INTERPRETER, Device, device_of, fitted
from groupbench.kernels.grouped_gemm.experts import expert_tiles, zero_past
from groupbench.kernels.grouped_gemm.support import (
    TRITON,
    group_ends,
    illegal_tile,
    no_tma,
    require_runnable,
    require_within_int32,
    stored_weights,
    without_ones,
    worker_count,
)
from groupbench.kernels.grouped_gemm.tile_order import super_grouped
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal, tuning_key
from groupbench.kernels.variants import Variant, first_that_runs

ENTRY = 3  # numbers per tile in the list: group, first row, end of the group's rows
# Helion puts this into the code that it generates. Helion uses int64 for operands of 2**31 elements or more; a tile
# number always fits into int32.
TILE_ORDER = """
@triton.jit
def tile_in_order(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    return super_grouped(tl.cast(tile, tl.int32), tiles_m, tiles_n, GROUP_M)


""" + inspect.getsource(super_grouped.fn)
IDENTITY = "{0}"


@dataclass(frozen=True)
class WorklistConfig:
    """Settings for the tile list (block_m), the tile order (group_m) and Helion (all others).

    Attributes:
        helion: Further settings for helion.Config, e.g. those that its autotuner chose; they override the fields above.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8  # tile rows of a super-group, see tile_order.py
    swap: bool = False  # out.T = b.T @ a.T
    flatten: bool = False  # one software pipeline over all tiles: a tile's loads start before the last one is stored
    per_sm: int = 1  # workers per SM
    helion: tuple[tuple[str, Any], ...] = ()

    def to_helion(self, tma: bool) -> Config:
        """Return the settings as Helion's own config."""
        settings: dict[str, Any] = {
            "block_sizes": [self.block_n, self.block_k],
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "range_flattens": [None, self.flatten or None, None],
        }
        if tma:
            settings |= {"indexing": "tensor_descriptor", "host_tensor_descriptors": True}
        return Config(**(settings | dict(self.helion)))


# For shapes without a tuned config; configs/worklist_h100.json has the measurements.
CONFIGS = {
    # Memory-bound: bytes in flight decide. 16 rows waste the least of a tile when a group has few rows.
    "decode": WorklistConfig(16, 128, 128, num_warps=4, num_stages=4, swap=True),
    "decode_32": WorklistConfig(32, 128, 128, num_warps=4, num_stages=4, swap=True),
    "small": WorklistConfig(64, 128, 64, num_warps=4, num_stages=5),
    "medium": WorklistConfig(128, 128, 64, num_warps=4, num_stages=4),
    # 128 x 256 keeps 128 accumulators per thread of 8 warps. Four stages fit only because the stored tile reuses their
    # memory, which one pipeline over all tiles would rule out.
    "large": WorklistConfig(128, 256, 64, num_warps=8, num_stages=4),
    # IEEE fp32 runs on FMA units, which read registers.
    "fp32": WorklistConfig(64, 64, 32, num_warps=4, num_stages=3),
    # The cost in Triton's interpreter depends on the number of operations, not of elements.
    "cpu": WorklistConfig(32, 32, 32, num_warps=4, num_stages=1, group_m=2),
    "cpu_swap": WorklistConfig(16, 32, 32, num_warps=4, num_stages=1, group_m=2, swap=True),
}


def candidates(mean_rows: float, K: int) -> list[WorklistConfig]:
    """Return the tuning candidates for 16-bit dtypes, by a group's mean rows."""
    if mean_rows <= 16:
        tiles = [(16, 128, 128, 4, 4), (16, 64, 128, 4, 5), (16, 128, 64, 4, 5), (16, 256, 64, 8, 4)]
        configs = [WorklistConfig(*tile, swap=True) for tile in tiles]
    elif mean_rows <= 96:
        swapped = [(32, 128, 128, 4, 4), (32, 128, 64, 4, 5)]
        straight = [(64, 128, 64, 4, 5), (64, 256, 64, 8, 4), (64, 256, 64, 4, 4)]
        configs = [WorklistConfig(*tile, swap=True) for tile in swapped]
        configs += [WorklistConfig(*tile) for tile in straight]
    else:
        configs = [replace(CONFIGS["large"], group_m=group_m) for group_m in (4, 8, 16)]
        if mean_rows <= 1200:
            configs += [CONFIGS["medium"], replace(CONFIGS["medium"], num_warps=8), WorklistConfig(64, 256, 64, 4, 4)]
    flat = [replace(config, num_stages=min(config.num_stages, 3), flatten=True) for config in configs[:2]]
    return [config for config in configs + flat if K % config.block_k == 0 or config.block_k <= 64]


def illegal(config: WorklistConfig, dtype: torch.dtype, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot be compiled for a GPU, or None if it can."""
    return illegal_tile(config.block_m, config.block_n, config.block_k, config.num_stages, dtype, device)


def default_config(M: int, G: int, N: int, dtype: torch.dtype, device: Device) -> WorklistConfig:
    """Return the config for the mean rows per group, or the nearest one fitting the GPU's shared memory."""
    if device.vendor == "cpu":
        return CONFIGS["cpu_swap" if M <= 8 * G else "cpu"]
    if dtype == torch.float32:
        name = "fp32"
    else:
        classes = ((16, "decode"), (32, "decode_32"), (96, "small"), (256, "medium"))
        # 128 x 256 only if there are enough such tiles for every SM.
        large = "large" if (M / 128) * (N / 256) >= 100 else "medium"
        name = next((name for limit, name in classes if limit >= M / G), large)
    return fitted(CONFIGS[name], lambda config: illegal(config, dtype, device))


def configs_for(
    M: int, G: int, N: int, K: int, dtype: torch.dtype, device: Device, nk: bool
) -> list[tuple[str, WorklistConfig, str | None]]:
    """Return (name, config, why it is illegal here) for this problem's tuned config, if any, and the default."""
    default = default_config(M, G, N, dtype, device)
    if device.vendor == "cpu" or dtype == torch.float32:
        return [("default", default, None)]
    key = tuning_key(M, G, N, K, dtype, nk)
    return configs_in_order("worklist", key, device, default, lambda c: illegal(c, dtype, device), config_from)


def choose_config(
    M: int, G: int, N: int, K: int, dtype: torch.dtype, device: Device, nk: bool = False
) -> WorklistConfig:
    """Return this problem's tuned config on this GPU, else the default for the mean rows per group."""
    return first_legal(configs_for(M, G, N, K, dtype, device, nk))


def config_from(values: dict[str, Any]) -> WorklistConfig:
    """Return the config from the JSON for `dataclasses.asdict`. Raises TypeError if a field is unknown."""
    return WorklistConfig(**{**values, "helion": tuple((key, value) for key, value in values.get("helion", ()))})


@triton.jit
def _list_tiles(
    offs_ptr,  # [G]
    tiles_ptr,  # [W, ENTRY]
    count_ptr,  # [1]
    out_ptr,  # [M, N]
    M,
    N,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    ENTRY: tl.constexpr,
    SHARED_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write group g's tiles (program g) after those of all earlier groups, and their total (program 0).

    With SHARED_B all groups have matrix 0.
    """
    g = tl.program_id(0)
    starts, ends, counts, in_front = expert_tiles(offs_ptr, G, G_POW2, BLOCK_M)
    is_own = tl.arange(0, G_POW2) == g
    before = tl.sum(tl.where(is_own, in_front, 0), 0)
    start = tl.sum(tl.where(is_own, starts, 0), 0)
    end = tl.sum(tl.where(is_own, ends, 0), 0)
    count = tl.sum(tl.where(is_own, counts, 0), 0)
    for first in range(0, count, CHUNK):
        step = first + tl.arange(0, CHUNK)
        at = tiles_ptr + (before + step) * ENTRY
        tl.store(at, tl.full((CHUNK,), 0, tl.int32) + (0 if SHARED_B else g), mask=step < count)
        tl.store(at + 1, start + step * BLOCK_M, mask=step < count)
        tl.store(at + 2, tl.full((CHUNK,), 0, tl.int32) + end, mask=step < count)
    if g == 0:
        tl.store(count_ptr, tl.sum(counts, 0))
    zero_past(out_ptr, tl.load(offs_ptr + G - 1).to(tl.int32), M, N, N, G, 1024)


# dot_precision applies to fp32 operands; the default, TF32, would leave them fp16's mantissa.
@helion.kernel(static_shapes=False, dot_precision="ieee")
def grouped_gemm_worklist(
    a: Tensor,  # [M, K]
    weights: Tensor,  # [G or 1, K, N] or [G or 1, N, K]
    out: Tensor,  # [M, N]
    tiles: Tensor,  # [W, ENTRY], int32 or int64
    count: Tensor,  # [1], int32: the number of entries in use
    k_extent: int,  # K, or with TMA the next multiple of a tile
    block_m: int,
    group_m: int,
    workers: int,
    tma: hl.constexpr,
    nk: hl.constexpr,
    swap: hl.constexpr,
    by_number: hl.constexpr,  # the pointers to B may be indexed by a number; otherwise by a block of one
) -> Tensor:  # [M, N]
    N = hl.specialize(out.size(1))
    k_extent = hl.specialize(k_extent)
    block_m = hl.specialize(block_m)
    group_m = hl.specialize(group_m)
    workers = hl.specialize(workers)
    BLOCK_N = hl.register_block_size(16, 256)
    for worker in hl.grid(workers):
        tiles_m = count[0]
        for tile in hl.grid(worker, tiles_m * ((N + BLOCK_N - 1) // BLOCK_N), workers):
            scalar = hl.full([], 0, dtype=torch.int32)
            entry, tile_n = hl.triton_kernel(
                TILE_ORDER,
                args=(tile, tiles_m, (N + BLOCK_N - 1) // BLOCK_N, group_m),
                output_like=(scalar, scalar),
            )
            g = tiles[entry, 0]
            start = tiles[entry, 1]
            end = tiles[entry, 2]
            first = tile_n * BLOCK_N
            row = start + hl.arange(block_m)
            col = first + hl.arange(BLOCK_N)
            row_ok = (row < end)[:, None]
            col_ok = (col < N)[None, :]
            if swap:
                acc = hl.zeros([BLOCK_N, block_m], dtype=torch.float32)
            else:
                acc = hl.zeros([block_m, BLOCK_N], dtype=torch.float32)
            for tile_k in hl.tile(k_extent):
                # With TMA, the indices are computed here: Helion makes a descriptor only if it sees that they are
                # consecutive.
                if tma:
                    a_tile = a[start + hl.arange(block_m), tile_k]
                    a_tile = hl.inline_triton(IDENTITY, args=(a_tile,), output_like=a_tile)
                else:
                    a_tile = hl.load(a, [row, tile_k], extra_mask=row_ok)
                # Helion 1.5.1 generates `g[:, None]` if a number indexes a load by pointers. Triton 3.9 refuses that.
                if nk:
                    if tma:
                        b_nk = weights[g, first + hl.arange(BLOCK_N), tile_k]
                        b_nk = hl.inline_triton(IDENTITY, args=(b_nk,), output_like=b_nk)
                    elif by_number:
                        b_nk = hl.load(weights, [g, col, tile_k], extra_mask=(col < N)[:, None])
                    else:
                        in_g = g + hl.arange(1)
                        b_nk = hl.load(weights, [in_g, col, tile_k], extra_mask=(col < N)[None, :, None]).squeeze(0)
                    b_tile = b_nk.T
                else:
                    if tma:
                        b_tile = weights[g, tile_k, first + hl.arange(BLOCK_N)]
                        b_tile = hl.inline_triton(IDENTITY, args=(b_tile,), output_like=b_tile)
                    elif by_number:
                        b_tile = hl.load(weights, [g, tile_k, col], extra_mask=col_ok)
                    else:
                        in_g = g + hl.arange(1)
                        b_tile = hl.load(weights, [in_g, tile_k, col], extra_mask=col_ok[None, :, :]).squeeze(0)
                if swap:
                    acc = torch.addmm(acc, b_tile.T, a_tile.T)
                else:
                    acc = torch.addmm(acc, a_tile, b_tile)
            if swap:
                hl.store(out, [row, col], acc.T.to(out.dtype), extra_mask=row_ok & col_ok)
            else:
                hl.store(out, [row, col], acc.to(out.dtype), extra_mask=row_ok & col_ok)
    return out


def prepare_helion_worklist(
    a: Tensor,  # [M, K], any strides
    b: Tensor,  # [G, K, N], any strides; one shared matrix is expanded
    offs: Tensor,  # [G], int32 or int64 end offsets
    config: WorklistConfig | None = None,
    tma: bool | None = None,  # None: if it can read the operands
) -> Callable[[], Tensor]:  # [M, N]; rows past offs[-1] are zero
    """Compile, without tuning; the returned callable allocates the list and the output and launches both kernels.

    The callable reads `offs` on the device and follows later changes. Raises ValueError for unsupported operands or
    configs, and RuntimeError if Helion compiles TMA loads to something else.
    """
    require_runnable(a, b)
    group_ends(a, b, offs)
    (M, K), (G, _, N) = a.shape, b.shape
    if M == 0 or N == 0 or K == 0:
        return lambda: torch.zeros(M, N, dtype=a.dtype, device=a.device)
    device = device_of(a.device)
    if config is not None:
        if reason := illegal(config, a.dtype, device):
            raise ValueError(f"{config}: {reason}")
        return _prepare_with(a, b, offs, config, tma)
    variants = []
    for name, chosen, reason in configs_for(M, G, N, K, a.dtype, device, stored_weights(b)[1]):
        no_descriptors = without_tma(a, b, chosen) if tma is None else None if tma else "TMA was not requested"
        key = (chosen, a.dtype, a.shape, b.shape, a.device)
        by_tma = partial(_prepare_with, a, b, offs, chosen, True)
        variants.append(Variant(f"tma, {name} config", by_tma, reason or no_descriptors, key))
    variants.append(Variant("pointers", partial(_prepare_with, a, b, offs, chosen, False)))
    return first_that_runs("helion_worklist", variants)


def _prepare_with(a: Tensor, b: Tensor, offs: Tensor, config: WorklistConfig, tma: bool | None) -> Callable[[], Tensor]:
    """Run `prepare_helion_worklist` with a config, for checked operands."""
    M, N = a.size(0), b.size(2)
    if tma is None:
        tma = without_tma(a, b, config) is None
    if not tma:
        require_within_int32(a=a, b=b)
    problem = make_problem(a, b, offs, config, tma)
    bound = grouped_gemm_worklist.bind(problem.specimen() if tma else problem.arguments())
    settings = config.to_helion(tma)
    if tma and bound.to_triton_code(settings).count("_desc.load(") < 2:
        # Unmasked loads by pointers would read past the matrices.
        raise RuntimeError(f"Helion {version('helion')} makes no TMA loads of {config}; prepare with tma=False")
    compiled = bound.compile_config(settings)

    def run() -> Tensor:
        out: Tensor = compiled(*problem.arguments())
        return out[:M, :N] if M == 1 or N == 1 else out

    if a.device.type == "cuda":
        run()  # compiles the generated Triton code
    return run


@dataclass(frozen=True)
class Problem:
    """A call's operands and config."""

    a: Tensor  # [M, K]
    weights: Tensor  # [G, K, N], or [G, N, K] with `nk`; G is 1 with `shared`
    offs: Tensor  # [G]
    config: WorklistConfig
    tma: bool
    nk: bool
    shared: bool

    def arguments(self) -> tuple[Any, ...]:
        """Return the Helion kernel's arguments; allocate output and list, and launch the list kernel."""
        a, config = self.a, self.config
        (M, K), N, G = a.shape, self.weights.size(1 if self.nk else 2), self.offs.numel()
        out = torch.empty(M, N, dtype=a.dtype, device=a.device)
        # Indices get the list's dtype: int64 if an operand has elements past 2**31.
        wide = max(M * max(a.stride(0), N), G * self.weights.stride(0)) >= 2**31
        rows = triton.cdiv(M, config.block_m) + G
        tiles = torch.empty(rows, ENTRY, dtype=torch.int64 if wide else torch.int32, device=a.device)
        count = torch.empty(1, dtype=torch.int32, device=a.device)
        _list_tiles[(G,)](
            self.offs,
            tiles,
            count,
            out,
            M,
            N,
            G=G,
            G_POW2=triton.next_power_of_2(G),
            ENTRY=ENTRY,
            SHARED_B=self.shared,
            BLOCK_M=config.block_m,
            CHUNK=128,
            num_warps=4,
        )
        k_extent = triton.cdiv(K, config.block_k) * config.block_k if self.tma else K
        workers = worker_count(a.device, config.per_sm)
        sizes = (k_extent, config.block_m, config.group_m, workers)
        return (a, self.weights, out, tiles, count, *sizes, self.tma, self.nk, config.swap, TRITON < (3, 9))

    def specimen(self) -> tuple[Any, ...]:
        """Return arguments to compile TMA loads for: views with fewer than 2**31 elements.

        For larger operands Helion would use int64, and makes no descriptors as long as it knows no bound of M. This is
        safe: a descriptor has its own coordinates in each dimension, and each call makes it from its operands.
        """
        a, weights, out, *rest = self.arguments()
        rows = (2**31 - 1) // max(a.stride(0), a.size(1), out.size(1))
        groups = max((2**31 - 1) // weights[0].numel(), 1)
        return (a[:rows], weights[:groups], out[:rows], *rest)


def make_problem(a: Tensor, b: Tensor, offs: Tensor, config: WorklistConfig, tma: bool) -> Problem:
    """Return the operands a [M, K], b [G, K, N] and offs [G] as the kernel takes them."""
    a, b = without_ones(a, b)
    weights, nk, shared = stored_weights(b)
    return Problem(a, weights, offs, config, tma, nk, shared)


def without_tma(a: Tensor, b: Tensor, config: WorklistConfig) -> str | None:
    """Return why TMA cannot read a [M, K] and b [G, K, N], or None if it can."""
    if a.device.type == "cpu":
        return "Helion makes no descriptors for a CPU"
    if config.block_m > a.size(0) or config.block_n > b.size(2) or config.block_k > a.size(1):
        return "a tile is larger than a matrix"
    return no_tma(b.size(2), a=a, b=stored_weights(b)[0])
