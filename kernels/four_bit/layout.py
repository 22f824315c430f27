"""The four-bit weight layout for hopper.py: blocks in the order for wgmma's left operand.

A block has 64 rows from an expert's weights and 128 activation bytes along K: 64 values for 16-bit activations, 128 for
fp8. It is stored in one piece, codes and then scales, so one copy brings both:

    [G, ceil(N / 64), ceil(K / BLOCK_K), codes | scales | zero points]

A thread in the four warps multiplying a block reads 16 code bytes (32 for fp8) at once. They are the thread's operand
share for all the block's K, and scales are next to those of the thread's other row. docs/explanation/kernels/
four-bit.md has a drawing. N and K are padded with zero weights; padding is never stored.

*mxfp4.* Scales are kept as powers of two relative to the row's largest, and an fp32 factor for each weight row
multiplies the sums. So bf16 holds every scaled weight exactly, whatever the scales, and a NaN scale makes
the factor NaN. For fp8, a scaled weight is exact in e4m3 if a row's scales differ by at most 2^14; other
weights are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from groupbench.kernels.four_bit.formats import BIAS, E2M1, MIDDLE, NAN, Format, Weights, power_of_two, unpack

BLOCK_N = 64
MOST_BINADES = 14  # of e4m3 below the values of e2m1 times 64: it has 2^-9 to 448
IN_FIRST = 0x06030603  # bits for two words' last registers that the first of them holds
HEADROOM = 6  # binades of e4m3 above those of e2m1
LARGEST = 253  # exponent of bf16 for the largest scale of a row: 2^126, which e2m1's bits lack (four_bit.cu)


@dataclass(frozen=True)
class Blocks:
    """Weights in the layout above.

    blocks   [G, ceil(N / 64), ceil(K / block_k), block_bytes] uint8
    factors  [G, ceil(N / 64) * 64] fp32 for mxfp4, else None
    table    [256] uint8 for fp8: the codes' e4m3 values, for every scale or zero point; else None
    """

    fmt: Format
    G: int
    N: int
    K: int
    fp8: bool
    blocks: Tensor
    factors: Tensor | None
    table: Tensor | None

    @property
    def groups(self) -> int:
        """Groups with a scale along a block's K."""
        return groups_of(self.fmt, self.fp8)

    @property
    def nbytes(self) -> int:
        return self.blocks.numel() + (0 if self.factors is None else self.factors.numel() * 4)


def block_k(fp8: bool) -> int:
    """Return a block's K."""
    return 128 if fp8 else 64


def groups_of(fmt: Format, fp8: bool) -> int:
    """Return how many groups with a scale a block has along K."""
    return block_k(fp8) // gcd(block_k(fp8), fmt.group)


def lay_out(w: Weights, fp8: bool) -> Blocks:
    """Return weights in blocks, one expert after another. Raises ValueError for mxfp4 values e4m3 cannot hold."""
    step, groups = block_k(fp8), groups_of(w.fmt, fp8)
    n_blocks, k_blocks = -(-w.N // BLOCK_N), -(-w.K // step)
    of_scales = BLOCK_N * groups * w.fmt.scale_bytes
    size = BLOCK_N * step // 2 + of_scales
    blocks = torch.empty(w.G, n_blocks, k_blocks, size, dtype=torch.uint8, device=w.codes.device)
    factors = torch.ones(w.G, n_blocks * BLOCK_N, device=w.codes.device) if w.fmt.floating else None
    for g in range(w.G):
        expert = w[g]
        codes = unpack(expert.codes[0], w.K)
        if factors is not None:
            scales, factors[g, : w.N] = _relative(codes, expert.scales[0], fp8)
            parts = [_by_block(scales, w, fp8)]
            # A thread's bytes: for bf16 its two rows times two groups, for fp8 its two rows, group by group.
            order = (0, 4, 5, 1, 3, 2) if fp8 else (0, 4, 1, 3, 2, 5)
            parts = [part.permute(order[0], order[1], *order[2:]) for part in parts]
        else:
            both = [expert.scales[0], *([] if expert.zeros is None else [expert.zeros[0]])]
            parts = [_by_block(part, w, fp8).permute(0, 4, 5, 1, 3, 2) for part in both]
        blocks[g, :, :, : size - of_scales] = _codes(codes, w.fmt, fp8)
        blocks[g, :, :, size - of_scales :] = torch.cat(
            [part.contiguous().flatten(2).view(torch.uint8).view(n_blocks, k_blocks, -1) for part in parts], -1
        )
    return Blocks(w.fmt, w.G, w.N, w.K, fp8, blocks, factors, _table(w.fmt).to(w.codes.device) if fp8 else None)


def _by_block(x: Tensor, w: Weights, fp8: bool) -> Tensor:
    """Return numbers [N, groups] as [n_blocks, warps, rows and rows + 8, 8 rows, k_blocks, groups per block]."""
    step, groups = block_k(fp8), groups_of(w.fmt, fp8)
    k_blocks = -(-w.K // step)
    at = torch.arange(k_blocks * groups, device=x.device) * (step // groups) // w.fmt.group
    x = torch.nn.functional.pad(x, (0, 1, 0, -w.N % BLOCK_N))[:, at.clamp(max=x.size(1))]
    return x.view(-1, 4, 2, 8, k_blocks, groups)


def _codes(codes: Tensor, fmt: Format, fp8: bool) -> Tensor:  # [N, K] uint8
    """Return all blocks' codes, [n_blocks, k_blocks, bytes]."""
    step = block_k(fp8)
    codes = torch.nn.functional.pad(codes, (0, -codes.size(1) % step, 0, -codes.size(0) % BLOCK_N)).int()
    if not fp8:
        # rows: block, warp, half, row   columns: block, slice, half, pair of a thread, value of a pair
        x = codes.view(-1, 4, 2, 8, codes.size(1) // 64, 4, 2, 4, 2)
        registers = [x[:, :, half, :, :, :, k_half] for k_half in (0, 1) for half in (0, 1)]
        words = _words_of_e2m1(registers) if fmt.floating else _words_of_integers(registers)
        words = words.permute(0, 3, 1, 2, 5, 4)  # block, block along K, warp, row, thread of the row, slice
    else:
        # columns: block, slice, half, four values of a thread
        x = codes.view(-1, 4, 2, 8, codes.size(1) // 128, 4, 2, 4, 4)
        words = torch.zeros(x[:, :, :, :, :, :, 0, :, 0].shape, dtype=torch.int32, device=codes.device)
        for k_half in (0, 1):
            for value in range(4):
                code = x[:, :, :, :, :, :, k_half, :, value]
                if not (fmt.floating or fmt.zero_point):  # twice the size, of a negative one less 1, and the sign
                    words |= torch.where(code < MIDDLE, 15 - 2 * code, 2 * code - 16) << 8 * value + 4 * k_half
                    continue
                words |= (code & 7) << 4 * (4 * k_half + value) | (code >> 3) << 8 * value + (3 if k_half else 7)
        words = words.permute(0, 4, 1, 3, 6, 5, 2)  # ..., thread of the row, slice, row or row + 8
    return words.contiguous().view(torch.uint8).view(words.size(0), words.size(1), -1)


def _words_of_integers(registers: list[Tensor]) -> Tensor:
    """Return the words for the codes [..., slice, pair, 2] of each of a thread's four registers."""
    words = torch.zeros_like(registers[0][..., 0])
    for register, codes in enumerate(registers):
        words |= codes[..., 0] << 4 * register | codes[..., 1] << 4 * register + 16
    return words


def _words_of_e2m1(registers: list[Tensor]) -> Tensor:
    """Do as `_words_of_integers` for mxfp4.

    A register takes the sign, exponent and mantissa where bf16 has them, after one rotation of a word. Three registers
    fill 12 bits of a half. What is left in two slices' words holds the fourth register of both; see values.cuh.
    """
    places = [(codes & 8) << 12 | (codes & 7) << 6 for codes in registers]
    first, second, third, fourth = (place[..., 0].long() | place[..., 1].long() << 16 for place in places)
    words = first | _rotated(second, 4) | _rotated(third, 10)
    both = _rotated(fourth[..., ::2, :], 6) | _rotated(fourth[..., 1::2, :], 12)
    words[..., ::2, :] |= both & IN_FIRST
    words[..., 1::2, :] |= _rotated(both & ~IN_FIRST, 2)
    return words.int()


def _rotated(words: Tensor, right: int) -> Tensor:
    """Return 32 bits rotated to the right, in int64."""
    return words >> right | (words & (1 << right) - 1) << 32 - right


def _relative(codes: Tensor, scales: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    """Return one expert's scales relative to the row's largest, [N, groups], and the factors [N] fp32."""
    pad = -codes.size(1) % 32
    used = torch.nn.functional.pad(codes & 7, (0, pad)).unflatten(1, (-1, 32)).amax(-1) > 0
    largest = torch.where(used & (scales != NAN), scales, 0).amax(1)
    factors = power_of_two(largest.long() - BIAS - HEADROOM * fp8).float()
    factors = torch.where((scales == NAN).any(1), float("nan"), factors)
    below = largest.int()[:, None] - scales.int()
    if not fp8:
        return (LARGEST - below).clamp(0, LARGEST).to(torch.uint8), factors
    if bool((used & (scales != NAN) & (below > MOST_BINADES)).any()):
        raise ValueError(
            f"scales of a row of weights differ by more than 2^{MOST_BINADES}: e4m3 cannot hold the values"
        )
    return below.clamp(0, MOST_BINADES).to(torch.uint8), factors


def _table(fmt: Format) -> Tensor:
    """Return the codes' values in e4m3, [256] bytes: 8 for each mxfp4 scale, 16 for each zero point."""
    if fmt.floating:
        scales = power_of_two(HEADROOM - torch.arange(MOST_BINADES + 1)).float()
        values = torch.tensor(E2M1) * scales[:, None]
    else:
        values = torch.arange(16.0) - torch.arange(16.0)[:, None]
    table = values.to(torch.float8_e4m3fn).view(torch.uint8).flatten()
    return torch.nn.functional.pad(table, (0, 256 - table.numel()))
