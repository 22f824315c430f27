"""The record files of nightly runs: the unfinished one, and the newest finished one.

Each device and toolchain has two pointer files that hold their names. An interrupted run continues in the same file,
and the next run begins with the cells left out by the newest finished run.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path

from groupbench.tracker.facts.errors import IngestError
from groupbench.tracker.facts.record import RecordError, decode
from groupbench.tracker.text.files import whole_file


class NightFiles:
    """The record files of one device in a folder; with a toolchain of groupbench.toml, of that toolchain."""

    def __init__(self, folder: Path, device: str, toolchain: str | None = None) -> None:
        whose = device if toolchain is None else f"{device}@{toolchain}"
        self._folder = folder
        self._unfinished = folder / f".unfinished-{whose}"
        self._newest = folder / f".newest-{whose}"
        self._claim = folder / f".claimed-{whose}"

    def claim(self) -> None:
        """Keep other processes from this device's files until this process ends. Raises IngestError.

        The device's lock does not suffice: containers may share this folder, but not the lock's.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._claimed = self._claim.open("wb")  # locked until it is closed
        except OSError as error:
            raise IngestError(f"cannot write {self._claim}: {error.strerror}") from error
        try:
            fcntl.flock(self._claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise IngestError(f"another night writes to {self._folder}: set another with GROUPBENCH_RECORDS") from error
        except OSError:  # a file system without locks
            pass

    @property
    def unfinished(self) -> Path | None:
        """The file of an interrupted run, which may be empty; None if no run was interrupted."""
        return self._pointed(self._unfinished)

    @property
    def has_begun(self) -> bool:
        """Whether the unfinished run has measured a cell."""
        file = self.unfinished
        return file is not None and file.is_file() and file.stat().st_size > 0

    @property
    def newest(self) -> Path | None:
        """The file of the run that finished last, or None."""
        file = self._pointed(self._newest)
        return file if file is not None and file.is_file() else None

    @property
    def pointer(self) -> Path:
        """The pointer file that names the interrupted run."""
        return self._unfinished

    def set_aside_unreadable(self) -> list[Path]:
        """Rename unreadable files, which would stop this run and all later ones; return their new names."""
        moved = []
        for pointer in (self._unfinished, self._newest):
            file = self._pointed(pointer)
            if file is not None and file.is_file() and not _is_readable(file):
                moved.append(file.rename(file.with_name(file.name + ".unreadable")))
                pointer.unlink()
        return moved

    def begin(self) -> Path:
        """Return the file of a new run and mark it as unfinished. Raises IngestError."""
        stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}"
        names = chain([f"{stem}.jsonl"], (f"{stem}-{number}.jsonl" for number in count(2)))
        file = next(path for path in map(self._folder.joinpath, names) if not path.exists())
        with whole_file(self._unfinished, IngestError) as pointer:
            pointer.write(f"{file.name}\n".encode())
        return file

    def forget(self) -> None:
        """Remove the pointer to the unfinished run, which has measured nothing."""
        self._unfinished.unlink(missing_ok=True)

    def end(self) -> None:
        """Mark the unfinished run as finished: it is stored and judged."""
        self._unfinished.replace(self._newest)

    def _pointed(self, pointer: Path) -> Path | None:
        with suppress(OSError, UnicodeDecodeError):
            name = pointer.read_text().strip()
            return self._folder / name if name else None
        return None


def _is_readable(path: Path) -> bool:
    """Return whether every complete line is a record. A killed process may leave an incomplete last line."""
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:
            if line.strip():
                decode(line)
    except (OSError, RecordError):
        return False
    return True


def run_of(path: Path) -> str | None:
    """Return the id of the first run in a file of records, or None if the file has no record."""
    with suppress(OSError, RecordError), path.open("rb") as file:
        return decode(file.readline()).run.id
    return None
