"""Watch which files of the repository, and which libraries, this process loads.

One audit hook sees every file that Python opens for reading, every module that it runs, and every shared object that it
loads, in this process and in all that it forks. The table of memory mappings adds the shared objects that C++ loads.
A file is noted with its size and time, so that its content can be hashed later and by another process (fingerprint.py).
Files that only another program reads are not seen, unless its command line names them.

Needs only the standard library, since it is imported before any code of the user's.
"""

from __future__ import annotations

import os
import re
import site
import stat
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from groupbench.tracker.facts.measured_tree import measured_tree

PLACES = {"open": 0, "exec": 0, "import": 1, "ctypes.dlopen": 0, "subprocess.Popen": 1}
"""Audit events, and which of their arguments is the path. `import` has one for extension modules."""

C_SOURCES = (".cu", ".cuh", ".c", ".cc", ".cpp", ".cxx", ".h", ".hh", ".hpp")
"""Endings of files in C, C++ and CUDA."""

PROJECT = "groupbench.toml"

_MAPPING = re.compile(rb"^\S+ ..(.). \S+ \S+ \S+ +(/.*)$", re.MULTILINE)

Noted = tuple[str, int, int, bool]
"""A file: path relative to the repository, size in bytes, time of its last change in ns, and whether it was run."""
Seen = tuple[tuple[Noted, ...], tuple[str, ...]]
"""The files and the libraries that a process has loaded so far."""


@cache
def repository_root() -> str | None:
    """Return the top folder of the repository whose code this process measures, or None.

    This is the measured checkout, or else the nearest folder at or above the current one with `.git`. A copy without
    git is recognised by its groupbench.toml.
    """
    if (measured := measured_tree()) is not None:
        return os.path.realpath(measured.tree)
    try:
        here = Path.cwd()
    except OSError:
        return None
    for name in (".git", PROJECT):
        for folder in (here, *here.parents):
            if (folder / name).exists():
                return os.path.realpath(folder)
    return None


@cache
def library_folders() -> tuple[str, ...]:
    """Return the folders of the standard library and of installed packages."""
    folders = [*site.getsitepackages(), site.getusersitepackages()]
    folders += [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple(dict.fromkeys(place for folder in folders for place in (folder, os.path.realpath(folder))))


class Watch:
    """The files of a repository, and the libraries, that this process has loaded since it started.

    Args:
        root: Top folder of the repository; None to note no file.
    """

    def __init__(self, root: str | None) -> None:
        self.checks: list[Callable[[str], None]] = []
        self._root = root
        self._libraries = tuple(sorted((folder + os.sep for folder in library_folders()), key=len, reverse=True))
        self._linked = () if root is None else tuple(_linked(root))
        self._folders: dict[str, str | None] = {}  # path relative to the root, with a slash; None outside
        self._noted: dict[tuple[str, bool], Noted | None] = {}  # by place, and whether it was run
        self._names: set[str] = set()
        for module in list(sys.modules.values()):
            place = getattr(module, "__file__", None)
            if isinstance(place, str) and place.endswith((".py", *EXTENSION_SUFFIXES)):
                self.note(place, run=True)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event."""
        if event not in PLACES:
            return
        place = arguments[PLACES[event]]
        if event == "exec":
            place = getattr(place, "co_filename", None)
        elif event == "subprocess.Popen":
            self._note_program(place)
            return
        elif event == "open" and _is_written(arguments):
            return
        if isinstance(place, bytes):
            place = os.fsdecode(place)
        if not isinstance(place, str):
            return
        if event != "exec":
            for check in self.checks:
                check(place)
        self.note(place, run=event != "open")

    def note(self, place: str, run: bool) -> None:
        """Note a file, if it is in the repository."""
        if (place, run) in self._noted or place.startswith("<") or (not run and place.endswith(".pyc")):
            return
        if place.startswith(self._libraries) and not self._is_linked(place):
            return
        self._noted[place, run] = self._look(place, run)

    def _look(self, place: str, run: bool) -> Noted | None:
        try:
            folder, name = os.path.split(place if place.startswith("/") else Path.cwd() / place)
            if folder not in self._folders:
                real = os.path.realpath(folder) + os.sep
                inside = self._root is not None and real.startswith(self._root + os.sep)
                self._folders[folder] = real[len(self._root or "") + 1 :] if inside else None
            relative = self._folders[folder]
            if relative is None:
                return None
            status = Path(folder, name).stat()
        except (OSError, ValueError):  # no such file; the caller's own call reports it
            return None
        path = (relative + name).encode(errors="replace").decode()  # not found again if a name is not in UTF-8
        return (path, status.st_size, status.st_mtime_ns, run) if stat.S_ISREG(status.st_mode) else None

    def _note_program(self, command: Any) -> None:
        """Check and note the files in a command line: sources for a compiler, scripts, configs."""
        for word in command if isinstance(command, list | tuple) else ():
            if isinstance(word, str) and word.startswith("/"):
                for check in self.checks:
                    check(word)
            if isinstance(word, str):
                self.note(word, run=word.endswith((*C_SOURCES, ".py", ".sh")))

    def loaded(self) -> Seen:
        """Return the files of the repository, and the outermost names of the libraries, that were loaded so far."""
        for place, run in _mappings():
            if place.startswith(self._libraries):
                folder = next(folder for folder in self._libraries if place.startswith(folder))
                self._names.add(place[len(folder) :].partition(os.sep)[0].partition(".")[0])
            elif self._root is not None and place.startswith(self._root + os.sep):
                self.note(place, run)
        tops = {name.partition(".")[0] for name in list(sys.modules)} - sys.stdlib_module_names - self._names
        self._names |= {top for top in tops if self._is_library(top)}
        noted = sorted(filter(None, list(self._noted.values())), key=lambda one: one[3])
        by_path = {one[0]: one for one in noted}  # a file that was run counts as such
        return tuple(by_path.values()), tuple(sorted(self._names))

    def _is_library(self, name: str) -> bool:
        module = sys.modules.get(name)
        place = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", None) or ()), None)
        return isinstance(place, str) and place.startswith(self._libraries) and not self._is_linked(place)

    def _is_linked(self, place: str) -> bool:
        return bool(self._linked) and place.startswith(self._linked)


def _is_written(arguments: tuple[Any, ...]) -> bool:
    """Return whether the arguments of `open` are those of a file that is only written."""
    mode = arguments[1] if len(arguments) > 1 else None
    if isinstance(mode, str):
        return "r" not in mode
    flags = arguments[2] if len(arguments) > 2 else None
    return isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY


def _linked(root: str) -> Iterator[str]:
    """Yield the packages in the folders of libraries that are links into the repository."""
    for folder in library_folders():
        try:
            with os.scandir(folder) as entries:
                places = [entry.path for entry in entries if entry.is_symlink()]
        except OSError:
            continue
        yield from (place for place in places if os.path.realpath(place).startswith(root + os.sep))


def _mappings() -> set[tuple[str, bool]]:
    """Return the files that are mapped into this process's memory, and whether they are run."""
    try:
        table = Path("/proc/self/maps").read_bytes()
    except OSError:
        return set()
    return {(os.fsdecode(place), run == b"x") for run, place in set(_MAPPING.findall(table))}


_watch: Watch | None = None


def watch() -> Watch:
    """Return this process's watch. The first call starts it, also for all processes that are forked later."""
    global _watch
    if _watch is None:
        _watch = Watch(repository_root())
        _add_hook(_watch.audit)
    return _watch


def _add_hook(audit: Callable[[str, tuple[Any, ...]], None]) -> None:
    """Pass the audit events of files on. Python calls the hook for all events, four times as fast as a method."""

    def hook(event: str, arguments: tuple[Any, ...], places: dict[str, int] = PLACES) -> None:
        if event in places:
            audit(event, arguments)

    sys.addaudithook(hook)
