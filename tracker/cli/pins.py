"""`groupbench pins`: fixed commits for comparison with every run, in addition to the history."""

from __future__ import annotations

import click

from groupbench.tracker.cli.declared import argument, command, flag, option
from groupbench.tracker.cli.here import person
from groupbench.tracker.cli.options import IN_PERCENT, Percent, reading, writing
from groupbench.tracker.cli.output import Column, Format, output_formats, say, write_rows
from groupbench.tracker.text.wording import commit_text, date, printable, signed_change, signed_percent

_COLUMNS = (
    Column("pin", "name"),
    Column("commit", "commit", commit_text),
    Column("max slowdown", "max_slowdown", signed_percent, right=True),
    Column("created", "created", date),
    Column("by", "who"),
    Column("ended", "ended", date),
)


@command()
def add(
    db: str,
    commit: str = argument(),
    max_slowdown: float = option(
        "--max-slowdown",
        type=Percent(),
        required=True,
        help=f"Largest slowdown allowed, {IN_PERCENT}",
    ),
    name: str | None = option("--name", help="Name of the pin. Default: COMMIT as typed, or the hash of HEAD~2."),
) -> None:
    """Compare every later run with COMMIT, in addition to history.

    The gate fails a series if it is slower than at COMMIT by more than --max-slowdown, however gradually it got there.
    COMMIT must have been measured in the same environment. A pin with the same name is replaced.
    """
    from groupbench.tracker.judge import pins

    with writing(db) as session:
        row = pins.pin(session, commit, max_slowdown, name, person())
    click.echo(printable(f"pinned {row.name}: {commit_text(row.commit)}, at most {signed_change(row.max_slowdown)}"))


@command()
def list_pins(
    db: str, everything: bool = flag("--all", help="Include pins that were removed."), form: Format = output_formats
) -> None:
    """List the pinned commits."""
    from groupbench.tracker.judge.pins import PinRow, find

    with reading(db) as session:
        rows = find(session, ended=everything)
    write_rows(PinRow, _COLUMNS, rows, form)
    if form == "table" and not rows:
        say("no pins; `groupbench pins add COMMIT --max-slowdown 3%` adds one")


@command()
def remove(db: str, name: str = argument()) -> None:
    """Stop comparing runs with the pin NAME."""
    from groupbench.tracker.judge import pins

    with writing(db) as session:
        row = pins.unpin(session, name)
    click.echo(printable(f"removed the pin {row.name} of {commit_text(row.commit)}"))
