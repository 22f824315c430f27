"""A launch in Triton's interpreter patches each language module once, and restores all of them. Dtypes are Triton's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
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
