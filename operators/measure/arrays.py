"""View NumPy arrays as torch tensors on the same memory, so measuring and checking handle only tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

from groupbench.operators.measure.deferred import Tensor, np, torch

NUMPY = {"fp16": "float16", "fp32": "float32", "fp64": "float64"}


def tensor_of(value: Any) -> Tensor | None:
    """Return a tensor for a tensor or array, sharing the array's memory if possible; None for anything else.

    A read-only array, one with negative strides, and a NumPy scalar are copied.
    """
    if is_tensor(value):
        tensor: Tensor = value
        return tensor
    if not is_numpy(value):
        return None
    array = np.asarray(value)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:  # text, objects
        return None


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_numpy(value: Any) -> bool:
    """Return whether a value is an array or scalar of NumPy, without importing NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))


def memory_of(value: Any) -> tuple[int, int]:
    """Return a tensor's or array's address and element bytes, each counted once.

    A tensor without memory has address 0. This does not import torch.
    """
    if is_numpy(value):
        return value.__array_interface__["data"][0], value.nbytes
    storage = value.untyped_storage()
    size = min(elements(value) * value.element_size(), storage.nbytes())
    return (0 if value.is_meta else storage.data_ptr()), size


def elements(value: Any) -> int:
    return math.prod(value.shape)


def size_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def numpy_of(name: str) -> Any:
    """Return NumPy's dtype by name. Raises ValueError for an unknown name."""
    if name not in NUMPY:
        raise ValueError(f"NumPy has no {name}; it has {', '.join(NUMPY)}")
    return np.dtype(NUMPY[name])
