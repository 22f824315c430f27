"""Load plugins: operators, and backends for these or for groupbench's operators.

A plugin is named by an entry point in the groups `groupbench.operators` and `groupbench.backends`, or by `--plugin`:

    module.attribute      an operator, a backend, several of them, or a function that returns backends
    module                all operators and backends that are attributes of the module or in its lists and tuples,
                          except names with an underscore in front
    folder/file.py        the same of a file; folder/file.py:attribute one attribute of it
    folder/file.json      a definition or solution of FlashInfer-Bench or SOL-ExecBench (problems/definition.py)
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, distributions, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from groupbench.operators.define import Definition
from groupbench.operators.errors import UsageError
from groupbench.operators.measure.faults import located
from groupbench.operators.operator import KINDS, Backend, Operator
from groupbench.operators.problems.definition import PublishedProblem, read_json
from groupbench.tracker.facts.measured_tree import measured_folders
from groupbench.tracker.text.wording import closest

MAX_NAME = 500  # characters, as in the record

DEFINED = (Definition, PublishedProblem)
"""A class whose instances have an `operator`."""

INSTALLED = "groupbench.operators", "groupbench.backends"
"""Groups of entry points."""


@dataclass(frozen=True)
class Plugin:
    """One plugin's operators and backends. `origin` is the plugin's name as users write it."""

    origin: str
    operators: tuple[Operator, ...] = ()
    backends: tuple[Backend, ...] = ()


@cache  # reads a file of every installed package: 15 ms with a hundred of them
def offered() -> dict[str, tuple[EntryPoint, ...]]:
    """Return the installed packages' entry points by group, without loading them."""
    everything = entry_points()
    elsewhere = [folder for folder in measured_folders() if folder not in sys.path]
    measured = [entry for each in distributions(path=elsewhere) for entry in each.entry_points]
    return {
        group: (*everything.select(group=group), *(entry for entry in measured if entry.group == group))
        for group in INSTALLED
    }


FAULTS = (Exception, SystemExit, KeyboardInterrupt)
"""The exceptions of a plugin during the import."""


@cache
def installed(group: str) -> tuple[Plugin, ...]:
    """Return the installed packages' plugins in an entry-point group. Raises UsageError if one does not load."""
    plugins = []
    for entry_point in offered()[group]:
        try:
            with _own_environment():
                loaded = entry_point.load()
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"entry point {entry_point.name} = {entry_point.value} does not load: {error!r}"
            ) from error
        plugins.append(_plugin(loaded, entry_point.value))
    return tuple(plugins)


def read(path: str) -> Plugin:
    """Return the plugin named by `--plugin path`. Raises UsageError."""
    return _plugin(load(path), path)


def operators_in(path: str) -> tuple[Operator, ...]:
    """Return the operators named by `--plugin path`. Calls no function, since it may be one for TritonBench.

    Raises UsageError if the plugin does not load.
    """
    loaded = load(path)
    if not isinstance(loaded, (*DEFINED, Operator, ModuleType, Sequence)) or isinstance(loaded, str):
        return ()
    return _plugin(loaded, path).operators


def load(path: str) -> Any:
    """Return the object named by `--plugin path`. Modules in the current folder are found too. Raises UsageError."""
    with _own_environment():
        return _loaded(path)


variables: dict[str, str | None] = {}
"""The environment variables that plugins have set when they were imported, or removed (None)."""


@contextmanager
def _own_environment() -> Iterator[None]:
    """Restore the environment, and remember the changes that the import of a plugin makes in this context.

    Only the process of its own backend takes the changes on (`adopt_variables`): all others are to be measured as the
    user started them.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        now = dict(os.environ)
        for name in {**before, **now}:
            if now.get(name) != before.get(name):
                variables[name] = now.get(name)
                _set(name, before.get(name))


def adopt_variables() -> None:
    """Change the environment of this process as its imported plugins do."""
    for name, value in variables.items():
        _set(name, value)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _loaded(path: str) -> Any:
    if path.endswith(".json"):
        return _from_json(_existing(path, path))
    file, _, attribute = path.rpartition(":") if ".py:" in path else (path, "", "")
    if file.endswith(".py"):
        return _attribute(_from_file(file, path), attribute, path) if attribute else _from_file(file, path)
    return _from_module(path)


def _from_module(path: str) -> Any:
    """Import `module`, or return `module.attribute`. Modules in the current folder are found too."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    dotted = path.replace(":", ".")
    if "/" in path or not all(dotted.split(".")) or (Path(path).is_file() and not path.endswith(".py")):
        is_folder = bool(path) and Path(path).is_dir()
        problem = (
            "a folder; name a file in it, such as FILE.py"
            if is_folder
            else "neither module.attribute, a module nor a Python file"
        )
        raise UsageError(f"plugin {path!r} does not load: it is {problem}")
    module_name, _, attribute = dotted.rpartition(".")
    try:
        if not module_name:
            return importlib.import_module(path)
        module = importlib.import_module(module_name)
        if not hasattr(module, attribute) and importlib.util.find_spec(f"{module_name}.{attribute}"):
            return importlib.import_module(f"{module_name}.{attribute}")
    except FAULTS as error:
        raise _does_not_load(path, error) from error
    return _attribute(module, attribute, path)


@cache  # one file is one operator, however often it is named
def _from_json(path: Path) -> Any:
    return read_json(path)


def _attribute(module: Any, attribute: str, path: str) -> Any:
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise _does_not_load(path, error) from error


def _existing(file: str, path: str) -> Path:
    """Return a plugin file's full path. Raises UsageError, with the probable file for a mistyped name."""
    source = Path(file).resolve()
    if not source.is_file():
        like = source.parent.glob(f"*{source.suffix}") if source.parent.is_dir() else ()
        meant = closest(source.name, (other.name for other in like))
        raise UsageError(f"plugin {path!r}: there is no file {file}" + (f"; did you mean {meant}?" if meant else ""))
    return source


def _from_file(file: str, path: str) -> ModuleType:
    """Import a file, under the file's own name if importing that name finds this file, so other modules can import it
    too.

    More than one folder may have a `softmax.py`, and an `operator.py` exists in Python's library as well.
    """
    source = _existing(file, path)
    with _changing_code_not_kept(source.parent):
        return _imported(source, path)


def _imported(source: Path, path: str) -> ModuleType:
    if str(source.parent) not in sys.path:
        sys.path.append(str(source.parent))
    if _found_at(source.stem) == source:
        try:
            return importlib.import_module(source.stem)
        except FAULTS as error:
            raise _does_not_load(path, error) from error
    name = f"{source.stem}_{hashlib.sha256(str(source).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except FAULTS as error:
        del sys.modules[name]
        raise _does_not_load(path, error) from error
    return module


@contextmanager
def _changing_code_not_kept(folder: Path) -> Iterator[None]:
    """Keep no compiled module code if a file in the folder has just been changed.

    Python finds compiled code by the source's size and time in whole seconds, so the next change could get this one's
    code. A loop writing and evaluating candidates is fast enough for this.
    """
    newest = 0.0
    with suppress(OSError):  # a file may be removed at any time
        newest = max((file.stat().st_mtime for file in folder.glob("*.py")), default=0.0)
    kept = sys.dont_write_bytecode
    sys.dont_write_bytecode = kept or time.time() < newest + 2
    try:
        yield
    finally:
        sys.dont_write_bytecode = kept


def _found_at(module_name: str) -> Path | None:
    """Return the file that importing a module name would run, or has run."""
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError):  # a module without a spec, such as __main__
        return None
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None


def _does_not_load(path: str, error: BaseException) -> UsageError:
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        raise error  # of the user: plugins are usually imported in processes that none reaches
    return UsageError(f"plugin {path!r} does not load: {located(error)}")


def _plugin(loaded: Any, origin: str) -> Plugin:
    """Raise UsageError for a plugin with neither operators nor backends."""
    parts = _checked_parts(loaded, origin)
    operators = tuple(part for part in parts if isinstance(part, Operator))
    backends = tuple(part for part in parts if isinstance(part, Backend))
    for operator in operators:
        _check_operator(operator, origin)
    for backend in (*backends, *(backend for operator in operators for backend in operator.backends)):
        _check_backend(backend, origin)
    return Plugin(origin, operators, backends)


def _checked_parts(loaded: Any, origin: str) -> list[Any]:
    """Return the loaded object's operators and backends. Raises UsageError for an object without them."""
    try:
        parts = _parts(loaded)
    except UsageError:
        raise
    except FAULTS as error:
        raise UsageError(f"plugin {origin!r} raised {located(error)}") from error
    if parts is None or not all(isinstance(part, (Backend, Operator)) for part in parts):
        raise UsageError(f"plugin {origin!r} is neither a Backend nor an operator, nor a sequence of them: {loaded!r}")
    if not parts and isinstance(loaded, ModuleType):
        raise UsageError(
            f"plugin {origin!r}: the module has no operator and no Backend; docs/guide/operators.md shows both"
        )
    return parts


def _parts(loaded: Any) -> list[Any] | None:
    """Return the loaded object's operators and backends; None if it cannot have any."""
    if isinstance(loaded, ModuleType):
        loaded = _parts_of_module(loaded)
    elif callable(loaded) and not isinstance(loaded, (Backend, Operator, *DEFINED)):
        loaded = loaded()
    if isinstance(loaded, (Backend, Operator, *DEFINED)):
        loaded = [loaded]
    if not isinstance(loaded, Iterable):
        return None
    return [part.operator if isinstance(part, DEFINED) else part for part in loaded]


def _parts_of_module(module: ModuleType) -> list[Any]:
    """Return the public operators and backends in a module and in lists and tuples there, each once."""
    public = [value for name, value in vars(module).items() if not name.startswith("_")]
    listed = [part for value in public if isinstance(value, (list, tuple)) for part in value]
    parts = (part for part in (*public, *listed) if isinstance(part, (Backend, Operator, *DEFINED)))
    return list({id(part): part for part in parts}.values())


def _check_operator(operator: Operator, origin: str) -> None:
    """Raise UsageError for an operator or backend that cannot be measured."""
    _check_name(operator.name, "an operator's", "--op", origin)
    names = [backend.name for backend in operator.backends]
    if not names:
        raise UsageError(f"plugin {origin!r}: operator {operator.name!r} has no backend")
    if operator.baseline not in names:
        raise UsageError(
            f"plugin {origin!r}: operator {operator.name!r} has no backend {operator.baseline!r}, its baseline"
        )
    if not operator.suites:
        raise UsageError(f"plugin {origin!r}: operator {operator.name!r} has no shapes")


def _check_backend(backend: Backend, origin: str) -> None:
    """Raise UsageError for a name not representable in records, options or processes."""
    _check_name(backend.name, "a backend's", "--only", origin)
    if backend.kind not in KINDS:
        raise UsageError(
            f"plugin {origin!r}: backend {backend.name!r} is of kind {backend.kind!r}; known: {', '.join(KINDS)}"
        )


def _check_name(name: Any, whose: str, option: str, origin: str) -> None:
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= MAX_NAME:
        raise UsageError(
            f"plugin {origin!r}: {name!r:.80} is not {whose} name: it needs 1 to {MAX_NAME} printable characters"
        )
    if "," in name or name != name.strip():
        raise UsageError(f"plugin {origin!r}: {name!r} is not {whose} name, because {option} could not select it")
