"""Avoid repeated work of Helion when it binds a kernel: infer the types in a loop once, if that is enough.

Helion infers them twice, since a variable may have another type after the first iteration. A loop in two others is so
read eight times, which takes half of the time of a bind.
"""

from __future__ import annotations

import functools
from typing import Any

from helion._compiler import type_propagation


def patch_once() -> None:
    """Change Helion in this process, unless it is changed or this version of Helion has other loops."""
    propagation = type_propagation.TypePropagation
    infer = getattr(propagation, "_loop_body", None)
    if infer is None or hasattr(infer, "__wrapped__") or not hasattr(type_propagation, "LocalScope"):
        return

    @functools.wraps(infer)
    def infer_once(self: Any, statements: Any) -> Any:
        before = self.scope
        if getattr(before, "is_final", False):  # for the second time, Helion begins with the result of the first
            return type_propagation.LocalScope(parent=before)
        after = infer(self, statements)
        names = [name for name in after.variables if before.maybe_get(name) is not None]
        after.is_final = all(is_same(before.get(name), after.variables[name]) for name in names)
        return after

    propagation._loop_body = infer_once


def is_same(before: Any, after: Any) -> bool:
    """Return whether two types are equal. Sizes are compared as text, since a comparison of symbols would fix them."""
    if not all(isinstance(of, type_propagation.TensorType) for of in (before, after)):
        return before is after or before == after
    a, b = before.fake_value, after.fake_value
    return (a.dtype, a.device) == (b.dtype, b.device) and list(map(str, a.shape)) == list(map(str, b.shape))
