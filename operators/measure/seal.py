"""Check whether the measuring functions are still the imported ones.

The harness holds references to clocks from before any plugin is imported, so replacing `time.perf_counter` does not
change a measurement. A backend replacing such a function, on purpose or by a leftover test helper, is still reported,
because other changes are unknown.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from multiprocessing import connection
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
TORCH = ("Tensor", "UntypedStorage", "cuda")
"""Classes and a module of torch, which are watched like MODULES."""
PACKAGES = ("groupbench.operators.", "groupbench.tracker.facts.record", "groupbench.tracker.facts.physics")
"""Packages in whose modules every function and method is watched."""

ATEN = ("copy_", "clone", "detach", "empty_like", "zero_", "bitwise_xor_.Tensor", "sum", "contiguous")
"""Operations of torch that the harness uses between timed calls, whose kernels `torch.library` can replace."""
KEYS = ("CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "Autograd[alias]", "Composite")
"""Beginnings of the names of the dispatch keys under which their kernels are registered."""

Place = tuple[str, Any, str, Any]
"""Something that is watched: its label, the namespace, class or function that holds it, its name there, and itself."""

_GONE = object()
_first: dict[str, Place] = {}
_first_hooks: dict[str, Any] = {}
_first_kernels: dict[str, list[str]] = {}
_used: set[str] = set()
_newest = ""
"""The module that was the newest when `close` last looked."""


def close() -> None:
    """Remember the current functions, before a plugin is imported. Does not replace remembered functions.

    A module in PACKAGES is read once, mostly in the fork server for all processes. Reading all names in `sys.modules`
    again would take a process 10 ms, since it has to copy each one's memory.
    """
    global _newest
    names = list(takewhile(_newest.__ne__, reversed(sys.modules)))
    _newest = next(iter(names), _newest)
    modules = [(name, module) for name in names if name.startswith(PACKAGES) and (module := sys.modules.get(name))]
    for name, module in modules:
        if name.startswith(HARNESS):
            for _, _, _, value in _functions(name, module):
                if isinstance(value, CodeType):
                    _used.update(_names(value))
    for place in (*_used_places(), *_own_places(modules)):
        _first.setdefault(place[0], place)
    for label, hook in _set_hooks().items():
        _first_hooks.setdefault(label, hook)
    for label, kernels in _kernels().items():
        _first_kernels.setdefault(label, kernels)


def renew() -> None:
    """Forget the remembered functions, and remember the current ones."""
    global _newest
    _newest = ""
    _first.clear()
    _first_hooks.clear()
    _first_kernels.clear()
    close()


def broken() -> str | None:
    """Return a replaced function's name, or None."""
    return changed(_first.values()) or _hooks() or _modes() or _replaced_kernel()


def changed(places: Iterable[Place]) -> str | None:
    """Return the first label for a place with another object, or None.

    It calls none of this module's functions: replacing them cannot make it blind.
    """
    for label, holder, name, value in places:
        if isinstance(holder, dict):
            now = holder.get(name)
        elif isinstance(holder, type):  # without binding it
            for base in holder.__mro__:
                if name in base.__dict__:
                    now = base.__dict__[name]
                    break
            else:
                now = None
        else:
            now = getattr(holder, name)
        if now is not value:
            return label
    return None


def problem() -> str | None:
    """Return the result from `broken` as a record's message."""
    return as_problem(broken())


def as_problem(name: str | None) -> str | None:
    """Return a record's message about something replaced."""
    return name and f"the backend's process replaced {name}, which measures it"


def exchanged(*objects: tuple[Any, type]) -> str | None:
    """Return what was replaced in a harness object: the class, or a method on the object; or None.

    Args:
        objects: Each with its class.
    """
    for value, kind in objects:
        if type(value) is not kind:
            return f"the class of its {kind.__name__}"
        for name in getattr(value, "__dict__", ()):
            if callable(getattr(kind, name, None)):
                return f"{name} of its {kind.__name__}"
    return None


def differing(label: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> str | None:
    """Return an attribute's name if it is another object than before, or None."""
    names = (name for name in {**before, **now} if now.get(name, _GONE) is not before.get(name, _GONE))
    return next((f"{label} {name}" for name in names), None)


def _hooks() -> str | None:
    """Return the set hook, or None: Python calls it between the harness's own operations."""
    return next((name for name, hook in _set_hooks().items() if hook is not _first_hooks.get(name)), None)


def _set_hooks() -> dict[str, Any]:
    hooks = {"Python's profile hook": sys.getprofile(), "Python's trace hook": sys.gettrace()}
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    tools = {f"Python's monitoring tool {tool}": monitoring.get_tool(tool) for tool in range(6)} if monitoring else {}
    return hooks | tools


def _replaced_kernel() -> str | None:
    """Return the torch operation with a replaced kernel, or None."""
    return next((f"torch's {name}" for name, now in _kernels().items() if now != _first_kernels.get(name, now)), None)


def _kernels() -> dict[str, list[str]]:
    """Return where ATEN's kernels are registered."""
    torch = sys.modules.get("torch")
    dump = getattr(getattr(torch, "_C", None), "_dispatch_dump", None)
    if dump is None:
        return {}
    return {name: [line for line in dump(f"aten::{name}").splitlines() if line.startswith(KEYS)] for name in ATEN}


def _modes() -> str | None:
    """Return the mode left on by a backend, or None. It could change the harness's own operations."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch._C._len_torch_dispatch_stack():
        return "torch's dispatch mode"
    if torch._C._len_torch_function_stack():
        return "torch's function mode"
    return None


def remembered() -> list[Place]:
    """Return everything remembered by `close`."""
    return list(_first.values())


def watched() -> list[Place]:
    """Return everything watched as it is now; for a function, also the code."""
    return [*_used_places(), *_own_places(sys.modules.items())]


def _used_places() -> list[Place]:
    """Return the Python and torch functions used by the harness."""
    places: list[Place] = [(f"time.{name}", vars(time), name, getattr(time, name)) for name in CLOCKS]
    for place in _holders():
        label, _, _, holder = place
        names = sorted(_used.union(OPERATORS).intersection(dir(holder)).difference(RENEWED))
        of: Any = holder if isinstance(holder, type) else vars(holder)
        places += [place, *((f"{label}.{name}", of, name, _of(holder, name)) for name in names)]
    return places


def _own_places(modules: Iterable[tuple[str, ModuleType]]) -> Iterator[Place]:
    """Return every function and class from the modules in PACKAGES."""
    for module_name, module in list(modules):
        if not module_name.startswith(PACKAGES) or ".catalog" in module_name or ".integrity" in module_name:
            continue
        short, values = module_name.removeprefix("groupbench."), vars(module)
        yield short, sys.modules, module_name, module
        yield from ((f"{short}.{name}", values, name, values[name]) for name in OWN if name in values)
        yield from _functions(module_name, module)


def _functions(module_name: str, module: ModuleType) -> list[Place]:
    """Return the functions and classes defined by a module."""
    places: list[Place] = []
    short = module_name.removeprefix("groupbench.")
    for name, value in list(vars(module).items()):
        if getattr(value, "__module__", None) == module_name and callable(value):
            label = f"{short}.{name}"
            places.append((label, vars(module), name, value))
            if isinstance(value, FunctionType):
                places += _inside(label, value)
            elif isinstance(value, type):
                for member, method in list(vars(value).items()):
                    if isinstance(method, FunctionType):
                        places += [(f"{label}.{member}", value, member, method), *_inside(f"{label}.{member}", method)]
    return places


def _names(code: CodeType) -> set[str]:
    """Return the global and attribute names in a function and in those inside it."""
    inner = (const for const in code.co_consts if isinstance(const, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _inside(label: str, function: FunctionType) -> list[Place]:
    return [
        (f"{label}'s code", function, "__code__", function.__code__),
        (f"{label}'s defaults", function, "__defaults__", function.__defaults__),
    ]


def _holders() -> list[Place]:
    """Return the modules and classes whose functions the harness uses, if they are imported."""
    imported = sys.modules
    holders: list[Place] = [(name, imported, name, imported[name]) for name in MODULES if name in imported]
    holders.append(("random.SystemRandom", vars(random), "SystemRandom", random.SystemRandom))
    holders.append(("Connection", vars(connection), "Connection", connection.Connection))
    torch = imported.get("torch")
    if torch is not None and hasattr(torch, "cuda"):
        holders += [(f"torch.{name}", vars(torch), name, getattr(torch, name)) for name in TORCH]
        holders.append(("torch.cuda.Event", vars(torch.cuda), "Event", torch.cuda.Event))
    return holders


def _of(holder: Any, name: str) -> Any:
    """Return a class attribute, without binding it, or a module attribute."""
    if isinstance(holder, type):
        for base in holder.__mro__:
            if name in vars(base):
                return vars(base)[name]
        return None
    return vars(holder).get(name)
