"""Find operators by name: groupbench's and plugins', with backends added by plugins.

A backend's attribute `operator` names the operator. plugins.py defines plugins.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from groupbench.operators import plugins as plugin_sources
from groupbench.operators.errors import UsageError
from groupbench.operators.hosts import has_tritonbench
from groupbench.operators.operator import Backend, Operator
from groupbench.operators.plugins import Plugin
from groupbench.tracker.text.wording import no_such

CATALOG = (
    *("grouped_gemm", "grouped_gemm_dgrad", "grouped_gemm_wgrad", "grouped_gemm_mnk", "grouped_gemm_fp8"),
    *("grouped_gemm_fp8_blockwise", "grouped_gemm_bias_add_permute", "grouped_gemm_w4a16", "grouped_gemm_w4a8"),
    *("quantize_fp8", "quantize_w4", "split_k_matmul", "row_softmax", "causal_attention", "vector_add"),
    *("matmul_outer_k", "moe_permute", "moe_unpermute", "moe_layer", "moe_layer_w4a16", "canary"),
)
"""Names of the operators in catalog/. A module there defines each under its name in capitals.

An operator is imported when it is first used.
"""

MODULES = {
    "grouped_gemm_fp8_blockwise": "grouped_gemm_fp8",
    "grouped_gemm_w4a16": "grouped_gemm_w4",
    "grouped_gemm_w4a8": "grouped_gemm_w4",
    "moe_layer_w4a16": "moe_layer_w4",
}
"""The modules of operators that have not a module of their name."""


def operator_names(plugins: Iterable[str] = ()) -> list[str]:
    """Return all operator names: groupbench's, then those in installed plugins and in `plugins`.

    Raises UsageError if a plugin does not load.
    """
    return [*CATALOG, *_added_operators(tuple(plugins))]


def has_operator(name: str, plugins: Iterable[str] = ()) -> bool:
    """Return whether groupbench or a plugin has this operator. Calls no function named by `plugins`."""
    if name in CATALOG or name in _added_operators(()):
        return True
    return any(operator.name == name for path in plugins for operator in plugin_sources.operators_in(path))


def module_name(operator: str) -> str:
    """Return the full module name for an operator. Raises UsageError for an unknown operator."""
    if operator not in CATALOG:
        raise _no_operator(operator)
    return f"groupbench.operators.catalog.{MODULES.get(operator, operator)}"


def catalog_operator(name: str) -> Operator:
    """Return groupbench's operator with groupbench's backends only. Raises UsageError for an unknown operator."""
    operator: Operator = getattr(importlib.import_module(module_name(name)), name.upper())
    return operator


def operator_alone(name: str, plugins: Iterable[str] = ()) -> Operator:
    """Return the operator without plugin backends, importing as few plugins as possible.

    Raises UsageError for an unknown operator or a plugin that does not load.
    """
    if name in CATALOG:
        return catalog_operator(name)
    for path in (None, *plugins):
        entry = _added_operators((path,) if path else ()).get(name)
        if entry is not None:
            return entry[0]
    raise _no_operator(name, plugins)


def home_of(name: str, plugins: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the plugin defining an operator, as a tuple; () if the definition is installed.

    If no plugin seems to define it, return all `plugins`.
    """
    plugins = tuple(plugins)
    if name in CATALOG or name in _added_operators(()):
        return ()
    entry = _added_operators(plugins).get(name)
    return (entry[1],) if entry else plugins


def plugins_of(name: str, backend: str, plugins: Iterable[str]) -> tuple[str, ...]:
    """Return the plugins to import in a backend's process: none for groupbench's own.

    Otherwise a plugin could slow down the backends it is compared with.
    """
    plugins = tuple(plugins)
    is_own = name in CATALOG and get_operator(name, plugins).backend(backend) in catalog_operator(name).backends
    return () if is_own else plugins


def check_baselines(name: str, plugins: Iterable[str]) -> None:
    """Raise UsageError if a plugin replaces a groupbench backend used as a baseline."""
    if name not in CATALOG:
        return
    operator = catalog_operator(name)
    baselines = {operator.baseline, *operator.suite_baselines.values()}
    for backend in operator.backends:
        if backend.name in baselines and get_operator(name, plugins).backend(backend.name) != backend:
            raise UsageError(
                f"a plugin replaces {name}'s backend {backend.name!r}, to which the speed-ups are relative; give it "
                "another name"
            )


def get_operator(name: str, plugins: Iterable[str] = (), mode: str = "fwd") -> Operator:
    """Return an operator by name, in a mode, with backends from itself, installed plugins and `plugins`.

    Raises UsageError for an unknown operator or a plugin that does not load, KeyError for an unknown mode.
    """
    return _resolved(name, tuple(plugins), mode)


@cache  # every record asks for its operator
def _resolved(name: str, plugins: tuple[str, ...], mode: str) -> Operator:
    if mode != "fwd":
        return _resolved(name, plugins, "fwd").in_mode(mode)
    added = _added_operators(plugins)
    if name not in added and name not in CATALOG:
        raise _no_operator(name, plugins)
    operator = added[name][0] if name in added else catalog_operator(name)
    return operator.with_backends(tuple(b for b in plugin_backends(plugins) if b.operator == name))


@cache
def _added_operators(plugins: tuple[str, ...]) -> dict[str, tuple[Operator, str]]:
    """Return (operator, plugin) for operators from installed plugins and `plugins`, by operator name.

    Raises UsageError for two namesakes.
    """
    added: dict[str, tuple[Operator, str]] = {}
    for plugin in _plugins(plugins):
        for operator in plugin.operators:
            if operator.name in CATALOG:
                raise UsageError(
                    f"plugin {plugin.origin!r}: groupbench has an operator {operator.name!r} already; give this one "
                    "another name"
                )
            first, origin = added.get(operator.name, (operator, plugin.origin))
            if first.make_inputs != operator.make_inputs:
                raise UsageError(
                    f"plugins {origin!r} and {plugin.origin!r} both have an operator {operator.name!r}; give one of "
                    "them another name"
                )
            added[operator.name] = (operator, origin)  # the same, to which the later plugin may have added backends
    return added


def _plugins(plugins: tuple[str, ...]) -> Iterator[Plugin]:
    for group in plugin_sources.INSTALLED:
        yield from map(_without_imported, plugin_sources.installed(group))
    yield from _read(plugins)


@cache
def _read(plugins: tuple[str, ...]) -> tuple[Plugin, ...]:
    return tuple(map(read, plugins))


def read(path: str) -> Plugin:
    """Return the plugin named by `--plugin path`, without imported groupbench operators.

    Raises UsageError.
    """
    plugin = plugin_sources.read(path)
    own = _without_imported(plugin)
    if plugin.operators and not own.operators and not own.backends:
        raise UsageError(f"plugin {path!r} adds nothing: it imports operators of groupbench, and has no Backend")
    return own


def _without_imported(plugin: Plugin) -> Plugin:
    operators = (operator for operator in plugin.operators if not _is_of_catalog(operator))
    return replace(plugin, operators=tuple(operators))


def _is_of_catalog(operator: Operator) -> bool:
    return operator.name in CATALOG and operator is catalog_operator(operator.name)


def forget() -> None:
    """Resolve operators and installed plugins again when they are next asked for."""
    plugin_sources.offered.cache_clear()
    plugin_sources.installed.cache_clear()
    _read.cache_clear()
    _added_operators.cache_clear()
    _resolved.cache_clear()


def get_backend(operator: Operator, name: str) -> Backend:
    """Return a backend by name. Raises UsageError, which lists the operator's backends."""
    try:
        return operator.backend(name)
    except KeyError:
        names = [backend.name for backend in operator.backends]
        raise UsageError(no_such(f"{operator.name} has no backend", name, names)) from None


def plugin_backends(plugins: Iterable[str]) -> list[Backend]:
    """Return backends from installed plugins, then from `plugins`, without those on a plugin's own operator.

    Raises UsageError if one does not load or has no operator.
    """
    plugins = tuple(plugins)
    names = operator_names(plugins)
    backends = []
    for plugin in _plugins(plugins):
        for backend in plugin.backends:
            if backend.operator not in names:
                named = f"names operator {backend.operator!r}" if backend.operator else "has no `operator`"
                raise UsageError(
                    f"plugin {plugin.origin!r}: backend {backend.name!r} {named}; known: {', '.join(names)}"
                )
            backends.append(backend)
    return backends


def _no_operator(name: str, plugins: Iterable[str] = ()) -> UsageError:
    tritonbench = "" if has_tritonbench() else ", and TritonBench, which is not installed, has more"
    problem = no_such("no operator", name, operator_names(plugins))
    return UsageError(f"{problem}. --plugin FILE.py, or plugins in groupbench.toml, adds another{tritonbench}")
