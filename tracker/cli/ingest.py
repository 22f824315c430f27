"""`groupbench ingest`: files of records into the database."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from groupbench.tracker.cli.output import printable


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.pass_obj
def ingest(db: str, files: tuple[str, ...]) -> None:
    """Store files of records (JSON lines); `-` is stdin.

    Each file is stored whole or not at all. Records that are stored already change nothing. The database is
    made if there is none.
    """
    from groupbench.tracker.errors import IngestError, TrackerError
    from groupbench.tracker.ingest import ingest as store_records
    from groupbench.tracker.ingest import parse
    from groupbench.tracker.store import open_store

    stored = 0
    try:
        for name in files:
            source = "stdin" if name == "-" else name
            try:
                if name == "-":
                    records = parse(sys.stdin.buffer, source)
                else:
                    with Path(name).open("rb") as lines:
                        records = parse(lines, source)
            except (OSError, ValueError) as error:
                raise IngestError(f"{source}: {getattr(error, 'strerror', None) or error}") from error
            with open_store(db, create=True) as store:
                done = store_records(store, records, source)
            stored += 1
            of_runs = "; ".join(f"run {run} at {commit[:10]}{'+' if dirty else ''}" for run, commit, dirty in done.runs)
            nothing = " (nothing new)" if not done.added else ""
            told = (
                f"{source}: {done.records} records: {done.added} points added, "
                f"{done.known} already known{nothing}, {done.new_series} series new; {of_runs}"
            )
            click.echo(printable(told))
    except TrackerError as error:
        if stored:
            kept = "the file before it is" if stored == 1 else f"the {stored} files before it are"
            raise IngestError(f"{error.message}; {kept} stored") from error
        raise
