"""Launch a kernel again and again without Triton's argument binding.

At each launch, Triton binds every argument, derives the specialisation (whether an address is a multiple of 16, whether
an integer is 1), looks up the compiled kernel, and makes all descriptors. On an H200's host, that is 60 µs for a
flat-kernel call with 23 arguments, where only the addresses change. `Launch` does it once, and then launches the
compiled kernel with the new addresses (direct.py) as long as the other arguments are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from triton import knobs

from groupbench.kernels.device import has_context, make_context_current
from groupbench.kernels.direct import Direct, Unknown, of_triton

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
        self._made: dict[tuple[Any, ...], tuple[Direct | None, Callable[..., object]]] = {}
        self._aligned: Direct | None = None
        self._device: int | None = None

    def __call__(self, *args: Any) -> None:
        """Launch with the arguments before the constants, in signature order. Does not wait for the GPU.

        Raises ValueError under another current device than at the first launch.
        """
        if self._made and not (through_triton or _hooked()):
            facts, addresses = _facts(args)
            if (made := self._made.get(facts)) is not None:
                if made[0] is not None and made[0](addresses):
                    return
                _require_context()
                made[1](*args)
                return
        _require_context()
        if self._device is not None:
            require_current(self._device)
        compiled = self._kernel[self._grid](*args, **self._fixed)
        if compiled is not None:  # by the interpreter
            self._keep(compiled, args)

    def again(self, *addresses: int) -> bool:
        """Launch as before with the addresses of tensors and descriptors, in order of the arguments, if possible.

        Return False if a full call must launch: before the first one, or with an address other than a multiple of 16.
        The caller must know that all other arguments are those of the last full call.
        """
        direct = self._aligned
        return direct is not None and not through_triton and not _hooked() and direct(addresses, 15)

    def _keep(self, compiled: Any, args: tuple[Any, ...]) -> None:
        """Keep a compiled kernel for further launches with such arguments."""
        names = self._kernel.arg_names[len(args) :]
        if not all(name in self._fixed for name in names):
            return
        arguments = (*args, *[self._fixed[name] for name in names])
        direct, run = None, compiled[(*self._grid, 1, 1)[:3]]
        with suppress(Unknown):
            direct = of_triton(compiled, self._grid, arguments)
        constants = arguments[len(args) :]
        facts, addresses = _facts(args)
        if len(self._made) >= MOST_FACTS:
            self._made.clear()
        self._made[facts] = direct, lambda *args: run(*args, *constants)
        self._device = facts[0]
        self._aligned = None if any(address & 15 for address in addresses) else direct


MOST_FACTS = 64
"""Sets of facts that a launch keeps kernels for, as when the row count changes with every call."""


def _require_context() -> None:
    """Make a context current in a thread that has not used CUDA yet, for Triton."""
    if not has_context() and torch.cuda.is_initialized():
        make_context_current(torch.cuda.current_device())


def _hooked() -> bool:
    """Return whether a profiler wants to be called at every launch of Triton's."""
    hook = knobs.runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))


def require_current(device: int) -> None:
    """Raise ValueError unless this is the current device: a launch would go to another GPU than its operands'."""
    if (current := torch.cuda.current_device()) != device:
        raise ValueError(
            f"the kernel was prepared for cuda:{device}, and the current device is cuda:{current}: "
            f"call within torch.cuda.device({device})"
        )


def _facts(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]]:
    """Return the facts that decide on the kernel and its launch, and the tensors' addresses.

    The device comes first. The arguments must have the same types at every call. Descriptors only have an address: TMA
    demands their alignment, and their sizes and blocks do not change.
    """
    facts: list[Any] = [torch.cuda.current_device()]
    addresses = []
    for arg in args:
        if isinstance(arg, Tensor):
            addresses.append(address := arg.data_ptr())
            facts.append(address & 15)
        elif isinstance(arg, _VALUES):
            facts.append(arg or str(arg))  # -0.0 equals 0.0
        elif arg is not None:
            addresses.append(arg.base.data_ptr())
    return tuple(facts), addresses


_VALUES = (int, float, tuple)


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
