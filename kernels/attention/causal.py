"""Causal attention for any sequence lengths, forward, in Triton: causal_attention's backend `triton`.

    out[i, h] = sum_j p[i, j] v[j, h // R] / sum_j p[i, j],   p[i, j] = exp(scale <q[i, h], k[j, h // R]>)   j <= i

    q, out [T, H, D]   k, v [T, KV, D]   i, j rows in one sequence; R = H / KV heads share one k and v head
    lse [H, T] fp32, log2 of p's sum, for the backward pass

Sequences follow each other without padding, T rows in all, as tokens in a serving engine or a packed training batch
do: attention's own grouped problem. A program computes ROWS rows for one head. It passes over the keys in blocks, so
the score matrix never exists in memory. A row's highest score so far and its sum are corrected when a block has a
higher one (online softmax). Blocks to the diagonal's left need no mask; those on it do.

A table lists all sequences' tiles, the longest sequence first: short ones fill the gaps at the end. Tiles of a sequence
stay together, those with most keys first. Heads come in sections whose keys and values fit in L2 together.

TMA reads all operands, as [H, T, D], and fills D with zeros up to a power of two. A tile at a sequence's end reads rows
from the next one. As keys they come after all stored rows. Their values are replaced by zeros, since
0 * NaN is NaN.

After flash attention 2 (Dao, 2023) and Triton's tutorial 06-fused-attention, item e in gpu-mode's course.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from groupbench.kernels.device import device_of
from groupbench.kernels.grouped_gemm.reference import without_tf32
from groupbench.kernels.grouped_gemm.support import TMA_BYTES, require_runnable, require_tensors
from groupbench.kernels.launch import Launch

LOG2_E = 1.4426950408889634  # the GPU computes powers of two: exp(x) = exp2(x * LOG2_E)
L2_BYTES = 24 << 20  # of keys and values that are read at the same time
MAX_D = 256


@dataclass(frozen=True)
class AttentionConfig:
    """Rows and keys per block, and launch options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


CONFIGS = {
    # Heads of up to 128 elements. Several small programs per SM: one has its softmax while another multiplies. On an
    # H200, 16 heads of 128 and 4 x 4096 rows take 0.55 ms, and tiles of 128 x 128 with 8 warps 0.61 ms.
    "short": AttentionConfig(64, 64, num_warps=4, num_stages=3),
    "long": AttentionConfig(128, 64, num_warps=8, num_stages=2),
    "fp32": AttentionConfig(32, 32, num_warps=4, num_stages=1),  # IEEE fp32 runs on FMA units, which read registers
}


def default_config(D: int, dtype: torch.dtype, device: torch.device) -> AttentionConfig:
    """Return the config for a head size."""
    if dtype == torch.float32 or device.type == "cpu":
        return CONFIGS["fp32"]
    return CONFIGS["short" if D <= 128 else "long"]


@triton.jit
def place_of(pid, tiles_ptr, TILES, H: tl.constexpr, SECTION: tl.constexpr):
    """Return a program's (head, tile's first row, sequence's first row, sequence's end)."""
    section = pid // (TILES * SECTION)
    rest = pid % (TILES * SECTION)
    head = section * SECTION + rest % SECTION
    row = tiles_ptr + rest // SECTION * 3
    return head, tl.load(row), tl.load(row + 1), tl.load(row + 2)


@triton.jit
def _blocks(
    acc, highest, total,  # of the rows so far: sum of p * v, highest score, sum of p
    q, k_desc, v_desc, head, rows, first, last, end, scale,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys from `first` to `last`."""
    for key in range(first, last, KEYS):
        k = k_desc.load([head, key, 0]).reshape(KEYS, BLOCK_D)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        v = v_desc.load([head, key, 0]).reshape(KEYS, BLOCK_D)
        if MASKED:
            keys = key + tl.arange(0, KEYS)
            scores = tl.where(rows[:, None] >= keys[None, :], scores, -float("inf"))
            v = tl.where((keys < end)[:, None], v, 0.0)
        higher = tl.maximum(highest, tl.max(scores, 1) * scale)
        p = tl.exp2(scores * scale - higher[:, None])  # one multiply-add
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        highest = higher
    return acc, highest, total


@triton.jit
def _forward_kernel(
    q_desc,  # [H, T, D], boxes [1, ROWS, BLOCK_D]
    k_desc,  # [KV, T, D], boxes [1, KEYS, BLOCK_D]
    v_desc,
    out_ptr,  # [T, H, D]
    lse_ptr,  # [H, T]
    tiles_ptr,  # [TILES, 3] int32: first row of the tile, first row of its sequence, end of its sequence
    TILES,
    T,
    scale,  # times LOG2_E
    H: tl.constexpr,
    R: tl.constexpr,
    SECTION: tl.constexpr,
    D: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head, row, start, end = place_of(tl.program_id(0), tiles_ptr, TILES, H, SECTION)
    rows = row + tl.arange(0, ROWS)
    q = q_desc.load([head, row, 0]).reshape(ROWS, BLOCK_D)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    highest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    # Rows and blocks of keys begin at the sequence's start, and KEYS divides ROWS: all blocks before `row` are full.
    acc, highest, total = _blocks(
        acc, highest, total, q, k_desc, v_desc, head // R, rows, start, row, end, scale, PRECISION, KEYS, BLOCK_D, False
    )
    last = tl.minimum(row + ROWS, end)
    acc, highest, total = _blocks(
        acc, highest, total, q, k_desc, v_desc, head // R, rows, row, last, end, scale, PRECISION, KEYS, BLOCK_D, True
    )
    columns = tl.arange(0, BLOCK_D)
    inside = (rows < end)[:, None] & (columns < D)[None, :]
    at = rows.to(tl.int64)[:, None] * (H * D) + head * D + columns[None, :]
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(lse_ptr + head.to(tl.int64) * T + rows, highest + tl.log2(total), mask=rows < end)


def prepare_causal(
    q: Tensor,  # [T, H, D]
    k: Tensor,  # [T, KV, D]
    v: Tensor,  # [T, KV, D]
    lengths: Sequence[int],  # rows of each sequence, T in all
    config: AttentionConfig | None = None,
) -> Callable[[], Tensor]:  # [T, H, D]
    """Make the tile table; the returned callable allocates the output and launches. Raises ValueError."""
    run = prepare_with_lse(q, k, v, lengths, config)
    return lambda: run()[0]


def prepare_with_lse(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], config: AttentionConfig | None = None
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return `prepare_causal`'s callable with lse [H, T] as a second output."""
    require_sequences(lengths, q=q, k=k, v=v)
    (T, H, D), KV = q.shape, k.size(1)
    config = config or default_config(D, q.dtype, q.device)
    tiles = tiles_of(lengths, config.rows, q.device)
    block_d = max(16, triton.next_power_of_2(D))
    descriptors = [by_head(x, size, block_d) for x, size in ((q, config.rows), (k, config.keys), (v, config.keys))]
    launch = Launch(
        _forward_kernel,
        (len(tiles) * H,),
        H=H,
        R=H // KV,
        SECTION=section(H, KV, max(lengths, default=0), D, q.dtype),
        D=D,
        PRECISION="ieee",
        ROWS=config.rows,
        KEYS=config.keys,
        BLOCK_D=block_d,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    scale = D**-0.5 * LOG2_E

    def run() -> tuple[Tensor, Tensor]:
        out = torch.empty(T, H, D, dtype=q.dtype, device=q.device)
        lse = torch.empty(H, T, dtype=torch.float32, device=q.device)
        if T:
            launch(*descriptors, out, lse, tiles, len(tiles), T, scale)
        return out, lse

    return run


def tiles_of(lengths: Sequence[int], rows: int, device: torch.device, most_work_last: bool = False) -> Tensor:
    """Return all sequences' tiles [tiles, 3], int32: of the longest sequence first, and with most work first."""
    tiles, start = [], 0
    for length in lengths:
        tiles += [(first, start, start + length) for first in range(start, start + length, rows)]
        start += length
    tiles.sort(key=lambda tile: (tile[1] - tile[2], tile[1], tile[0] if most_work_last else -tile[0]))
    return torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 3)


def section(H: int, KV: int, longest: int, D: int, dtype: torch.dtype) -> int:
    """Return how many heads are computed at the same time: a number dividing H, whose keys and values fit in L2.

    They are of one sequence, which has at most `longest` rows.
    """
    fits = L2_BYTES // max(1, 2 * longest * D * dtype.itemsize)  # heads of k and v
    return next(heads for heads in range(H, 0, -1) if H % heads == 0 and (heads * KV <= fits * H or heads == 1))


def by_head(x: Tensor, rows: int, block_d: int) -> TensorDescriptor:
    """Return a descriptor for [T, heads, D] as [heads, T, D]."""
    return TensorDescriptor.from_tensor(x.transpose(0, 1), [1, rows, block_d])


def require_sequences(lengths: Sequence[int], **operands: Tensor) -> None:
    """Raise ValueError or TypeError unless the operands are [T, H, D], or [T, KV, D] for k and v, as TMA reads them."""
    require_tensors(**operands)
    q, k = operands["q"], operands["k"]
    for name, x in operands.items():
        like = k if name in ("k", "v") else q
        if x.ndim != 3 or x.shape != like.shape or not x.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous {tuple(like.shape)}, got {tuple(x.shape)}")
    (T, H, D), KV = q.shape, k.size(1)
    if k.size(0) != T or k.size(2) != D or KV == 0 or H % KV or min(lengths, default=0) < 0 or sum(lengths) != T:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and sequences of {sum(lengths)} rows do not fit")
    if D > MAX_D or D * q.element_size() % TMA_BYTES:
        raise ValueError(f"D={D}: a head has at most {MAX_D} elements, in multiples of {TMA_BYTES} bytes")
    require_runnable(*operands.values())
    if not device_of(q.device).tma:
        raise ValueError("this GPU has no TMA")


def causal_attention_reference(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return the output [T, H, D] in a wider dtype, differentiable, with one head's scores at a time."""
    wide = torch.float64 if q.dtype == torch.float32 else torch.float32
    R, scale = q.size(1) // k.size(1), q.size(2) ** -0.5
    sequences = []
    with without_tf32():
        for q_s, k_s, v_s in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True):
            later = torch.ones(len(q_s), len(q_s), dtype=torch.bool, device=q.device).triu(1)
            heads = []
            for h in range(q.size(1)):
                scores = q_s[:, h].to(wide) @ k_s[:, h // R].to(wide).T * scale
                heads.append(torch.softmax(scores.masked_fill(later, -float("inf")), -1) @ v_s[:, h // R].to(wide))
            sequences.append(torch.stack(heads, 1))
    return torch.cat(sequences)
