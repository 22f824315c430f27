"""SQLite files on disk: check, open read-only, copy. Needs only the standard library."""

from __future__ import annotations

import errno
import fcntl
import filecmp
import glob
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from groupbench.tracker.facts.errors import NoDatabaseError, StoreError

BUSY_SECONDS = 30
"""How long to wait for another process's transaction."""


def check_file(path: Path, *, create: bool) -> bool:
    """Return whether the file exists. Raises StoreError if it is not a database, or cannot become one."""
    try:
        if path.is_dir():
            raise StoreError(f"{path}: is a directory, not a database")
        if not path.exists():
            if not create:
                raise no_database(path)
            if not path.parent.is_dir():
                raise StoreError(f"{path}: {path.parent} is not a directory")
            return False
        if not path.is_file():  # to open a named pipe would wait for a writer
            raise StoreError(f"{path}: is not a regular file")
        empty = path.stat().st_size == 0
        if not os.access(path, os.R_OK):
            raise StoreError(f"{path}: {os.strerror(errno.EACCES)}")
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if empty and not create:
        raise no_database(path, "is empty, not a database")
    if not empty and _is_something_else(path):
        raise StoreError(f"{path}: is not a SQLite database")
    return True


def _is_something_else(path: Path) -> bool:
    """Return whether a file is not a SQLite database.

    SQLite itself reads it. If this process closed a descriptor of its own, the system would drop the locks of a
    database that is open here, and other processes would delete the write-ahead log.
    """
    try:
        with closing(sqlite3.connect(_uri(path, "immutable=1"), uri=True)) as connection:
            connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.Error as error:
        return error.sqlite_errorcode == sqlite3.SQLITE_NOTADB
    return False


def no_database(path: Path, problem: str = "no such database") -> NoDatabaseError:
    """Return the error for a file without a database, with the command to make one."""
    from groupbench.tracker import project  # the rest of this module needs only the standard library

    how = (
        "`groupbench init` and then `night` create one, or `groupbench ingest FILE`"
        if project.find() is None
        else "run `groupbench night` first"
    )
    return NoDatabaseError(f"{path}: {problem}", how)


def read_only_uri(path: Path) -> str:
    """Return a read-only URI for a file.

    A database in WAL mode needs files next to it. If they cannot be created, the file is opened as immutable.
    """
    writable = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return _uri(path, "mode=ro" if writable or Path(f"{path}-wal").exists() else "immutable=1")


def _uri(path: Path, mode: str) -> str:
    quoted = str(path.resolve()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    return f"file:{quoted}?{mode}"


def put(made: Path, place: Path) -> None:
    """Move a finished file into place without replacing a file there. Raises FileExistsError, OSError."""
    mask = os.umask(0)
    os.umask(mask)
    made.chmod(0o666 & ~mask)
    try:
        os.link(made, place)
    except FileExistsError:
        raise
    except OSError:  # the file system has no hard links: reserve the name first
        place.touch(exist_ok=False)
        made.replace(place)


@contextmanager
def folder_beside(place: Path) -> Iterator[Path]:
    """Create a hidden folder next to `place` for unfinished files, and remove it at the end.

    The creator locks it. Folders without a lock belong to killed processes and are removed. Raises OSError.
    """
    prefix = f".{place.name[:50]}."
    for left in place.parent.glob(f"{glob.escape(prefix)}????????"):
        _remove_abandoned(left)
    # Named before it exists: an interrupt between its creation and the `try` would leave it behind.
    while (folder := place.with_name(f"{prefix}{secrets.token_hex(4)}")).exists():
        pass
    handle = None
    try:
        try:
            folder.mkdir(mode=0o700)
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # again, in case the first removal was interrupted
        if handle is not None:
            os.close(handle)


def _remove_abandoned(folder: Path) -> None:
    """Remove a leftover folder from `folder_beside`, unless the creator is alive or it contains other files."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # a file, or gone
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        names = {name.partition(".db")[0] for name in (entry.name for entry in folder.iterdir())}
        fresh = time.time() - os.fstat(handle).st_mtime < _FRESH_SECONDS
        if names <= _MADE and (names or not fresh):  # a new folder may not be locked yet
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # its creator is alive
    finally:
        os.close(handle)


_MADE = {"new", "copy"}
"""Names of the files in such folders, up to `.db`."""

_FRESH_SECONDS = 60


def copy_sqlite(path: Path, copy: Path) -> None:
    """Copy a database atomically to another file while it is in use.

    Raises FileExistsError if `copy` exists, OSError, sqlite3.Error.
    """
    if copy.exists():
        raise FileExistsError(f"{copy}: already exists")
    with folder_beside(copy) as folder:
        put(_copied(path, folder), copy)


def copy_once(path: Path, name: str) -> Path:
    """Copy a database next to it, to the first free name: `name`, `name-1`, `name-2` and so on. Returns the copy.

    A copy with the same content is kept instead, such as one from a killed process. Raises OSError, sqlite3.Error.
    """
    with folder_beside(path.with_name(name)) as folder:
        made, copy, number = _copied(path, folder), path.with_name(name), 0
        while True:
            try:
                put(made, copy)
                return copy
            except FileExistsError:
                if copy.is_file() and filecmp.cmp(made, copy, shallow=False):
                    return copy
                number += 1
                copy = path.with_name(f"{name}-{number}")


def _copied(path: Path, folder: Path) -> Path:
    """Copy a database's committed data into a folder from `folder_beside`."""
    made = folder / "copy.db"
    with closing(sqlite3.connect(path, timeout=BUSY_SECONDS)) as source, closing(sqlite3.connect(made)) as target:
        source.backup(target)
        target.execute("PRAGMA journal_mode = DELETE")  # a single file, without a write-ahead log
    return made
