"""Gluon's functions under one name, for every tested Triton.

| here          | Triton 3.6, 3.7               | 3.8                           | 3.9             |
|---------------|-------------------------------|-------------------------------|-----------------|
| `async_load`  | `tma.async_copy_global_to_shared` | `tma.async_load`          | `tma.async_load` |
| `async_store` | `tma.async_copy_shared_to_global` | `tma.async_store`         | `tma.async_store` |
| `barrier`     | `gl.thread_barrier` (3.6)     | `gl.barrier`                  | `gl.barrier`    |
| `reinterpret` | `memory._reinterpret`         | `memory._reinterpret`         | `memory.reinterpret` |

Raises ImportError if all names are missing: Gluon is experimental, and a newer one may differ again.
"""

from __future__ import annotations

from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import builtin

from groupbench.kernels.device import Device


def _first(owner: Any, *names: str) -> Any:
    """Return the first existing attribute on `owner`. Raises ImportError if all are missing."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise ImportError(f"{owner.__name__} lacks {' and '.join(names)}")


async_load = _first(tma, "async_load", "async_copy_global_to_shared")
async_store = _first(tma, "async_store", "async_copy_shared_to_global")
barrier = _first(gl, "barrier", "thread_barrier")
_reinterpret = _first(gl.shared_memory_descriptor, "reinterpret", "_reinterpret")


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Return the same shared memory with another dtype, shape and layout."""
    return _reinterpret(memory, dtype, shape, layout, _semantic=_semantic)


def not_hopper(device: Device) -> str | None:
    """Return why the Gluon kernels cannot run on a device, or None if they can."""
    if device.vendor == "cpu":
        return "Gluon has no interpreter"
    return None if device.hopper else f"its instructions are Hopper's, and this GPU is {device.arch}"
