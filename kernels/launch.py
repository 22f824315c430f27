"""Launch a kernel again and again without Triton's argument binding.

At each launch, Triton binds every argument, derives the specialisation (whether an address is a multiple of 16, whether
an integer is 1) and looks up the compiled kernel. On an H200's host, this is half of the 45 µs for a flat-kernel call,
with 23 arguments and only the output changing. `Launch` does it once, and then launches the compiled kernel with the
new arguments as long as these would give the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from groupbench.kernels.device import has_context, make_context_current

D = TypeVar("D")
T = TypeVar("T")

through_triton = False
"""Whether every launch goes through Triton's own launcher. Set it while something wraps that to see the launches."""


class Launch:
    """A kernel with a grid, compile-time constants and options; a call passes the other arguments.

    kernel  a function of `triton.jit` or `gluon.jit`, with its constants last in the signature
    fixed   every constant and option by name

    It may be called from any thread and on any stream, under the first launch's current device.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], **fixed: Any) -> None:
        self._kernel, self._grid, self._fixed = kernel, grid, fixed
        self._direct: Callable[..., object] | None = None
        self._constants: tuple[Any, ...] = ()
        self._specialization: tuple[Any, ...] = ()
        self._device: int | None = None

    def __call__(self, *args: Any) -> None:
        """Launch with the arguments before the constants, in signature order. Does not wait for the GPU.

        Raises ValueError under another current device than at the first launch.
        """
        if not has_context() and torch.cuda.is_initialized():
            make_context_current(torch.cuda.current_device())
        direct = self._direct
        if direct is not None and not through_triton and self._specialization == _specialization(args):
            direct(*args, *self._constants)
            return
        if self._device is not None:
            require_current(self._device)
        compiled = self._kernel[self._grid](*args, **self._fixed)
        if compiled is None:  # by the interpreter
            return
        names = self._kernel.arg_names[len(args) :]
        if all(name in self._fixed for name in names):
            self._constants = tuple(self._fixed[name] for name in names)
            self._specialization = _specialization(args)
            self._device = self._specialization[0]
            self._direct = compiled[(*self._grid, 1, 1)[:3]]


def require_current(device: int) -> None:
    """Raise ValueError unless this is the current device: a launch would go to another GPU than its operands'."""
    if (current := torch.cuda.current_device()) != device:
        raise ValueError(
            f"the kernel was prepared for cuda:{device}, and the current device is cuda:{current}: "
            f"call within torch.cuda.device({device})"
        )


def _specialization(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the facts selecting the compiled kernel, for arguments with the same types.

    Descriptors are left out: TMA demands their alignment, and their blocks do not change.
    """
    return (
        torch.cuda.current_device(),
        *[arg.data_ptr() & 15 if isinstance(arg, Tensor) else arg for arg in args if isinstance(arg, _SPECIALIZED)],
    )


_SPECIALIZED = (Tensor, int, tuple)


class Outputs(Generic[D]):
    """Descriptors for tensors with one shape, dtype and layout, such as a callable's operands or outputs.

    The first is made by `make`, and others are copies with another address, without `make`'s arithmetic and checks: 0.4
    instead of 3.6 µs for a ragged descriptor. Keeps no tensor alive.
    """

    def __init__(self, make: Callable[[Tensor], D]) -> None:
        self._make = make
        self._made: tuple[type[D], dict[str, Any]] | None = None

    def __call__(self, tensor: Tensor) -> D:
        if self._made is None:
            made = self._make(tensor)
            self._made = type(made), {**vars(made), "base": None}
            return made
        kind, fields = self._made
        copied = object.__new__(kind)
        vars(copied).update(fields, base=tensor)
        return copied


def described(make: Callable[..., D], tensor: Tensor, *tile: Any) -> Outputs[D]:
    """Return descriptors for tensors like this one; `make(tensor, *tile)` makes the first.

    A call may pass another view on the same memory, such as the weights transposed.
    """
    descriptors = Outputs(lambda tensor: make(tensor, *tile))
    descriptors(tensor)
    return descriptors


MOST_KEPT = 4096


class Kept(Generic[T]):
    """A cache for objects made per problem class, such as bound launches. A key has everything the object depends on.

    The oldest is dropped when there are too many, as when the row count changes with every call.
    """

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._made: dict[Hashable, T] = {}
        self.get = self._made.get

    def add(self, key: Hashable, made: T) -> T:
        """Keep and return an object."""
        while len(self._made) >= self._most:
            self._made.pop(next(iter(self._made)), None)
        self._made[key] = made
        return made

    def clear(self) -> None:
        self._made.clear()


_launches: Kept[Launch] = Kept()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **fixed: Any) -> None:
    """Launch a kernel as `Launch` does, with one `Launch` per kernel, grid, and argument types.

    The first argument is a tensor, whose device decides. Arguments must not be descriptors.
    """
    types = [arg.dtype if isinstance(arg, Tensor) else type(arg) for arg in args]
    key = (id(kernel), grid, args[0].get_device(), *types, *fixed.values())
    kept = _launches.get(key)
    if kept is None:
        kept = _launches.add(key, Launch(kernel, grid, **fixed))
    kept(*args)
