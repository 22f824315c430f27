"""`groupbench incidents mute` and `unmute`, `groupbench db reject` and `rename`: decisions about history."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from groupbench.tracker.cli.here import person
from groupbench.tracker.cli.options import When, reason_option
from groupbench.tracker.text.wording import counted, date, printable
from groupbench.tracker.tools.parameters import SERIES

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

    from groupbench.tracker.query.rows import SeriesRow


_series = click.argument("series", type=SERIES, nargs=-1, required=True, metavar="SERIES...")


@click.command()
@_series
@click.option(
    "--until",
    type=When(end=True, ahead=True),
    required=True,
    metavar="DATE",
    help="Last day of the mute: 2026-01-31 or 30d.",
)
@reason_option("Why the series is muted.")
@click.pass_obj
def mute(db: str, series: tuple[int, ...], until: datetime, reason: str) -> None:
    """Let the gate pass series until a date. SERIES is a number in `groupbench list series`.

    A muted series is `ok` and gets no A/B and no incident. A wrong result still fails.
    """
    from groupbench.tracker.store import decisions
    from groupbench.tracker.store.engine import open_store

    now = datetime.now(UTC)
    if until <= now:
        raise click.UsageError("--until is in the past; give a future date")
    with open_store(db, create=False) as store, store.write() as session:
        rows = _rows(session, series)
        for row in rows:
            decisions.decide(session, "muted", now, series=row.pk, who=person(), reason=reason, until=until)
    for row in rows:
        click.echo(printable(f"muted until {date(until)} UTC: {row}"))


@click.command()
@_series
@click.pass_obj
def unmute(db: str, series: tuple[int, ...]) -> None:
    """Judge muted series again. SERIES is a number in `groupbench list series`."""
    from groupbench.tracker.store import decisions
    from groupbench.tracker.store.engine import open_store

    with open_store(db, create=False) as store, store.write() as session:
        rows = _rows(session, series)
        muted = [decisions.withdraw(session, "muted", datetime.now(UTC), series=row.pk) for row in rows]
    for row, was in zip(rows, muted, strict=True):
        click.echo(printable(f"{'judged again' if was else 'was not muted'}: {row}"))


def _rows(session: Session, keys: tuple[int, ...]) -> list[SeriesRow]:
    """Return the series with these numbers. Raises UsageError for an unknown one."""
    from groupbench.tracker.query.series import series_rows

    rows = series_rows(session, list(keys))
    for key in keys:
        if key not in rows:
            raise click.UsageError(f"no series {key}; `groupbench list series` lists them")
    return [rows[key] for key in dict.fromkeys(keys)]


@click.command()
@click.argument("run")
@click.option("--undo", is_flag=True, help="Let the run count again.")
@reason_option("Why the run does not count, or counts again.")
@click.pass_obj
def reject(db: str, run: str, undo: bool, reason: str) -> None:
    """Reject RUN, such as a night on a disturbed machine: no run is compared with it any more.

    RUN is the start of a run's id. Its results stay in the database.
    """
    from groupbench.tracker.query.resolve import find_run
    from groupbench.tracker.store import decisions
    from groupbench.tracker.store.engine import open_store

    now = datetime.now(UTC)
    with open_store(db, create=False) as store, store.write() as session:
        row = find_run(session, run)
        if undo:
            was = decisions.withdraw(session, "rejected", now, run=row.pk)
        else:
            decisions.decide(session, "rejected", now, run=row.pk, who=person(), reason=reason)
            was = True
    word = "rejected" if not undo else "counts again" if was else "was not rejected"
    click.echo(printable(f"{word}: run {row.id} of {row.started:%Y-%m-%d %H:%M} at {row.state}"))


@click.command()
@click.argument("field", type=click.Choice(("operator", "backend", "shape")))
@click.argument("old")
@click.argument("new")
@click.option("--operator", "--op", "operator", metavar="NAME", help="Rename only in the series of this operator.")
@click.pass_obj
def rename(db: str, field: Any, old: str, new: str, operator: str | None) -> None:
    """Rename an operator, a backend or a shape from OLD to NEW: its series continue under the new name.

    Records on disk keep the old name: if they are ingested again, the old series comes back.
    """
    from groupbench.tracker.store import rename as renaming
    from groupbench.tracker.store.engine import open_store

    with open_store(db, create=False) as store, store.write() as session:
        number = renaming.rename(session, field, old, new, operator)
    click.echo(printable(f"renamed {field} {old} to {new} in {counted(number, 'series', 'series')}"))
