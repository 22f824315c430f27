"""Optional backends with other projects' kernels, a user's alternatives.

This is a plugin like any other. `--rivals` loads it, and so does a backend's name. A plan lists PLUGIN in `plugins`.
Each rival has a file; package.py checks which packages are installed.
"""

from __future__ import annotations

from collections.abc import Iterable

from groupbench.operators.catalog.rivals import deep_gemm, fbgemm, flashinfer, humming, liger, quack, triton_kernels
from groupbench.operators.operator import Backend

PLUGIN = "groupbench.operators.catalog.rivals.backends"

_RIVALS = (quack, deep_gemm, fbgemm, triton_kernels, flashinfer, liger, humming)


def backends() -> tuple[Backend, ...]:
    """Return every rival's backends, installed or not."""
    return tuple(backend for rival in _RIVALS for backend in rival.BACKENDS)


def names() -> frozenset[str]:
    return frozenset(backend.name for backend in backends())


def not_installed(operators: Iterable[str]) -> dict[str, str]:
    """Return how to install the missing packages, by backend name, for these operators."""
    wanted = set(operators)
    return {
        backend.name: rival.PACKAGE.missing or ""
        for rival in _RIVALS
        if rival.PACKAGE.missing
        for backend in rival.BACKENDS
        if backend.operator in wanted
    }
