"""A mask that a number's condition can empty."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def masked_if(condition, mask):
    """Return the mask where the condition, one for all elements, holds; else a mask of nothing.

    As `mask & condition`, of which the interpreter of Triton 3.9 makes integers, which no load takes as a mask.
    """
    return tl.where(condition, mask, mask ^ mask)
