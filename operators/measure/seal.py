"""Check whether the code that runs between timed calls is still the imported one.

The judging process compares the outputs, and the parent's clock bounds the times, so a replaced function makes no wrong
result right. On a GPU, though, the parent's clock does not see the cost of the harness's own handling of an
output, nor work before the clock starts: work can hide there. Each guard is for one way to hide it, and for each,
tests/operators/measure/test_seal.py has a cheat that passes without it.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

HARNESS = "groupbench.operators.measure."
"""Package with watched functions."""
HOLDERS = (
    *("builtins", "time", "os", "gc", "mmap", "random", "random.SystemRandom", "secrets", "statistics"),
    *("msgspec.msgpack", "multiprocessing.connection.Connection"),
    *("torch", "torch.Tensor", "torch.UntypedStorage", "torch.cuda", "torch.cuda.Event", "torch._C._functorch"),
    *("torch.utils._device", "torch.utils._device.DeviceContext"),
)
"""Modules and classes whose functions are watched if those of HARNESS name them."""
IMPLIED = ("__and__", "__getitem__", "__iter__", "__len__", "__import__", "__torch_function__", "_device_constructors")
"""Functions called by an operator, by an import, or by torch with a default device."""
RENEWED = ("manual_seed",)
"""Functions replaced by torch itself when Dynamo is imported. The harness does not call them, only a namesake."""
ATEN = ("copy_", "clone", "detach", "empty_like", "zero_", "bitwise_xor_.Tensor", "sum", "contiguous")
"""Operations of torch between timed calls, whose kernels `torch.library` can replace."""

Place = tuple[str, Any, str, Any]
"""A watched value: label, the namespace, class or function with the value, name there, and the value."""

_first: list[Place] = []
_first_kernels: dict[str, str] = {}
_first_hooks: dict[str, Any] = {}


def close(again: bool = False) -> None:
    """Remember the current functions, before a plugin is imported: mostly in the fork server, for all its processes.

    Reading all of them takes a process 20 ms.
    """
    if not _first or again:
        _first[:] = _places()
        _first_kernels.update(_kernels())
        _first_hooks.update(_hooks())


def problem() -> str | None:
    """Return as a record's message the thing replaced or left on, or None."""
    name = replaced() or hook() or mode() or kernel()
    return name and f"the backend's process replaced {name}, which measures it"


def replaced() -> str | None:
    """Return a replaced function, class or module.

    Only this catches `lazy_method`: a method of all tensors computes the output when the harness handles it.
    """
    return next((label for label, holder, name, value in _first if _of(holder, name) is not value), None)


def hook() -> str | None:
    """Return a hook called by Python between the harness's own operations.

    Only this catches `profile_hook` and `trace_hook`, which compute there.
    """
    return next((name for name, now in _hooks().items() if now is not _first_hooks.get(name)), None)


def mode() -> str | None:
    """Return a mode of torch left on, which sees the harness's own operations.

    Only this catches `dispatch_left_on`.
    """
    torch: Any = sys.modules["torch"]
    if torch._C._len_torch_dispatch_stack():
        return "torch's dispatch mode"
    # A default device is such a mode, which `replaced` watches.
    usual = getattr(sys.modules.get("torch.utils._device"), "DeviceContext", None)
    modes = torch.overrides._get_current_function_mode_stack()
    return "torch's function mode" if any(type(mode) is not usual for mode in modes) else None


def kernel() -> str | None:
    """Return an operation of torch whose kernel was replaced.

    Only this catches `patched_kernel`, which computes when the harness copies the output.
    """
    return next((f"torch's {name}" for name, now in _kernels().items() if now != _first_kernels[name]), None)


def exchanged(*objects: tuple[Any, type]) -> str | None:
    """Return the replaced part in an object of the harness: the class, or a method on the object.

    Only this catches `ahead_of_the_clock`, which computes as soon as the inputs have moved.

    Args:
        objects: Each with its class.
    """
    for value, kind in objects:
        methods = [name for name in getattr(value, "__dict__", ()) if callable(getattr(kind, name, None))]
        if type(value) is not kind or methods:
            return f"{methods[0] if methods else 'the class'} of its {kind.__name__}"
    return None


def _hooks() -> dict[str, Any]:
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    tools = {f"Python's monitoring tool {tool}": monitoring.get_tool(tool) for tool in range(6)} if monitoring else {}
    return {"Python's profile hook": sys.getprofile(), "Python's trace hook": sys.gettrace(), **tools}


def _kernels() -> dict[str, str]:
    """Return where ATEN's kernels are registered; nothing without torch."""
    if "torch" not in sys.modules:
        return {}
    return {name: sys.modules["torch"]._C._dispatch_dump(f"aten::{name}") for name in ATEN}


def _places() -> Iterator[Place]:
    """Yield the harness's functions and classes, then those named by them of Python and torch."""
    used = {*IMPLIED}
    for module_name, module in [item for item in sys.modules.items() if item[0].startswith(HARNESS)]:
        short = module_name.removeprefix("groupbench.")
        yield short, sys.modules, module_name, module
        for name, value in list(vars(module).items()):
            if callable(value):  # clocks, too
                yield f"{short}.{name}", vars(module), name, value
                if getattr(value, "__module__", None) == module_name:
                    yield from _inside(f"{short}.{name}", value, used)
    for label in [name for name in HOLDERS if name.partition(".")[0] in sys.modules]:
        holder, (above, _, last) = pkgutil.resolve_name(label), label.rpartition(".")
        yield label, vars(pkgutil.resolve_name(above)) if above else sys.modules, last, holder
        watched = used.intersection(dir(holder)).difference(RENEWED)
        if label == "time":
            watched = {name for name in dir(holder) if callable(getattr(holder, name))}
        place = holder if isinstance(holder, type) else vars(holder)
        yield from ((f"{label}.{name}", place, name, _of(place, name)) for name in sorted(watched))


def _inside(label: str, value: Any, used: set[str]) -> Iterator[Place]:
    """Yield a function's parts, or a class's methods with theirs. Adds the names in their code to `used`."""
    if isinstance(value, FunctionType):
        used.update(_names(value.__code__))
        yield f"{label}'s code", value, "__code__", value.__code__
        yield f"{label}'s defaults", value, "__defaults__", value.__defaults__
    elif isinstance(value, type):
        for name, method in list(vars(value).items()):
            if isinstance(method, FunctionType):
                yield f"{label}.{name}", value, name, method
                yield from _inside(f"{label}.{name}", method, used)


def _names(code: CodeType) -> set[str]:
    """Return the global and attribute names in a function and in those inside it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _of(holder: Any, name: str) -> Any:
    """Return the value held by a namespace, a class or a function under a name, without binding it."""
    if isinstance(holder, dict):
        return holder.get(name)
    if isinstance(holder, type):
        return next((base.__dict__[name] for base in holder.__mro__ if name in base.__dict__), None)
    return getattr(holder, name)
