"""Layouts for several rivals: row counts, offsets beginning with 0, weights as [G, N, K].

A router returns end offsets, so anything else is computed from them inside the call, on the device. Weights keep one
layout for a model's life, so a rival's layout is made before the clock starts.
"""

from __future__ import annotations

from collections.abc import Callable

from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.errors import Unavailable
from groupbench.operators.relayout import laid_out


def starts_and_ends(
    offs: Tensor,  # [G] int32
) -> Callable[[], Tensor]:
    """Return a callable for 0 and the current offsets, [G + 1] int32, by one copy of 4 G bytes."""
    bounds = offs.new_zeros(offs.numel() + 1)

    def read() -> Tensor:
        bounds[1:].copy_(offs)
        return bounds

    return read


def row_counts(
    offs: Tensor,  # [G] int32
) -> Callable[[], Tensor]:
    """Return a callable for each group's rows, [G] int32, from the current offsets."""
    read = starts_and_ends(offs)
    return lambda: torch.diff(read())


def weights_nk(
    b: Tensor,  # [G, K, N], any strides
) -> Tensor:
    """Return the weights as a contiguous [G, N, K]: a view if possible, else a copy following them."""
    nk = b.transpose(1, 2)
    if nk.is_contiguous():
        return nk
    return laid_out(torch.empty(nk.shape, dtype=b.dtype, device=b.device), nk)


def require(multiple: int, **sizes: int) -> None:
    """Check for sizes in multiples of `multiple`. Raises Unavailable."""
    for name, size in sizes.items():
        if size % multiple:
            raise Unavailable(f"it needs {name} to be a multiple of {multiple}, not {size}")
