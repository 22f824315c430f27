"""Find a rival's package without importing it, and make the layouts that several rivals take.

A router returns end offsets, so anything else is computed from them inside the call, on the device. Weights keep one
layout for a model's life, so a rival's layout is made before the clock starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Backend, Target
from groupbench.operators.relayout import laid_out
from groupbench.tracker.facts.measured_tree import measured_folders

HOPPER = (9, 0)


@dataclass(frozen=True)
class RivalPackage:
    """One rival's package.

    Attributes:
        distribution: Its name for pip, without the version.
        module: Module that its backends import; a submodule if several packages share the top-level name.
        extra: Extra of groupbench that installs it.
        note: Further condition of installing it, or empty.
    """

    distribution: str
    module: str
    extra: str
    note: str = ""

    @property
    def missing(self) -> str | None:
        """Return why the backends cannot be imported, with the install command; None if it is installed."""
        if importable(self.module):
            return None
        note = f" ({self.note})" if self.note else ""
        return f"{self.distribution} is not installed: pip install 'groupbench[{self.extra}]'{note}"

    def unavailable(
        self, dtypes: tuple[str, ...], least: tuple[int, int] = HOPPER, below: tuple[int, int] = (99, 0)
    ) -> Callable[[Target], str | None]:
        """Return a backend's `unavailable` for these dtypes and for capabilities from `least` to below `below`."""

        def reason(target: Target) -> str | None:
            reasons = [self.missing, _device(target, least, below)]
            if target.dtype not in dtypes:
                reasons.append(f"it takes {' and '.join(dtypes)}, not {target.dtype}")
            return "; ".join(text for text in reasons if text) or None

        return reason

    def backend(self, operator: str, name: str, prepare: Any, source: str, **further: Any) -> Backend:
        """Return an operator's backend; the records contain the package's version."""
        return Backend(name, prepare, source, operator=operator, packages=(self.distribution,), **further)


def importable(module: str) -> bool:
    """Return whether a module could be imported. Unlike importlib.util.find_spec, no parent package is imported."""
    path = [*sys.path, *measured_folders()]
    for part in module.split("."):
        # By its last name alone: with its full name, a namespace package asks for its parent to be imported.
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations or ())
    return True


def _device(target: Target, least: tuple[int, int], below: tuple[int, int]) -> str | None:
    if target.device != "cuda":
        return "it needs an NVIDIA GPU"
    if target.capability is not None and not least <= target.capability < below:
        upper = f" and below {below[0]}.{below[1]}" if below[0] < 99 else ""
        return f"it needs a GPU of capability {least[0]}.{least[1]} or newer{upper}, not {target.capability}"
    return None


# --- layouts ----------------------------------------------------------------------------------------------------------


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
