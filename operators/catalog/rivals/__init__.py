"""Other projects' kernels as backends, each optional: what a user would otherwise take, measured in the same way.

A plugin like any other: `--rivals` loads it, and so does naming one of its backends. A plan names PLUGIN among its
`plugins`. One file for each rival; package.py says what is installed.
"""

from __future__ import annotations

from collections.abc import Iterable

from groupbench.operators.catalog.rivals import deep_gemm, fbgemm, flashinfer, liger, quack, triton_kernels
from groupbench.operators.operator import Backend

PLUGIN = "groupbench.operators.catalog.rivals.backends"

_RIVALS = (quack, deep_gemm, fbgemm, triton_kernels, flashinfer, liger)


def backends() -> tuple[Backend, ...]:
    """Return the backends of every rival, installed or not."""
    return tuple(backend for rival in _RIVALS for backend in rival.BACKENDS)


def names() -> frozenset[str]:
    return frozenset(backend.name for backend in backends())


def not_installed(operators: Iterable[str]) -> dict[str, str]:
    """Return, by backend of these operators whose package is missing, how to install it."""
    wanted = set(operators)
    return {
        backend.name: rival.PACKAGE.missing or ""
        for rival in _RIVALS
        if rival.PACKAGE.missing
        for backend in rival.BACKENDS
        if backend.operator in wanted
    }
