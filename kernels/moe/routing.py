"""From each token's experts to the order in which a grouped GEMM wants its rows.

    ids [T, k]  ->  offs [G], position [T, k], source [T*k]

Choice j of token t is flat choice i = t*k + j. Rows are sorted by expert, and in one expert by flat choice: a stable
counting sort, the same for every call. `position[t, j]` is the row of a choice, `source[row]` the flat choice of a row,
and `offs[g]` where the rows of expert g end.

An id that is none of 0..G-1 (-1 for a dropped choice, or an expert of another rank) has no row: its position is -1, and
offs[-1] says how many rows there are. Rows from there on belong to nobody: nothing here writes them or reads them, in
`source` as in every matrix of rows.

Three launches, no host sync, no atomics: the first counts each expert's choices in chunks of flat choices, the second
sums each expert's counts over the chunks in front, the third ranks the choices of a chunk by comparing all pairs of
them. Every program does one short thing: what these launches cost is latency, and the copy after them is to run at the
memory's rate. Few choices are one chunk, which one launch counts and places.

Sources: megablocks' and SonicMoE's histogram and cumulative sum over tokens; ranks by pairs in place of a sort are
ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from groupbench.kernels.grouped_gemm.support import interpreted

MAX_EXPERTS = 4096  # a program compares a choice with all of them
ONE_CHUNK = 512  # choices that one program counts and places, block after block
SCANNED = (256, 16)  # chunks and experts that a program sums at a time
AT_ONCE = 16384  # comparisons, of choices with experts or each other, that a program holds in registers
WARPS = 8


@dataclass(frozen=True)
class Routing:
    """Where each choice's row is; see the head of this file."""

    offs: Tensor  # [G] int32
    position: Tensor  # [T, k] int32, -1 without a row
    source: Tensor  # [T*k] int32, arbitrary from offs[-1] on


@triton.jit
def _experts_of(ids_ptr, at, n, G: tl.constexpr):
    """The experts of flat choices `at`, -1 where an id is no expert's or past the last choice."""
    ids = tl.load(ids_ptr + at, mask=at < n, other=-1)
    # Before it is narrowed: 2**32 would become expert 0.
    return tl.where((ids >= 0) & (ids < G), ids, -1).to(tl.int32)


@triton.jit
def _count(ids_ptr, first, last, n, G: tl.constexpr, G_POW2: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the choices first..last - 1 each expert has, [G_POW2]."""
    experts = tl.arange(0, G_POW2)
    counts = tl.zeros((G_POW2,), dtype=tl.int32)
    for start in range(first, last, BLOCK):
        of = _experts_of(ids_ptr, start + tl.arange(0, BLOCK), n, G)
        counts += tl.sum((of[:, None] == experts[None, :]).to(tl.int32), 0)
    return counts


@triton.jit
def _count_kernel(
    ids_ptr,  # [n]
    counts_ptr,  # [chunks, G_POW2]
    n,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0) * CHUNK
    counts = _count(ids_ptr, first, tl.minimum(first + CHUNK, n), n, G, G_POW2, BLOCK)
    tl.store(counts_ptr + tl.program_id(0) * G_POW2 + tl.arange(0, G_POW2), counts)


@triton.jit
def _scan_kernel(
    counts_ptr,  # [chunks, G_POW2]; becomes the sum of those in front
    totals_ptr,  # [G_POW2]
    chunks,
    G_POW2: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    running = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, chunks, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = counts_ptr + rows[:, None] * G_POW2 + experts[None, :]
        inside = (rows < chunks)[:, None]
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, running[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        running += tl.sum(counts, 0)
    tl.store(totals_ptr + experts, running)


@triton.jit
def _place(
    ids_ptr, position_ptr, source_ptr, following, start, n, G: tl.constexpr, G_POW2: tl.constexpr, BLOCK: tl.constexpr
):
    """Place the choices start..start + BLOCK - 1, of which each expert's first goes to row `following` [G_POW2]."""
    lanes = tl.arange(0, BLOCK)
    choice = start + lanes
    of = _experts_of(ids_ptr, choice, n, G)
    earlier = (of[:, None] == of[None, :]) & (lanes[None, :] < lanes[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    own = of[:, None] == tl.arange(0, G_POW2)[None, :]
    row = tl.sum(tl.where(own, following[None, :], 0), 1) + rank
    tl.store(position_ptr + choice, tl.where(of >= 0, row, -1), mask=choice < n)
    tl.store(source_ptr + row, choice, mask=of >= 0)
    return of


@triton.jit
def _place_kernel(
    ids_ptr,  # [n]
    before_ptr,  # [chunks, G_POW2], what _scan_kernel leaves; unused where ONE_CHUNK
    totals_ptr,  # [G_POW2], likewise
    offs_ptr,  # [G]
    position_ptr,  # [n]
    source_ptr,  # [n]
    n,
    G: tl.constexpr,
    G_POW2: tl.constexpr,
    ONE_CHUNK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    mine = tl.program_id(0)
    first = mine * CHUNK
    last = tl.minimum(first + CHUNK, n)
    experts = tl.arange(0, G_POW2)
    if ONE_CHUNK:
        total = _count(ids_ptr, first, last, n, G, G_POW2, BLOCK)
        before = tl.zeros((G_POW2,), dtype=tl.int32)
    else:
        total = tl.load(totals_ptr + experts)
        before = tl.load(before_ptr + mine * G_POW2 + experts)
    ends = tl.cumsum(total, 0)
    if mine == 0:
        tl.store(offs_ptr + experts, ends, mask=experts < G)
    following = ends - total + before  # the row of each expert's next choice
    if ONE_CHUNK:
        for start in range(first, last, BLOCK):
            of = _place(ids_ptr, position_ptr, source_ptr, following, start, n, G, G_POW2, BLOCK)
            following += tl.sum((of[:, None] == experts[None, :]).to(tl.int32), 0)
    else:
        _place(ids_ptr, position_ptr, source_ptr, following, first, n, G, G_POW2, BLOCK)


def check_ids(ids: Tensor, G: int) -> None:
    """Raise ValueError unless ids [T, k] are integers and G and their number are what the kernels take."""
    if ids.ndim != 2 or ids.size(1) == 0 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expected ids [T, k] in int32 or int64, k at least 1; got {tuple(ids.shape)} in {ids.dtype}")
    if not 1 <= G <= MAX_EXPERTS:
        raise ValueError(f"G={G}: 1 to {MAX_EXPERTS} experts")
    if ids.numel() >= 2**31 - ONE_CHUNK:
        raise ValueError(f"{ids.numel()} choices: their numbers are int32")


def route(
    ids: Tensor,  # [T, k], int32 or int64, any strides
    G: int,
) -> Routing:
    """Count and place on the device. Raises ValueError for ids or a G that the kernels cannot take."""
    check_ids(ids, G)
    if ids.device.type == "cpu" and not interpreted():
        raise ValueError("CPU tensors need Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported")
    n = ids.numel()
    offs = torch.empty(G, dtype=torch.int32, device=ids.device)
    position = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    source = torch.empty(n, dtype=torch.int32, device=ids.device)
    if n == 0:
        return Routing(offs.zero_(), position, source)
    ids = ids.contiguous()
    g_pow2 = triton.next_power_of_2(G)
    block = block_of(G)
    one_chunk = n <= max(ONE_CHUNK, block)
    chunk = max(triton.next_power_of_2(n), block) if one_chunk else block
    chunks = triton.cdiv(n, chunk)
    counts = totals = offs
    if not one_chunk:
        counts = torch.empty(chunks, g_pow2, dtype=torch.int32, device=ids.device)
        totals = torch.empty(g_pow2, dtype=torch.int32, device=ids.device)
        _count_kernel[(chunks,)](ids, counts, n, G=G, G_POW2=g_pow2, CHUNK=chunk, BLOCK=block, num_warps=WARPS)
        experts = min(SCANNED[1], g_pow2)
        _scan_kernel[(g_pow2 // experts,)](
            counts, totals, chunks, G_POW2=g_pow2, ROWS=SCANNED[0], EXPERTS=experts, num_warps=WARPS
        )
    _place_kernel[(chunks,)](
        ids, counts, totals, offs, position, source, n, G=G, G_POW2=g_pow2, ONE_CHUNK=one_chunk, CHUNK=chunk,
        BLOCK=block, num_warps=WARPS,
    )  # fmt: skip
    return Routing(offs, position, source)


def block_of(G: int) -> int:
    """Choices that a program looks at together."""
    return min(max(AT_ONCE // triton.next_power_of_2(G), 16), 128)


def route_reference(ids: Tensor, G: int) -> Routing:
    """The same by a stable sort; `source` is 0 from offs[-1] on."""
    flat = ids.flatten().long()
    valid = (flat >= 0) & (flat < G)
    order = torch.where(valid, flat, G).argsort(stable=True)[: int(valid.sum())]
    offs = torch.bincount(flat[valid], minlength=G).cumsum(0).int()
    position = torch.full_like(flat, -1, dtype=torch.int32)
    position[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids.device)
    source = torch.zeros_like(position)
    source[: order.numel()] = order.int()
    return Routing(offs, position.view(ids.shape), source)
