"""A mask that a number's condition can empty."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def masked_if(condition, mask):
    """Return the mask if the condition, one for all elements, holds, else an empty mask.

    `mask & condition` would be simpler, but the interpreter of Triton 3.9 makes integers of it, which are not masks.
    """
    return tl.where(condition, mask, mask ^ mask)
