"""Keep cell output, including tracebacks: a file for each failed cell, or for every cell with --logs."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from groupbench.tracker.facts.record import Record
from groupbench.tracker.text.wording import printable_lines

KEPT = ("error", "oom", "timeout", "wrong")
"""Statuses of which a log is kept unless more is asked for."""


@dataclass(frozen=True)
class Logs:
    """The log folder and the rules for keeping logs, small enough to send to a worker.

    Attributes:
        every: Also keep the logs of cells with status ok.
        screen: Show each log on standard error when its cell is finished.
    """

    folder: Path
    every: bool = False
    screen: bool = False

    def keep(self, record: Record, text: str) -> None:
        """Keep and show a cell's output, unless it is empty. An unwritable folder is ignored."""
        if not text.strip():
            return
        if self.screen:
            shown = printable_lines(f"--- {_name(record)}\n{text.rstrip()}")
            print(shown, file=sys.stderr, flush=True)
        if self.every or record.status in KEPT:
            head = f"{_name(record)}\n{record.status}: {record.message or 'measured'}\n\n"
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / file_name(record)).write_text(head + text, errors="backslashreplace")

    def written(self, records: Iterable[Record]) -> bool:
        """Return whether any record has a log."""
        return any((self.folder / file_name(record)).exists() for record in records)


def logs_for(records: Path | None, run: str, folder: Path | None, screen: bool) -> Logs:
    """Return a run's logs: in `folder` if given, else next to the records, else in a new temporary folder."""
    if folder is not None:
        return Logs(folder, every=True, screen=screen)
    if records is not None:
        return Logs(records.with_name(f"{records.name}.logs"), screen=screen)
    return Logs(own_folder() / run[:10], screen=screen)


def own_folder() -> Path:
    """Return this user's folder for temporary files, in which no other user can create or replace files.

    The name is known, so another user may have made it, or a link there; then the folder is a new one.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no name
        user = str(os.getuid())
    folder = Path(tempfile.gettempdir()) / f"groupbench-{user}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
        if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
            return Path(tempfile.mkdtemp(prefix=f"groupbench-{user}-"))
        if facts.st_mode & 0o022:
            folder.chmod(facts.st_mode & 0o755)
    return folder


def file_name(record: Record) -> str:
    """Return a cell's log name: readable, and different for every cell."""
    name = _name(record)
    readable = re.sub(r"[^\w.=,-]+", "-", name)[:120].strip("-")
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:6]}.log"


def _name(record: Record) -> str:
    cell = record.cell
    return f"{cell.operator}/{cell.backend} {cell.shape} {cell.dtype} {cell.mode}"
