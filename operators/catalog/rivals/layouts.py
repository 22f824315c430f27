"""What several rivals want in place of end offsets: row counts, offsets that begin with 0, weights as [G, N, K].

A caller's router gives end offsets, so what follows from them is computed inside the call, on the device. Weights have
one layout for the whole life of a model: theirs is made beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from groupbench.operators.errors import Unavailable
from groupbench.operators.relayout import laid_out

if TYPE_CHECKING:
    from torch import Tensor


def starts_and_ends(
    offs: Tensor,  # [G] int32
) -> Callable[[], Tensor]:
    """Return a callable that returns [G + 1] int32, 0 and the offsets as they are then: one copy of 4 G bytes."""
    bounds = offs.new_zeros(offs.numel() + 1)

    def read() -> Tensor:
        bounds[1:].copy_(offs)
        return bounds

    return read


def row_counts(
    offs: Tensor,  # [G] int32
) -> Callable[[], Tensor]:
    """Return a callable that returns [G] int32, the rows of each group as the offsets say then."""
    import torch

    read = starts_and_ends(offs)
    return lambda: torch.diff(read())


def weights_nk(
    b: Tensor,  # [G, K, N], any strides
) -> Tensor:
    """Return the weights as a contiguous [G, N, K]: a view where they are stored so, else a copy that follows them."""
    import torch

    nk = b.transpose(1, 2)
    if nk.is_contiguous():
        return nk
    return laid_out(torch.empty(nk.shape, dtype=b.dtype, device=b.device), nk)


def require(multiple: int, **sizes: int) -> None:
    """Raises Unavailable if a size is not a multiple of `multiple`."""
    for name, size in sizes.items():
        if size % multiple:
            raise Unavailable(f"it takes {name} that is a multiple of {multiple}, not {size}")
