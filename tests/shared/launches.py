"""Make a launch in Triton's interpreter patch `triton.language` once, instead of at every call of a device function.

The interpreter replaces functions of the language while a kernel runs. It repeats this at each call of a `@jit`
function by a kernel, a quarter of its time, and does not restore what only that call replaced.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter

REPLACED = ("_patch_lang", "_LangPatchScope", "GridExecutor", "tl")  # as in Triton 3.6 to 3.9


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
