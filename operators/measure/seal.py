"""Check whether the code that runs between timed calls is still the imported one.

The judging process compares the outputs, and the parent's clock bounds the times, so a replaced function makes no wrong
result right. On a GPU, though, the parent's clock does not see the cost of the harness's own handling of an
output, nor work before the clock starts: work can hide there. Each guard is for one way to hide it, and for each,
tests/operators/measure/test_seal.py has a cheat that passes without it.

Only functions called by the harness between timed calls count. A backend may replace everything else in the
process, which neither the judging process nor rivals share: functions wrapped by a library, kernels of other devices.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

HARNESS = "groupbench.operators.measure."
"""Package with watched functions."""
BETWEEN_CALLS = ("arrays", "cell", "deferred", "exchange", "keeper", "moves", "protocol", "seal")
"""The modules with code between timed calls."""
HOLDERS = (
    *("builtins", "time", "os", "gc", "mmap", "random", "random.SystemRandom", "secrets", "statistics"),
    *("msgspec.msgpack", "multiprocessing.connection.Connection"),
    *("torch", "torch.Tensor", "torch.UntypedStorage", "torch.cuda", "torch.cuda.Event", "torch._C._functorch"),
    *("torch.utils._device", "torch.utils._device.DeviceContext", "torch.autograd.graph", "torch._C"),
    f"{HARNESS}deferred.torch",
)
"""Modules and classes whose functions are watched if those of HARNESS name them."""
IMPLIED = (
    *("__and__", "__getitem__", "__iter__", "__len__", "__import__", "__torch_function__", "_device_constructors"),
    "_increment_version",
)
"""Functions called by an operator, by an import, or by torch: with a default device, and for a tensor's version."""
RENEWED = ("manual_seed",)
"""Functions replaced by torch itself when Dynamo is imported. The harness does not call them, only a namesake."""
ATEN = (
    *("copy_", "clone", "detach", "empty_like", "zero_", "bitwise_xor_.Tensor", "sum", "contiguous", "stack"),
    *("_to_copy", "as_strided", "empty.memory_format", "empty_strided", "fill_.Scalar", "sum.dim_IntList", "cat"),
)
"""Operations of torch between timed calls, and those below them, whose kernels `torch.library` can replace."""

Watched = tuple[str, Callable[[], Any], Any]
"""A label, a function to read the watched value, and this value before a plugin was imported."""

_first: list[Watched] = []


def close(again: bool = False) -> None:
    """Remember the current functions, before a plugin is imported: mostly in the fork server, for all its processes.

    Reading all of them takes a process 20 ms.
    """
    if not _first or again:
        _first[:] = [(label, read, read()) for label, read in (*_functions(), *_hooks(), *_of_torch())]


def problem(device: str, *objects: tuple[Any, type]) -> str | None:
    """Return as a record's message the thing replaced or left on, or None.

    Args:
        objects: Pairs of an object of the harness and the class.
    """
    name = next((label for label, read, before in _first if _differs(read, before, device)), None)
    return _named(name) or exchanged(*objects)


def _named(label: str | None) -> str | None:
    return label and f"the backend's process replaced {label}, which measures it"


def _differs(read: Callable[[], Any], before: Any, device: str) -> bool:
    if not isinstance(before, str):
        return read() is not before
    now = before if device == "cpu" else read()  # tables of kernels
    return now != before and _kernels_of(now, device) != _kernels_of(before, device)


def _functions() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield functions, classes and modules: the harness's, then those named by them of Python and torch.

    Only this catches `lazy_method`: a method of all tensors computes the output when the harness handles it, and
    `lazy_module`, which does so in the look-up of a module's function.
    """
    used = {*IMPLIED}
    for short, module in [(name, sys.modules.get(f"{HARNESS}{name}")) for name in BETWEEN_CALLS]:
        if module is None:
            continue
        yield f"operators.measure.{short}", partial(sys.modules.get, f"{HARNESS}{short}")
        yield f"the class of operators.measure.{short}", partial(type, module)
        for name, value in list(vars(module).items()):
            if not isinstance(value, str):  # clocks and modules, too
                yield f"operators.measure.{short}.{name}", partial(vars(module).get, name)
                if getattr(value, "__module__", None) == module.__name__:
                    yield from _inside(f"operators.measure.{short}.{name}", value, used)
    for label in [name for name in HOLDERS if name.partition(".")[0] in sys.modules]:
        holder, (above, _, last) = pkgutil.resolve_name(label), label.rpartition(".")
        yield label, partial((vars(pkgutil.resolve_name(above)) if above else sys.modules).get, last)
        yield f"the class of {label}", partial(type, holder)
        watched = {name for name in used if hasattr(holder, name)}.difference(RENEWED)
        if label == "time":
            watched = {name for name in dir(holder) if callable(getattr(holder, name))}
        for name in sorted(watched):
            yield f"{label}.{name}", partial(_of, holder, name)


def _hooks() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield hooks called by Python between the harness's own operations.

    Only this catches `profile_hook` and `trace_hook`, which compute there.
    """
    yield from (("Python's profile hook", sys.getprofile), ("Python's trace hook", sys.gettrace))
    if hasattr(sys, "monitoring"):  # since Python 3.12
        yield from ((f"Python's monitoring tool {tool}", partial(sys.monitoring.get_tool, tool)) for tool in range(6))


def _of_torch() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield modes of torch, which see the harness's own operations, and tables of their kernels; none without torch.

    Only the modes catch `dispatch_left_on`, and only the kernels `patched_kernel`, which computes on a GPU when the
    harness copies the output. On a CPU the parent's clock sees such work.
    """
    if (torch := sys.modules.get("torch")) is not None:
        yield "torch's dispatch mode", torch._C._len_torch_dispatch_stack
        yield "torch's function mode", _foreign_modes
        yield from ((f"torch's {name}", partial(torch._C._dispatch_dump_table, f"aten::{name}")) for name in ATEN)


def _foreign_modes() -> int:
    """Return the number of function modes. A default device is one, which belongs to the watched functions."""
    usual = getattr(sys.modules.get("torch.utils._device"), "DeviceContext", None)
    modes: Any = sys.modules["torch"].overrides._get_current_function_mode_stack()
    return sum(type(mode) is not usual for mode in modes)


def _kernels_of(table: str, device: str) -> list[str]:
    """Return the lines of an operation's kernels without those reached by tensors of other devices alone."""
    lines = [line for line in table.splitlines() if ":" in line]
    keys = {line.partition(":")[0] for line in lines}
    others = tuple(key for key in keys if f"Autograd{key}" in keys and key != device.upper())
    return [line for line in lines if not line.partition(":")[0].endswith(others)]


def exchanged(*objects: tuple[Any, type]) -> str | None:
    """Return as a record's message the replaced part in a harness object: the class, or a method on the object.

    Only this catches `ahead_of_the_clock` and `moves_in_a_wrapper`, which compute as soon as the inputs have moved.
    """
    for value, kind in objects:
        methods = [name for name in getattr(value, "__dict__", ()) if callable(getattr(kind, name, None))]
        if type(value) is not kind or methods:
            return _named(f"{methods[0] if methods else 'the class'} of its {kind.__name__}")
    return None


def _inside(label: str, value: Any, used: set[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield a function's parts, or a class's methods with theirs. Adds the names in their code to `used`."""
    if isinstance(value, FunctionType):
        used.update(_names(value.__code__))
        yield f"{label}'s code", partial(getattr, value, "__code__")
    elif isinstance(value, type):
        for name, method in list(vars(value).items()):
            if isinstance(method, FunctionType):
                yield f"{label}.{name}", partial(_of, value, name)
                yield from _inside(f"{label}.{name}", method, used)


def _names(code: CodeType) -> set[str]:
    """Return the global and attribute names in a function and in those inside it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _of(holder: Any, name: str) -> Any:
    """Return the value held by a module or class under a name, without binding it."""
    places = [vars(base) for base in holder.__mro__] if isinstance(holder, type) else [vars(holder)]
    return next((place[name] for place in places if name in place), None)
