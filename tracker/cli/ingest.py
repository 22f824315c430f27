"""`groupbench ingest`: store files of records in the database."""

from __future__ import annotations

import gc
import sys
from contextlib import nullcontext
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from groupbench.tracker.cli.declared import argument, command
from groupbench.tracker.facts.errors import IngestError, TrackerError
from groupbench.tracker.text.wording import counted, printable

if TYPE_CHECKING:
    from groupbench.tracker.store.ingest import Ingested


@command()
def ingest(db: str, files: tuple[str, ...] = argument(nargs=-1, required=True, metavar="FILE...")) -> None:
    """Store files of records (JSON lines) in the database; `-` is stdin.

    Each file is stored completely or not at all. Stored records are skipped. The database is created
    if it does not exist.
    """
    stored = 0
    try:
        for name in files:
            done = store(db, name)
            stored += 1
            click.echo(printable(f"{done.source}: {counted(done.records, 'record')}: {done.summary}"))
            for warning in done.warnings:
                click.echo(printable(f"{done.source}: {warning}"), err=True)
    except TrackerError as error:
        if stored:
            kept = "the file before it is" if stored == 1 else f"the {stored} files before it are"
            raise IngestError(f"{error.message}; {kept} stored") from error
        raise


def store(db: str, name: str) -> Ingested:
    """Check a whole file before opening the database, then store it. Raises IngestError, StoreError."""
    from groupbench.tracker.store.staged import Staged, checking

    gc.freeze()  # modules live as long as the process
    gc.disable()  # records have no cycles, and collections take a twentieth of the time
    source = "stdin" if name == "-" else name
    try:
        with (
            nullcontext(cast("BufferedReader", sys.stdin.buffer)) if name == "-" else Path(name).open("rb") as stream,
            checking(stream, source) as parts,
        ):
            from groupbench.tracker.store.engine import open_store  # while processes check the first parts
            from groupbench.tracker.store.ingest import ingest_checked

            staged = Staged(parts, source)
        with staged, open_store(db, create=True) as opened:
            return ingest_checked(opened, staged, source)
    except (OSError, ValueError) as error:
        raise IngestError(f"{source}: {getattr(error, 'strerror', None) or error}") from error
    finally:
        gc.enable()
