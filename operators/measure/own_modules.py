"""Import the measured checkout's modules, never the working tree's or an installed copy's.

A commit is measured in a checkout, but a user's environment finds the package in the working tree: by an editable
install, a `.pth` file, PYTHONPATH, or `sys.path` edits. Otherwise foreign times would be stored under the commit's
name.

A finder at the front of `sys.meta_path` asks all other finders first and looks only at the place they found. A place in
the working tree becomes the same place in the checkout, so it does not matter how the environment found it. The audit
hook of loaded.py then refuses every other way to read code of the working tree. Needs only the standard library.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from importlib.util import source_from_cache, spec_from_file_location
from pathlib import Path
from types import ModuleType

from groupbench.operators.measure.loaded import C_SOURCES, library_folders, watch
from groupbench.tracker.facts.measured_tree import USUAL_FOLDERS, MeasuredTree, add_to_path, measured_tree

CODE_SUFFIXES = (*(".py", ".pyc", ".pyd", ".so"), *C_SOURCES, *(".ptx", ".cubin", ".fatbin", ".hsaco"))
"""Endings of files that are imported, loaded or compiled. Data that the commit lacks may be read from anywhere."""

_STARTUP = """
import importlib.machinery, importlib.util, os, sys
try:
    import groupbench.operators
except ImportError:
    pass
folders = [place for place in sys.path if os.path.realpath(place) != os.path.dirname(os.path.realpath(__file__))]
if spec := importlib.machinery.PathFinder.find_spec("sitecustomize", folders):
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
"""The sitecustomize.py of Python programs that a measured process starts. It goes on with the next one."""

MOST_LEVELS = 3
"""Levels below a project's folder in which a package is searched, if none of the usual folders has it."""


class ForeignCodeError(SystemExit):
    """Code would have been measured under the wrong commit's name.

    A SystemExit, so a fallback such as `except ImportError` or `except Exception` cannot hide it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class OwnModules(MetaPathFinder):
    """Find modules in the measured checkout.

    Args:
        measured: The checkout, and the repository's other checkouts.
    """

    def __init__(self, measured: MeasuredTree) -> None:
        self.measured = measured
        self._tree = os.path.realpath(measured.tree)
        # The innermost first: a checkout may be inside another.
        self._others = sorted(map(os.path.realpath, measured.others), key=len, reverse=True)
        self._installed = tuple({os.path.realpath(folder) for folder in library_folders()})
        self._kept = (*self._installed, *_own_code(self._others))

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the checkout's module, or the spec from other finders for other packages.

        Raises:
            ModuleNotFoundError: The commit has no such module, though the working tree does.
            ForeignCodeError: Only a build, or an installed copy whose source is unknown, has the module.
        """
        if fullname.partition(".")[0] == "groupbench":  # the driver decides which parts are whose
            return None
        spec = _others(self, fullname, path, target)
        if spec is None and path is not None:
            self._check_built(fullname, path)
            return None
        if spec is None:
            places = [replacement for entry in sys.path if (replacement := self.counterpart(entry)) is not None]
            return PathFinder.find_spec(fullname, places) if places else None
        if spec.origin is None or not spec.has_location:
            return self._namespace(fullname, spec)
        if (file := self.counterpart(spec.origin)) is not None:
            return self._owned(fullname, spec, [_search_folder(spec, file)], file)
        if not self._owns(spec.origin) and self._builds(fullname):
            return self._owned(fullname, spec, self._folders(fullname, path))
        return spec

    def _owns(self, place: str | None) -> bool:
        return place is not None and _within(os.path.realpath(place), self._tree)

    def counterpart(self, place: str) -> str | None:
        """Return the checkout's path for a place in the working tree, or None for any other place."""
        try:
            real = os.path.realpath(place)
        except OSError:  # relative to a folder that is gone
            return None
        other = next((folder for folder in self._others if _within(real, folder)), None)
        if other is None or (_within(real, self._tree) and len(self._tree) > len(other)):
            return None
        if any(_within(real, folder) for folder in self._kept):
            return None
        return str(Path(self._tree, os.path.relpath(real, other)))

    def check_file(self, place: str) -> None:
        """Raise ForeignCodeError if a file holds working-tree code, or data of which the commit has its own."""
        if place.startswith(self._installed) or (replacement := self.counterpart(place)) is None:
            return
        if place.endswith(CODE_SUFFIXES) or (Path(replacement).is_file() and "-info" not in Path(place).parent.suffix):
            relative = os.path.relpath(_source_of(replacement), self._tree)
            raise ForeignCodeError(
                f"{_source_of(place)} of the working tree would be measured as {self._name}; "
                f"load {relative} by a path relative to the file that needs it"
            )

    def check_loaded(self) -> None:
        """Raise ForeignCodeError if a module was imported from the working tree before this finder existed."""
        for name, module in list(sys.modules.items()):
            place = getattr(module, "__file__", None)
            if name.partition(".")[0] not in ("groupbench", "__main__") and isinstance(place, str):
                self.check_file(place)

    def _namespace(self, name: str, spec: ModuleSpec) -> ModuleSpec:
        """Return a namespace package with the checkout's folders; other specs without a file are returned unchanged."""
        if spec.submodule_search_locations is None:
            return spec
        before = list(spec.submodule_search_locations)
        after = [place for folder in before if (place := self._part(folder)) is not None]
        if before == after or all(self.counterpart(folder) is None for folder in before):
            return spec
        if not after:
            raise self._missing(name, before[0])
        replacement = ModuleSpec(name, None, is_package=True)
        replacement.submodule_search_locations = after
        return replacement

    def _part(self, folder: str) -> str | None:
        """Return the folder to search instead of a namespace's, or None without one.

        A build tool's folder of links to the working tree's files remains: each file found there is replaced.
        """
        place = self.counterpart(folder) or folder
        if Path(place).is_dir():
            return place
        return folder if any(file.is_symlink() for file in Path(folder).rglob("*.py")) else None

    def _owned(self, name: str, spec: ModuleSpec, folders: Sequence[str], file: str | None = None) -> ModuleSpec:
        """Return the module in the checkout's folders, or in a file, whose folder may have another name."""
        replacement = PathFinder.find_spec(name, folders)
        if (replacement is None or replacement.origin is None) and file is not None and Path(file).is_file():
            inner = None if spec.submodule_search_locations is None else [str(Path(file).parent)]
            replacement = spec_from_file_location(name, file, submodule_search_locations=inner)
        if replacement is not None and self._owns(replacement.origin):
            self._packages.add(name)
            return replacement
        place = str(spec.origin)
        if place.endswith(tuple(EXTENSION_SUFFIXES)):
            raise self._unbuilt(name, place)
        if self.counterpart(place) is None and not folders:
            raise ForeignCodeError(
                f"{name} is an installed copy ({place}), and {self._name} has its own in an unknown folder; "
                "name this folder in `pythonpath` of groupbench.toml"
            )
        raise self._missing(name, place)

    def _check_built(self, name: str, path: Sequence[str]) -> None:
        """Raise ForeignCodeError for an extension without which the package may use slower code."""
        for folder in (real for real in map(os.path.realpath, path) if _within(real, self._tree)):
            for other in self._others:
                place = str(Path(other, os.path.relpath(folder, self._tree), name.rpartition(".")[2]))
                if built := next(filter(os.path.exists, (place + suffix for suffix in EXTENSION_SUFFIXES)), None):
                    raise self._unbuilt(name, built)

    def _unbuilt(self, name: str, place: str) -> ForeignCodeError:
        return ForeignCodeError(
            f"{name} was built elsewhere ({place}), and {self._name} has not been built; "
            "set `setup` of groupbench.toml to the command that builds a checkout in place"
        )

    def _missing(self, name: str, place: str) -> ModuleNotFoundError:
        return ModuleNotFoundError(f"{self._name} has no module {name}; {place} is not used in its place", name=name)

    @property
    def _name(self) -> str:
        return f"the checkout {self.measured.tree}"

    def _builds(self, name: str) -> bool:
        """Return whether a module belongs to a package in the checkout."""
        return any(name == package or name.startswith(f"{package}.") for package in self._packages)

    @cached_property
    def _packages(self) -> set[str]:
        """The checkout's packages, as far as they are known: from installed distributions, and found ones."""
        return {package for name, _ in self.measured.projects for package in _installed_packages(name)}

    def _folders(self, name: str, path: Sequence[str] | None) -> list[str]:
        """Return the checkout's folders for a module found in an installed copy."""
        own = [folder for folder in path or () if self._owns(folder)]
        if own:
            return own
        inner = name.split(".")
        for _, project in self.measured.projects:
            root = Path(self._tree, project)
            usual = [place for folder in USUAL_FOLDERS if _has(place := root.joinpath(folder, *inner))]
            if usual or len(usual := _packages_below(root, inner)) == 1:
                return [str(usual[0].parent)]
        return []


def guard_programs(folder: Path) -> dict[str, str]:
    """Return an environment in which Python programs measure only the named checkout too, if there is one."""
    if measured_tree() is None:
        return {}
    (folder / "sitecustomize.py").write_text(_STARTUP)
    return add_to_path([str(folder)], os.environ)


def install() -> None:
    """Measure only the code in the driver's named checkout, if any. Later calls do nothing.

    Raises:
        ForeignCodeError: A working-tree module is already imported.
    """
    if any(isinstance(finder, OwnModules) for finder in sys.meta_path):
        return
    if (measured := measured_tree()) is None:
        return
    finder = OwnModules(measured)
    sys.meta_path.insert(0, finder)
    watch().checks.append(finder.check_file)
    finder.check_loaded()


def _others(
    replacement: OwnModules, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if finder is replacement or find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


def _source_of(place: str) -> str:
    """Return the source of a cached module, or the place itself."""
    return source_from_cache(place) if Path(place).parent.name == "__pycache__" else place


def _search_folder(spec: ModuleSpec, file: str) -> str:
    """Return the folder in which `PathFinder` finds this module's file."""
    folder = Path(file).parent
    return str(folder.parent if spec.submodule_search_locations is not None else folder)


def _within(place: str, folder: str) -> bool:
    return place == folder or place.startswith(folder.rstrip(os.sep) + os.sep)


def _own_code(others: Sequence[str]) -> list[str]:
    """Return the places with the driver's own code, which measures every checkout, groupbench's included."""
    root = Path(os.path.realpath(__file__)).parents[2]
    measuring = ("operators/measure",) if str(root) in others else ("kernels", "operators")
    return [str(root / part) for part in ("tracker", *measuring)]


def _installed_packages(distribution: str) -> Iterator[str]:
    """Yield an installed distribution's outermost packages and modules."""
    try:
        files = importlib.metadata.distribution(distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        return
    inits = [path.parts[:-1] for path in files if path.name == "__init__.py"]
    for parts in inits:
        if not any(parts[: len(other)] == other and other != parts for other in inits):
            yield ".".join(parts)
    for path in files:
        if len(path.parts) == 1 and path.suffix == ".py" and re.fullmatch(r"[A-Za-z]\w*", path.stem):
            yield path.stem


def _has(place: Path) -> bool:
    return (place / "__init__.py").is_file() or place.with_name(f"{place.name}.py").is_file()


def _packages_below(root: Path, inner: Sequence[str]) -> list[Path]:
    """Return a package's places within the next levels below a folder, not those behind links."""
    root = Path(os.path.realpath(root))
    levels = ("/".join(["[!.]*"] * level) for level in range(1, MOST_LEVELS + 1))
    folders = (folder for level in levels for folder in root.glob(level))
    places = [place for folder in folders if _has(place := folder.joinpath(*inner))]
    return [place for place in places if os.path.realpath(place.parent) == str(place.parent)]
