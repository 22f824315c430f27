"""A SQLite file on its disk: looking at it, opening it to read, copying it whole. Needs the standard library alone."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from groupbench.tracker.errors import StoreError

BUSY_SECONDS = 30
"""How long one process waits for another's transaction."""

_MAGIC = b"SQLite format 3\x00"


def check_file(path: Path, *, create: bool) -> bool:
    """Return whether the file exists. Raises StoreError when it is, or would be, no database."""
    try:
        if path.is_dir():
            raise StoreError(f"{path}: is a directory, not a database")
        if not path.exists():
            if not create:
                raise StoreError(f"{path}: no such database; `groupbench ingest FILE` makes one")
            if not path.parent.is_dir():
                raise StoreError(f"{path}: {path.parent} is not a directory")
            return False
        with path.open("rb") as file:
            head = file.read(len(_MAGIC))
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if head and head != _MAGIC:
        raise StoreError(f"{path}: is not a SQLite database")
    if not head and not create:
        raise StoreError(f"{path}: is empty, not a database; `groupbench ingest FILE` fills one")
    return True


def read_only_uri(path: Path) -> str:
    """Return the URI that opens a file to read alone.

    A database in WAL mode needs files beside it. Where none can be made, it is opened as one that nobody writes.
    """
    quoted = str(path.resolve()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    mode = "mode=ro" if writable or Path(f"{path}-wal").exists() else "immutable=1"
    return f"file:{quoted}?{mode}"


def put(made: Path, place: Path) -> None:
    """Move a finished file to its place, where nothing may be. Raises FileExistsError, OSError."""
    mask = os.umask(0)
    os.umask(mask)
    made.chmod(0o666 & ~mask)
    try:
        os.link(made, place)
    except FileExistsError:
        raise
    except OSError:  # a file system without links: the name is taken first
        place.touch(exist_ok=False)
        made.replace(place)


def copy_sqlite(path: Path, copy: Path) -> None:
    """Copy what `path` holds into another file, while others read and write it; whole, or not at all.

    Raises FileExistsError where there is a file already, OSError, sqlite3.Error.
    """
    if copy.exists():
        raise FileExistsError(f"{copy}: exists already")
    folder = Path(tempfile.mkdtemp(prefix=f".{copy.name[:50]}.", dir=copy.parent))
    try:
        made = folder / "copy.db"
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as source, closing(sqlite3.connect(made)) as target:
            source.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")  # one file, whatever the source had beside it
        put(made, copy)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
