"""The files of records of nightly runs: which one is not ended, and which ended last.

Two pointers, one of each for every device, hold a file's name: a run that is interrupted is continued in its file, and
what a run left out is what the next one begins with.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path

from groupbench.tracker.errors import IngestError
from groupbench.tracker.record import RecordError, decode


class NightFiles:
    """The records of one device in a folder.

    Raises IngestError where the folder cannot be written.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self._folder = folder
        self._unfinished = folder / f".unfinished-{device}"
        self._newest = folder / f".newest-{device}"

    @property
    def unfinished(self) -> Path | None:
        """The file of a run that was interrupted, whether or not it holds anything."""
        return self._pointed(self._unfinished)

    @property
    def newest(self) -> Path | None:
        """The file of the run that ended last."""
        found = self._pointed(self._newest)
        return found if found is not None and found.is_file() else None

    @property
    def pointer(self) -> Path:
        """The file that says which run was interrupted."""
        return self._unfinished

    def set_aside_unreadable(self) -> list[Path]:
        """Rename files that no reader takes, which would stop this run and all that come; return their new names."""
        moved = []
        for pointer in (self._unfinished, self._newest):
            file = self._pointed(pointer)
            if file is not None and file.is_file() and not _is_readable(file):
                moved.append(file.rename(file.with_name(file.name + ".unreadable")))
                pointer.unlink()
        return moved

    def begin(self) -> Path:
        """Return the file of a new run, which is unfinished from now on."""
        stem = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{os.getpid()}"
        names = chain([f"{stem}.jsonl"], (f"{stem}-{number}.jsonl" for number in count(2)))
        file = next(path for path in map(self._folder.joinpath, names) if not path.exists())
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._unfinished.write_text(file.name + "\n")
        except OSError as error:
            raise IngestError(f"cannot write {self._unfinished}: {error.strerror}") from error
        return file

    def forget(self) -> None:
        """The run that began has not measured anything."""
        self._unfinished.unlink(missing_ok=True)

    def end(self) -> None:
        """The run is stored and judged."""
        self._unfinished.replace(self._newest)

    def _pointed(self, pointer: Path) -> Path | None:
        with suppress(OSError, UnicodeDecodeError):
            name = pointer.read_text().strip()
            return self._folder / name if name else None
        return None


def _is_readable(path: Path) -> bool:
    """Return whether every whole line is a record: a last one without its end is what a killed process leaves."""
    try:
        for line in path.read_bytes().split(b"\n")[:-1]:
            if line.strip():
                decode(line)
    except (OSError, RecordError):
        return False
    return True


def run_of(path: Path) -> str | None:
    """Return the id of the run that a file of records begins with; None where it holds no record."""
    with suppress(OSError, RecordError), path.open("rb") as file:
        return decode(file.readline()).run.id
    return None
