"""`groupbench ingest`: files of records into the database."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import click

from groupbench.tracker.text.wording import counted, printable

if TYPE_CHECKING:
    from groupbench.tracker.store.ingest import Ingested


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.pass_obj
def ingest(db: str, files: tuple[str, ...]) -> None:
    """Store files of records (JSON lines); `-` is stdin.

    Each file is stored whole or not at all. Records that are stored already change nothing. The database is
    made if there is none.
    """
    from groupbench.tracker.errors import IngestError, TrackerError

    stored = 0
    try:
        for name in files:
            done = _store(db, name)
            stored += 1
            click.echo(printable(f"{done.source}: {counted(done.records, 'record')}: {done.told}"))
    except TrackerError as error:
        if stored:
            kept = "the file before it is" if stored == 1 else f"the {stored} files before it are"
            raise IngestError(f"{error.message}; {kept} stored") from error
        raise


def _store(db: str, name: str) -> Ingested:
    """Check all of a file before the database is opened, then store it: nothing of it is held meanwhile."""
    from itertools import islice

    from groupbench.tracker.errors import IngestError
    from groupbench.tracker.record import read
    from groupbench.tracker.store.engine import open_store
    from groupbench.tracker.store.ingest import ingest as store_records
    from groupbench.tracker.store.ingest import read_checked

    source = "stdin" if name == "-" else name
    try:
        with _rewindable(name) as file:
            last = max(number for number, _ in read_checked(file, source))
            file.seek(0)
            with open_store(db, create=True) as store:
                return store_records(store, read(islice(file, last)), source)  # a writer may have gone on
    except (OSError, ValueError) as error:
        raise IngestError(f"{source}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def _rewindable(name: str) -> Iterator[IO[bytes]]:
    """The file, or a copy of what cannot be read twice."""
    with nullcontext(sys.stdin.buffer) if name == "-" else Path(name).open("rb") as stream:
        if name != "-" and stream.seekable():
            yield stream
            return
        with tempfile.SpooledTemporaryFile(max_size=1 << 24) as copy:
            shutil.copyfileobj(stream, copy)
            copy.seek(0)
            yield cast("IO[bytes]", copy)
