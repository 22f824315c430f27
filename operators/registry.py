"""The operators there are, and the backends that other packages add to them.

A plugin is what an entry point of the group `groupbench.backends` names, or `--plugin module.attribute`: a Backend,
several of them, or a function without arguments that returns either. Which operator a backend belongs to is its
`operator`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from groupbench.operators.errors import UsageError
from groupbench.operators.operator import KINDS, Backend, Operator

CATALOG = {
    "grouped_gemm": "grouped_gemm",
    "grouped_gemm_dgrad": "grouped_gemm_dgrad",
    "grouped_gemm_wgrad": "grouped_gemm_wgrad",
    "grouped_gemm_fp8": "grouped_gemm_fp8",
    "grouped_gemm_fp8_blockwise": "grouped_gemm_fp8",
    "grouped_gemm_bias_add_permute": "grouped_gemm_bias_add_permute",
    "quantize_fp8": "quantize_fp8",
    "split_k_matmul": "split_k_matmul",
    "vector_add": "vector_add",
    "matmul_outer_k": "matmul_outer_k",
    "moe_permute": "moe_permute",
    "moe_unpermute": "moe_unpermute",
    "moe_layer": "moe_layer",
    "canary": "canary",
}
"""Each operator's name and its module in catalog/, which defines it under its name in capitals.

An operator is imported when it is first asked for.
"""


MAX_NAME = 500  # characters, as in the record


def operator_names() -> list[str]:
    return [*CATALOG]


def module_name(operator: str) -> str:
    """The full name of the module that defines an operator. Raises UsageError where there is no such operator."""
    if operator not in CATALOG:
        raise UsageError(f"no operator {operator!r}; there are: {', '.join(CATALOG)}")
    return f"groupbench.operators.catalog.{CATALOG[operator]}"


def catalog_operator(name: str) -> Operator:
    """Return the operator of that name with its own backends alone. Raises UsageError where there is none."""
    operator: Operator = getattr(importlib.import_module(module_name(name)), name.upper())
    return operator


def get_operator(name: str, plugins: Iterable[str] = (), mode: str = "fwd") -> Operator:
    """Return the operator of that name, in a mode, with its own backends, installed plugins' and those of `plugins`.

    Raises UsageError where there is no such operator or a plugin does not load, KeyError for a mode it does not have.
    """
    return _resolved(name, tuple(plugins), mode)


@cache  # every record asks for its operator
def _resolved(name: str, plugins: tuple[str, ...], mode: str) -> Operator:
    if mode != "fwd":
        return _resolved(name, plugins, "fwd").in_mode(mode)
    operator = catalog_operator(name)
    return operator.with_backends(tuple(b for b in plugin_backends(plugins) if b.operator == name))


def forget() -> None:
    """Resolve operators and installed plugins again when they are next asked for."""
    _installed_backends.cache_clear()
    _resolved.cache_clear()


def get_backend(operator: Operator, name: str) -> Backend:
    """Raises UsageError, listing the operator's backends."""
    try:
        return operator.backend(name)
    except KeyError:
        names = ", ".join(backend.name for backend in operator.backends)
        raise UsageError(f"{operator.name} has no backend {name!r}; there are: {names}") from None


def plugin_backends(plugins: Iterable[str]) -> list[Backend]:
    """Those of installed plugins, then those of `plugins`. Raises UsageError where one does not load."""
    backends = list(_installed_backends())
    for plugin in plugins:
        backends += _as_backends(load_plugin(plugin), plugin)
    return backends


@cache  # walks through every installed package: 1.3 ms with a hundred of them
def _installed_backends() -> tuple[Backend, ...]:
    backends: list[Backend] = []
    for entry_point in entry_points(group="groupbench.backends"):
        try:
            loaded = entry_point.load()
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"entry point {entry_point.name} = {entry_point.value} does not load: {error!r}"
            ) from error
        backends += _as_backends(loaded, entry_point.value)
    return tuple(backends)


def load_plugin(path: str) -> Any:
    """What `module.attribute` names; modules in the current folder are found too. Raises UsageError."""
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if not module_name:
        raise UsageError(f"plugin {path!r} is not of the form module.attribute")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:
        raise UsageError(f"plugin {path!r} does not load: {type(error).__name__}: {error}") from error


def _as_backends(loaded: Any, origin: str) -> list[Backend]:
    try:
        if callable(loaded) and not isinstance(loaded, Backend):
            loaded = loaded()
        backends = [loaded] if isinstance(loaded, Backend) else list(loaded) if isinstance(loaded, Iterable) else None
    except (Exception, SystemExit) as error:
        raise UsageError(f"plugin {origin!r} raised {type(error).__name__}: {error}") from error
    if backends is None or not all(isinstance(backend, Backend) for backend in backends):
        raise UsageError(f"plugin {origin!r} gives neither a Backend nor several: {loaded!r}")
    for backend in backends:
        _check(backend, origin)
    return backends


def _check(backend: Backend, origin: str) -> None:
    """Raises UsageError for what no record, no option or no process could take."""
    name, names = backend.name, operator_names()
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise UsageError(f"plugin {origin!r}: {name!r:.80} is no backend's name: 1 to {MAX_NAME} printable characters")
    if "," in name or name != name.strip():
        raise UsageError(f"plugin {origin!r}: {name!r} is no backend's name, since --only could not say it")
    if backend.operator not in names:
        raise UsageError(
            f"plugin {origin!r}: backend {name!r} names operator {backend.operator!r}; there are: {', '.join(names)}"
        )
    if backend.kind not in KINDS:
        raise UsageError(
            f"plugin {origin!r}: backend {name!r} is of kind {backend.kind!r}; there are: {', '.join(KINDS)}"
        )
