"""Gradient of a grouped GEMM's weights, dB[g] = A[rows of g]^T @ dC[rows of g]: backend `triton_flat`.

    a [M, K]   dc [M, N]   ->   db [G, K, N]        stored as [G, K, N], or as [G, N, K] if the weights are

Every group has the same number of tiles, and the reduction runs over the group's rows. A tile costs as much as the
group has rows, and nothing for an empty group, whose gradient is zero. One matrix product serves both layouts: with
weights stored as [G, N, K] the operands change places. In the kernel they are x [M, P] and y [M, Q], and out[g] = x^T @
y.

The last block of a group's rows runs into the next group's, and rows past offs[-1] may hold anything, NaN included.
Both operands are therefore read through *ragged* descriptors, which the hardware clips at the group's last row and
fills with zeros: no instruction masks, and zero never meets NaN. (triton.tools.ragged_tma; triton_kernels, of
triton-lang/triton, reads its operands so.) If TMA cannot read the operands, the same kernel reads by pointers with
masks on both.

The schedule assigns tiles to programs, in either of two orders of the groups:

    static    tile t goes to program t mod W. One launch. Even work if groups are alike.
    dynamic   groups with most rows first, and each program takes the next tile when it is free. In a group with a third
              of all rows, a tile costs a third of a program's time; light tiles fill the gaps. A small launch before
              ranks the groups and sets the counter.

Both read sizes from the offsets on the device, so that a CUDA graph may be replayed with other offsets.

With many tiles, on Hopper, configs are `specialized`: wgrad_specialized.py computes the same tiles with a role for each
warp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor, to_ragged_indices
from triton.tools.tensor_descriptor import TensorDescriptor

from groupbench.kernels.configs import launch_keywords
from groupbench.kernels.device import INTERPRETER, Device, device_of, fitted
from groupbench.kernels.grouped_gemm.predict import Tile, gradient_us, limited_by_power
from groupbench.kernels.grouped_gemm.support import (
    TRITON,
    illegal_roles,
    illegal_tile,
    no_tma,
    require_gradient_operands,
    worker_count,
)
from groupbench.kernels.grouped_gemm.tile_order import super_grouped
from groupbench.kernels.grouped_gemm.tuned import configs_in_order, first_legal, tuning_key
from groupbench.kernels.grouped_gemm.wgrad_config import WgradConfig
from groupbench.kernels.launch import Launch, Outputs, described
from groupbench.kernels.variants import Gluon, Variant, first_that_runs, specialized_or_not

RAGGED_ROWS = 2**30
RANKED_AT_ONCE = 32  # groups that one program of the plan ranks
MOST_RANKED = 4096  # groups: each is compared with all others
SPARSE_ROWS = 8  # of a group on average, up to which "sparse" is faster than cluster_wgrad.py (H200, 2026-11-30)


# For shapes without a tuned config; those tuned on an H100 are in configs/wgrad_h100.json.
CONFIGS = {
    "large": WgradConfig(128, 256, 64, num_warps=8, num_stages=4, split_store=True),
    # A tile of a group of a few hundred rows takes as long to write as to compute, and groups are rarely alike.
    "paired": WgradConfig(128, 128, 64, num_warps=4, num_stages=3, dynamic=True, per_sm=2),
    # Few rows per group: writing the gradient takes most of the time, and one step reads all rows.
    "short": WgradConfig(128, 128, 16, num_warps=4, num_stages=2, per_sm=2),
    # Hardly any rows: most tiles are zeros. Groups with rows come first, and stores of many tiles are in flight.
    "sparse": WgradConfig(128, 128, 16, num_warps=4, num_stages=2, dynamic=True, per_sm=4),
    # With many tiles: large groups are limited by the GPU's power, and lockstep moves the fewest bytes. Groups of some
    # hundred rows are uneven, and a step of 32 rows wastes less at their ends.
    "specialized": WgradConfig(128, 256, 64, num_warps=4, num_stages=4, specialized=True, lockstep=16),
    "specialized_uneven": WgradConfig(128, 256, 32, num_warps=4, num_stages=8, specialized=True, dynamic=True),
    # Fewer bytes from L2, and three groups of warps that store at once.
    "specialized_192": WgradConfig(192, 256, 32, num_warps=4, num_stages=6, specialized=True, dynamic=True),
    # Without TMA: the wide tile with its pointers and masks would spill 600 bytes per thread.
    "pointers": WgradConfig(128, 128, 32, num_warps=8, num_stages=3),
    # IEEE fp32 runs on FMA units, which read registers.
    "fp32": WgradConfig(64, 64, 32, num_warps=4, num_stages=3),
    # The cost in Triton's interpreter depends on the number of operations, not of elements.
    "cpu": WgradConfig(32, 32, 32, num_warps=4, num_stages=1, group_p=2),
    "cpu_dynamic": WgradConfig(32, 32, 32, num_warps=4, num_stages=1, group_p=2, dynamic=True),
}
PREDICTED = ("paired", "large", "specialized", "specialized_uneven", "specialized_192")
"""Configs for an untuned problem on Hopper, of which it takes the one with the shortest predicted time."""
PREDICTED_LOCKSTEP = ("specialized", "specialized_192")
"""The same for large groups, if power limits the product."""


def candidates(mean_rows: float) -> list[WgradConfig]:
    """Return the configs that tuning tries for 16-bit dtypes, by the mean rows of a group."""
    large, paired, short = CONFIGS["large"], CONFIGS["paired"], CONFIGS["short"]
    pairs = [paired, replace(paired, dynamic=False, num_stages=2)]
    if mean_rows <= 64:
        shorts = [short, replace(short, block_m=32), WgradConfig(128, 256, 16, 8, 3), WgradConfig(128, 256, 32, 8, 3)]
        return [*shorts, *pairs]
    wide = [large, replace(large, group_p=4), replace(large, group_p=16), replace(large, block_p=256, block_q=128)]
    # The tile's store shares memory with the stages if no loads are in flight during it.
    free = [replace(large, split_store=False, dynamic=True), replace(large, num_stages=3, split_store=False)]
    lockstep, uneven, taller = (CONFIGS[name] for name in ("specialized", "specialized_uneven", "specialized_192"))
    specialized = [lockstep, replace(lockstep, group_p=16), replace(lockstep, lockstep=0, dynamic=True)]
    specialized += [uneven, replace(uneven, dynamic=False, lockstep=32)]
    specialized += [taller, replace(taller, group_p=4), replace(taller, dynamic=False, lockstep=16)]
    return [*wide, *free, *pairs, WgradConfig(128, 128, 128, 8, 3), *specialized]


def illegal(config: WgradConfig, dtype: torch.dtype, device: Device = INTERPRETER) -> str | None:
    """Return why a config cannot be compiled for a GPU, or None if it can."""
    if config.specialized:
        return _illegal_specialized(config, dtype, device)
    reason = illegal_tile(config.block_p, config.block_q, config.block_m, config.num_stages, dtype, device)
    if reason is not None:
        # illegal_tile names the sides of a forward tile.
        for forward, ours in (("block_m=", "block_p="), ("block_n=", "block_q="), ("block_k=", "block_m=")):
            if reason.startswith(forward):
                return reason.replace(forward, ours)
        return reason
    shared, have = shared_bytes(config, dtype, device), device.room(config.per_sm)
    if shared > have:
        return f"{config.num_stages} stages and the output tile take {shared} bytes of {have}"
    return None


def _illegal_specialized(config: WgradConfig, dtype: torch.dtype, device: Device) -> str | None:
    tile = (config.block_p, config.block_q, config.block_m, config.num_stages)
    if tile not in ((128, 256, 64, 4), (128, 256, 32, 8), (192, 256, 32, 6)):
        return "specialized has tiles of 128 x 256 in 4 stages of 64 rows or 8 of 32, or of 192 x 256 in 6 of 32"
    if (config.num_warps, config.per_sm) != (4, 1) or config.split_store:
        return "specialized has groups of 4 warps, one program per SM, and no split_store"
    if config.lockstep and config.dynamic:
        return "lockstep needs the static schedule"
    return illegal_roles(config.lockstep, dtype, device)


def shared_bytes(config: WgradConfig, dtype: torch.dtype, device: Device = INTERPRETER) -> int:
    """Return the bytes of shared memory that the operands' stages and the output tile take.

    With a dynamic schedule they are not in use together. Triton up to 3.8 lets them share memory; 3.9 does not.
    """
    buffers = device.buffers(config.num_stages)
    stages = buffers * (config.block_p + config.block_q) * config.block_m * dtype.itemsize
    store = config.block_p * config.block_q * dtype.itemsize // (2 if config.split_store else 1)
    return max(stages, store) if config.dynamic and TRITON < (3, 9) else stages + store


def predicted_us(config: WgradConfig, M: int, G: int, P: int, Q: int, device: Device) -> float:
    """Return the predicted time in us."""
    start, rest = (7.9, 1.2 if config.lockstep else 0.7) if config.specialized else (6.4, 2.9)
    start += 2.0 if config.dynamic else 0.0  # the launch that ranks the groups
    return gradient_us(Tile(config.block_p, config.block_q, config.per_sm, start, rest), M, G, P, Q, device)


def default_config(M: int, G: int, N: int, K: int, dtype: torch.dtype, device: Device) -> WgradConfig:
    """Return the config for the number of tiles and the work of each, or the nearest one that fits the GPU."""
    if device.vendor == "cpu":
        return CONFIGS["cpu"]
    few_tiles = G * triton.cdiv(K, 128) * triton.cdiv(N, 256) < 2 * device.sms
    if dtype == torch.float32:
        config = CONFIGS["fp32"]
    elif M <= SPARSE_ROWS * G and G <= MOST_RANKED:
        config = CONFIGS["sparse"]
    elif M <= 32 * G:
        config = CONFIGS["short"]
    elif few_tiles or M <= 512 * G:
        config = CONFIGS["paired"] if G <= MOST_RANKED else replace(CONFIGS["paired"], num_stages=2, dynamic=False)
    else:
        config = CONFIGS["large"]
    return _fitted(config, dtype, device)


def pointer_config(dtype: torch.dtype, device: Device) -> WgradConfig:
    """Return the config for operands that TMA cannot read."""
    if device.vendor == "cpu":
        return CONFIGS["cpu"]
    return _fitted(CONFIGS["fp32" if dtype == torch.float32 else "pointers"], dtype, device)


def _fitted(config: WgradConfig, dtype: torch.dtype, device: Device) -> WgradConfig:
    return fitted(config, lambda smaller: illegal(smaller, dtype, device), "block_p", "block_q")


def configs_for(
    M: int, G: int, N: int, K: int, dtype: torch.dtype, device: Device, nk: bool
) -> list[tuple[str, WgradConfig, str | None]]:
    """Return (name, config, why it is illegal here): tuned, by predicted time, and the default."""
    default = default_config(M, G, N, K, dtype, device)
    if device.vendor == "cpu" or dtype == torch.float32:
        return [("default", default, None)]
    key = tuning_key(M, G, N, K, dtype, nk)
    configs = configs_in_order("wgrad", key, device, default, lambda config: _illegal_for(config, G, dtype, device))
    if device.hopper and M > 32 * G:
        P, Q = (N, K) if nk else (K, N)
        names = PREDICTED if M <= 1024 * G or not limited_by_power(M, N, K) else PREDICTED_LOCKSTEP
        ranked = sorted((CONFIGS[name] for name in names), key=lambda c: predicted_us(c, M, G, P, Q, device))
        configs[-1:-1] = [("predicted", config, _illegal_for(config, G, dtype, device)) for config in ranked]
    return configs


def choose_config(M: int, G: int, N: int, K: int, dtype: torch.dtype, device: Device, nk: bool) -> WgradConfig:
    """Return this problem's tuned config on this GPU, else the default."""
    return first_legal(configs_for(M, G, N, K, dtype, device, nk))


def _illegal_for(config: WgradConfig, G: int, dtype: torch.dtype, device: Device) -> str | None:
    if config.dynamic and G > MOST_RANKED:
        return f"{G} groups, but a dynamic schedule ranks at most {MOST_RANKED}"
    return illegal(config, dtype, device)


@triton.jit
def _plan_kernel(
    offs_ptr,  # [G]
    plan_ptr,  # [1 + G]: the next tile to take, then the groups, those with most rows first
    G,
    first,
    G_POW2: tl.constexpr,
    MINE: tl.constexpr,
):
    """Rank the groups: those with more rows come first, and of equal ones the one with the lower number."""
    groups = tl.arange(0, G_POW2)
    real = groups < G
    starts = tl.load(offs_ptr + groups - 1, mask=real & (groups > 0), other=0)
    sizes = (tl.load(offs_ptr + groups, mask=real, other=0) - starts).to(tl.int32)
    ranked = tl.program_id(0) * MINE + tl.arange(0, MINE)
    ranked_starts = tl.load(offs_ptr + ranked - 1, mask=(ranked < G) & (ranked > 0), other=0)
    ranked_sizes = (tl.load(offs_ptr + ranked, mask=ranked < G, other=0) - ranked_starts).to(tl.int32)
    more = sizes[None, :] > ranked_sizes[:, None]
    as_many = (sizes[None, :] == ranked_sizes[:, None]) & (groups[None, :] < ranked[:, None])
    place = tl.sum(((more | as_many) & real[None, :]).to(tl.int32), 1)
    tl.store(plan_ptr + 1 + place, ranked, mask=ranked < G)
    if tl.program_id(0) == 0:
        tl.store(plan_ptr, first)


@triton.jit
def _rows(
    x,
    start,
    size,
    row,
    column,
    stride,
    stride_column,
    columns,
    TMA: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Return the tile [ROWS, COLUMNS] at `row` of the rows start..start + size; zeros past them and the columns."""
    if TMA:
        # Like load_ragged of triton.tools.ragged_tma, which Triton's interpreter cannot run.
        billion, end, inside = to_ragged_indices(start, size, row)
        tile = x.load([billion, end, inside, column]).reshape(ROWS, COLUMNS)
    else:
        rows = row + tl.arange(0, ROWS)
        across = column + tl.arange(0, COLUMNS)
        at = x + (start + rows).to(tl.int64)[:, None] * stride + across.to(tl.int64)[None, :] * stride_column
        tile = tl.load(at, mask=(rows < size)[:, None] & (across < columns)[None, :], other=0.0)
    return tile


@triton.jit
def _store(out, g, row, column, tile, P, Q, TMA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    if TMA:
        out.store([g, row, column], tile.reshape(1, ROWS, COLUMNS))
    else:
        rows = row + tl.arange(0, ROWS)
        across = column + tl.arange(0, COLUMNS)
        at = out + (g.to(tl.int64) * P + rows[:, None]) * Q + across[None, :]
        tl.store(at, tile, mask=(rows < P)[:, None] & (across < Q)[None, :])


@triton.jit
def _tile(
    x,
    y,
    out,
    offs_ptr,
    g,
    number,
    P,
    Q,
    stride_x,
    stride_xp,
    stride_y,
    stride_yq,
    TMA: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_P: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
):
    """Compute and write the `number`-th tile of group g."""
    start = tl.load(offs_ptr + g - 1, mask=g > 0, other=0).to(tl.int32)
    size = tl.load(offs_ptr + g).to(tl.int32) - start
    tile_p, tile_q = super_grouped(number, tl.cdiv(P, BLOCK_P), tl.cdiv(Q, BLOCK_Q), GROUP_P)
    p = tile_p * BLOCK_P
    q = tile_q * BLOCK_Q
    acc = tl.zeros((BLOCK_P, BLOCK_Q), dtype=tl.float32)
    for row in range(0, size, BLOCK_M):
        x_tile = _rows(x, start, size, row, p, stride_x, stride_xp, P, TMA, BLOCK_M, BLOCK_P)
        y_tile = _rows(y, start, size, row, q, stride_y, stride_yq, Q, TMA, BLOCK_M, BLOCK_Q)
        acc = tl.dot(x_tile.T, y_tile, acc, input_precision="ieee")
    if SPLIT_STORE:
        halves = tl.permute(tl.reshape(acc, (BLOCK_P, 2, BLOCK_Q // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        _store(out, g, p, q, left.to(DTYPE), P, Q, TMA, BLOCK_P, BLOCK_Q // 2)
        _store(out, g, p, q + BLOCK_Q // 2, right.to(DTYPE), P, Q, TMA, BLOCK_P, BLOCK_Q // 2)
    else:
        _store(out, g, p, q, acc.to(DTYPE), P, Q, TMA, BLOCK_P, BLOCK_Q)


@triton.jit
def _wgrad_kernel(
    x,  # [M, P]: a ragged descriptor along M with tiles [BLOCK_M, BLOCK_P], or a pointer
    y,  # [M, Q]: likewise, tiles [BLOCK_M, BLOCK_Q]
    out,  # [G, P, Q] contiguous: a descriptor with tiles of one group, or a pointer
    offs_ptr,  # [G]
    plan_ptr,  # [1 + G], see _plan_kernel; unused by the static schedule
    G,
    P,
    Q,
    stride_x,  # from one row to the next; strides are unused by TMA
    stride_xp,
    stride_y,
    stride_yq,
    TMA: tl.constexpr,
    DTYPE: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP_P: tl.constexpr,
    SPLIT_STORE: tl.constexpr,
    DYNAMIC: tl.constexpr,
):
    tiles = tl.cdiv(P, BLOCK_P) * tl.cdiv(Q, BLOCK_Q)  # of each group
    if DYNAMIC:
        taken = tl.program_id(0)
        while taken < G * tiles:
            # Requested early: the result arrives while this tile is computed.
            following = tl.atomic_add(plan_ptr, 1, sem="relaxed")
            g = tl.load(plan_ptr + 1 + taken // tiles)
            _tile(x, y, out, offs_ptr, g, taken % tiles, P, Q, stride_x, stride_xp, stride_y, stride_yq,
                  TMA, DTYPE, BLOCK_P, BLOCK_Q, BLOCK_M, GROUP_P, SPLIT_STORE)  # fmt: skip
            taken = following
    else:
        # A `for`, so that a tile's store continues while the next one is computed.
        for tile in tl.range(tl.program_id(0), G * tiles, NUM_PROGRAMS):
            _tile(x, y, out, offs_ptr, tile // tiles, tile % tiles, P, Q, stride_x, stride_xp, stride_y, stride_yq,
                  TMA, DTYPE, BLOCK_P, BLOCK_Q, BLOCK_M, GROUP_P, SPLIT_STORE)  # fmt: skip


def prepare_wgrad(
    a: Tensor,  # [M, K]
    dc: Tensor,  # [M, N]
    offs: Tensor,  # [G], int32 or int64 end offsets
    nk: bool = False,  # the weights, and so their gradient, are stored as [G, N, K]
    config: WgradConfig | None = None,
) -> Callable[[], Tensor]:  # [G, K, N], a transposed view with `nk`; zero for a group without rows
    """Check the operands and make the descriptors; the returned callable allocates the output and launches.

    The callable reads `offs` on the device and follows later changes. Rows past offs[-1] are not read. Raises
    ValueError for operands or a config that the kernel cannot take.
    """
    require_gradient_operands(a, dc, offs, trusted=False)
    return wgrad_launcher(a, dc, offs, nk, config)


def wgrad_launcher(
    a: Tensor,  # [M, K]
    dc: Tensor,  # [M, N]
    offs: Tensor,  # [G], int32 or int64
    nk: bool = False,
    config: WgradConfig | None = None,
) -> Callable[[], Tensor]:  # [G, K, N]
    """Return `prepare_wgrad`'s callable without checking the offsets, which would synchronise with the device.

    Raises ValueError for operands or a config that the kernel cannot take.
    """
    require_gradient_operands(a, dc, offs, trusted=True)
    a, dc = a.resolve_neg(), dc.resolve_neg()
    run = bind_wgrad(a, dc, offs, nk, config)
    return lambda: run(a, dc, offs)


def bind_wgrad(
    a: Tensor,  # [M, K]
    dc: Tensor,  # [M, N]
    offs: Tensor,  # [G]
    nk: bool = False,
    config: WgradConfig | None = None,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Do as `wgrad_launcher` for operands that were checked; the callable takes operands like these.

    Their shapes, strides and dtypes must be equal, and their addresses multiples of 16 if these are. It may be called
    from any thread.
    """
    (M, K), N, G = a.shape, dc.size(1), offs.numel()
    x, y = (dc, a) if nk else (a, dc)
    P, Q = x.size(1), y.size(1)

    def as_weights(out: Tensor) -> Tensor:
        return out.transpose(1, 2) if nk else out

    if M == 0 or N == 0 or K == 0:
        return lambda a, dc, offs: as_weights(torch.zeros(G, P, Q, dtype=a.dtype, device=a.device))
    without_tma = needs_pointers(x, y)
    if config is not None:
        if reason := _illegal_for(config, G, a.dtype, device_of(a.device)):
            raise ValueError(f"{config}: {reason}")
        if config.specialized and without_tma:
            raise ValueError(f"the specialized kernel cannot run: {without_tma}")
        run = _launcher(x, y, offs, config, without_tma is None)
    else:
        run = first_that_runs("wgrad", _variants(x, y, offs, nk, without_tma))
    if nk:
        return lambda a, dc, offs: run(dc, a, offs).transpose(1, 2)
    return run


def _variants(
    x: Tensor,  # [M, P]
    y: Tensor,  # [M, Q]
    offs: Tensor,  # [G]
    nk: bool,
    without_tma: str | None,  # why TMA cannot read x and y
) -> list[Variant[Tensor]]:
    """Return the kernels and configs in order of preference."""
    M, G, dtype, device = x.size(0), offs.numel(), x.dtype, device_of(x.device)
    pointers = Variant("pointers", partial(_launcher, x, y, offs, pointer_config(dtype, device), False))
    if without_tma is not None:
        return [Variant("tma", pointers.prepare, without_tma), pointers]
    N, K = (x.size(1), y.size(1)) if nk else (y.size(1), x.size(1))
    by_tma = specialized_or_not(
        "tma",
        configs_for(M, G, N, K, dtype, device, nk),
        lambda config: _launcher(x, y, offs, config, True),
        _specialized(x.device),
        (dtype, x.device),
    )
    return [*by_tma, pointers]


def _specialized(device: torch.device) -> Gluon:
    return Gluon(f"{__package__}.wgrad_specialized", device)


def _launcher(
    x: Tensor,  # [M, P]
    y: Tensor,  # [M, Q]
    offs: Tensor,  # [G]
    config: WgradConfig,  # legal
    tma: bool,  # which can read x and y
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:  # [G, P, Q], of operands like these
    """Make the descriptors; the returned callable allocates the output and launches."""
    G, P, Q = offs.numel(), x.size(1), y.size(1)
    programs = worker_count(x.device, config.per_sm)
    if config.specialized:
        launch = _specialized(x.device).prepare(x, y, offs, config)
    else:
        launch = _prepare_plain(x, y, offs, config, tma)
    make_plan = Launch(
        _plan_kernel, (triton.cdiv(G, RANKED_AT_ONCE),), G_POW2=triton.next_power_of_2(G), MINE=RANKED_AT_ONCE
    )

    dtype, device = x.dtype, x.device

    def run(x: Tensor, y: Tensor, offs: Tensor) -> Tensor:
        out = torch.empty(G, P, Q, dtype=dtype, device=device)
        plan = offs
        if config.dynamic:
            plan = torch.empty(1 + G, dtype=torch.int32, device=device)
            make_plan(offs, plan, G, programs)
        launch(x, y, offs, out, plan)
        return out

    return run


def _prepare_plain(
    x: Tensor, y: Tensor, offs: Tensor, config: WgradConfig, tma: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]:
    """Make the descriptors; the returned function launches once: x, y and offs, out [G, P, Q], the schedule's plan."""
    G, P, Q = offs.numel(), x.size(1), y.size(1)
    if tma:
        x_in: Callable[[Tensor], Any] = described(create_ragged_descriptor, x, [config.block_m, config.block_p])
        y_in: Callable[[Tensor], Any] = described(create_ragged_descriptor, y, [config.block_m, config.block_q])
    else:
        x_in = y_in = lambda x: x
    block_out = [1, config.block_p, config.block_q // (2 if config.split_store else 1)]
    out_desc = Outputs(lambda out: TensorDescriptor.from_tensor(out, block_out))
    programs = worker_count(x.device, config.per_sm)
    launch = Launch(
        _wgrad_kernel,
        (programs,),
        **launch_keywords(_wgrad_kernel, config, TMA=tma, DTYPE=_TRITON_DTYPES[x.dtype], NUM_PROGRAMS=programs),
    )
    strides = (*x.stride(), *y.stride())
    return lambda x, y, offs, out, plan: launch(
        x_in(x), y_in(y), out_desc(out) if tma else out, offs, plan, G, P, Q, *strides
    )


_TRITON_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def needs_pointers(x: Tensor, y: Tensor) -> str | None:
    """Return why TMA cannot read x [M, P] and y [M, Q] or write the output, or None if it can."""
    if x.size(0) > RAGGED_ROWS:
        return f"a ragged descriptor has at most {RAGGED_ROWS} rows"
    return no_tma(y.size(1), x=x, y=y)
