"""`groupbench db export`: write every stored point, as a backup or for other programs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from groupbench.tracker.cli.declared import argument, command, option
from groupbench.tracker.cli.options import reading
from groupbench.tracker.cli.output import say
from groupbench.tracker.facts.errors import StoreError
from groupbench.tracker.text.files import whole_file
from groupbench.tracker.text.wording import counted, printable

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

FORMATS = ("jsonl", "csv", "v3", "bencher", "github-action")
_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv"}


@command()
def export(
    db: str,
    file: str = argument(metavar="FILE"),
    form: str | None = option(
        "--format", type=click.Choice(FORMATS), help="Format to write. Default: by the ending of FILE, jsonl for `-`."
    ),
) -> None:
    """Write every point to FILE; `-` is stdout.

    \b
    jsonl    the records as measured, with samples as float32; `ingest` reads them back
    csv      one line per point, without samples; formula-like text gets an apostrophe
    v3       the format of PyTorch's benchmark dashboard
    bencher        Bencher Metric Format, with the newest latency of each series in ns
    github-action  a list for github-action-benchmark's customSmallerIsBetter, likewise, in ms

    An existing FILE is replaced once the export is complete.
    """
    ending = "jsonl" if file == "-" else None
    form = form or _SUFFIXES.get(Path(file).suffix.lower(), ending)
    if form is None:
        raise click.UsageError(f"{file}: the ending names no format; give --format {'|'.join(FORMATS)}")
    write = _writer(form)
    with reading(db) as session:
        if file == "-":
            write(session, sys.stdout.buffer)
            return
        with whole_file(Path(file), StoreError) as target:
            count = write(session, target)
    say(printable(f"{file}: {counted(count, 'point')}"))


def _writer(form: str) -> Callable[[Session, IO[bytes]], int]:
    from groupbench.tracker.formats import write_metrics, write_table, write_v3
    from groupbench.tracker.store import records

    writers: dict[str, Callable[[Session, IO[bytes]], int]] = {
        "jsonl": records.write_jsonl,
        "csv": write_table.write_csv,
        "v3": write_v3.write_v3,
        "bencher": write_metrics.write_bencher,
        "github-action": write_metrics.write_github_action,
    }
    return writers[form]
