"""Folders that are kept between commands, up to a size and an age: the least recently used go first.

A command holds a shared lock on each folder in use, until it ends. A folder is removed only under the exclusive
lock, and renamed before: no process finds half of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from pathlib import Path

MOST_BYTES = 5 << 30
"""Size on disk up to which folders are kept; ccache, which has the same purpose, has the same default."""
UNUSED_S = 30 * 86400.0
"""Age at which a folder is removed that no command has used since. A choice."""
_REMOVED = "removed-"

_held: dict[Path, int] = {}  # descriptors of the locks


def hold(folder: Path) -> None:
    """Make a folder, or mark it as used. No process removes it as long as this one runs. Raises OSError."""
    while folder not in _held:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # removed just now
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            with contextlib.suppress(OSError):  # without locks, only the age protects the folder
                fcntl.flock(handle, fcntl.LOCK_SH)
            if _is_at(handle, folder):
                _held[folder] = handle
            else:
                os.close(handle)
    os.utime(folder)


def trim(above: Path) -> None:
    """Remove the folders in `above` that are unused, and the least recently used ones beyond the size."""
    found = []
    for folder in above.glob("*"):
        with contextlib.suppress(OSError):
            found.append((folder.stat().st_mtime, folder, _size(folder)))
    total = sum(size for *_, size in found)
    for used, folder, size in sorted(found):
        is_unused = time.time() - used > UNUSED_S or folder.name.startswith(_REMOVED)
        if (total > MOST_BYTES or is_unused) and _remove(folder):
            total -= size


def _size(folder: Path) -> int:
    """Return the bytes that a folder takes on the disk."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                total += entry.stat(follow_symlinks=False).st_blocks * 512
            if entry.is_dir(follow_symlinks=False):
                total += _size(Path(entry.path))
    return total


def _remove(folder: Path) -> bool:
    """Remove a folder, unless a process holds it. Returns whether it is removed."""
    moved = folder.with_name(f"{_REMOVED}{secrets.token_hex(8)}")
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_at(handle, folder):
            return False
        folder.rename(moved)
    except OSError:
        return False
    finally:
        os.close(handle)
    shutil.rmtree(moved, ignore_errors=True)
    return True


def _is_at(handle: int, folder: Path) -> bool:
    """Return whether an open folder still has this path."""
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False
