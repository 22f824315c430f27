"""Register operations with torch: fake kernels, gradients, autocast, and refusals by name.

    define("double(Tensor x) -> Tensor", compute, fake, gradients=(save, backward), cast=("x",))

registers `torch.ops.groupbench.double` for CPU and CUDA tensors. Such an operation is one node to torch.compile and
torch.export, it works under activation checkpointing and CUDA graphs, and autocast casts the arguments
in `cast`. Without `gradients` it refuses to be differentiated. vmap is refused.

An operation of Python costs 10 to 40 µs of host time per call in torch's dispatcher. A call that needs none of it
(`direct`) therefore goes around it: plain tensors, and no mode, transform or tracer that should see the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "groupbench"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_left_by_transform = torch._C._functorch.is_functorch_wrapped_tensor
autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Return whether autocast is enabled for any kind of device."""


def define(
    schema: str,
    compute: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: tuple[Callable[..., None], Callable[..., Any]] | None = None,
    cast: Sequence[str] = (),
) -> torch._ops.OpOverload:
    """Register an operation and return it.

    Args:
        schema: its signature in torch's notation.
        compute: its implementation, which may launch kernels.
        fake: returns empty tensors of the result's shapes, strides and dtypes.
        gradients: (setup_context, backward) as for `torch.library.register_autograd`.
        cast: names of the arguments that autocast casts.
    """
    name = schema.partition("(")[0]
    full = f"{NAMESPACE}::{name}"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    for key in ("CPU", "CUDA"):
        _library.impl(name, compute, key)
    torch.library.register_fake(full, fake, lib=_library)
    save, backward = gradients or (None, refuse_derivative(full))
    torch.library.register_autograd(full, backward, setup_context=save, lib=_library)
    torch.library.register_vmap(full, refuse_vmap(full), lib=_library)
    operation: torch._ops.OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    if cast:
        at = [i for i, argument in enumerate(operation._schema.arguments) if argument.name in cast]
        for device in ("cpu", "cuda"):
            _library.impl(name, _casting(operation, at, device), f"Autocast{device.upper()}")
    return operation


def transformed() -> bool:
    """Return whether a transform of torch.func is active outside torch.compile."""
    return not torch.compiler.is_compiling() and bool(_transforms())


def direct(*tensors: Tensor | None) -> bool:
    """Return whether a call with these tensors may go around torch's dispatcher."""
    if torch.compiler.is_compiling() or _modes() or _transforms():
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN or (tensor is not None and _left_by_transform(tensor)):
            return False
    return True


def cast_by_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors as torch.matmul would take them: in autocast's dtype if autocast is enabled."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(_cast(tensor, dtype) for tensor in tensors)


def _cast(tensor: Any, dtype: torch.dtype) -> Any:
    eligible = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype.itemsize in (2, 4)
    return tensor.to(dtype) if eligible else tensor


def _casting(operation: torch._ops.OpOverload, at: list[int], device: str) -> Callable[..., Any]:
    """Return the operation's kernel under autocast."""
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device.upper()}"))

    def run(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*[_cast(arg, dtype) if i in at else arg for i, arg in enumerate(args)])

    return run


def refuse_derivative(name: str) -> Callable[..., Any]:
    """Return a backward function that raises NotImplementedError."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(f"{name} has no derivative: groupbench's operations are differentiable once")

    return backward


def refuse_vmap(name: str) -> Callable[..., Any]:
    """Return a batching rule that raises NotImplementedError."""

    def batched(*args: Any) -> Any:
        raise NotImplementedError(f"{name} does not support vmap: pass the batch as more rows or more groups")

    return batched
