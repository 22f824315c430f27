"""Entry points of TritonBench with our operators and backends, and a record of each cell.

Our launcher runs this module as a child process. TritonBench's own run.py calls `plugin`:

python run.py --op grouped_gemm --plugin groupbench.operators.hosts.tritonbench_adapter.plugin

Code that depends on TritonBench's internals is in adapter/.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from groupbench.operators.errors import GroupbenchError, Incomplete, UsageError
from groupbench.operators.hosts.adapter import lists
from groupbench.operators.hosts.adapter.arguments import check_metrics, refuse
from groupbench.operators.hosts.adapter.internals import PACKAGE, operator_list, run_utils
from groupbench.operators.hosts.adapter.own import add_backends, add_operator, own_operator
from groupbench.operators.hosts.adapter.recording import recording
from groupbench.operators.hosts.journal import Event, Setup, send
from groupbench.operators.measure.confine import confine
from groupbench.operators.measure.faults import describe
from groupbench.operators.measure.folders import CACHES, layered
from groupbench.operators.measure.loaded import watch
from groupbench.operators.plugins import load, operators_in
from groupbench.operators.registry import CATALOG, get_operator, has_operator, operator_names
from groupbench.tracker.facts.exits import ExitCode
from groupbench.tracker.text.wording import suggestion


def plugin() -> None:
    """Add our backends to the TritonBench operators that we have backends for."""
    for name in CATALOG:
        module = sys.modules.get(f"{PACKAGE}.{name}")
        if module is not None:
            add_backends(module.Operator, name, get_operator(name))


def _operators_of_tritonbench() -> list[str]:
    return sorted(Path(path).name for path in operator_list._list_opbench_paths())


def _unknown_operator(setup: Setup) -> UsageError:
    """Return the error for an operator that neither groupbench nor a plugin nor TritonBench has."""
    names = [*operator_names(), *(operator.name for path in setup.plugins for operator in operators_in(path))]
    of_tritonbench = _operators_of_tritonbench()
    meant = suggestion(setup.op, [*names, *of_tritonbench])
    return UsageError(
        f"no operator {setup.op!r}{meant}; known: {', '.join(names)}; TritonBench's: {', '.join(of_tritonbench)}"
    )


def _run(setup: Setup, arguments: list[str]) -> None:
    """Prepare TritonBench's operator, or ours as one of its own, and run it."""
    name = setup.op
    is_ours = setup.own or has_operator(name)
    if not is_ours:
        _register_plugins(setup)
    ours = get_operator(name, setup.plugins).in_mode(setup.mode) if is_ours else None
    if setup.own:
        assert ours is not None
        cls = own_operator(setup, ours)
        add_backends(cls, name, ours, setup.shapes)
        add_operator(name, recording(cls, setup, ours))
    elif not name.startswith("aten::"):
        module = _module_of(setup)
        base: Any = module.Operator
        if ours is not None:
            add_backends(base, name, ours)
        if setup.lists:
            lists.show(setup, base)
            return
        setattr(module, "Operator", recording(base, setup, ours))  # noqa: B010 - a module has no such attribute by type
    check_metrics(setup, arguments)
    sys.argv = ["run.py", *arguments]
    try:
        run_utils.tritonbench_run(arguments)
    except OSError as error:
        files = [value for flag, value in pairwise(arguments) if flag in ("--output", "--output-json")]
        wrote = " and ".join(["its table", *files])
        raise Incomplete(f"TritonBench, which writes {wrote}: {describe(error)}") from error


def _register_plugins(setup: Setup) -> None:
    """Let the plugins register their backends with an operator of TritonBench. Raises UsageError."""
    loaded = [load(path) for path in setup.plugins]
    for path, function in zip(setup.plugins, loaded, strict=True):
        if not callable(function):
            if setup.op not in _operators_of_tritonbench():
                raise _unknown_operator(setup)
            raise UsageError(
                f"plugin {path!r}: {setup.op} is TritonBench's, for which a plugin is a function that registers its "
                f"backends with TritonBench: {function!r}"
            )
        function()


def _module_of(setup: Setup) -> ModuleType:
    """Import the module of TritonBench's operator. Raises UsageError."""
    module_name = f"{PACKAGE}.{setup.op}"
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            raise _unknown_operator(setup) from error
        raise UsageError(f"TritonBench's operator {setup.op} does not import here: {describe(error)}") from error


def _written(arguments: list[str]) -> list[Path]:
    """Return the folders with TritonBench's outputs, temporary files and caches."""
    values = [Path(text.rpartition("=")[2]).absolute() for text in arguments]
    caches = [os.environ[name] for name in CACHES if name in os.environ]
    usual = [Path.home() / name for name in (".cache", ".triton", ".nv")]
    return [*map(Path, caches), *usual, Path.cwd(), Path(tempfile.gettempdir()), *values, *(v.parent for v in values)]


def main() -> None:
    """Run TritonBench with the arguments after the setup file's name. Report an error as one event.

    Backends run in this process, so it is confined: they cannot signal or trace a process that it did not start, nor
    change a file outside of the folders that TritonBench writes to.
    """
    confine(_written(sys.argv[2:]), layered())
    setup = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Setup)
    watch()
    argparse.ArgumentParser.error = refuse  # type: ignore[assignment,method-assign]
    try:
        _run(setup, sys.argv[2:])
    except Exception as error:
        send(setup, Event(refused=str(error) if isinstance(error, GroupbenchError) else describe(error)))
        sys.exit(ExitCode.USAGE)


if __name__ == "__main__":
    main()
