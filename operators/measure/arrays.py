"""NumPy's arrays as torch's tensors of the same memory, so that what measures and judges knows one kind alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NUMPY = {"fp16": "float16", "fp32": "float32", "fp64": "float64"}


def tensor_of(value: Any) -> Tensor | None:
    """The tensor itself, one that shares an array's memory where it can, or None for anything else.

    An array that may not be written to, or that runs backwards, is copied. So is a number of NumPy's.
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
    """NumPy's dtype of that name. Raises ValueError where it has none."""
    import numpy

    if name not in NUMPY:
        raise ValueError(f"NumPy has no {name}; it has {', '.join(NUMPY)}")
    return numpy.dtype(NUMPY[name])
