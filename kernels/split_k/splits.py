"""Choose the number of stretches into which K is cut: the rules that tiled.py and stream.py share."""

from __future__ import annotations

import triton

MAX_SPLITS = 1024
# Bytes of operands from which a product is bound by DRAM; below, the latency of its steps decides.
LARGE_BYTES = 16 << 20


def even_splits(splits: int) -> int:
    """Return the next lower power of two if it is at most a tenth less, else `splits`.

    33 slots are loaded as 64, in twice the time of 32.
    """
    power = 1 << (splits.bit_length() - 1) if splits else 0
    return power if 10 * power >= 9 * splits else splits


def legal_splits(splits: int, K: int, block_k: int) -> int:
    """Return the nearest number of splits that leaves each a block of K.

    Its product with the number of blocks fits into int32, in which the kernels compute it.
    """
    blocks = max(triton.cdiv(K, block_k), 1)
    return max(1, min(splits, blocks, MAX_SPLITS, (2**31 - 1) // blocks))
