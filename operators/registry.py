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

from groupbench.operators.catalog.canary import CANARY
from groupbench.operators.catalog.grouped_gemm import GROUPED_GEMM
from groupbench.operators.catalog.grouped_gemm_bias_add_permute import GROUPED_GEMM_BIAS_ADD_PERMUTE
from groupbench.operators.catalog.grouped_gemm_dgrad import GROUPED_GEMM_DGRAD
from groupbench.operators.catalog.grouped_gemm_fp8 import GROUPED_GEMM_FP8, GROUPED_GEMM_FP8_BLOCKWISE
from groupbench.operators.catalog.grouped_gemm_wgrad import GROUPED_GEMM_WGRAD
from groupbench.operators.catalog.matmul_outer_k import MATMUL_OUTER_K
from groupbench.operators.catalog.moe_layer import MOE_LAYER
from groupbench.operators.catalog.moe_permute import MOE_PERMUTE
from groupbench.operators.catalog.moe_unpermute import MOE_UNPERMUTE
from groupbench.operators.catalog.quantize_fp8 import QUANTIZE_FP8
from groupbench.operators.catalog.split_k_matmul import SPLIT_K_MATMUL
from groupbench.operators.catalog.vector_add import VECTOR_ADD
from groupbench.operators.errors import UsageError
from groupbench.operators.operator import KINDS, Backend, Operator

OPERATORS: tuple[Operator, ...] = (
    GROUPED_GEMM,
    GROUPED_GEMM_DGRAD,
    GROUPED_GEMM_WGRAD,
    GROUPED_GEMM_FP8,
    GROUPED_GEMM_FP8_BLOCKWISE,
    GROUPED_GEMM_BIAS_ADD_PERMUTE,
    QUANTIZE_FP8,
    SPLIT_K_MATMUL,
    VECTOR_ADD,
    MATMUL_OUTER_K,
    MOE_PERMUTE,
    MOE_UNPERMUTE,
    MOE_LAYER,
    CANARY,
)


MAX_NAME = 500  # characters, as in the record


def operator_names() -> list[str]:
    return [operator.name for operator in OPERATORS]


def get_operator(name: str, plugins: Iterable[str] = ()) -> Operator:
    """The operator of that name with all its backends: its own, installed plugins', then those of `plugins`.

    Raises UsageError where there is no such operator or a plugin does not load.
    """
    for operator in OPERATORS:
        if operator.name == name:
            return operator.with_backends(tuple(b for b in plugin_backends(plugins) if b.operator == name))
    raise UsageError(f"no operator {name!r}; there are: {', '.join(operator_names())}")


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


@cache  # walks through every installed package: 1.3 ms with a hundred of them, and each record asks for its operator
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
