"""Avoid repeated work of Triton's interpreter: patch the language once a launch, and remember numpy's dtypes.

The interpreter replaces functions of the language while a kernel runs. It repeats this at each call of a `@jit`
function by a kernel, a quarter of its time, and does not restore what only that call replaced.

It also builds its table of dtypes at each look-up, of which every operation of a kernel makes one. It computes
whether integers overflow with ten operations of the language, which nothing reads, and makes a shape for each tensor.
The calls of the language pass through two more functions each, and most casts and look-ups of constants change nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter

REPLACED = ("_patch_lang", "_LangPatchScope", "GridExecutor", "tl", "_get_np_dtype")  # as in Triton 3.6 to 3.9


def patch_once() -> None:
    """Change the interpreter of this process, unless it is changed or this version of Triton has another one."""
    if not all(hasattr(interpreter, name) for name in REPLACED) or hasattr(interpreter._patch_lang, "__wrapped__"):
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
    skip_unread_checks()
    if share_shapes():
        shorten_calls()
    remember_builtins()


def skip_unread_checks() -> None:
    """Do not compute whether integers overflow: Triton drops the result, except with its option `debug`."""
    builder = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if getattr(options, "debug", True) is False and hasattr(options, "sanitize_overflow"):
        builder.options = dataclasses.replace(options, sanitize_overflow=False)


def share_shapes() -> bool:
    """Make the shapes of tensors once, and the type of a tuple only if it is read. Return whether Triton has both."""
    core = interpreter.tl.core
    if not all(hasattr(core, name) for name in ("tuple", "_type_for_tuple_values")):
        return False
    make_tuple = core.tuple.__init__

    @functools.wraps(make_tuple)
    def new_tuple(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            make_tuple(self, args, type)

    core.tuple.__init__ = new_tuple
    core.tuple.type = TypeOfTuple()
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    @functools.wraps(core.tensor.__init__)
    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            shapes[sizes] = core.tuple(list(map(core.constexpr, sizes))), core.constexpr(math.prod(sizes))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[sizes]

    core.tensor.__init__ = new_tensor
    with_element = core.block_type.with_element_ty
    blocks: dict[tuple[str, tuple[int, ...]], Any] = {}

    @functools.wraps(with_element)
    def block_with_element(self: Any, scalar: Any) -> Any:
        if type(scalar) is not core.dtype:  # a name does not distinguish pointers
            return with_element(self, scalar)
        key = scalar.name, tuple(self.shape)
        if key not in blocks:
            blocks[key] = with_element(self, scalar)
        return blocks[key]

    core.block_type.with_element_ty = block_with_element
    return True


def shorten_calls() -> None:
    """Return at once where most calls change nothing, and remember the type of an operation's result by its operands'.

    A handle's data are not compared with its type, which only guards the interpreter against itself.
    """
    core, semantic = interpreter.tl.core, getattr(interpreter, "TritonSemantic", None)
    names = ("cast", "computation_type_impl")
    if not all(hasattr(semantic, name) for name in names) or not hasattr(core, "_unwrap_if_constexpr"):
        return
    unwrap, cast, computed = core._unwrap_if_constexpr, semantic.cast, semantic.computation_type_impl
    plain = (core.tensor, int, float, bool, str, type(None), core.dtype, core.block_type)
    types: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(unwrap)
    def unwrap_constant(of: Any) -> Any:
        kind = type(of)
        return of.value if kind is core.constexpr else of if kind in plain else unwrap(of)

    @functools.wraps(cast)
    def cast_unless_same(self: Any, of: Any, to: Any, *args: Any, **kwargs: Any) -> Any:
        return of if of.dtype is to else cast(self, of, to, *args, **kwargs)

    @functools.wraps(computed)
    def type_of_result(self: Any, a: Any, a_is_scalar: bool, b: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = a.name, a_is_scalar, b.name, b_is_scalar, div_or_mod
        if key not in types:
            types[key] = computed(self, a, a_is_scalar, b, b_is_scalar, div_or_mod)
        return types[key]

    core._unwrap_if_constexpr = unwrap_constant
    semantic.cast, semantic.computation_type_impl = cast_unless_same, type_of_result
    if hasattr(interpreter.TensorHandle, "__post_init__"):
        interpreter.TensorHandle.__post_init__ = lambda self: None


def remember_builtins() -> None:
    """Look for the builtins of a module once, not at each launch, and call them without a check and a copy."""
    patch = getattr(interpreter, "_patch_builtin", None)
    if patch is None or list(inspect.signature(patch).parameters) != ["pkg", "builder", "scope"]:
        return
    semantic = interpreter.interpreter_semantic
    calls: dict[Any, dict[str, Any]] = {}

    def bound(member: Any) -> Any:
        function = getattr(member, "__wrapped__", member)

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    @functools.wraps(patch)
    def patch_builtin(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in calls:
            members = inspect.getmembers(pkg, interpreter.tl.core.is_builtin)
            calls[pkg] = {name: bound(member) for name, member in members}
        for name, call in calls[pkg].items():
            scope.set_attr(pkg, name, call)

    interpreter._patch_builtin = patch_builtin


class TypeOfTuple:
    """The attribute `type` of a tuple of the language, until it is set."""

    def __get__(self, of: Any, owner: Any) -> Any:
        if of is None:
            return self
        of.type = interpreter.tl.core._type_for_tuple_values(of.values)
        return of.type
