"""A launch in Triton's interpreter patches each language module once, and restores all of them.

Dtypes, shapes and types of results are Triton's, and no overflow check is lost.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language import semantic
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="The kernels run on the GPU")


@triton.jit
def _doubled(x):
    return 2 * tl.sum(x, 0)


@triton.jit
def _sums_kernel(out_ptr, FAILS: tl.constexpr):
    total = tl.zeros([], tl.int32)
    for i in range(5):
        total += _doubled(tl.arange(0, 4) + i)
    tl.static_assert(not FAILS)
    tl.store(out_ptr + tl.program_id(0), total)


def members() -> dict[tuple[Any, str], Any]:
    objects = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base)
    return {(o, name): getattr(o, name) for o in objects for name in dir(o)}


@pytest.mark.parametrize("fails", [False, True])
def test_a_launch_patches_each_module_once_and_restores_all(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    patched: list[str] = []
    patch_builtin = interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda o, *args: (patched.append(o.__name__), patch_builtin(o, *args))
    )
    before = members()
    out = torch.zeros(3, dtype=torch.int32)
    if fails:
        with pytest.raises(interpreter.InterpreterError):
            _sums_kernel[(3,)](out, FAILS=True)
    else:
        _sums_kernel[(3,)](out, FAILS=False)
        assert out.tolist() == [140] * 3
    assert "triton.language" in patched
    assert patched.count("triton.language") == 1
    after = members()
    assert [name for name, value in before.items() if after[name] != value] == []


SCALARS = [value for value in vars(tl).values() if isinstance(value, tl.dtype) and value.name != "void"]


@pytest.mark.parametrize("scalar", [*SCALARS, *map(tl.pointer_type, SCALARS)], ids=lambda scalar: scalar.name)
def test_remembered_dtypes_are_those_that_triton_finds(scalar: Any) -> None:
    find = interpreter._get_np_dtype.__wrapped__
    for of in (scalar, tl.block_type(scalar, [4, 8])):
        try:
            expected = find(of)
        except KeyError:
            with pytest.raises(KeyError):
                interpreter._get_np_dtype(of)
        else:
            assert interpreter._get_np_dtype(of) == expected


@triton.jit
def _doubled_kernel(x_ptr):
    tl.store(x_ptr, tl.load(x_ptr) * 2)


def test_triton_does_not_read_the_overflow_check_that_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = interpreter.interpreter_builder
    assert (builder.options.debug, builder.options.sanitize_overflow) == (False, False)
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=True))
    _doubled_kernel[(1,)](torch.tensor(2**30, dtype=torch.int32))
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=True))
    with pytest.raises(interpreter.InterpreterError, match="int32 overflow detected for operation mul"):
        _doubled_kernel[(1,)](torch.tensor(2**30, dtype=torch.int32))


def test_tensors_share_shapes_that_are_tritons() -> None:
    core = tl.core
    for block in (tl.block_type(tl.float16, [4, 8]), tl.block_type(tl.pointer_type(tl.int8), [2])):
        for type_ in (block, block.with_element_ty(tl.int32), block.with_element_ty(tl.pointer_type(tl.int32))):
            made, expected = core.tensor(None, type_), object.__new__(core.tensor)
            core.tensor.__init__.__wrapped__(expected, None, type_)
            assert vars(made) == vars(expected)
            assert [size.value for size in made.shape] == list(type_.shape)
            assert made.shape.type == expected.shape.type == core._type_for_tuple_values(made.shape.values)
            assert made.shape is core.tensor(None, type_).shape
    assert vars(core.tensor(None, tl.int1)) == vars(core.tensor(None, tl.int1))
    assert block.with_element_ty(tl.int32) == tl.block_type(tl.int32, [2])


def test_remembered_types_of_results_are_those_that_triton_computes() -> None:
    remembered = semantic.TritonSemantic.computation_type_impl
    compute = remembered.__wrapped__
    for arguments in itertools.product(SCALARS, (False, True), SCALARS, (False, True), (False, True)):
        try:
            expected = compute(interpreter.interpreter_semantic, *arguments)
        except (TypeError, AssertionError) as error:
            with pytest.raises(type(error)):
                remembered(interpreter.interpreter_semantic, *arguments)
        else:
            for _ in range(2):
                assert remembered(interpreter.interpreter_semantic, *arguments) is expected


def test_constants_are_unwrapped_as_triton_does() -> None:
    core = tl.core
    unwrap = core._unwrap_if_constexpr
    inner = [core.constexpr(2), 3, True, None, "x", 1.5, object()]
    for of in (*inner, inner, tuple(inner)):
        made, expected = unwrap(of), unwrap.__wrapped__(of)
        assert (type(made), made) == (type(expected), expected)
    assert unwrap(core.tuple([core.constexpr(2)])).values == [2]
    tensor = core.tensor(None, tl.int32)
    assert unwrap(tensor) is tensor


def test_a_cast_to_the_same_type_is_the_tensor_and_one_to_another_is_not() -> None:
    cast = interpreter.interpreter_semantic.cast
    block = tl.tensor(interpreter.TensorHandle(np.arange(4, dtype=np.int32), tl.int32), tl.block_type(tl.int32, [4]))
    assert cast(block, tl.int32) is block
    assert cast(block, tl.float32).handle.data.dtype == np.float32
