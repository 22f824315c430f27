"""Reduce the files and libraries that a process loaded to a record's fingerprint.

A file of the repository counts in either of two cases:

- git tracks it, and the process read or ran it;
- git does not track it, and the process ran it (a module, a shared object, a compiled source), outside of caches and
  virtual environments. Version files that build tools derive from the commit do not count, nor do files in a process's
  own layer (confine.py), which code that counts has made.

So a tuned-config file counts, and scratch data, records, databases and caches do not. Without git, every file counts
that is not in a cache or virtual environment.

A source in C, C++ or CUDA counts with the headers of the repository that it includes, because a compiler reads them in
another process. If a file has changed since the process read it, the code is unknown.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from groupbench.operators.measure.loaded import C_SOURCES, Noted, repository_root
from groupbench.tracker.facts.loaded import loaded_of
from groupbench.tracker.facts.record import Loaded
from groupbench.tracker.tools import git

VERSION_FILES = ("_version.py", "version.py", "__version__.py")
"""Names of modules that setuptools-scm, hatch-vcs and the like write with the commit's name."""

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*[<"]([^">\n]+)', re.MULTILINE)
_MOST_SOURCE = 4 << 20
"""Size in bytes of a source above which it is not searched for headers."""


class Fingerprints:
    """Computes fingerprints, and remembers the hash of each version of a file.

    Args:
        root: Top folder of the repository; None if the code is unknown.
    """

    def __init__(self, root: str | None) -> None:
        self._root = None if root is None else Path(root)
        self._tracked = _tracked(root)
        self._hashes: dict[tuple[str, int, int], str | None] = {}
        self._folders: dict[str, bool] = {}
        self._includes: dict[str, tuple[str, ...]] = {}  # ends of the included paths, by the source's hash

    def of(self, noted: Iterable[Noted], libraries: Iterable[str]) -> Loaded:
        """Return the fingerprint of a process.

        Args:
            noted: Files of the repository that it loaded.
            libraries: Outermost names of the modules that it imported from installed packages.
        """
        if self._root is None:
            return loaded_of(None, versions(libraries))
        hashes = {
            path: self._hash(path, size, time_ns) for path, size, time_ns, run in noted if self._counts(path, run)
        }
        files = {path: value for path, value in hashes.items() if value is not None}
        complete = len(files) == len(hashes)
        self._add_headers(files)
        return loaded_of(files if complete else None, versions(libraries))

    def _counts(self, path: str, run: bool) -> bool:
        if self._tracked is not None:
            if path in self._tracked:
                return True
            if not run or path.rpartition("/")[2] in VERSION_FILES:
                return False
        return not self._is_excluded(path.rpartition("/")[0]) and Path(self._root or "", path).exists()

    def _is_excluded(self, folder: str) -> bool:
        """Return whether a folder is in a cache, a virtual environment or a hidden folder."""
        if not folder:
            return False
        if folder not in self._folders:
            parent, _, name = folder.rpartition("/")
            assert self._root is not None
            self._folders[folder] = (
                name.startswith(".")
                or name.lower().rstrip("_").endswith(("cache", "caches"))
                or (self._root / folder / "pyvenv.cfg").exists()
                or self._is_excluded(parent)
            )
        return self._folders[folder]

    def _hash(self, path: str, size: int, time_ns: int) -> str | None:
        """Return the hash of a file as the process read it, or None if it has changed since."""
        key = path, size, time_ns
        if key not in self._hashes:
            self._hashes[key] = self._hash_now(path, size, time_ns)
        return self._hashes[key]

    def _hash_now(self, path: str, size: int, time_ns: int) -> str | None:
        assert self._root is not None
        try:
            with (self._root / path).open("rb") as file:
                value = hashlib.file_digest(file, "sha256").hexdigest()[:16]
                status = os.fstat(file.fileno())
        except OSError:
            return None
        return value if (status.st_size, status.st_mtime_ns) == (size, time_ns) else None

    def _add_headers(self, files: dict[str, str]) -> None:
        """Add the tracked headers that the sources include, directly or not."""
        sources = [path for path in files if path.endswith(C_SOURCES)]
        tracked = [path for path in self._tracked or () if path.endswith(C_SOURCES)] if sources else []
        for path in sources:  # grows
            included = self._included(path, files[path])
            for header in tracked:
                if header in files or not f"/{header}".endswith(included):
                    continue
                if (value := self._current(header)) is not None:
                    files[header] = value
                    sources.append(header)

    def _included(self, path: str, value: str) -> tuple[str, ...]:
        """Return the ends of the paths that a source with this hash includes."""
        if value not in self._includes:
            assert self._root is not None
            names: list[bytes] = []
            with contextlib.suppress(OSError), (self._root / path).open("rb") as file:
                names = _INCLUDE.findall(file.read(_MOST_SOURCE))
            self._includes[value] = tuple("/" + os.fsdecode(name).lstrip("./") for name in dict.fromkeys(names))
        return self._includes[value]

    def _current(self, path: str) -> str | None:
        assert self._root is not None
        try:
            status = (self._root / path).stat()
        except OSError:
            return None
        return self._hash(path, status.st_size, status.st_mtime_ns)


@cache
def fingerprints() -> Fingerprints:
    """Return the fingerprints of the repository that this process measures."""
    return Fingerprints(repository_root())


def _tracked(root: str | None) -> frozenset[str] | None:
    """Return the files that git tracks, those of submodules included, or None without git."""
    if root is None:
        return None
    listed = git.ask(root, "ls-files", "-z", "--recurse-submodules") or git.ask(root, "ls-files", "-z")
    return None if listed is None else frozenset(filter(None, listed.split("\0")))


def versions(modules: Iterable[str]) -> dict[str, str]:
    """Return the versions of the distributions that provide these modules. Those of a namespace all count."""
    names = {name for module in modules for name in _by_module().get(module, ())}
    return {name.lower().replace("_", "-"): _version(name) for name in sorted(names)}


_by_module = cache(importlib.metadata.packages_distributions)


@cache
def _version(name: str) -> str:
    """Return a distribution's version, with the commit if it was installed from a repository."""
    installed = importlib.metadata.distribution(name)
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    commit = origin.get("vcs_info", {}).get("commit_id", "")[:10]
    return installed.version + (f"+{commit}" if commit else "")
