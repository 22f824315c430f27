"""Register copies of inputs in a layout that a backend needs, such as rows padded to 16 bytes.

A caller would have its inputs in that layout from the start, so making the copy is not timed. But the copy must not be
one of values that have changed since: the harness writes new values into the inputs before every timed call, and
refreshes each copy that was registered here. A backend that packs an input without registering the copy computes with
stale values, and its output is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_copies: list[tuple[Tensor, Tensor]] = []


def laid_out(copy: Tensor, source: Tensor) -> Tensor:
    """Copy `source` into `copy`, both of one shape and dtype, and keep them equal from now on. Returns `copy`.

    `source` is an input or a view of one.
    """
    copy.copy_(source)
    _copies.append((copy, source))
    return copy


def take() -> list[tuple[Tensor, Tensor]]:
    """Return the (copy, source) pairs registered since the last call, and forget them."""
    pairs = _copies[:]
    _copies.clear()
    return pairs
