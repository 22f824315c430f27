"""Compute the order in which a grouped GEMM needs its rows from each token's experts.

    ids [T, k]  ->  offs [G], position [T, k], source [T*k]

Choice j of token t is flat choice i = t*k + j. Rows are sorted by expert, and within one expert by flat choice: a
stable counting sort, the same for every call. `position[t, j]` is the row of a choice, `source[row]` the flat choice of
a row, and `offs[g]` the end of the rows of expert g.

An id that is not in 0..G-1 (-1 for a dropped choice, or an expert of another rank) has no row: its position is -1.
offs[-1] is the number of rows. Rows from there on belong to no choice: nothing here writes or reads them, in `source`
as in every matrix of rows.

Three launches, no host sync, the same bits in every call. The first counts each expert's choices in blocks of flat
choices, the second sums each expert's counts over the earlier blocks, the third ranks the choices of a block by
comparing all pairs of them. If there are few choices, one program counts and places them block after block. If rows are
copied next, permute_fused.py does the third launch's work itself.

Every program does one short thing, and latency is most of the cost of these launches. On Hopper each is launched while
the previous one still runs, and waits on the device for the previous end (programmatic dependent launch).

Work is by choice, not by choice and expert: a histogram counts, and a choice looks up the expert's next row. A matrix
of choices x experts instead cost 29 us more on an H100 (65,536 choices, 128 experts). Pairs are summed down the columns
of their matrix, which a thread holds. Sums along its rows go through all threads of a warp.

Sources: megablocks' and SonicMoE's histogram and cumulative sum over tokens. Ranks by pairs instead of a sort are our
own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from groupbench.kernels.grouped_gemm.support import can_chain, require_device, require_tensors
from groupbench.kernels.launch import Kept, Launch, launch

MAX_EXPERTS = 4096  # every program sums over all of them
ONE_PROGRAM = 512  # choices that one program counts and places
BLOCK = 128  # choices whose pairs a program compares
LEAST_BINS = 32  # of a histogram, which needs at least one bin per thread of a warp
SCANNED = (1024, 4)  # blocks and experts that a program sums at a time
WARPS = 4


@dataclass(frozen=True)
class Routing:
    """The row of each choice, and the choice of each row; see the module's docstring."""

    offs: Tensor  # [G] int32
    position: Tensor  # [T, k] int32, -1 without a row
    source: Tensor  # [T*k] int32, arbitrary from offs[-1] on


@triton.jit
def _experts_of(ids_ptr, at, n, G: tl.constexpr):
    """Return the experts of flat choices `at`; -1 for ids outside 0..G-1 and past the last choice."""
    ids = tl.load(ids_ptr + at, mask=at < n, other=-1)
    # Compared before they are narrowed: 2**32 would become expert 0.
    return tl.where((ids >= 0) & (ids < G), ids, -1).to(tl.int32)


@triton.jit
def _count(of, BINS: tl.constexpr):
    """Return how many of the choices with experts `of` each expert has, [BINS]."""
    return tl.histogram(tl.maximum(of, 0), BINS, mask=of >= 0)


@triton.jit
def _count_kernel(
    ids_ptr,  # [n]
    counts_ptr,  # [blocks, BINS]
    n,
    G: tl.constexpr,
    BINS: tl.constexpr,
    CHOICES: tl.constexpr,  # of a block
    BLOCK: tl.constexpr,  # CHOICES, rounded up to a power of two
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
    first = tl.program_id(0) * CHOICES
    of = _experts_of(ids_ptr, first + tl.arange(0, BLOCK), tl.minimum(first + CHOICES, n), G)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), _count(of, BINS))


@triton.jit
def _scan_kernel(
    counts_ptr,  # [blocks, BINS]; each becomes the sum over the earlier blocks
    totals_ptr,  # [BINS]
    blocks,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
        gdc_wait()
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    running = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in range(0, blocks, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = counts_ptr + rows[:, None] * BINS + experts[None, :]
        inside = (rows < blocks)[:, None]
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, running[None, :] + tl.cumsum(counts, 0) - counts, mask=inside)
        running += tl.sum(counts, 0)
    tl.store(totals_ptr + experts, running)


@triton.jit
def _ranks(of, BLOCK: tl.constexpr):
    """Return how many choices of a block with experts `of` [BLOCK] have the same expert and come earlier."""
    lanes = tl.arange(0, BLOCK)
    earlier = (of[:, None] == of[None, :]) & (lanes[:, None] < lanes[None, :])
    return tl.sum(earlier.to(tl.int32), 0)


@triton.jit
def _place(position_ptr, source_ptr, following, of, rank, choice, n):
    """Write the rows of choices [BLOCK]; the first choice of each expert goes to row `following` [BINS]."""
    row = tl.gather(following, tl.maximum(of, 0), 0) + rank
    tl.store(position_ptr + choice, tl.where(of >= 0, row, -1), mask=choice < n)
    tl.store(source_ptr + row, choice, mask=of >= 0)


@triton.jit
def _place_kernel(
    ids_ptr,  # [n]
    before_ptr,  # [blocks, BINS], result of _scan_kernel
    totals_ptr,  # [BINS], likewise
    offs_ptr,  # [G]
    position_ptr,  # [n]
    source_ptr,  # [n]
    n,
    G: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    if CHAINED:
        gdc_launch_dependents()
    program = tl.program_id(0)
    choice = program * BLOCK + tl.arange(0, BLOCK)
    of = _experts_of(ids_ptr, choice, n, G)
    rank = _ranks(of, BLOCK)
    if CHAINED:
        gdc_wait()  # not needed before: ids were complete before the first launch began
    experts = tl.arange(0, BINS)
    total = tl.load(totals_ptr + experts)
    ends = tl.cumsum(total, 0)
    if program == 0:
        tl.store(offs_ptr + experts, ends, mask=experts < G)
    following = ends - total + tl.load(before_ptr + program * BINS + experts)
    _place(position_ptr, source_ptr, following, of, rank, choice, n)


@triton.jit
def _route_kernel(
    ids_ptr,  # [n]
    offs_ptr,  # [G]
    position_ptr,  # [n]
    source_ptr,  # [n]
    n,
    G: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Count and place all choices in one program."""
    if CHAINED:
        gdc_launch_dependents()
    experts = tl.arange(0, BINS)
    total = tl.zeros((BINS,), dtype=tl.int32)
    for start in range(0, n, BLOCK):
        total += _count(_experts_of(ids_ptr, start + tl.arange(0, BLOCK), n, G), BINS)
    ends = tl.cumsum(total, 0)
    tl.store(offs_ptr + experts, ends, mask=experts < G)
    following = ends - total
    for start in range(0, n, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        of = _experts_of(ids_ptr, choice, n, G)
        _place(position_ptr, source_ptr, following, of, _ranks(of, BLOCK), choice, n)
        following += _count(of, BINS)


def check_ids(ids: Tensor, G: int) -> None:
    """Raise ValueError unless ids [T, k] are integers, and G and their number are within the kernels' limits."""
    require_tensors(ids=ids)
    if ids.ndim != 2 or ids.size(1) == 0 or ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"expected ids [T, k] in int32 or int64, k at least 1; got {tuple(ids.shape)} in {ids.dtype}")
    if not 1 <= G <= MAX_EXPERTS:
        raise ValueError(f"G={G}: 1 to {MAX_EXPERTS} experts")
    if ids.numel() >= 2**31 - BLOCK:
        raise ValueError(f"{ids.numel()} choices: their numbers are int32")
    if triton.cdiv(ids.numel(), BLOCK) * bins_of(G) >= 2**31:
        raise ValueError(f"{ids.numel()} choices of {G} experts: counts of {BLOCK} choices each pass 2**31")


def route(
    ids: Tensor,  # [T, k], int32 or int64, any strides
    G: int,
) -> Routing:
    """Return the routing of ids, computed on the device.

    Raises ValueError for ids or a G that the kernels cannot take.
    """
    require_tensors(ids=ids)
    key = (ids.shape, ids.dtype, ids.get_device(), G)
    few = _few.get(key)
    if few is None:
        check_ids(ids, G)
        require_device(ids.device)
    n = ids.numel()
    offs = torch.empty(G, dtype=torch.int32, device=ids.device)
    position = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    source = torch.empty(n, dtype=torch.int32, device=ids.device)
    if n == 0:
        return Routing(offs.zero_(), position, source)
    ids = ids.contiguous()
    if few is None and n <= ONE_PROGRAM:
        constants = {"G": G, "BINS": bins_of(G), "BLOCK": BLOCK, "CHAINED": can_chain(ids.device)}
        few = _few.add(key, Launch(_route_kernel, (1,), **constants, num_warps=WARPS))
    if few is not None:
        if not few.again(ids.data_ptr(), offs.data_ptr(), position.data_ptr(), source.data_ptr()):
            few(ids, offs, position, source, n)
        return Routing(offs, position, source)
    chained = can_chain(ids.device)
    before, totals = count_before(ids, G, BLOCK)
    launch(
        _place_kernel, (before.size(0),),
        ids, before, totals, offs, position, source, n, G=G, BINS=bins_of(G), BLOCK=BLOCK, CHAINED=chained,
        num_warps=WARPS, **({"launch_pdl": True} if chained else {}),
    )  # fmt: skip
    return Routing(offs, position, source)


_few: Kept[Launch] = Kept()
"""Bound launches of `_route_kernel` by problem class."""


def bins_of(G: int) -> int:
    """Return the number of a block's counters for G experts."""
    return max(triton.next_power_of_2(G), LEAST_BINS)


def count_before(
    ids: Tensor,  # [T, k], contiguous, not empty
    G: int,
    choices: int,  # of a block
) -> tuple[Tensor, Tensor]:  # choices in earlier blocks [blocks, bins], and in all [bins]
    """Count the choices of every expert: the first two launches, which the next one may overlap on Hopper."""
    n, bins, chained = ids.numel(), bins_of(G), can_chain(ids.device)
    blocks, block = triton.cdiv(n, choices), triton.next_power_of_2(choices)
    counts = torch.empty(blocks, bins, dtype=torch.int32, device=ids.device)
    totals = torch.empty(bins, dtype=torch.int32, device=ids.device)
    launch(
        _count_kernel, (blocks,),
        ids, counts, n, G=G, BINS=bins, CHOICES=choices, BLOCK=block, CHAINED=chained,
        num_warps=WARPS if block >= BLOCK else 1,
    )  # fmt: skip
    rows, experts = min(SCANNED[0], triton.next_power_of_2(blocks)), SCANNED[1]
    launch(
        _scan_kernel, (bins // experts,),
        counts, totals, blocks, BINS=bins, ROWS=rows, EXPERTS=experts, CHAINED=chained, num_warps=WARPS,
        **({"launch_pdl": True} if chained else {}),
    )  # fmt: skip
    return counts, totals


def route_reference(ids: Tensor, G: int) -> Routing:
    """Return the routing by a stable sort; `source` is 0 from offs[-1] on."""
    flat = ids.flatten().long()
    valid = (flat >= 0) & (flat < G)
    order = torch.where(valid, flat, G).argsort(stable=True)[: int(valid.sum())]
    offs = torch.bincount(flat[valid], minlength=G).cumsum(0).int()
    position = torch.full_like(flat, -1, dtype=torch.int32)
    position[order] = torch.arange(order.numel(), dtype=torch.int32, device=ids.device)
    source = torch.zeros_like(position)
    source[: order.numel()] = order.int()
    return Routing(offs, position.view(ids.shape), source)
