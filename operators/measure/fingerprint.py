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
    """Computes fingerprints. The hash of each version of a file is remembered.

    Args:
        root: Top folder of the repository; None if the code is unknown.
    """

    def __init__(self, root: str | None) -> None:
        self._root = None if root is None else Path(root)
        self._tracked = _tracked(root)

    def of(self, noted: Iterable[Noted], libraries: Iterable[str]) -> Loaded:
        """Return the fingerprint of a process.

        Args:
            noted: Files of the repository that it loaded.
            libraries: Outermost names of the modules that it imported from installed packages.
        """
        if self._root is None:
            return loaded_of(None, versions(libraries))
        read = [(path, size, time_ns) for path, size, time_ns, run in noted if self._counts(self._root, path, run)]
        hashes = {path: _hash(self._root / path, size, time_ns) for path, size, time_ns in read}
        files = {path: value for path, value in hashes.items() if value is not None}
        complete = len(files) == len(hashes)
        self._add_headers(self._root, files)
        return loaded_of(files if complete else None, versions(libraries))

    def _counts(self, root: Path, path: str, run: bool) -> bool:
        if self._tracked is not None:
            if path in self._tracked:
                return True
            if not run or path.rpartition("/")[2] in VERSION_FILES:
                return False
        return not _is_excluded(root, (root / path).parent) and (root / path).exists()

    def _add_headers(self, root: Path, files: dict[str, str]) -> None:
        """Add the tracked headers that the sources include, directly or not."""
        sources = [path for path in files if path.endswith(C_SOURCES)]
        tracked = [path for path in self._tracked or () if path.endswith(C_SOURCES)] if sources else []
        for path in sources:  # grows
            included = _included(root / path, files[path])
            for header in tracked:
                if header in files or not f"/{header}".endswith(included):
                    continue
                if (value := _current(root / header)) is not None:
                    files[header] = value
                    sources.append(header)


@cache
def _is_excluded(root: Path, folder: Path) -> bool:
    """Return whether a folder is in a cache, a virtual environment or a hidden folder below the root."""
    return folder != root and (
        folder.name.startswith(".")
        or folder.name.lower().rstrip("_").endswith(("cache", "caches"))
        or (folder / "pyvenv.cfg").exists()
        or _is_excluded(root, folder.parent)
    )


@cache
def _hash(file: Path, size: int, time_ns: int) -> str | None:
    """Return the hash of a file as the process read it, or None if it has changed since."""
    try:
        with file.open("rb") as opened:
            value = hashlib.file_digest(opened, "sha256").hexdigest()[:16]
            status = os.fstat(opened.fileno())
    except OSError:
        return None
    return value if (status.st_size, status.st_mtime_ns) == (size, time_ns) else None


@cache
def _included(source: Path, value: str) -> tuple[str, ...]:
    """Return the ends of the paths that a source with this hash includes."""
    names: list[bytes] = []
    with contextlib.suppress(OSError), source.open("rb") as file:
        names = _INCLUDE.findall(file.read(_MOST_SOURCE))
    return tuple("/" + os.fsdecode(name).lstrip("./") for name in dict.fromkeys(names))


def _current(file: Path) -> str | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return _hash(file, status.st_size, status.st_mtime_ns)


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
    return {name.lower().replace("_", "-"): version_of(name) for name in sorted(names)}


_by_module = cache(importlib.metadata.packages_distributions)


@cache
def version_of(name: str) -> str:
    """Return a distribution's version, with the commit if it was installed from a repository."""
    installed = importlib.metadata.distribution(name)
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    commit = origin.get("vcs_info", {}).get("commit_id", "")[:10]
    return installed.version + (f"+{commit}" if commit else "")
