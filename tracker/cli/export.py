"""`groupbench export`: what is stored, for keeping and for other programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from groupbench.tracker.cli.options import reading
from groupbench.tracker.cli.output import say
from groupbench.tracker.text.wording import counted, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy.orm import Session

FORMATS = ("jsonl", "csv", "parquet", "v3")
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}


@click.command()
@click.argument("file", metavar="FILE")
@click.option("--format", "form", type=click.Choice(FORMATS), help="Default: what the name of FILE ends in.")
@click.pass_obj
def export(db: str, file: str, form: str | None) -> None:
    """Write every point to FILE; `-` is stdout.

    jsonl is lossless: records as they were measured, samples as float32, which `ingest` takes back. csv has a line
    for each point, without its samples; parquet has them, and needs pyarrow; v3 is for PyTorch's benchmark
    dashboard. FILE is replaced once all is written.
    """
    from groupbench.tracker.errors import StoreError
    from groupbench.tracker.text.files import whole_file

    form = form or _SUFFIXES.get(Path(file).suffix.lower(), "jsonl" if file == "-" else None)
    if form is None:
        raise click.UsageError(f"{file}: no format has this ending; give --format {'|'.join(FORMATS)}")
    write = _writer(form)
    with reading(db) as session:
        if file == "-":
            write(session, sys.stdout.buffer)
            return
        with whole_file(Path(file), StoreError) as target:
            count = write(session, target)
    say(printable(f"{file}: {counted(count, 'point')}"))


def _writer(form: str) -> Callable[[Session, IO[bytes]], int]:
    from groupbench.tracker.formats import write_table, write_v3
    from groupbench.tracker.store import records

    return {
        "jsonl": records.write_jsonl,
        "csv": write_table.write_csv,
        "parquet": write_table.write_parquet,
        "v3": write_v3.write_v3,
    }[form]
