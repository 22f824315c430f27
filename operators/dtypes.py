"""Convert between dtype names, as in options and records, and torch's dtypes."""

from __future__ import annotations

from groupbench.operators.deferred import torch

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8": 1, "int8": 1, "int32": 4, "int64": 8, "bool": 1}
"""Bytes per element of each dtype."""


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for bf16, fp16, fp32, fp64, fp8 (e4m3fn), int8, int32, int64 or bool. Raises KeyError."""
    others = {"fp64": torch.float64, "int8": torch.int8, "int32": torch.int32, "int64": torch.int64, "bool": torch.bool}
    return (_dtypes() | others)[name]


def dtype_name(dtype: torch.dtype) -> str | None:
    """Return a floating-point dtype's name, or None if groupbench's operators do not take it."""
    return next((name for name, value in _dtypes().items() if value == dtype), None)


def _dtypes() -> dict[str, torch.dtype]:
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
