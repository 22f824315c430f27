"""`groupbench import`: import files written by other benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.options import BACKEND, DTYPE, OPERATOR, When, collected
from groupbench.tracker.formats import FORMATS, Options
from groupbench.tracker.text.cells import json_for
from groupbench.tracker.text.wording import counted, printable, some

if TYPE_CHECKING:
    from groupbench.tracker.formats import Loaded


class Mapping(click.ParamType[dict[str, str]]):
    """Record fields and their columns: `latency_ms=time,operator=op`."""

    name = "mapping"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, str]:
        if isinstance(value, dict):
            return value
        pairs: dict[str, str] = {}
        for part in str(value).split(","):
            field, equals, column = (text.strip() for text in part.partition("="))
            if not (equals and field and column):
                self.fail(f"{part.strip()!r} is not FIELD=COLUMN", param, ctx)
            if field in pairs:
                self.fail(f"{field} is mapped twice", param, ctx)
            pairs[field] = column
        return pairs


@click.command(name="import")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--format",
    "format_name",
    metavar="NAME",
    help=f"Format of the files: {', '.join(FORMATS)}. Default: detected for each file.",
)
@collected(
    Options,
    "facts",
    click.option("--commit", metavar="HASH", help="Commit that was measured, if the file does not name it."),
    click.option("--branch", metavar="NAME", help="Branch of that commit."),
    click.option("--dirty", is_flag=True, help="Mark the working tree as different from that commit."),
    click.option("--date", type=When(), metavar="DATE", help="Time of the measurement, if the file does not have it."),
    click.option("--gpu", metavar="NAME", help="GPU model, if the file does not name it."),
    click.option("--cpu", metavar="NAME", help="CPU model, for results without a GPU."),
    click.option(*OPERATOR, metavar="NAME", help="Operator of all results."),
    click.option(*BACKEND, metavar="NAME", help="Backend of all results."),
    click.option("--mode", metavar="NAME", help="Mode of all results: fwd, bwd or fwd_bwd."),
    click.option(*DTYPE, metavar="NAME", help="Dtype of all results."),
    click.option(
        "--plan", metavar="NAME", help="Plan of the run, which the gate compares with earlier runs of the plan."
    ),
    click.option(
        "--commit-of",
        default="tritonbench",
        show_default=True,
        metavar="NAME",
        help="A TritonBench file names the commits of tritonbench, triton and pytorch; use this one.",
    ),
    click.option(
        "--map",
        "mapping",
        type=Mapping(),
        default=dict,
        metavar="FIELD=COLUMN,...",
        help="Columns of a plain CSV that hold a record's fields: latency_ms=time,operator=op.",
    ),
    click.option("--unit", metavar="UNIT", help="Unit of a plain CSV's latency: s, ms, us or ns. Default: ms."),
)
@click.option("--dry-run", is_flag=True, help="Write the records to stdout instead of storing them.")
@click.pass_obj
def import_(
    db: str,
    files: tuple[str, ...],
    format_name: str | None,
    facts: Options,
    dry_run: bool,
) -> None:
    """Import files written by other benchmarks.

    Each file is stored completely or not at all; importing it again changes nothing. Text instead of a number, such as
    "CUDA OOM", becomes a status, never a latency. A plain CSV needs --map.
    """
    from groupbench.tracker.facts.errors import IngestError, TrackerError
    from groupbench.tracker.facts.record import encode
    from groupbench.tracker.formats import load

    stored = 0
    try:
        for name in files:
            loaded = load(Path(name), format_name, facts)
            if dry_run:
                for record in loaded.records:
                    click.echo(json_for(sys.stdout, encode(record)), nl=False)
                for note in _notes(loaded):
                    click.echo(printable(f"{name}: {note}"), err=True)
                continue
            click.echo(printable(_store(db, name, loaded)))
            stored += 1
    except TrackerError as error:
        if stored:
            kept = "the file before it is" if stored == 1 else f"the {stored} files before it are"
            raise IngestError(f"{error.message}; {kept} stored") from error
        raise


def _notes(loaded: Loaded) -> list[str]:
    """Return notes on file parts without records."""
    notes = []
    if loaded.left_out:
        notes.append(f"{counted(len(loaded.left_out), 'result')} left out: {loaded.losses}")
    if loaded.merged:
        column = loaded.merged[0]
        notes.append(
            f"rows that differ in {some(loaded.merged)} became bursts of one cell; "
            f"if they are other problems, give --map {column}={column}"
        )
    return notes


def _store(db: str, name: str, loaded: Loaded) -> str:
    from groupbench.tracker.store.engine import open_store
    from groupbench.tracker.store.ingest import ingest

    with open_store(db, create=True) as store:
        done = ingest(store, enumerate(loaded.records, 1), name)
    without = sum(record.status != "ok" for record in loaded.records)
    failed = f", {without} of them without a correct result" if without else ""
    head = f"{name}: {loaded.title}: {counted(done.records, 'result')}{failed}: {done.summary}"
    return "; ".join([head, *_notes(loaded)])
