"""Register input copies in a layout for a backend, such as rows padded to 16 bytes.

A caller would have inputs in the right layout from the start, so making the copy is not timed. But the copy must not
hold old values: the harness writes new values into the inputs before every timed call, and refreshes each copy
registered here. A backend packing an input without registering the copy computes with stale values, and the output is
wrong.
"""

from __future__ import annotations

from groupbench.operators.deferred import Tensor

_copies: list[tuple[Tensor, Tensor]] = []


def laid_out(copy: Tensor, source: Tensor) -> Tensor:
    """Copy `source` into `copy`, both with one shape and dtype, and keep them equal from now on. Returns `copy`.

    `source` is an input or a view.
    """
    copy.copy_(source)
    _copies.append((copy, source))
    return copy


def take() -> list[tuple[Tensor, Tensor]]:
    """Return the (copy, source) pairs registered since the last call, and forget them."""
    pairs = _copies[:]
    _copies.clear()
    return pairs
