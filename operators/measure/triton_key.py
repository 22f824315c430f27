"""Triton's digest over Triton's files, a part of each compiled kernel's name.

Triton computes it in the first compilation of a process, from more than 100 MB: 0.4 s on one core. Processes of the
fork server inherit it, so only one of them takes that time.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

MODULES = ("triton.runtime.cache", "triton.compiler.compiler")
"""Modules in which newer and older versions of Triton define `triton_key`."""


def compute() -> None:
    """Compute the digest for this process and for those that it forks, if Triton is installed."""
    with contextlib.suppress(Exception):  # the process that compiles reports the error
        if (key := _cached()) is not None:
            key()


def forget() -> None:
    """Let the next compilation compute the digest, as in a process that was not forked."""
    if (key := _cached()) is not None:
        key.cache_clear()


def _cached() -> Any:
    """Return Triton's function, which keeps the result, or None."""
    for name in MODULES:
        with contextlib.suppress(ImportError):
            key = getattr(importlib.import_module(name), "triton_key", None)
            if hasattr(key, "cache_clear"):
                return key
    return None
