"""Place choices and copy rows in one launch: `triton` of moe_permute for many tokens with four to eight experts.

    routing.py's count and scan  ->  this: offs [G], position [T, k], source [T*k], rows [T*k, H]

A program has a few tokens. It requests their whole rows of x, ranks their choices as routing.py's third launch does
while the rows arrive and the scan runs, and stores each row k times. This helps in two ways. The copy waits for one
launch less. And when the scan is done, the rows of all first programs are on the SMs, in registers. Reads between
writes cost the DRAM twice as much as reads alone, and 4096 tokens of 4 KB are all read before the first row is written.

A token's ids decide whether it has a row. A token without one is not read, except by the first programs, which do not
wait for ids. The times below are in microseconds, on an H100 in bf16; before means permute.py's kernel after routing's
three launches:

    T, k, G, H                before   now    copy alone      clone of as many bytes
    4096, 8, 128, 2048         62.4    56.8       57.5            54.8
    8192, 8, 128, 2048        117.6   112.2      112.0           104.4
    8192, 4, 32, 2880          94.5    91.4       90.1            83.0

With k of 2 (H = 4096) it gained nothing. Wider and narrower rows and other k were not tried and stay with permute.py.
The reference is permute.permute_reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from groupbench.kernels.grouped_gemm.support import can_chain, worker_count
from groupbench.kernels.launch import launch
from groupbench.kernels.moe.routing import Routing, _experts_of, _ranks, bins_of, count_before

LEAST_TOKENS = 4096
CHOICES = (4, 8)  # of a token, the fewest and the most
ROW_BYTES = (4096, 8192)  # of a row, rounded up to a power of two: the least and the most
MOST_EXPERTS = 256  # a program holds the start of their rows in addition to its rows of x
ALIGNED = 16  # rows must start at multiples of so many elements, or Triton stores their elements one by one
SM_BYTES = 131072  # bytes of rows that an SM's registers hold; its programs need the rest for other values


@dataclass(frozen=True)
class TokensConfig:
    """A program takes `tokens` whole rows of `block_h` columns."""

    tokens: int
    block_h: int
    num_warps: int


def choose_tokens(
    x: Tensor,  # [T, H]
    k: int,
    G: int,
) -> TokensConfig | None:
    """Return the config for tokens with k of G experts each, or None if permute.py's own kernel should copy.

    A program takes eight tokens. Four warps took 1 % less time than eight for H = 2880, and 1 % more for H = 2048.
    """
    T, H = x.shape
    block_h = triton.next_power_of_2(H)
    row = block_h * x.element_size()
    if T < LEAST_TOKENS or not CHOICES[0] <= k <= CHOICES[1] or not ROW_BYTES[0] <= row <= ROW_BYTES[1]:
        return None
    if G > MOST_EXPERTS or x.stride(1) != 1 or H % ALIGNED or x.stride(0) % ALIGNED:
        return None
    return TokensConfig(8, block_h, num_warps=8 if row == ROW_BYTES[0] else 4)


@triton.jit
def _place_and_spread_kernel(
    ids_ptr,  # [T, K]
    before_ptr,  # [programs, BINS], result of routing's scan
    totals_ptr,  # [BINS], likewise
    x_ptr,  # [T, H]
    offs_ptr,  # [G]
    position_ptr,  # [T, K]
    source_ptr,  # [T*K]
    out_ptr,  # [T*K, H]
    T,
    H,
    early,  # programs that read their rows before they know whether these are needed
    stride_x,
    stride_xh,
    G: tl.constexpr,
    BINS: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,  # K, rounded up to a power of two
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    CHAINED: tl.constexpr,
):
    program = tl.program_id(0)
    number = tl.arange(0, TOKENS * CHOICES)
    n = T * K
    choice = tl.where(number % CHOICES < K, (program * TOKENS + number // CHOICES) * K + number % CHOICES, n)
    of = _experts_of(ids_ptr, choice, n, G)

    token = program * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, BLOCK_H)
    wanted = token < T
    if program >= early:
        some = _experts_of(ids_ptr, token * K, n, G)
        for j in range(1, K):
            some = tl.maximum(some, _experts_of(ids_ptr, token * K + j, n, G))
        wanted = some >= 0
    inside = wanted[:, None] & (columns < H)[None, :]
    at = x_ptr + token.to(tl.int64)[:, None] * stride_x + columns.to(tl.int64)[None, :] * stride_xh
    rows = tl.load(at, mask=inside)

    rank = _ranks(of, TOKENS * CHOICES)

    if CHAINED:
        gdc_wait()  # not needed before: x and ids were complete before the first launch began
    experts = tl.arange(0, BINS)
    total = tl.load(totals_ptr + experts)
    following = tl.load(before_ptr + program * BINS + experts)
    ends = tl.cumsum(total, 0)
    following += ends - total
    position = tl.where(of >= 0, tl.gather(following, tl.maximum(of, 0), 0) + rank, -1)
    of_token = tl.reshape(position, (TOKENS, CHOICES))
    for j in tl.static_range(K):
        to = tl.max(tl.where(tl.arange(0, CHOICES)[None, :] == j, of_token, -1), 1).to(tl.int64)[:, None]
        tl.store(out_ptr + to * H + columns[None, :], rows, mask=inside & (to >= 0))

    tl.store(position_ptr + choice, position, mask=choice < n)
    tl.store(source_ptr + position, choice, mask=of >= 0)
    if program == 0:
        tl.store(offs_ptr + experts, ends, mask=experts < G)


def place_and_spread(
    x: Tensor,  # [T, H], any strides
    ids: Tensor,  # [T, k], int32 or int64, checked
    G: int,
    config: TokensConfig,
) -> tuple[Tensor, Routing]:  # rows [T*k, H]; those from offs[-1] on are not written
    """Return the rows of all choices, sorted by expert, and their routing, by three launches.

    T and H must be at least 1. The reference is permute.permute_reference.
    """
    (T, H), k, n = x.shape, ids.size(1), ids.numel()
    ids = ids.contiguous()
    chained = can_chain(ids.device)
    before, totals = count_before(ids, G, config.tokens * k)
    offs = torch.empty(G, dtype=torch.int32, device=ids.device)
    position = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    source = torch.empty(n, dtype=torch.int32, device=ids.device)
    out = torch.empty(n, H, dtype=x.dtype, device=x.device)
    program_bytes = config.tokens * config.block_h * x.element_size()
    early = worker_count(x.device, max(SM_BYTES // program_bytes, 1)) if chained else 0
    launch(
        _place_and_spread_kernel, (triton.cdiv(T, config.tokens),),
        ids, before, totals, x, offs, position, source, out, T, H, early, *x.stride(), G=G, BINS=bins_of(G), K=k,
        CHOICES=triton.next_power_of_2(k), TOKENS=config.tokens, BLOCK_H=config.block_h, CHAINED=chained,
        num_warps=config.num_warps, **({"launch_pdl": True} if chained else {}),
    )  # fmt: skip
    return out, Routing(offs, position, source)
