"""Into how many stretches K is cut: what the rules of tiled.py and stream.py share."""

from __future__ import annotations

import triton

MAX_SPLITS = 1024
# Bytes of operands from which a product is bound by DRAM; below, by the latency of its steps.
LARGE_BYTES = 16 << 20


def even_splits(splits: int) -> int:
    """A power of two where one is at most a tenth less: 33 slots are loaded as 64, in twice the time of 32."""
    power = 1 << (splits.bit_length() - 1) if splits else 0
    return power if 10 * power >= 9 * splits else splits


def legal_splits(splits: int, K: int, block_k: int) -> int:
    """The nearest number of splits that leaves a block of K to each, and whose product with blocks is an int32."""
    blocks = max(triton.cdiv(K, block_k), 1)
    return max(1, min(splits, blocks, MAX_SPLITS, (2**31 - 1) // blocks))
