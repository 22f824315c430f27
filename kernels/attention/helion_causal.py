"""Causal attention for any sequence lengths, and its gradients, in Helion: causal_attention's backend `helion`.

Formulas, layouts and tile tables are the same as in causal.py and causal_backward.py. A program computes ROWS rows for
a head, or gradients for ROWS keys, and a tile passes over the others. Rows past a sequence's end are masked.

After Helion's examples/attention.py, which has equally long sequences, no mask and no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import helion
import helion.language as hl
import torch
from torch import Tensor

from groupbench.kernels.attention.causal import LOG2_E, require_sequences, tiles_of
from groupbench.kernels.helion_configs import compile_for

CONFIGS = {
    "cuda": (64, helion.Config(block_sizes=[64], num_warps=4, num_stages=3)),
    "fp32": (32, helion.Config(block_sizes=[32], num_warps=4, num_stages=1)),
}


# dot_precision applies to fp32 operands; the default, TF32, would leave them fp16's mantissa.
@helion.kernel(static_shapes=True, dot_precision="ieee")
def attend(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, KV, D]
    v: Tensor,
    tiles: Tensor,  # [tiles, 3] int32: first row of the tile, first row of its sequence, end of its sequence
    rows: int,
    scale: float,  # times LOG2_E
) -> tuple[Tensor, Tensor]:  # out [T, H, D], lse [H, T]
    ROWS = hl.specialize(rows)
    T, H, D = q.shape
    R = H // k.size(1)
    out = torch.empty_like(q)
    lse = torch.empty([H, T], dtype=torch.float32, device=q.device)
    for work, head in hl.grid([tiles.size(0), H]):
        end = tiles[work, 2]
        row = tiles[work, 0] + hl.arange(ROWS)
        inside = row < end
        q_tile = hl.load(q, [row, head, slice(None)], extra_mask=inside[:, None])
        acc = hl.zeros([ROWS, D], dtype=torch.float32)
        highest = hl.full([ROWS], -1e30, dtype=torch.float32)
        total = hl.zeros([ROWS], dtype=torch.float32)
        for keys in hl.tile(tiles[work, 1], torch.minimum(tiles[work, 0] + ROWS, end)):
            scores = hl.dot(q_tile, k[keys, head // R, :].transpose(0, 1)) * scale
            scores = torch.where(row[:, None] >= keys.index[None, :], scores, -float("inf"))
            higher = torch.maximum(highest, torch.amax(scores, 1))
            shifted = scores - higher[:, None]
            p = hl.inline_triton("tl.exp2({0})", args=(shifted,), output_like=shifted)
            change = highest - higher
            shrink = hl.inline_triton("tl.exp2({0})", args=(change,), output_like=change)
            total = total * shrink + torch.sum(p, 1)
            acc = hl.dot(p.to(v.dtype), v[keys, head // R, :], acc=acc * shrink[:, None])
            highest = higher
        hl.store(out, [row, head, slice(None)], (acc / total[:, None]).to(q.dtype), extra_mask=inside[:, None])
        logarithm = hl.inline_triton("tl.log2({0})", args=(total,), output_like=total)
        hl.store(lse, [head, row], highest + logarithm, extra_mask=inside)
    return out, lse


@helion.kernel(static_shapes=True, dot_precision="ieee")
def attend_backward_rows(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, tiles: Tensor, rows: int, scale: float
) -> Tensor:  # dq [T, H, D], without its factor
    ROWS = hl.specialize(rows)
    _, H, D = q.shape
    R = H // k.size(1)
    dq = torch.empty_like(q)
    for work, head in hl.grid([tiles.size(0), H]):
        end = tiles[work, 2]
        row = tiles[work, 0] + hl.arange(ROWS)
        inside = row < end
        q_tile = hl.load(q, [row, head, slice(None)], extra_mask=inside[:, None])
        dout_tile = hl.load(dout, [row, head, slice(None)], extra_mask=inside[:, None])
        lse_tile = hl.load(lse, [head, row], extra_mask=inside)
        delta_tile = hl.load(delta, [head, row], extra_mask=inside)
        acc = hl.zeros([ROWS, D], dtype=torch.float32)
        for keys in hl.tile(tiles[work, 1], torch.minimum(tiles[work, 0] + ROWS, end)):
            k_tile = k[keys, head // R, :]
            shifted = hl.dot(q_tile, k_tile.transpose(0, 1)) * scale - lse_tile[:, None]
            p = hl.inline_triton("tl.exp2({0})", args=(shifted,), output_like=shifted)
            p = torch.where(row[:, None] >= keys.index[None, :], p, 0.0)
            ds = p * (hl.dot(dout_tile, v[keys, head // R, :].transpose(0, 1)) - delta_tile[:, None])
            acc = hl.dot(ds.to(k.dtype), k_tile, acc=acc)
        hl.store(
            dq, [row, head, slice(None)], (acc * (scale * 0.6931471805599453)).to(q.dtype), extra_mask=inside[:, None]
        )
    return dq


@helion.kernel(static_shapes=True, dot_precision="ieee")
def attend_backward_keys(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, tiles: Tensor, rows: int, scale: float
) -> tuple[Tensor, Tensor]:  # dk, dv [T, KV, D]
    ROWS = hl.specialize(rows)
    KV, D = k.size(1), k.size(2)
    R = q.size(1) // KV
    dk = torch.empty_like(k)
    dv = torch.empty_like(v)
    for work, kv in hl.grid([tiles.size(0), KV]):
        end = tiles[work, 2]
        key = tiles[work, 0] + hl.arange(ROWS)
        inside = key < end
        k_tile = hl.load(k, [key, kv, slice(None)], extra_mask=inside[:, None])
        v_tile = hl.load(v, [key, kv, slice(None)], extra_mask=inside[:, None])
        dk_acc = hl.zeros([ROWS, D], dtype=torch.float32)
        dv_acc = hl.zeros([ROWS, D], dtype=torch.float32)
        for member in hl.grid(R):
            head = kv * R + member
            for row in hl.tile(tiles[work, 0], end):
                q_tile = q[row, head, :]
                dout_tile = dout[row, head, :]
                shifted = hl.dot(k_tile, q_tile.transpose(0, 1)) * scale - lse[head, row][None, :]
                p = hl.inline_triton("tl.exp2({0})", args=(shifted,), output_like=shifted)
                p = torch.where(row.index[None, :] >= key[:, None], p, 0.0)
                dv_acc = hl.dot(p.to(v.dtype), dout_tile, acc=dv_acc)
                ds = p * (hl.dot(v_tile, dout_tile.transpose(0, 1)) - delta[head, row][None, :])
                dk_acc = hl.dot(ds.to(k.dtype), q_tile, acc=dk_acc)
        dk_acc = dk_acc * (scale * 0.6931471805599453)
        hl.store(dk, [key, kv, slice(None)], dk_acc.to(k.dtype), extra_mask=inside[:, None])
        hl.store(dv, [key, kv, slice(None)], dv_acc.to(v.dtype), extra_mask=inside[:, None])
    return dk, dv


def prepare_causal_helion(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, KV, D]
    v: Tensor,  # [T, KV, D]
    lengths: Sequence[int],
) -> Callable[[], Tensor]:  # [T, H, D]
    """Compile for these sizes, without tuning; the returned callable allocates the output and launches.

    Raises ValueError if operands do not fit together.
    """
    require_sequences(lengths, q=q, k=k, v=v)
    rows, config = CONFIGS["fp32" if q.dtype == torch.float32 or q.device.type == "cpu" else "cuda"]
    tiles = tiles_of(lengths, rows, q.device)
    arguments = (q, k, v, tiles, rows, q.size(2) ** -0.5 * LOG2_E)
    compiled = compile_for(attend, arguments, config)
    return lambda: compiled(*arguments)[0]


def prepare_causal_backward_helion(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, KV, D]
    v: Tensor,  # [T, KV, D]
    out: Tensor,  # [T, H, D], and lse: of the forward pass
    lse: Tensor,  # [H, T]
    dout: Tensor,  # [T, H, D]
    lengths: Sequence[int],
) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:  # dq [T, H, D], dk and dv [T, KV, D]
    """Compile for these sizes, without tuning; the returned callable allocates the gradients and launches."""
    require_sequences(lengths, q=q, k=k, v=v, out=out, dout=dout)
    rows, config = CONFIGS["fp32" if q.dtype == torch.float32 or q.device.type == "cpu" else "cuda"]
    scale = q.size(2) ** -0.5 * LOG2_E
    operands = (q, k, v, dout, lse, torch.empty_like(lse))
    by_keys = (*operands, tiles_of(lengths, rows, q.device, most_work_last=True), rows, scale)
    by_rows = (*operands, tiles_of(lengths, rows, q.device), rows, scale)
    keys_kernel = compile_for(attend_backward_keys, by_keys, config)
    rows_kernel = compile_for(attend_backward_rows, by_rows, config)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        delta = torch.sum(out.float() * dout, 2).t().contiguous()
        with_delta = (q, k, v, dout, lse, delta)
        dk, dv = keys_kernel(*with_delta, *by_keys[6:])
        return rows_kernel(*with_delta, *by_rows[6:]), dk, dv

    return run
