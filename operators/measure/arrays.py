"""View NumPy arrays as torch tensors of the same memory, so that measuring and checking handle only tensors."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NUMPY = {"fp16": "float16", "fp32": "float32", "fp64": "float64"}


def tensor_of(value: Any) -> Tensor | None:
    """Return a tensor for a tensor or array, sharing the array's memory if possible; None for anything else.

    A read-only array, one with negative strides, and a NumPy scalar are copied.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return value
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return None
    array = numpy.asarray(value)
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except TypeError:  # text, objects
        return None


def numpy_of(name: str) -> Any:
    """Return NumPy's dtype of that name. Raises ValueError for an unknown name."""
    import numpy

    if name not in NUMPY:
        raise ValueError(f"NumPy has no {name}; it has {', '.join(NUMPY)}")
    return numpy.dtype(NUMPY[name])
