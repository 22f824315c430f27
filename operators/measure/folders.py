"""The folders that a cell's process may write to: one for temporary files, and one for its party's compiled code.

A *party* is the set of plugins that a process imports, in one repository; groupbench's own backends are one. Compilers
trust the files in their caches, so no party writes to the cache of another. The sides of a comparison keep theirs
only as long as their command: neither of two commits can leave code for the other.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from groupbench.operators.measure import bounded
from groupbench.operators.measure.loaded import library_folders, repository_root
from groupbench.tracker.facts.measured_tree import measured_tree
from groupbench.tracker.text.scratch import Scratch

CACHES = (
    *("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HELION_CACHE_DIR", "CUDA_CACHE_PATH", "TORCH_EXTENSIONS_DIR"),
    *("FLASHINFER_WORKSPACE_BASE", "DG_JIT_CACHE_DIR", "TILELANG_CACHE_DIR", "QUACK_CACHE_DIR", "CUTE_DSL_CACHE_DIR"),
    *("CUPY_CACHE_DIR", "NUMBA_CACHE_DIR"),
)
"""Environment variables with the folders of compilers' caches."""
SETTING = "GROUPBENCH_WRITABLE"
"""Environment variable with further folders that all cells may write to."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Folders:
    """The folders of one process.

    scratch   for temporary files; removed with the process
    caches    for compiled code
    writable  these, and those that the user's setting adds
    """

    scratch: Path
    caches: Path
    writable: tuple[Path, ...]

    def variables(self) -> dict[str, str]:
        """Return the environment variables by which programs find the folders."""
        return {"TMPDIR": str(self.scratch)} | caches_in(self.caches)

    def remove(self, killed: bool = False) -> None:
        """Remove the folder for temporary files, and a killed process's locks."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        # Torch's extensions have one each, without an owner: all later processes would wait.
        for lock in (self.caches / "torch_extensions_dir").glob("*/lock") if killed else ():
            lock.unlink(missing_ok=True)


def new(caches: Path | None = None) -> Folders:
    """Make the folders of a process. Without `caches`, compiled code is removed with the process."""
    folder = _scratch(os.getpid()) / str(next(_numbers))
    folder.mkdir(0o700)
    users = map(Path, filter(None, os.environ.get(SETTING, "").split(os.pathsep)))
    return Folders(folder, caches or folder, (folder, caches or folder, *users))


def layered() -> list[Path]:
    """Return the folders with modules, and those in which programs usually keep caches, logs and tuned configs.

    A process with the right to mount has layers there.
    """
    modules = (place for place in sys.path if not place.startswith(library_folders()))
    usual = ("/tmp", "/var/tmp", os.environ.get("XDG_CACHE_HOME", "."), repository_root() or ".", *modules)  # noqa: S108
    return [folder for folder in (Path.home(), Path.cwd(), *map(Path, usual)) if folder.resolve() != Path("/")]


def caches_in(folder: Path) -> dict[str, str]:
    """Return the environment variables that let all compilers keep their caches in a folder."""
    return {name: str(folder / name.lower()) for name in CACHES}


def of_this_command() -> Path:
    """Return a folder for compiled code that is removed with this command."""
    folder = _scratch(os.getpid()) / "caches"
    folder.mkdir(0o700, exist_ok=True)
    return folder


def of_party(plugins: Sequence[str]) -> Path:
    """Return the folder for the compiled code of processes that import these plugins, which is kept."""
    measured, root = measured_tree(), repository_root() or str(Path.cwd())
    if measured is not None and measured.others:  # a checkout belongs to the repository's first working tree
        plugins, root = [name.replace(measured.tree, measured.others[0]) for name in plugins], measured.others[0]
    key = hashlib.sha256(json.dumps([root, *plugins] if plugins else []).encode()).hexdigest()[:16]
    try:
        folder = _all_parties() / key
        bounded.hold(folder)
    except (OSError, RuntimeError):  # no home, or one that is read-only
        return of_this_command()
    return folder


@functools.cache
def _all_parties() -> Path:
    """Return the folder above those of all parties, after removing the least recently used ones beyond a size."""
    above = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "groupbench" / "compiled"
    bounded.trim(above)
    return above


@functools.cache
def _scratch(owner: int) -> Path:
    """Return the folder above those of this command's processes, which does not outlive it."""
    scratch = Scratch("cells")
    atexit.register(lambda: scratch.remove() if os.getpid() == owner else None)
    return scratch.path
