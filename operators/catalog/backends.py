"""Declare backends: kernels imported when prepared, inputs drawn, and reasons why one cannot run."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from groupbench.operators.deferred import Tensor, torch
from groupbench.operators.dtypes import BYTES, torch_dtype
from groupbench.operators.errors import Unavailable
from groupbench.operators.operator import Backend, Run, Target
from groupbench.operators.relayout import laid_out


def lazy(
    kernel: str,
    inputs: str,
    change: Mapping[str, Callable[[Any], Any]] | None = None,
    refuse: tuple[str, str] | None = None,
    **constants: Any,
) -> Callable[[Any], Any]:
    """Return a kernel's `prepare` or reference, imported at the first call, so listing backends needs no torch.

    Args:
        kernel: "module:function" below `groupbench.kernels`.
        inputs: Names of the inputs to pass, in order.
        change: Layouts to make of an input first, such as `{"a": aligned}`.
        refuse: A function of the module that returns why the kernel cannot take its inputs, and their names.
        constants: Further arguments of the function.
    """
    module, _, function = kernel.partition(":")
    changes = change or {}

    def call(x: Any) -> Any:
        kernels = importlib.import_module(f"groupbench.kernels.{module}")
        values = {name: getattr(x, name) for name in {*inputs.split(), *(refuse or ("", ""))[1].split()}}
        values |= {name: make(values[name]) for name, make in changes.items()}
        if refuse and (reason := getattr(kernels, refuse[0])(*(values[name] for name in refuse[1].split()))):
            raise Unavailable(reason)
        return getattr(kernels, function)(*(values[name] for name in inputs.split()), **constants)

    return call


def described(prepare: Callable[[Any], Run], of: Callable[..., Backend] = Backend, **facts: Any) -> Backend:
    """Return the backend NAME of a function `prepare_NAME`, with the first line of its docstring as description.

    Args:
        of: `Backend`, `triton` or `helion`.
        facts: Further fields.
    """
    about = (inspect.getdoc(prepare) or "").partition("\n")[0].rstrip(".")
    about = about[:1].lower() + about[1:] if about[1:2].islower() else about
    return of(prepare.__name__.removeprefix("prepare_"), prepare, about, **facts)


def drawing(dtype: str, device: str, seed: int) -> Callable[..., Tensor]:
    """Return a function from sizes to a tensor of standard normal values."""
    generator = torch.Generator(device).manual_seed(seed)
    return partial(torch.randn, generator=generator, device=device, dtype=torch_dtype(dtype))


def ends(rows: tuple[int, ...], device: torch.device | str) -> Tensor:  # [G] int32
    """Return where each group's rows end, on the device."""
    return torch.tensor(rows, dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


def aligned(x: Tensor) -> Tensor:
    """Return `x`, or a copy with the 16-byte strides required by torch's grouped GEMM, stride 0 included.

    The copy follows `x`. Making it is not timed: a caller allocates operands with suitable strides.
    """
    step = 16 // x.element_size()
    inner = -1 if x.stride(-1) == 1 or x.stride(-2) != 1 else -2
    outer = -3 - inner  # the other one of the last two
    if (
        x.stride(inner) == 1
        and x.stride(outer) % step == 0
        and (x.dim() == 2 or (x.stride(0) % step == 0 and x.stride(0)))
    ):
        return x
    source = x if inner == -1 else x.transpose(-1, -2)
    width = source.shape[-1]
    padded = source.new_empty(*source.shape[:-1], math.ceil(width / step) * step)[..., :width]
    laid_out(padded, source)
    return padded if inner == -1 else padded.transpose(-1, -2)


# --- why a backend cannot run -----------------------------------------------------------------------------------------


def not_hopper(target: Target) -> str | None:
    """Return why a kernel in CUDA C++ for Hopper cannot run there, or None if it can."""
    if target.device != "cuda" or (target.capability or (9, 0))[0] != 9:
        return "its kernel is CUDA C++ for Hopper GPUs"
    return None


def no_cluster(target: Target) -> str | None:
    if reason := not_hopper(target):
        return reason
    return None if BYTES[target.dtype] == 2 else f"its kernel multiplies fp16 or bf16, not {target.dtype}"


def no_interpreted_bf16(target: Target) -> str | None:
    if target.interpreted and target.dtype == "bf16":
        return "Triton's interpreter computes tl.dot on bf16 wrongly; use --precision fp16"
    return None


triton = partial(Backend, kind="triton", unavailable=no_interpreted_bf16)
helion = partial(Backend, kind="helion", unavailable=no_interpreted_bf16)
