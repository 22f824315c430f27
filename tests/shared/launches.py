"""Avoid repeated work of Triton's interpreter: patch the language once a launch, and remember numpy's dtypes.

The interpreter replaces functions of the language while a kernel runs. It repeats this at each call of a `@jit`
function by a kernel, a quarter of its time, and does not restore what only that call replaced.

It also builds its table of dtypes at each look-up, of which every operation of a kernel makes one.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter

REPLACED = ("_patch_lang", "_LangPatchScope", "GridExecutor", "tl", "_get_np_dtype")  # as in Triton 3.6 to 3.9


def patch_once() -> None:
    """Change the interpreter of this process, unless this version of Triton has another one."""
    if not all(hasattr(interpreter, name) for name in REPLACED):
        return
    patch, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
    whole = SimpleNamespace(__globals__={"tl": interpreter.tl, "core": interpreter.tl.core})
    patched: list[bool] = []  # for each launch that is running, whether it has patched the language

    @functools.wraps(patch)
    def patch_lang(fn: Any) -> Any:
        if not patched:  # a test calls a device function without a launch
            return patch(fn)
        if patched[-1]:  # a device function, whose caller ignores the result
            return None
        patched[-1] = True
        return patch(whole)  # the launch restores it

    @functools.wraps(call)
    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.append(False)
        try:
            call(self, *args, **kwargs)
        finally:
            patched.pop()

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = launch
    find = interpreter._get_np_dtype
    numpy_dtypes: dict[str, Any] = {}  # by scalar; a block has the dtype of its elements

    @functools.wraps(find)
    def np_dtype(of: Any) -> Any:
        name = of.scalar.name
        if name not in numpy_dtypes:
            numpy_dtypes[name] = find(of.scalar)
        return numpy_dtypes[name]

    interpreter._get_np_dtype = np_dtype
