"""Check that the functions that measure are still those that were imported.

The harness holds its own references to clocks, taken before any plugin is imported, so that replacing
`time.perf_counter` does not change a measurement. A backend that replaces such a function, on purpose or by a test
helper left in, is still reported, because its other changes are unknown.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import CodeType, FunctionType, ModuleType
from typing import Any

CLOCKS = (
    *("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time", "sleep"),
    *("thread_time", "clock_gettime", "clock_gettime_ns"),
)
OPERATORS = ("__and__", "__getitem__", "__iter__", "__len__")
"""Methods that the harness calls by an operator."""
RENEWED = ("manual_seed",)
"""Functions that torch itself replaces when Dynamo is imported. The harness does not call them, only a namesake."""
OWN = ("_now", "_threads", "now", "rest", "_draw_bytes")
"""Names under which modules of the harness keep their own clocks, and their source of secrets."""
HARNESS = "groupbench.operators.measure."
"""Package whose functions call those of MODULES and of classes of torch: each that they name is watched."""
MODULES = (
    *("builtins", "statistics", "random", "mmap", "os", "secrets", "gc", "msgspec.msgpack", "msgspec.structs"),
    *("multiprocessing.connection", "torch"),
)
PACKAGES = ("groupbench.operators.", "groupbench.tracker.record", "groupbench.tracker.physics")
"""Packages in whose modules every function and method is watched."""

ATEN = ("copy_", "clone", "detach", "empty_like", "zero_", "bitwise_xor_.Tensor", "sum", "contiguous")
"""Operations of torch that the harness uses between timed calls, whose kernels `torch.library` can replace."""
KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "Autograd[alias]", "Composite")
"""Beginnings of the names of the dispatch keys under which their kernels are registered."""

_GONE = object()
_first: dict[str, Any] = {}
_first_hooks: dict[str, Any] = {}
_first_kernels: dict[str, list[str]] = {}
_used: set[str] = set()


def close() -> None:
    """Remember the current functions, before a plugin is imported. Does not replace remembered functions."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(HARNESS):
            for _, value in _functions(module_name, module):
                if isinstance(value, CodeType):
                    _used.update(_names(value))
    for name, value in watched():
        _first.setdefault(name, value)
    for name, hook in _set_hooks().items():
        _first_hooks.setdefault(name, hook)
    for name, kernels in _kernels().items():
        _first_kernels.setdefault(name, kernels)


def renew() -> None:
    """Forget the remembered functions, and remember the current ones."""
    _first.clear()
    _first_hooks.clear()
    _first_kernels.clear()
    close()


def broken() -> str | None:
    """Return the name of a function that was replaced, or None."""
    now = dict(watched())
    for name, value in _first.items():
        if now.get(name, _GONE) is not value:  # a function of another module in its place is not watched, hence gone
            return name
    return _hooks() or _modes() or _replaced_kernel()


def problem() -> str | None:
    """Return the result of `broken` as a record's message."""
    return as_problem(broken())


def as_problem(name: str | None) -> str | None:
    """Return a record's message about something that was replaced."""
    return name and f"the backend's process replaced {name}, which measures it"


def exchanged(*objects: tuple[Any, type]) -> str | None:
    """Return what was replaced in an object of the harness: its class, or a method by one of its own; or None.

    objects  each with its class
    """
    for value, kind in objects:
        if type(value) is not kind:
            return f"the class of its {kind.__name__}"
        for name in getattr(value, "__dict__", ()):
            if callable(getattr(kind, name, None)):
                return f"{name} of its {kind.__name__}"
    return None


def differing(label: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
    """Return the name of an attribute that is another object than before, or None."""
    names = (name for name in {**before, **now} if now.get(name, _GONE) is not before.get(name, _GONE))
    return next((f"{label} {name}" for name in names), None)


def _hooks() -> str | None:
    """Return the hook that was set, or None: Python calls it between the harness's own operations."""
    return next((name for name, hook in _set_hooks().items() if hook is not _first_hooks.get(name)), None)


def _set_hooks() -> dict[str, Any]:
    hooks = {"Python's profile hook": sys.getprofile(), "Python's trace hook": sys.gettrace()}
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    tools = {f"Python's monitoring tool {tool}": monitoring.get_tool(tool) for tool in range(6)} if monitoring else {}
    return hooks | tools


def _replaced_kernel() -> str | None:
    """Return the operation of torch whose kernel was replaced, or None."""
    return next((f"torch's {name}" for name, now in _kernels().items() if now != _first_kernels.get(name, now)), None)


def _kernels() -> dict[str, list[str]]:
    """Return where the kernels of ATEN are registered."""
    torch = sys.modules.get("torch")
    dump = getattr(getattr(torch, "_C", None), "_dispatch_dump", None)
    if dump is None:
        return {}
    return {name: [line for line in dump(f"aten::{name}").splitlines() if line.startswith(KEYS)] for name in ATEN}


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


def watched() -> list[tuple[str, Any]]:
    """Return (name, object) of everything that is watched; for a function, also its code."""
    members: list[tuple[str, Any]] = [(f"time.{name}", getattr(time, name)) for name in CLOCKS]
    for holder, label in _holders():
        names = sorted(_used.union(OPERATORS).intersection(dir(holder)).difference(RENEWED))
        members += [(f"{label}.{name}", _of(holder, name)) for name in names]
    for module_name, module in list(sys.modules.items()):
        if not module_name.startswith(PACKAGES) or ".catalog" in module_name or ".integrity" in module_name:
            continue
        short = module_name.removeprefix("groupbench.")
        members += [(f"{short}.{n}", vars(module)[n]) for n in OWN if n in vars(module)]
        members += _functions(module_name, module)
    return members


def _functions(module_name: str, module: ModuleType) -> list[tuple[str, Any]]:
    """Return (name, object) of the functions and classes that a module defines."""
    members: list[tuple[str, Any]] = []
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) == module_name and callable(value):
            members += _inside(f"{module_name.removeprefix('groupbench.')}.{name}", value)
    return members


def _names(code: CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and in those inside it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _inside(label: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        return [(label, value), (f"{label}'s code", value.__code__), (f"{label}'s defaults", value.__defaults__)]
    members = [(label, value)]
    if isinstance(value, type):
        for name, member in list(vars(value).items()):
            if isinstance(member, FunctionType):
                members += [(f"{label}.{name}", member), (f"{label}.{name}'s code", member.__code__)]
    return members


def _holders() -> list[tuple[Any, str]]:
    """Return the modules and classes whose functions the harness uses, if they are imported."""
    holders: list[tuple[Any, str]] = [
        (module, name) for name in MODULES if (module := sys.modules.get(name)) is not None
    ]
    holders += [(random.SystemRandom, "random.SystemRandom"), (Connection, "Connection")]
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        holders += [(torch.Tensor, "torch.Tensor"), (torch.UntypedStorage, "torch.UntypedStorage")]
        holders += [(torch.cuda, "torch.cuda"), (torch.cuda.Event, "torch.cuda.Event")]
    return holders


def _of(holder: Any, name: str) -> Any:
    """Return an attribute of a class, without binding it, or of a module."""
    if isinstance(holder, type):
        for base in holder.__mro__:
            if name in vars(base):
                return vars(base)[name]
        return None
    return vars(holder).get(name)
