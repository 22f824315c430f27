"""Launch a kernel again and again without the cost of Triton's argument binding.

At each launch, Triton binds every argument, derives its specialisation (whether an address is a multiple of 16, whether
an integer is 1) and looks up the compiled kernel. On an H200's host, that is half of the 45 µs that a call of the flat
kernel took, with 23 arguments of which only the output changes. `Launch` does it once, and then launches the compiled
kernel with the new arguments as long as these would give the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

D = TypeVar("D")

through_triton = False
"""Whether every launch goes through Triton's own launcher. Set it while something wraps that to see the launches."""


class Launch:
    """A kernel with its grid, its compile-time constants and its options; a call passes the other arguments.

    kernel  a function of `triton.jit` or `gluon.jit`, with its constants last in the signature
    fixed   every constant and option by name
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **fixed: Any) -> None:
        self._kernel, self._grid, self._fixed = kernel, grid, fixed
        self._direct: Callable[..., object] | None = None
        self._constants: tuple[Any, ...] = ()
        self._specialization: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> None:
        """Launch with the arguments before the constants, in the order of the signature. Does not wait for the GPU."""
        if self._direct is not None and not through_triton and self._specialization == _specialization(args):
            self._direct(*args, *self._constants)
            return
        compiled = self._kernel[self._grid](*args, **self._fixed)
        if compiled is None:  # by the interpreter
            return
        names = self._kernel.arg_names[len(args) :]
        if all(name in self._fixed for name in names):
            self._constants = tuple(self._fixed[name] for name in names)
            self._specialization = _specialization(args)
            self._direct = compiled[(*self._grid, 1, 1)[:3]]


def _specialization(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what decides which compiled kernel runs, for arguments of the same types.

    Descriptors are left out: TMA demands their alignment, and their blocks do not change.
    """
    return (
        torch.cuda.current_device(),
        *[arg.data_ptr() & 15 if isinstance(arg, Tensor) else arg for arg in args if isinstance(arg, _SPECIALIZED)],
    )


_SPECIALIZED = (Tensor, int, tuple)


class Outputs(Generic[D]):
    """Descriptors of tensors of one shape, dtype and layout, such as a callable's outputs.

    The first is made by `make`, and others are copies with another address, without `make`'s arithmetic and checks:
    0.4 instead of 3.6 µs for a ragged descriptor. Keeps no tensor alive.
    """

    def __init__(self, make: Callable[[Tensor], D]) -> None:
        self._make = make
        self._fields: dict[str, Any] = {}
        self._kind: type[D] | None = None

    def __call__(self, tensor: Tensor) -> D:
        if self._kind is None:
            made = self._make(tensor)
            self._fields, self._kind = {**vars(made), "base": None}, type(made)
            return made
        copied = object.__new__(self._kind)
        vars(copied).update(self._fields, base=tensor)
        return copied
