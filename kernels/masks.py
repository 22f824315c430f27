"""Combine a mask with a condition on a number, which Triton 3.9 cannot do with `&`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def masked_if(condition, mask):
    """Return the mask if the condition on a number is true, else a mask of zeros.

    `mask & condition` would be simpler, but the interpreter of Triton 3.9 makes integers of it, which are not masks.
    """
    return tl.where(condition, mask, mask ^ mask)
