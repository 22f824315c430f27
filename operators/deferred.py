"""torch and NumPy, imported when one of their attributes is first read."""

from groupbench.operators.measure.deferred import F, Tensor, np, torch

__all__ = ["F", "Tensor", "np", "torch"]
