"""What cells print, tracebacks included: a file for each that failed, for all where that is asked for."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from groupbench.tracker.record import Record

KEPT = ("error", "oom", "timeout", "wrong")
"""Statuses of which a log is kept unless more is asked for."""


@dataclass(frozen=True)
class Logs:
    """Where logs go, small enough to send to a worker.

    every   keep those of cells that are ok too
    screen  show each on standard error as its cell is finished
    """

    folder: Path
    every: bool = False
    screen: bool = False

    def keep(self, record: Record, text: str) -> None:
        """Keep what a cell printed, where there is anything, and show it. A folder that cannot be written is let be."""
        if not text.strip():
            return
        if self.screen:
            print(f"--- {_name(record)}\n{text.rstrip()}", file=sys.stderr, flush=True)
        if self.every or record.status in KEPT:
            head = f"{_name(record)}\n{record.status}: {record.message or 'measured'}\n\n"
            with contextlib.suppress(OSError):
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / file_name(record)).write_text(head + text, errors="backslashreplace")

    def written(self, records: Iterable[Record]) -> bool:
        """Whether any of the records has a log."""
        return any((self.folder / file_name(record)).exists() for record in records)


def logs_for(records: Path | None, run: str, asked: Path | None, screen: bool) -> Logs:
    """The logs of a run: in the folder asked for, else next to its records, else in a temporary folder of its own."""
    if asked is not None:
        return Logs(asked, every=True, screen=screen)
    if records is not None:
        return Logs(records.with_name(f"{records.name}.logs"), screen=screen)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no name
        user = str(os.getuid())
    return Logs(Path(tempfile.gettempdir()) / f"groupbench-{user}" / run[:10], screen=screen)


def file_name(record: Record) -> str:
    """Of a cell's log: readable, and no other cell's."""
    name = _name(record)
    readable = re.sub(r"[^\w.=,-]+", "-", name)[:120].strip("-")
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:6]}.log"


def _name(record: Record) -> str:
    cell = record.cell
    return f"{cell.operator}/{cell.backend} {cell.shape} {cell.dtype} {cell.mode}"
