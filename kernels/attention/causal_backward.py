"""Causal attention's gradients in Triton: causal_attention's backend `triton`, mode bwd.

    p[i, j]  = exp2(scale <q[i], k[j]> - lse[i])                j <= i: the forward pass' weights, computed again
    dv[j]    = sum_i p[i, j] dout[i]
    ds[i, j] = p[i, j] (<dout[i], v[j]> - delta[i])             delta[i] = <dout[i], out[i]>
    dk[j]    = scale sum_i ds[i, j] q[i]        dq[i] = scale sum_j ds[i, j] k[j]

Three launches: delta; then a program for each key tile, which passes over the rows from the diagonal on, for all
heads sharing the keys; then a program for each row tile, which passes over the keys up to the diagonal. Each
computes p again, so there are two products more than with atomic additions to dq. In return, results are the same bits
in every call, and nothing has to be zeroed.

Layouts, tables and sources are the same as in causal.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.attention.causal import LOG2_E, by_head, place_of, require_sequences, section, tiles_of
from groupbench.kernels.launch import Launch


@dataclass(frozen=True)
class BackwardConfig:
    """Sizes: the tile a program keeps and the blocks it passes over; one divides the other.

    In the pass for dq, blocks are not larger than tiles.
    """

    tile: int
    block: int
    num_warps: int
    num_stages: int


# The passes for dk and dv ("keys") and for dq ("rows"), by the largest head. Measured on an H200.
CONFIGS = {
    ("keys", 64): BackwardConfig(64, 128, num_warps=4, num_stages=2),
    ("rows", 64): BackwardConfig(64, 32, num_warps=4, num_stages=3),
    ("keys", 128): BackwardConfig(64, 64, num_warps=4, num_stages=2),
    ("rows", 128): BackwardConfig(128, 64, num_warps=8, num_stages=4),
    ("keys", 256): BackwardConfig(64, 32, num_warps=8, num_stages=1),
    ("rows", 256): BackwardConfig(64, 32, num_warps=8, num_stages=1),
    "fp32": BackwardConfig(32, 32, num_warps=4, num_stages=1),
}


@triton.jit
def _delta_kernel(out_ptr, dout_ptr, delta_ptr, T, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.arange(0, triton.next_power_of_2(H))
    columns = tl.arange(0, BLOCK_D)
    at = row * H * D + head[:, None] * D + columns[None, :]
    inside = (head < H)[:, None] & (columns < D)[None, :]
    out = tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta_ptr + head.to(tl.int64) * T + row, tl.sum(out * dout, 1), mask=head < H)


@triton.jit
def _add_rows(
    dk, dv, k, v, q_desc, dout_desc, lse_ptr, delta_ptr, head, keys, first, last, end, T, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the rows from `first` to `last` in a head to the gradients for a tile with keys and values."""
    for row in range(first, last, BLOCK):
        rows = row + tl.arange(0, BLOCK)
        at = tl.cast(T, tl.int64) * head + rows
        q = q_desc.load([head, row, 0]).reshape(BLOCK, BLOCK_D)
        lse = tl.load(lse_ptr + at, mask=rows < end, other=0.0)
        p = tl.exp2(tl.dot(k, q.T, input_precision=PRECISION) * scale - lse[None, :])  # [keys, rows]
        dout = dout_desc.load([head, row, 0]).reshape(BLOCK, BLOCK_D)
        if MASKED:
            p = tl.where((rows[None, :] >= keys[:, None]) & (rows < end)[None, :], p, 0.0)
            dout = tl.where((rows < end)[:, None], dout, 0.0)
            q = tl.where((rows < end)[:, None], q, 0.0)
        dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
        dp = tl.dot(v, dout.T, input_precision=PRECISION)
        delta = tl.load(delta_ptr + at, mask=rows < end, other=0.0)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _keys_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr, tiles_ptr, TILES, T, scale, dk_scale,
    KV: tl.constexpr, R: tl.constexpr, SECTION: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    kv, key, _, end = place_of(tl.program_id(0), tiles_ptr, TILES, KV, SECTION)
    keys = key + tl.arange(0, TILE)
    k = k_desc.load([kv, key, 0]).reshape(TILE, BLOCK_D)
    v = v_desc.load([kv, key, 0]).reshape(TILE, BLOCK_D)
    dk = tl.zeros((TILE, BLOCK_D), tl.float32)
    dv = tl.zeros((TILE, BLOCK_D), tl.float32)
    # Rows from `below` on see all keys. Blocks on the diagonal may reach past the tile.
    below = tl.minimum(key + (TILE if TILE > BLOCK else BLOCK), end)
    whole = below + (end - below) // BLOCK * BLOCK  # from here on a block is not full
    for head in range(kv * R, kv * R + R):
        dk, dv = _add_rows(
            dk, dv, k, v, q_desc, dout_desc, lse_ptr, delta_ptr, head, keys, key, below, end, T, scale,
            PRECISION, BLOCK, BLOCK_D, True,
        )  # fmt: skip
        dk, dv = _add_rows(
            dk, dv, k, v, q_desc, dout_desc, lse_ptr, delta_ptr, head, keys, below, whole, end, T, scale,
            PRECISION, BLOCK, BLOCK_D, False,
        )  # fmt: skip
        dk, dv = _add_rows(
            dk, dv, k, v, q_desc, dout_desc, lse_ptr, delta_ptr, head, keys, whole, end, end, T, scale,
            PRECISION, BLOCK, BLOCK_D, True,
        )  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    at = keys.to(tl.int64)[:, None] * (KV * D) + kv * D + columns[None, :]
    inside = (keys < end)[:, None] & (columns < D)[None, :]
    tl.store(dk_ptr + at, (dk * dk_scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add_keys(
    dq, q, dout, lse, delta, k_desc, v_desc, kv, rows, first, last, end, scale,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys from `first` to `last` to a row tile's gradient."""
    for key in range(first, last, BLOCK):
        k = k_desc.load([kv, key, 0]).reshape(BLOCK, BLOCK_D)
        v = v_desc.load([kv, key, 0]).reshape(BLOCK, BLOCK_D)
        p = tl.exp2(tl.dot(q, k.T, input_precision=PRECISION) * scale - lse[:, None])
        dp = tl.dot(dout, v.T, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        if MASKED:
            keys = key + tl.arange(0, BLOCK)
            ds = tl.where(rows[:, None] >= keys[None, :], ds, 0.0)
            k = tl.where((keys < end)[:, None], k, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _rows_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse_ptr, delta_ptr, dq_ptr, tiles_ptr, TILES, T, scale, dq_scale,
    H: tl.constexpr, R: tl.constexpr, SECTION: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, row, start, end = place_of(tl.program_id(0), tiles_ptr, TILES, H, SECTION)
    rows = row + tl.arange(0, TILE)
    q = q_desc.load([head, row, 0]).reshape(TILE, BLOCK_D)
    dout = dout_desc.load([head, row, 0]).reshape(TILE, BLOCK_D)
    lse = tl.load(lse_ptr + head.to(tl.int64) * T + rows, mask=rows < end, other=0.0)
    delta = tl.load(delta_ptr + head.to(tl.int64) * T + rows, mask=rows < end, other=0.0)
    dq = tl.zeros((TILE, BLOCK_D), tl.float32)
    dq = _add_keys(
        dq,
        q,
        dout,
        lse,
        delta,
        k_desc,
        v_desc,
        head // R,
        rows,
        start,
        row,
        end,
        scale,
        PRECISION,
        BLOCK,
        BLOCK_D,
        False,
    )
    last = tl.minimum(row + TILE, end)
    dq = _add_keys(
        dq, q, dout, lse, delta, k_desc, v_desc, head // R, rows, row, last, end, scale, PRECISION, BLOCK, BLOCK_D, True
    )
    columns = tl.arange(0, BLOCK_D)
    at = rows.to(tl.int64)[:, None] * (H * D) + head * D + columns[None, :]
    inside = (rows < end)[:, None] & (columns < D)[None, :]
    tl.store(dq_ptr + at, (dq * dq_scale).to(dq_ptr.dtype.element_ty), mask=inside)


def default_config(pass_over: str, D: int, dtype: torch.dtype, device: torch.device) -> BackwardConfig:
    """Return the config for the "keys" or "rows" programs."""
    if dtype == torch.float32 or device.type == "cpu":
        return CONFIGS["fp32"]
    return CONFIGS[pass_over, 64 if D <= 64 else 128 if D <= 128 else 256]


def prepare_causal_backward(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, KV, D]
    v: Tensor,  # [T, KV, D]
    out: Tensor,  # [T, H, D], and lse: of causal.prepare_with_lse
    lse: Tensor,  # [H, T]
    dout: Tensor,  # [T, H, D]
    lengths: Sequence[int],  # rows of each sequence
    configs: tuple[BackwardConfig, BackwardConfig] | None = None,  # of the passes for dk and dv, and for dq
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:  # dq [T, H, D], dk and dv [T, KV, D]
    """Make the tables; the returned callable allocates the gradients and launches. Raises ValueError."""
    require_sequences(lengths, q=q, k=k, v=v, out=out, dout=dout)
    (T, H, D), KV = q.shape, k.size(1)
    for_keys, for_rows = configs or (default_config(side, D, q.dtype, q.device) for side in ("keys", "rows"))
    block_d = max(16, triton.next_power_of_2(D))
    fixed = {"R": H // KV, "D": D, "PRECISION": "ieee", "BLOCK_D": block_d}
    heads = section(H, KV, max(lengths, default=0), D, q.dtype)
    passes = []
    for kernel, config, sizes, by_keys in (
        (_keys_kernel, for_keys, {"KV": KV, "SECTION": max(1, heads * KV // H)}, True),
        (_rows_kernel, for_rows, {"H": H, "SECTION": heads}, False),
    ):
        tiles = tiles_of(lengths, config.tile, q.device, most_work_last=by_keys)
        sides = (config.block, config.tile) if by_keys else (config.tile, config.block)
        operands = ((q, sides[0]), (k, sides[1]), (v, sides[1]), (dout, sides[0]))
        launch = Launch(
            kernel,
            (len(tiles) * (KV if by_keys else H),),
            **(fixed | sizes | {"TILE": config.tile, "BLOCK": config.block}),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        passes.append((launch, [by_head(x, side, block_d) for x, side in operands], tiles))
    delta_launch = Launch(_delta_kernel, (T,), H=H, D=D, BLOCK_D=block_d, num_warps=4)
    scale = D**-0.5

    def run() -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        delta = torch.empty_like(lse)
        if T:
            delta_launch(out, dout, delta, T)
            for (launch, descriptors, tiles), gradients in zip(passes, ((dk, dv), (dq,)), strict=True):
                launch(*descriptors, lse, delta, *gradients, tiles, len(tiles), T, scale * LOG2_E, scale)
        return dq, dk, dv

    return run
