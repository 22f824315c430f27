"""Write or append to files atomically: all of the data is written, or none of it. Hold locks of files."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Wait for others that lock a file or folder, then keep it locked. A missing file or lock is no error."""
    handle = -1
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle >= 0:
            os.close(handle)


@contextmanager
def whole_file(path: Path, error: Callable[[str], Exception]) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` once it is written and synced to disk.

    A pipe or device at `path` is written to directly, never replaced. Raises `error`, called with a one-line message,
    if it cannot be written; an existing file is then unchanged.
    """
    temporary: Path | None = None
    try:
        if path.is_dir():
            raise error(f"{path}: is a directory; give a file")
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        try:
            handle, name = tempfile.mkstemp(prefix=f".{path.name[:50]}.", dir=path.parent)
        except ValueError as cause:  # a null byte in the path
            raise error(f"{path}: cannot be written: {cause}") from cause
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)  # mkstemp makes files that only their owner can read
        temporary.replace(path)
    except OSError as cause:
        raise error(f"{path}: cannot be written: {cause.strerror or cause}") from cause
    finally:
        if temporary is not None:
            with suppress(OSError):
                temporary.unlink()


def append_whole(path: Path, data: bytes, error: Callable[[str], Exception]) -> None:
    """Append data to a file and sync it to disk: either all of it, or nothing.

    Raises `error`, called with a one-line message, if it cannot be written.
    """
    try:
        with path.open("ab", buffering=0) as file:
            regular = path.is_file()
            before = file.tell() if regular else 0
            try:
                left = memoryview(data)
                while left:  # a disk that fills up accepts a part, then fails
                    left = left[file.write(left) :]
                if regular:
                    os.fsync(file.fileno())
            except OSError:
                if regular:
                    file.truncate(before)
                raise
    except OSError as cause:
        raise error(f"{path}: cannot be written: {cause.strerror or cause}") from cause
