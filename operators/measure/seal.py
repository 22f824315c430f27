"""Check that the functions that measure are still those that were imported.

The harness holds its own references to clocks, taken before any plugin is imported, so that replacing
`time.perf_counter` does not change a measurement. A backend that replaces such a function, on purpose or by a test
helper left in, is still reported, because its other changes are unknown.
"""

from __future__ import annotations

import importlib
import sys
import time
from types import FunctionType
from typing import Any

CLOCKS = (
    *("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time", "sleep"),
    *("thread_time", "clock_gettime", "clock_gettime_ns"),
)
TENSOR = (
    *("copy_", "clone", "bitwise_xor_", "zero_", "fill_", "view", "reshape", "contiguous", "data_ptr", "is_contiguous"),
    *("untyped_storage", "set_", "__and__", "__getitem__", "detach"),
)
CUDA = ("synchronize", "current_stream", "default_stream", "set_stream", "stream", "Event", "Stream", "_sleep")
TORCH = ("empty", "empty_like", "randint", "Generator", "Tensor", "equal", "no_grad", "is_tensor")
BUILTINS = ("type", "isinstance", "len", "id", "getattr", "setattr", "min", "max", "sum", "range")
OWN = ("_now", "_threads", "now")
"""Names under which modules of the harness keep their own clocks."""
STATISTICS = ("median", "mean", "fmean")
PACKAGES = ("groupbench.operators.", "groupbench.tracker.record", "groupbench.tracker.physics")
"""Packages in whose modules every function and method is watched."""

_GONE = object()
_first: dict[str, Any] = {}


def close() -> None:
    """Remember the current functions, before a plugin is imported. Does not replace remembered functions."""
    for name, value in _watched():
        _first.setdefault(name, value)


def renew() -> None:
    """Forget the remembered functions, and remember the current ones."""
    _first.clear()
    close()


def broken() -> str | None:
    """Return the name of a function that was replaced, or None."""
    now = dict(_watched())
    for name, value in _first.items():
        if now.get(name, _GONE) is not value:  # a function of another module in its place is not watched, hence gone
            return name
    return _modes()


def problem() -> str | None:
    """Return the result of `broken` as a record's message."""
    name = broken()
    return name and f"the backend's process replaced {name}, which measures it"


def _modes() -> str | None:
    """Return the mode that a backend has left on, or None. It could change the harness's own operations."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch._C._len_torch_dispatch_stack():
        return "torch's dispatch mode"
    if torch._C._len_torch_function_stack():
        return "torch's function mode"
    return None


def _watched() -> list[tuple[str, Any]]:
    """Return (name, object) of everything that is watched; for a function, also its code."""
    members: list[tuple[str, Any]] = []
    for holder, label, names in _named():
        members += [(f"{label}.{name}", _of(holder, name)) for name in names]
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(PACKAGES) or ".catalog" in module_name or ".integrity" in module_name:
            continue
        short = module_name.removeprefix("groupbench.")
        members += [(f"{short}.{n}", vars(module)[n]) for n in OWN if n in vars(module)]
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", None) == module_name and callable(value):
                members += _inside(f"{module_name.removeprefix('groupbench.')}.{name}", value)
    return members


def _inside(label: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        return [(label, value), (f"{label}'s code", value.__code__), (f"{label}'s defaults", value.__defaults__)]
    members = [(label, value)]
    if isinstance(value, type):
        for name, member in list(vars(value).items()):
            if isinstance(member, FunctionType):
                members += [(f"{label}.{name}", member), (f"{label}.{name}'s code", member.__code__)]
    return members


def _named() -> list[tuple[Any, str, tuple[str, ...]]]:
    holders: list[tuple[Any, str, tuple[str, ...]]] = [
        (time, "time", CLOCKS),
        (importlib.import_module("builtins"), "builtins", BUILTINS),
    ]
    statistics = sys.modules.get("statistics")  # not used unless it is imported
    if statistics is not None:
        holders.append((statistics, "statistics", STATISTICS))
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        holders += [
            (torch, "torch", TORCH),
            (torch.Tensor, "torch.Tensor", TENSOR),
            (torch.cuda, "torch.cuda", CUDA),
            (torch.cuda.Event, "torch.cuda.Event", ("record", "query", "synchronize", "elapsed_time")),
        ]
    return holders


def _of(holder: Any, name: str) -> Any:
    """Return an attribute of a class, without binding it, or of a module."""
    if isinstance(holder, type):
        for base in holder.__mro__:
            if name in vars(base):
                return vars(base)[name]
        return None
    return vars(holder).get(name)
