"""torch and NumPy, imported when one of their attributes is first read.

So a module that uses them names them at its top, and listing operators does not wait for them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


class _Deferred:
    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self._module), name)
        setattr(self, name, value)  # later, the attribute is found as fast as in the module
        return value


if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import Tensor
else:
    np, torch, F = map(_Deferred, ("numpy", "torch", "torch.nn.functional"))
    Tensor = "torch.Tensor"

__all__ = ["F", "Tensor", "np", "torch"]
